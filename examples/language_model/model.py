"""A transformer for bytes whose attention decides, from the data, which keys each query sees.

The attention is the dynamic-mask attention of the Doge models ("Trainable Dynamic Mask Sparse Attention",
arXiv 2508.02124). Every key gets a learned score, computed from its value. The score does two things: the `window` keys
with the highest scores are the only ones that a query sees, and it is added to the attention scores as a bias, which is
how the loss teaches the model which keys deserve to be seen.

Shapes: B batch, S sequence length, H query heads, Hkv key heads (each serves H / Hkv query heads), D head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from flash_dmattn import dynamic_mask_attention
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    layers: int = 4
    width: int = 128
    heads: int = 4
    key_heads: int = 2
    window: int = 128  # keys that a query sees at most
    convolution: int = 4  # positions that a key's score looks at
    vocabulary: int = 256  # bytes

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(f"width must be a multiple of {2 * self.heads}, twice the heads; got {self.width}")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


@dataclass
class KeyValueCache:
    """Keys and values of the positions so far, (B, S, Hkv, D) each, of one layer."""

    key: Tensor | None = None
    value: Tensor | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.key = key if self.key is None else torch.cat([self.key, key], dim=1)
        self.value = value if self.value is None else torch.cat([self.value, value], dim=1)
        return self.key, self.value


class KeyBias(nn.Module):
    """bias = exp(A · softplus(V · W)) per key, where a short causal convolution lets V tell what came just before.

    Without the convolution a byte would have the same score wherever it stands. A starts at 0, so all scores start
    equal: the model begins as a sliding window and learns to depart from it.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        channels = config.key_heads * config.head_dim
        self.history = config.convolution - 1
        self.convolution = nn.Conv1d(channels, channels, config.convolution, groups=channels)
        self.projection = nn.Linear(channels, config.key_heads, bias=False)  # W
        self.strength = nn.Parameter(torch.zeros(config.key_heads))  # A
        self.values_before = self.no_values  # train_distributed.py puts another function here

    def no_values(self, value: Tensor) -> Tensor:
        """What stands before the first position: zeros, (B, history, Hkv, D)."""
        return value.new_zeros(value.shape[0], self.history, *value.shape[2:])

    def forward(self, value: Tensor) -> Tensor:
        """value (B, S, Hkv, D) -> bias (B, Hkv, S)."""
        channels = torch.cat([self.values_before(value), value], dim=1).flatten(2).transpose(1, 2)
        mixed = self.convolution(channels).transpose(1, 2)  # (B, S, Hkv * D)
        return torch.exp(self.strength * F.softplus(self.projection(mixed))).transpose(1, 2)


class DynamicMaskAttention(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        kv_width = config.key_heads * config.head_dim
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, kv_width, bias=False)
        self.value = nn.Linear(config.width, kv_width, bias=False)
        self.key_bias = KeyBias(config)
        self.output = nn.Linear(config.width, config.width, bias=False)
        self.attend = dynamic_mask_attention  # comparison.py and train_distributed.py put others here

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], cache: KeyValueCache) -> Tensor:
        """x (B, S, width), the newest positions -> (B, S, width)."""
        dim = self.config.head_dim
        query = rotate(self.query(x).unflatten(-1, (-1, dim)), rotation)  # (B, S, H, D)
        key = rotate(self.key(x).unflatten(-1, (-1, dim)), rotation)  # (B, S, Hkv, D)
        value = self.value(x).unflatten(-1, (-1, dim))
        key, value = cache.append(key, value)
        bias = self.key_bias(value)
        out = self.attend(query, key, value, bias, self.config.window)
        return self.output(out.flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int):
        super().__init__()
        hidden = max(1, width // 12) * 32  # about 8/3 of the width: as many weights as a plain layer of 4
        self.gate_and_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_and_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = DynamicMaskAttention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width)
        self.feed_forward = FeedForward(config.width)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], cache: KeyValueCache) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, cache)
        return x + self.feed_forward(self.feed_forward_norm(x))


class LanguageModel(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(_initialise)
        # Every block adds twice to the residual stream; small outputs keep its size independent of the depth.
        for block in self.blocks:
            for last in (block.attention.output, block.feed_forward.down):
                nn.init.normal_(last.weight, std=last.in_features**-0.5 / math.sqrt(2 * config.layers))

    def forward(self, tokens: Tensor, caches: list[KeyValueCache] | None = None, first_position: int = 0) -> Tensor:
        """tokens int64 (B, S) -> logits (B, S, vocabulary). With caches, `tokens` continue what the caches hold.

        `first_position`: of the first token that this model sees, where others hold those before it.
        """
        caches = caches or self.empty_caches()
        past = first_position + (0 if caches[0].key is None else caches[0].key.shape[1])
        positions = torch.arange(past, past + tokens.shape[1], device=tokens.device)
        rotation = rotation_of(positions, self.config.head_dim)
        x = self.embedding(tokens)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, rotation, cache)
        return self.head(self.norm(x))

    def empty_caches(self) -> list[KeyValueCache]:
        return [KeyValueCache() for _ in self.blocks]

    @torch.no_grad()
    def generate(self, prompt: Tensor, length: int, temperature: float, seed: int = 0) -> Tensor:
        """Continues prompt, int64 (S,), by `length` bytes: int64 (length,).

        The prompt runs once; then one query row at a time attends to the cached keys.
        """
        generator = torch.Generator().manual_seed(seed)
        caches, tokens, written = self.empty_caches(), prompt[None], []
        for _ in range(length):
            logits = self(tokens, caches)[0, -1].float().cpu()
            choice = torch.multinomial(torch.softmax(logits / temperature, dim=0), 1, generator=generator)
            tokens = choice[None].to(prompt.device)
            written.append(choice)
        return torch.cat(written)


def rotation_of(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine, (S, 1, D / 2) each, of the rotary position embedding (arXiv 2104.09864)."""
    frequency = 10000.0 ** -torch.linspace(0, 1, head_dim // 2 + 1, device=positions.device)[:-1]
    angle = positions[:, None, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates the pairs (d, d + D / 2) of x (B, S, heads, D) by their position's angles."""
    cosine, sine = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=1.0)
