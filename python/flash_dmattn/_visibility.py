"""What a call lets each query see, as one object from `attention` down to the operators."""

from typing import NamedTuple

from torch import Tensor


class Visibility(NamedTuple):
    """A score is visible if every field lets it be. B batch, Sq and Sk query and key length, H query heads, Hkv key
    heads; docs/semantics.md says what each field means.

    The operators take the fields side by side, of these names and in this order, but those that make a plan take none.
    The C++ side is VisibilityArguments in torch/visibility.h.
    """

    mask: Tensor | None = None
    """bool, True = visible: (B or 1, H or Hkv or 1, Sq or 1, Sk or 1), (B or 1, H or Hkv or 1, Sk or 1) or
    (Sq or 1, Sk or 1)."""
    seqlens_k: Tensor | None = None
    """int32 (B,): only so many keys of each batch element exist."""
    interval_begin: Tensor | None = None
    """int32 (B or 1, H or Hkv or 1, Sk): the first row that sees each key. KeyIntervals.begin."""
    interval_end: Tensor | None = None
    """The same of the first row after those that see it. KeyIntervals.end."""
    indices: Tensor | None = None
    """int32 (B or 1, H or Hkv or 1, Sq or 1, n): the keys, or blocks of keys, of each row. KeyIndices.indices."""
    index_lengths: Tensor | None = None
    """int32 (B or 1, H or Hkv or 1, Sq or 1): how many entries of each list count. KeyIndices.lengths."""
    plan: Tensor | None = None
    """uint8 (bytes,): what the operator attention_plan made of the other fields, which it only sums up."""
    is_causal: bool = False
    """Row i sees keys j <= i + n - Sq, where n keys exist."""
    interval_window: int = 0
    """The intervals show no row more keys than this; 0: unknown. KeyIntervals.window_size."""
    index_block_size: int = 1
    """Keys that an entry of a list stands for. KeyIndices.block_size."""

    @property
    def planned(self) -> list[Tensor]:
        """What a GPU makes a plan of. Without these there is none: lengths and the causal rule are arithmetic."""
        views = (self.mask, self.interval_begin, self.interval_end, self.indices, self.index_lengths)
        return [view for view in views if view is not None]


# ---- How operators take it, by their schemas: nothing else counts positions or lists names


def argument_names(op) -> tuple[str, ...]:
    """The names of an operator's arguments, in order."""
    return tuple(argument.name for argument in op._schema.arguments)


# What a caller knows arguments of other names by.
_SHOWN = {
    "interval_begin": "intervals.begin",
    "interval_end": "intervals.end",
    "index_lengths": "indices.lengths",
}


def shown_name(name: str) -> str:
    """An argument's name in error messages."""
    return _SHOWN.get(name, name)


def leading_tensors(op) -> tuple[str, ...]:
    """The tensors before the first argument that is none, as error messages name them."""
    names = []
    for argument in op._schema.arguments:
        if "Tensor" not in str(argument.type):
            break
        names.append(shown_name(argument.name))
    return tuple(names)


def visibility_fields(op) -> tuple[str, ...]:
    """The fields that an operator takes."""
    return tuple(name for name in argument_names(op) if name in Visibility._fields)


def flatten(visibility: Visibility, fields: tuple[str, ...]) -> tuple[object, ...]:
    """Those fields, as an operator takes them."""
    return tuple(getattr(visibility, name) for name in fields)


def unflatten(fields: tuple[str, ...], values: tuple[object, ...]) -> Visibility:
    """What `flatten` made the values of."""
    return Visibility(**dict(zip(fields, values, strict=True)))
