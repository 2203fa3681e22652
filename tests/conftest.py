from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Shared gloo ranks: `ranks.run(2, function, *arguments)`, `function` at module level."""
    pool = RankPool()
    yield pool
    pool.close()
