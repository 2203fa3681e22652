"""Processes of other tests, which live beside these: a pool of ranks, a fork server."""

from __future__ import annotations

import psutil
import pytest

from tests.rewards import make_sandbox


@pytest.fixture(autouse=True)
def _others() -> None:
    make_sandbox.OTHERS = frozenset(
        child.pid for child in psutil.Process().children(recursive=True)
    )
