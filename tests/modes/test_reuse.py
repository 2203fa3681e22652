"""Which sealed facts a resumed run goes on from: each way in which they may not fit, one by one.

Facts are written and read by two real ranks. What then follows from them is held against an
uninterrupted run in `tests/launch/test_reuse.py`. Not covered: file systems on which ranks see
different files for longer than one reading.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.contracts.records import Prompt
from megarl.data.cursor import PromptCursor
from megarl.data.prompts import PromptSet
from megarl.experience.manifest import iteration_folder
from megarl.modes.reuse import CannotReuse, proven_facts, reuse
from tests.experience.make_facts import SAMPLING, SCORER, make_facts, world_of, write_iterations

pytestmark = pytest.mark.dist

FACTS = make_facts(1, 2, 2, groups=8)
SEED = FACTS.drawn.cursor["seed"]
FINGERPRINT = FACTS.drawn.cursor["fingerprint"]
V1, R1 = SimpleNamespace(id="v1"), SimpleNamespace(id="r1")


@pytest.fixture(scope="module")
def folder(ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Iteration 0, as two ranks sealed it."""
    folder = tmp_path_factory.mktemp("run")
    ranks.run(2, write_iterations, folder, [FACTS])
    return folder


def cursor_of(
    rows: tuple[Prompt, ...] = FACTS.prompts, fingerprint: str = FINGERPRINT, seed: int = SEED
) -> PromptCursor:
    more = (Prompt("src/more", "src", "more?", (1,), "1"),)
    return PromptCursor(PromptSet(rows + more, (), {}, fingerprint), seed, 1)


def run_of(run_folder: Path, **changes: Any) -> SimpleNamespace:
    """What of a run the proof looks at, on this rank; only rank 0 has scorers."""
    world = world_of(torch.distributed.get_world_size(), rollout_tp=2)
    values = {
        "world": world,
        "folder": run_folder,
        "reusable": 0,
        "recipe": SimpleNamespace(run=SimpleNamespace(name="run")),
        "version": SimpleNamespace(id="v0"),
        "reference": object(),
        "reference_version": SimpleNamespace(id="r0"),
        "critic": None,
        "critic_version": None,
        "tokens": SimpleNamespace(hash="sha256:tokenizer"),
        "sampling": SAMPLING,
        "pool": SimpleNamespace(version=SCORER) if world.leads_replica else None,
        "cursor": cursor_of(),
        "start": None,
        "contracts": {},
    }
    return SimpleNamespace(**(values | changes))


def _told(folder: Path, changes: dict[str, Any], on_rank_1: dict[str, Any]) -> str:
    mine = changes | (on_rank_1 if torch.distributed.get_rank() == 1 else {})
    if "scorer" in mine:
        world = world_of(2, rollout_tp=2)
        version = SimpleNamespace(version=mine.pop("scorer"))
        mine["pool"] = version if world.leads_replica else None
    try:
        facts, prompts = proven_facts(run_of(folder, **mine), 0)
    except CannotReuse as error:
        return str(error)
    same = [prompt.prompt_id for prompt in prompts] == [each["prompt_id"] for each in facts.prompts]
    return f"proven, {len(facts.samples)} samples" if same else "other prompts"


def test_facts_of_this_run_are_proven(ranks, folder: Path) -> None:
    assert ranks.run(2, _told, folder, {}, {}) == [f"proven, {len(FACTS.samples)} samples"] * 2


def _edited(row: int, **change: Any) -> tuple[Prompt, ...]:
    rows = list(FACTS.prompts)
    rows[row] = replace(rows[row], **change)
    return tuple(rows)


MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "run": (
        {"recipe": SimpleNamespace(run=SimpleNamespace(name="other"))},
        "run.name run, this run has other",
    ),
    "version": ({"version": V1}, "old log-probs of version v0, this run has v1"),
    "reference": ({"reference_version": R1}, "ref log-probs of version r0, this run has r1"),
    "no reference": ({"reference": None}, "ref log-probs of version r0, this run has None"),
    "critic": (
        {"critic": object(), "critic_version": SimpleNamespace(id="c1")},
        "values of critic version None, this run has c1",
    ),
    "tokenizer": (
        {"tokens": SimpleNamespace(hash="sha256:x")},
        "tokenizer sha256:tokenizer, this run has sha256:x",
    ),
    "temperature": (
        {"sampling": replace(SAMPLING, temperature=0.5)},
        "sampling.temperature 1.0, this run has 0.5",
    ),
    "seed": ({"sampling": replace(SAMPLING, seed=8)}, "sampling.seed 7, this run has 8"),
    "stop": (
        {"sampling": replace(SAMPLING, stop_token_ids=(2,))},
        "sampling.stop_token_ids (2, 5), this run has (2,)",
    ),
    "scorer": ({"scorer": "s9"}, f"scorer version {SCORER}, this run has s9"),
    "data": (
        {"cursor": cursor_of(fingerprint="f0")},
        f"data fingerprint {FINGERPRINT}, this run has f0",
    ),
    "curriculum": (
        {
            "start": SimpleNamespace(
                position=SimpleNamespace(contracts={"curriculum": "sha256:1"})
            ),
            "contracts": {"curriculum": "sha256:2"},
        },
        "prompts of curriculum sha256:1, this run has sha256:2",
    ),
    "order": ({"cursor": cursor_of(seed=9)}, f"data seed {SEED}, this run has 9"),
    "row gone": (
        {"cursor": cursor_of(FACTS.prompts[1:])},
        "prompt src/0, this run has no such row",
    ),
    "row edited": (
        {"cursor": cursor_of(_edited(3, answer="4"))},
        'prompt src/3 of answer "3", this run has "4"',
    ),
    "row with other words": (
        {"cursor": cursor_of(_edited(3, text="x" * 99))},
        f'prompt src/3 of text "what? \\u00fc\\u2028 3", this run has "{"x" * 59}…;',
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_refused_with_both_values(ranks, folder: Path, name: str) -> None:
    changes, expected = MISFITS[name]
    first, second = ranks.run(2, _told, folder, changes, {})
    assert first == second and "\n" not in first
    assert first.startswith(f"{iteration_folder(folder, 0)}: sealed with ")
    assert expected in first
    assert first.endswith("; set resume.use=regenerate to sample the iteration again")


def test_what_one_rank_finds_is_told_by_all(ranks, folder: Path, tmp_path: Path) -> None:
    first, second = ranks.run(2, _told, folder, {}, {"folder": tmp_path})
    assert first == second
    assert first.startswith(f"{iteration_folder(tmp_path, 0)}/manifest.json: No such file")
    assert first.endswith("; set resume.use=regenerate to sample the iteration again")


def _reused(folder: Path, iteration: int, reusable: int | None) -> bool:
    return reuse(run_of(folder, reusable=reusable), iteration, None) is not None


@pytest.mark.parametrize("iteration, reusable", [(0, None), (0, 1), (1, 1)])
def test_what_was_not_asked_for_or_not_sealed_is_generated(
    ranks, folder: Path, iteration: int, reusable: int | None
) -> None:
    assert ranks.run(2, _reused, folder, iteration, reusable) == [False] * 2
