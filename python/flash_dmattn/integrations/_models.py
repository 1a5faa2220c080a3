"""Models of Transformers that do more with a mask than hand it to attention: what their masks must be.

A mask function is told the configuration only, so models are known by the name of their configuration class.
"""

from __future__ import annotations

import sys
from types import ModuleType

from transformers import PreTrainedConfig
from transformers.utils import logging

logger = logging.get_logger(__name__)

# Configurations of models that read or edit the mask as a bool one, as Transformers makes it for its sdpa attention.
_READ_BOOL = {"NemotronAsrStreamingEncoderConfig", "Qwen4ExpTextConfig", "T5Gemma2DecoderConfig"}

# Those that choose the keys of every query by scores of their own, and need a bool mask to hide some of these, in every
# forward; in layers of this kind in config.layer_types (None: in all), which have no window.
_INDEXERS_READ_BOOL = {
    "AXK2Config": None,
    "DeepseekV32Config": None,
    "Dots3NoteTextConfig": "indexed_attention",
    "GlmMoeDsaConfig": None,
    "HYV4Config": None,
    "MistralLarge4TextConfig": None,
}

# Those that add the mask to scores of their own, append to it or reshape it, which works with the mask of numbers only
# that Transformers makes for its eager attention. (DeepSeek-V4 appends 0 for keys that are seen and -inf for others,
# cast to the mask's dtype: to a bool mask it would append the opposite of what it means.)
_ADD_NUMBERS = {
    "BeitConfig",
    "BigBirdPegasusConfig",
    "DeepseekV4Config",
    "Gemma4AudioConfig",
    "GitConfig",
    "InformerConfig",
    "PPDocLayoutV2ReadingOrderConfig",
}

# Those whose decoders' attention modules say that they are not causal, so that their masks have to.
_NOT_CAUSAL_WITHOUT_MASK = {"NllbMoeConfig", "PegasusXConfig"}


def dense_mask_form(config: PreTrainedConfig | None, has_window: bool = False) -> str | None:
    """What a model needs that does more with its mask than hand it on: "bool" or "numbers", 4-D; None for all others.

    Args:
        has_window: the mask is that of layers with a sliding window.

    A model whose attention never asks AttentionInterface adds the mask to its scores itself, hence needs numbers; it
    runs as with its eager attention, with one warning.
    """
    name = type(config).__name__
    if name in _READ_BOOL:
        return "bool"
    if name in _INDEXERS_READ_BOOL and not has_window:
        layer_type = _INDEXERS_READ_BOOL[name]
        return "bool" if layer_type is None or layer_type in config.layer_types else None
    if name in _ADD_NUMBERS:
        return "numbers"
    if _attends_by_itself(_modeling_module(config)):
        logger.warning_once(
            f"Models of {name} compute attention themselves: attn_implementation 'dmattn' changes nothing in them."
        )
        return "numbers"
    return None


def needs_causal_mask(config: PreTrainedConfig | None) -> bool:
    """Whether no mask at all would let a decoder's rows see what comes behind them."""
    return type(config).__name__ in _NOT_CAUSAL_WITHOUT_MASK


def _modeling_module(config: PreTrainedConfig | None) -> ModuleType | None:
    """The module that holds the models of a configuration, if it has been imported."""
    return sys.modules.get(type(config).__module__.replace("configuration_", "modeling_"))


def _attends_by_itself(module: ModuleType | None) -> bool:
    """Whether there are attention modules in it, none of which can use AttentionInterface (Transformers' own test)."""
    if module is None or hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        return False
    return any("Attention" in name for name, value in vars(module).items() if isinstance(value, type))
