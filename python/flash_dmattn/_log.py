"""The package's messages, by Python's logging: what was chosen for the caller and would otherwise not be seen.

The logger is "flash_dmattn", those of flash_dmattn.integrations its children. DEBUG: what every call does. INFO: a
choice that costs time or memory. WARNING: something that was asked for does not happen. What a caller may have meant
otherwise is a warning of `warnings` instead, and lines of the kernels are asked for by FLASH_DMATTN_LOG
(docs/environment.md).
"""

import logging

import torch
from torch import Tensor

# No NullHandler: it would keep WARNINGs from programs that never set up logging.
_logger = logging.getLogger("flash_dmattn")


def logs(level: int) -> bool:
    """Whether a message of this level would be seen. Never in code that is being compiled, where logging would break
    the graph, and which would say once, at that time, what it does in every call."""
    return not torch.compiler.is_compiling() and _logger.isEnabledFor(level)


def debug(message: str, *values: object) -> None:
    """What a call does, for a message that is cheap to put together."""
    if logs(logging.DEBUG):
        _logger.debug(message, *values, stacklevel=2)


def info(message: str, *values: object) -> None:
    """A choice that costs time or memory."""
    if logs(logging.INFO):
        _logger.info(message, *values, stacklevel=2)


def described(tensor: Tensor) -> str:
    """ "bfloat16 (1, 1024, 8, 64)"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
