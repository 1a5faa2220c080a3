"""Small models of Transformers with random weights, and the same with another attention."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import Tensor, nn

VOCABULARY, LENGTH = 60, 19
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
INDEXER = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}
COMPRESSED = {"compressed_sparse_attention": 2, "heavily_compressed_attention": 6}
DEEPSEEK_V4 = SIZES | EXPERTS | INDEXER | {"index_topk": 2, "head_dim": 8, "qk_rope_head_dim": 4, "q_lora_rank": 16}
DEEPSEEK_V4 |= {"o_lora_rank": 8, "o_groups": 2, "sliding_window": 7, "compress_rates": COMPRESSED}
DEEPSEEK_V4 |= {"layer_types": list(COMPRESSED), "mlp_layer_types": ["moe", "moe"]}

PADDING = torch.ones(2, LENGTH, dtype=torch.long)
PADDING[1, :5] = 0
PADDING_RIGHT = PADDING.flip(1)


def tiny(kind: str, settings: dict[str, object]) -> transformers.PreTrainedModel:
    """A model class of Transformers, if this version has it, with random weights and eager attention."""
    model_class = getattr(transformers, kind, None)
    if model_class is None:
        pytest.skip(f"Transformers {transformers.__version__} has no {kind}")
    torch.manual_seed(0)
    config = model_class.config_class(**settings)
    model = model_class._from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or "sinks" in name:  # far enough from 0 that attention matters
            nn.init.normal_(parameter, std=0.3)
    return model


def with_attention(model: transformers.PreTrainedModel, implementation: str = "dmattn") -> transformers.PreTrainedModel:
    """A copy of it. `set_attn_implementation` leaves models alone that compute attention themselves; `from_pretrained`
    does not."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_attn_implementation"):
            module.config._attn_implementation = implementation
    return model


def tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (2, length))
