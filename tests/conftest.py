from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.pool import RankPool

# A shell without job control starts background jobs with SIGINT ignored, and children inherit that:
# what is tested of Ctrl-C would then not even arrive.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Shared gloo ranks: `ranks.run(2, function, *arguments)`, `function` at module level."""
    pool = RankPool()
    yield pool
    pool.close()
