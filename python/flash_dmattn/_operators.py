"""Loads the compiled library, and with it the operators `torch.ops.flash_dmattn.*`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ._visibility import argument_names, leading_tensors, visibility_fields

LIBRARY_FILE = Path(__file__).parent / "_C" / "libflash_dmattn_torch.so"

if not LIBRARY_FILE.exists():
    raise ImportError(
        f"flash_dmattn's compiled library is missing ({LIBRARY_FILE}): install the package with `pip install .`, or "
        "build it in place with `make library`, both in the root of the source tree"
    )
torch.ops.load_library(LIBRARY_FILE)

attention_forward = torch.ops.flash_dmattn.attention_forward.default
attention_backward = torch.ops.flash_dmattn.attention_backward.default
attention_plan = torch.ops.flash_dmattn.attention_plan.default
select_keys = torch.ops.flash_dmattn.select_keys.default
append_kept_keys = torch.ops.flash_dmattn.append_kept_keys.default
mask_intervals = torch.ops.flash_dmattn.mask_intervals.default
plan_report = torch.ops.flash_dmattn.plan_report.default
plan_chunks = torch.ops.flash_dmattn.plan_chunks.default

FORWARD_ARGUMENTS = argument_names(attention_forward)
FORWARD_TENSORS = leading_tensors(attention_forward)
PLANNED_TENSORS = leading_tensors(attention_plan)
# Visibility without a plan, as the operators that make one take it.
PLANNED_FIELDS = visibility_fields(attention_plan)


def call(operator: Callable[..., Any], *arguments: object) -> Any:
    """Calls an operator. What the library says of an argument is a ValueError, also with torch 2.15, which makes every
    exception of an operator a RuntimeError; of a failure it says "failed: ", of an argument "; got " (status.h).
    """
    if torch.compiler.is_compiling():
        return operator(*arguments)
    try:
        return operator(*arguments)
    except RuntimeError as error:
        message = str(error)
        if type(error) is RuntimeError and "; got " in message and " failed: " not in message:
            raise ValueError(message) from None
        raise
