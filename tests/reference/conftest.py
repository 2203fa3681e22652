from __future__ import annotations

import pytest

from tests.reference.runs import Bench


@pytest.fixture(scope="package")
def bench(tmp_path_factory) -> Bench:
    """Models, rows and the reference's iterations on them."""
    return Bench(tmp_path_factory.mktemp("reference"))
