"""Models of Transformers that need more than attention: what their masks must be, and which of them are refused.

A mask function is told the configuration only, so models are known by the name of their configuration class.
"""

from __future__ import annotations

import sys
from types import ModuleType

from transformers import PreTrainedConfig
from transformers.utils import logging

logger = logging.get_logger(__name__)

# Configurations of models that give attention a list of keys for every query: the keyword that they do it with, and
# the kind of layer in config.layer_types that does it (None: all layers).
_LISTS_OF_KEYS = {
    "AXK2Config": ("indices", None),
    "DeepseekV32Config": ("indices", None),
    "Dots3NoteTextConfig": ("indices", "indexed_attention"),
    "GlmMoeDsaConfig": ("indices", None),
    "HYV4Config": ("indices", None),
    "MiniMaxM3VLTextConfig": ("block_indices", "minimax_m3_sparse"),
    "MistralLarge4TextConfig": ("indices", None),
}

# Configurations of models that read or edit the mask as a bool one, as Transformers makes it for its sdpa attention.
_READ_BOOL = {"NemotronAsrStreamingEncoderConfig", "Qwen4ExpTextConfig", "T5Gemma2DecoderConfig"}

# Those that add the mask to scores of their own, append to it or reshape it, which works with the mask of numbers only
# that Transformers makes for its eager attention.
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


def refuse_lists_of_keys(config: PreTrainedConfig | None) -> None:
    """Raises a ValueError for models that select keys by lists, which attention would have to read."""
    keyword, layer_type = _LISTS_OF_KEYS.get(type(config).__name__, (None, None))
    if keyword is None or (layer_type is not None and layer_type not in config.layer_types):
        return
    raise ValueError(
        f"model {config.model_type} hands attention the keys that each query sees as {keyword}, which is not "
        "supported: use attn_implementation='eager' or 'sdpa' for it"
    )


def dense_mask_form(config: PreTrainedConfig | None) -> str | None:
    """What a model needs that does more with its mask than hand it on: "bool" or "numbers", 4-D; None for all others.

    A model whose attention never asks AttentionInterface adds the mask to its scores itself, hence needs numbers; it
    runs as with its eager attention, with one warning.
    """
    name = type(config).__name__
    if name in _READ_BOOL:
        return "bool"
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
