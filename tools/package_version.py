"""The package's version, for scikit-build-core (`[[tool.dynamic-metadata]]` of pyproject.toml): that of CMakeLists.txt.

FLASH_DMATTN_LOCAL_VERSION=cu130 makes 2.0.0 a 2.0.0+cu130, by which the wheels of one version are told apart (PEP 440,
"Local version identifiers").
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

_CMAKE_LISTS = Path(__file__).resolve().parent.parent / "CMakeLists.txt"


def package_version() -> str:
    """ "2.0.0", or "2.0.0+cu130"."""
    match = re.search(r"^project\(flash_dmattn VERSION ([0-9.]+)", _CMAKE_LISTS.read_text(), re.MULTILINE)
    if match is None:
        raise ValueError(f"{_CMAKE_LISTS} names no version")
    local = os.environ.get("FLASH_DMATTN_LOCAL_VERSION", "")
    return f"{match[1]}+{local}" if local else match[1]


def dynamic_metadata(settings: Mapping[str, object], project: Mapping[str, object]) -> dict[str, str]:
    """What scikit-build-core calls."""
    return {"version": package_version()}
