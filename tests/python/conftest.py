"""What the tests of several processes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks, start_ranks


@pytest.fixture(scope="module", params=[2, 3], ids=lambda size: f"{size}_ranks")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Processes on the CPU that compute together, by gloo."""
    with start_ranks(request.param, tmp_path_factory.mktemp("ranks")) as started:
        yield started
