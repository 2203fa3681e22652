from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.experience.make_facts import make_facts, write_iterations


@pytest.fixture(scope="session")
def written(ranks, tmp_path_factory) -> Path:
    """Two iterations of two ranks."""
    folder = tmp_path_factory.mktemp("written")
    every = [make_facts(seed, 2, 2, groups=8, with_critic=True) for seed in (1, 2)]
    ranks.run(2, write_iterations, folder, every)
    return folder


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "run")
