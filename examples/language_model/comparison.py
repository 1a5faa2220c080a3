"""The same model with what PyTorch has: top-k for every query row, and its own attention with the mask that results."""

from __future__ import annotations

import copy
import math
import statistics
import time
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .text import Text
from .training import Run, loss_of


def topk_mask_attention(query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor, window: int) -> Tensor:
    """`dynamic_mask_attention` in plain PyTorch, which holds (B, H, Sq, Sk) numbers. Ties go to any key.

    Args:
        query: (B, Sq, H, D); key, value: (B, Sk, Hkv, D); key_bias: (B, Hkv, Sk).

    Returns:
        (B, Sq, H, D).
    """
    rows, keys = query.shape[1], key.shape[1]
    position = torch.arange(keys, device=query.device)
    future = position > position[keys - rows :, None]  # (Sq, Sk)
    scores = key_bias.detach()[:, :, None].masked_fill(future, -math.inf)  # (B, Hkv, Sq, Sk)
    best = scores.topk(min(window, keys)).indices
    hidden = torch.ones_like(scores, dtype=torch.bool).scatter(-1, best, False) | future
    mask = key_bias[:, :, None].masked_fill(hidden, -math.inf).to(query.dtype)
    mask = mask.repeat_interleave(query.shape[2] // key.shape[2], dim=1)
    heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return F.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def tokens_per_second(run: Run, text: Text, steps: int = 5) -> dict[str, float]:
    """Speed of a training step, forward and backward, with each of the two: medians over alternating steps."""
    runs = {"dynamic_mask_attention": replace(run, model=copy.deepcopy(run.model).train())}
    runs["sdpa_topk_mask"] = replace(run, model=copy.deepcopy(run.model).train())
    for block in runs["sdpa_topk_mask"].model.blocks:
        block.attention.attend = topk_mask_attention
    config = run.training
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for step in range(steps + 1):
        inputs, targets = text.train_batch(step, config.batch_size, config.context, config.seed)
        for name, one in runs.items():
            began = time.perf_counter()
            loss_of(one, inputs, targets).backward()
            if one.device.type == "cuda":
                torch.cuda.synchronize(one.device)
            seconds[name].append(time.perf_counter() - began)
    tokens = config.batch_size * config.context
    return {name: tokens / statistics.median(times[1:]) for name, times in seconds.items()}  # the first warms up
