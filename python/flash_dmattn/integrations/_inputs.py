"""What all integrations do with the arguments that Transformers' attention modules pass."""

import torch
from torch import Tensor, nn
from transformers.utils import logging

from .._arguments import as_number

logger = logging.get_logger(__name__)


# Keywords that reach attention functions, since models hand on whatever they were called with, but change nothing that
# attention computes. `refuse_unknown` refuses whatever is neither here nor a parameter of the function.
HARMLESS = frozenset(
    {
        # What a model returns.
        "labels",
        "logits_to_keep",
        "num_items_in_batch",
        "output_attention_mask",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "return_loss",
        "shift_labels",
        # Caches: keys and values come out of them already.
        "cache_params",
        "cache_position",
        "past_key_values",
        "use_cache",
        # Positions: queries and keys are rotated already, and masks were made with them.
        "decoder_position_ids",
        "position_embeddings",
        "position_ids",
        # Inputs of a model: query, key, value and the mask were made of them.
        "bool_masked_pos",
        "decoder_attention_mask",
        "decoder_input_ids",
        "decoder_inputs_embeds",
        "encoder_attention_mask",
        "encoder_hidden_states",
        "encoder_outputs",
        "grid_thw",
        "hidden_states",
        "image_grid_thw",
        "image_sizes",
        "input_features",
        "input_features_mask",
        "input_ids",
        "input_values",
        "inputs_embeds",
        "interpolate_pos_encoding",
        "mm_encoder_outputs",
        "mm_token_type_ids",
        "pixel_mask",
        "pixel_values",
        "pixel_values_videos",
        "special_tokens_mask",
        "token_type_ids",
        "video_grid_thw",
        # Packed sequences: the longest document of cu_seq_lens_q and _k; documents of other kinds of layers.
        "max_length_k",
        "max_length_q",
        "seq_idx",
    }
)


def refuse_unsupported(dropout: float | None, arguments: dict[str, object]) -> None:
    """Raises where ignoring an argument would give a wrong result; only warns that there are no attention weights.

    Args:
        dropout: probability, 0 outside of training.
        arguments: the other keyword arguments of the call.
    """
    if dropout is not None and as_number("dropout", dropout) != 0.0:
        raise ValueError(
            "dropout of attention probabilities is not supported: set the model's attention dropout to 0 "
            f"(config.attention_dropout, T5: config.dropout_rate) or use another attention; got dropout {dropout}"
        )
    if arguments.get("head_mask") is not None:
        raise ValueError("head_mask is not supported: use attn_implementation='eager' for it")
    if arguments.get("output_attentions"):
        logger.warning_once("flash_dmattn computes no attention weights; None is returned in their place.")


def refuse_unknown(arguments: dict[str, object]) -> None:
    """Raises for keywords that are not known and so may change the result. None and False ask for nothing."""
    for name, value in arguments.items():
        if name not in HARMLESS and value is not None and value is not False:
            raise ValueError(
                f"{name} is a keyword that flash_dmattn does not know and that may change the result: "
                f"use another attn_implementation for it; got {name} of type {type(value).__name__}"
            )


def model_dtype(module: nn.Module, query: Tensor) -> torch.dtype | None:
    """The dtype to compute in if query is float32 but the model is not, as when PEFT keeps norms in float32.

    Returns:
        Autocast's dtype, else that from before quantisation, else that of the module's first Linear; None if query
        is not float32 or nothing says another.
    """
    if query.dtype != torch.float32:
        return None
    if torch.is_autocast_enabled(query.device.type):
        return torch.get_autocast_dtype(query.device.type)
    config = getattr(module, "config", None)
    if hasattr(config, "_pre_quantization_dtype"):
        return config._pre_quantization_dtype
    if getattr(config, "_is_quantized", False):
        return config.dtype
    return next((layer.weight.dtype for layer in module.modules() if isinstance(layer, nn.Linear)), None)


def cast_inputs(target_dtype: torch.dtype | None, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors, query first, in target_dtype if query is float32 and this another; those that are None stay so."""
    if target_dtype in (None, torch.float32) or tensors[0].dtype != torch.float32:
        return tensors
    logger.warning_once(f"Casting float32 inputs of attention to the model's {target_dtype}.")
    return tuple(None if tensor is None else tensor.to(target_dtype) for tensor in tensors)
