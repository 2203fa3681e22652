"""One real run, made once for all audits: tests copy what they change.

`audited` is the session-scoped fixture, a finished run's folder.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launch.runs import launch, make_model, run_warm, settings

# Scores of 0 and 1 leave some groups without variance; some responses cannot be scored.
SCORERS = "[{name: 'tests.audit.scorers:by_thirds', weight: 2.0}, {name: exact_match, weight: 0}]"

OVERRIDES = {
    "run.iterations": 3,
    "data.eval": "null",
    "reward.scorers": SCORERS,
    "reward.max_error_share": 1.0,
    "algorithm.kl.beta": 0.02,
    "world.timeout_seconds": 120,
}


@pytest.fixture(scope="session")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished GRPO run of three iterations on two ranks (actor TP2, two replicas):
    8 groups of four each, KL to a reference, some groups dropped, some responses not scorable."""
    data = make_model(tmp_path_factory.mktemp("audit_data"))
    runs = tmp_path_factory.mktemp("audit_runs")
    done = launch("audited", settings(data, runs, **OVERRIDES), runs)
    assert done.code == 0, done.output + done.logs()
    return done.folder


RESUMED = OVERRIDES | {"run.iterations": 4, "checkpoint.every": 2, "algorithm.kl.beta": 0.0}


@dataclass(frozen=True)
class Interrupted:
    """One run, as a kill left it and as its resume finished it; the names of both are equal."""

    killed: Path
    resumed: Path


@pytest.fixture(scope="session")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    """Four iterations, a checkpoint after two, killed in the update of the last one; resumed in
    the same layout. Iterations 2 and 3 were rolled back."""
    data = make_model(tmp_path_factory.mktemp("interrupted_data"))
    runs = tmp_path_factory.mktemp("interrupted_runs")
    kept = tmp_path_factory.mktemp("interrupted_kept") / "interrupted"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGARL_FAULT_TESTING", "1")
        patch.setenv("MEGARL_FAULT", "kill@update:rank=1:visit=4")
        done = run_warm("interrupted", settings(data, runs, **RESUMED), runs)
    assert done.code == 137, done.output
    shutil.copytree(done.folder, kept)
    done = run_warm("interrupted", settings(data, runs, **RESUMED), runs)
    assert done.code == 0, done.output + done.logs()
    return Interrupted(kept, done.folder)
