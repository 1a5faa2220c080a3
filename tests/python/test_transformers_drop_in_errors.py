"""What the drop-in functions refuse, and what they let pass."""

from __future__ import annotations

import math
import re

import pytest
import torch
from drop_in import attention_module
from flash_dmattn.integrations.flash_dynamic_mask_attention import flash_dynamic_mask_attention_forward


def bare(**changes: object) -> object:
    """A call with tensors of zeros and these changes."""
    arguments = {
        "module": attention_module(keep_window_size=3, is_causal=True),
        "query": torch.zeros(2, 4, 3, 8),
        "key": torch.zeros(2, 2, 5, 8),
        "value": torch.zeros(2, 2, 5, 8),
        "attention_mask": None,
        "attention_bias": torch.zeros(2, 2, 5),
    }
    return flash_dynamic_mask_attention_forward(**(arguments | changes))


ERRORS = {
    "dropout": ({"dropout": 0.1}, ValueError, "dropout of attention probabilities is not supported"),
    "head_mask": ({"head_mask": torch.ones(4)}, ValueError, "head_mask is not supported"),
    "sliding_window": ({"sliding_window": 3}, ValueError, "sliding_window must come as a 4-D attention_mask"),
    "query type": ({"query": None}, TypeError, "query must be a torch.Tensor"),
    "query rank": ({"query": torch.zeros(3, 8)}, ValueError, "query must have 4 dimensions; got query (3, 8)"),
    "mask type": ({"attention_mask": 1}, TypeError, "attention_mask must be a torch.Tensor or None"),
    "mask keys": (
        {"attention_mask": torch.ones(2, 4)},
        ValueError,
        "attention_mask must be a padding mask (B or 1, Sk) or bool",
    ),
    "mask dtype": (
        {"attention_mask": torch.zeros(2, 1, 3, 5)},
        ValueError,
        "got attention_mask float32 (2, 1, 3, 5), 5 keys",
    ),
    "mask rows": (
        {"attention_mask": torch.ones(2, 1, 4, 5, dtype=torch.bool), "attention_bias": torch.zeros(2, 2, 3, 5)},
        ValueError,
        "attention_mask must broadcast with attention_bias",
    ),
    "bias type": ({"attention_bias": 1.0}, TypeError, "attention_bias must be a torch.Tensor or None"),
    "bias rank": ({"attention_bias": torch.zeros(3, 5)}, ValueError, "attention_bias must be (B or 1, H or Hkv or 1"),
    "bias heads": ({"attention_bias": torch.zeros(2, 3, 5)}, ValueError, "must broadcast to"),
    "no bias": (
        {"attention_bias": None},
        ValueError,
        "attention_bias must be given to select the 3 best of 5 keys by; got attention_bias None",
    ),
    "window": ({"window_size": -1}, ValueError, "window_size must not be negative"),
    "window type": ({"window_size": 2.5}, TypeError, "keep_window_size must be an int"),
    "two windows": ({"window_size": 3, "keep_window_size": 4}, ValueError, "two names of one number"),
    "is_causal": (
        {"module": attention_module(keep_window_size=3)},
        ValueError,
        "is_causal must be given, or be an attribute of the module",
    ),
    "is_causal type": ({"is_causal": 1}, TypeError, "is_causal must be a bool"),
    "selection": ({"selection": "best"}, ValueError, "selection must be 'per_key' or 'causal'; got selection 'best'"),
    "selection causal": (
        {"selection": "causal", "is_causal": False},
        ValueError,
        "selection 'causal' chooses among the keys of a row's past and needs is_causal=True",
    ),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap must"),
    "scaling": ({"scaling": math.nan}, ValueError, "scale must be finite"),
}


@pytest.mark.devices("cpu")
@pytest.mark.parametrize(("changes", "kind", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_name_the_argument(changes: dict, kind: type, message: str) -> None:
    bare()
    with pytest.raises(kind, match=re.escape(message)):
        bare(**changes)


@pytest.mark.devices("cpu")
def test_dropout_of_zero_and_unknown_arguments_pass() -> None:
    bare(dropout=0.0, position_ids=torch.arange(3), use_cache=True, output_attentions=True, sliding_window=None)
    mask = torch.ones(2, 1, 3, 5, dtype=torch.bool)
    bare(sliding_window=3, attention_mask=mask)


@pytest.mark.devices("cpu")
def test_empty_sizes() -> None:
    for batch, rows, keys in ((0, 3, 5), (2, 0, 5), (2, 3, 0)):
        key, bias = torch.zeros(batch, 2, keys, 8), torch.zeros(batch, 2, keys)
        out, _ = bare(query=torch.zeros(batch, 4, rows, 8), key=key, value=key, attention_bias=bias)
        assert out.shape == (batch, rows, 4, 8) and (out == 0).all()
