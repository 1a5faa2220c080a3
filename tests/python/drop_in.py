"""What the original's drop-in functions are called with."""

from __future__ import annotations

from types import SimpleNamespace

from torch import nn


def attention_module(**attributes: object) -> nn.Module:
    """What flash_dynamic_mask_attention_forward reads of an attention module."""
    module = nn.Module()
    module.config = SimpleNamespace()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module
