"""Hugging Face Transformers: the "dmattn" attention for ordinary models, Doge, and the original package's functions.

Importing this package registers "dmattn" with Transformers and lets its Doge models run on it (docs/transformers.md).
"""

try:
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "flash_dmattn.integrations needs Hugging Face Transformers, 5.17 or later: pip install 'transformers>=5.17'"
    ) from error

from . import attention_interface, doge

attention_interface.register()
doge.install()

__all__ = ["attention_interface", "doge"]
