"""Whole runs: megatron-core actor, SGLang in the same ranks, on a tiny random model. The first one
is launched by torchrun, those held against it are ranks of `tests/warm.py`.

Not covered here: the quickstart's own accuracy (`make demo`), more than two ranks, GPUs, Slurm.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from safetensors import safe_open

from megarl.contracts.tokens import Tokens
from megarl.contracts.version import TensorEntry, WeightManifest
from megarl.experience.consumed import AlreadyTrained, Consumed, Use
from megarl.experience.updates import read_updates
from megarl.experience.versions import Versions
from megarl.reshard.digest import block_digest
from tests.launch.runs import Finished, launch, make_model, read_lines, run_warm, settings

pytestmark = pytest.mark.launch

# No answer of a random model is right: a share of digits is a reward that varies and can rise.
SCORERS = "[{name: 'tests.launch.scorers:digit_share'}, {name: exact_match, weight: 0.0}]"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Actor TP2, two TP1 replicas, three iterations: the quickstart's layout."""
    runs = tmp_path_factory.mktemp("runs")
    done = launch("tp2", settings(data, runs, **{"reward.scorers": SCORERS}), runs)
    assert done.code == 0, done.output + done.logs()
    return done


def _plain(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def test_every_row_has_what_people_plot(run: Finished) -> None:
    rows = run.rows
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    wanted = {"reward/mean", "parity/logprob_gap_max", "time/iteration", "time/generate"}
    assert all(wanted <= row.keys() for row in rows)
    assert {"eval/accuracy", "eval/accuracy_sampled"} <= rows[0].keys()
    assert rows[0]["eval/optimizer_step"] == 0
    assert rows[-1]["eval/final/optimizer_step"] == 6
    # No evaluation was due before the last iteration: the plain names are of those alone.
    assert "eval/optimizer_step" not in rows[-1] and "eval/accuracy" not in rows[-1]
    assert (run.folder / "report.html").exists()
    assert list((run.folder / "tensorboard").iterdir())


def test_trainer_and_generator_agree_at_every_iteration(run: Finished) -> None:
    for row in run.rows:
        assert 0 < row["parity/logprob_gap_max"] <= 1e-4
        assert row["policy/first_log_ratio_abs_max"] == 0.0
        assert row["update/steps"] == 2


def test_the_journal_is_one_legal_walk(run: Finished) -> None:
    lines = read_lines(run.folder / "journal.jsonl")
    cycle = ["EXPORTING", "ROLLOUT_LOADING", "ROLLOUT_READY", "GENERATING", "PREPARING"]
    cycle += ["EXPERIENCE_SEALED", "UPDATING_FROM", "ACTOR_COMMITTED"]
    final = ["EXPORTING", "ROLLOUT_LOADING", "ROLLOUT_READY", "ACTOR_COMMITTED"]
    assert [line["state"] for line in lines] == ["ACTOR_COMMITTED"] + cycle * 3 + final
    committed = [line for line in lines if line["state"] == "ACTOR_COMMITTED"]
    assert [line["optimizer_step"] for line in committed] == [0, 2, 4, 6, 6]
    ready = [line for line in lines if line["state"] == "ROLLOUT_READY"]
    assert [line["version"] for line in ready] == [line["version"] for line in committed[:-1]]
    assert len({line["version"] for line in ready}) == 4


def test_the_ledger_closes_every_iteration(run: Finished) -> None:
    for line in read_lines(run.folder / "ledger.jsonl"):
        out = sum(line["dropped"].values()) + sum(line["refused"].values())
        assert line["sampled"] == 32 == line["trained"] + out
        assert (line["prompts"], line["rounds"]) == (8, 1)
        assert line["joined"] == {"duplicates": 0, "late": 0}
        folder = run.folder / "experience" / f"iter_{line['iteration']:06d}"
        manifest = json.loads((folder / "manifest.json").read_text())
        assert line["experience_hash"] == manifest["experience_hash"]


def test_every_version_is_told_from_both_sides(run: Finished) -> None:
    """The generator's own parameters at the last hand-over are the exported files', bit for bit."""
    versions = Versions.read(run.folder)
    journal = read_lines(run.folder / "journal.jsonl")
    ready = [line for line in journal if line["state"] == "ROLLOUT_READY"]
    assert [(one.id, one.iteration) for one in versions.loaded] == [
        (line["version"], line["iteration"]) for line in ready
    ]
    for loaded, line in zip(versions.loaded, ready, strict=True):
        assert (loaded.side, loaded.replicas) == ("rollout", 2)
        assert loaded.manifest == versions.resolve(line["version"]).manifest
        assert line["weight_manifest_hash"] == loaded.manifest.hash and line["verified"]
    assert versions.loaded[-1].manifest.hash == _manifest_hash(run.folder / "hf")
    assert {line["version"] for line in journal} == versions.committed.keys()


def test_every_update_is_recorded_once(run: Finished) -> None:
    updates, torn = read_updates(run.folder)
    assert not torn and [update.iteration for update in updates] == [0, 1, 2]
    journal = read_lines(run.folder / "journal.jsonl")
    begun = [line for line in journal if line["state"] == "UPDATING_FROM"]
    committed = [line["version"] for line in journal if line["state"] == "ACTOR_COMMITTED"]
    for update, line, row in zip(updates, begun, run.rows, strict=True):
        folder = run.folder / "experience" / f"iter_{update.iteration:06d}"
        manifest = json.loads((folder / "manifest.json").read_text())
        assert manifest["experience_hash"] == update.experience_hash == line["experience_hash"]
        derived_hash = "blake3:" + blake3((folder / "derived.json").read_bytes()).hexdigest()
        assert derived_hash == update.derived_hash == line["derived_hash"]
        assert update.from_version == line["version"] == committed[update.iteration]
        assert update.to_version == committed[update.iteration + 1]
        assert [step.minibatch for step in update.steps] == [0, 1]
        assert all(step.stepped and step.skipped_reason is None for step in update.steps)
        for key in ("loss", "grad_norm"):
            mean = sum(getattr(step, key) for step in update.steps) / 2
            assert mean == pytest.approx(row[f"update/{key}"], rel=1e-12)
        trained = sum(step.sequences for step in update.steps)
        assert 0 < trained <= row["groups/samples_trained"]


def test_a_later_process_knows_what_was_trained_on(run: Finished) -> None:
    consumed = Consumed.read(run.folder)
    for update in read_updates(run.folder)[0]:
        with pytest.raises(AlreadyTrained, match=f"iteration {update.iteration} did already"):
            consumed.use(update.experience_hash, Use(3, "in this process"))


def test_the_run_keeps_its_tokenizer(run: Finished, data: Path) -> None:
    kept = Tokens.load(run.folder / "tokenizer")
    assert kept.hash == Tokens.load(data / "model").hash
    assert read_lines(run.folder / "versions.jsonl")[0]["tokenizer_hash"] == kept.hash


def test_the_export_is_the_last_committed_version_and_transformers_loads_it(
    run: Finished, data: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run.folder / "hf")
    before = AutoModelForCausalLM.from_pretrained(data / "model")
    moved = [
        not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True)
    ]
    assert all(moved)
    finished = json.loads((run.folder / "finished.json").read_text())
    assert _manifest_hash(run.folder / "hf") == finished["weight_manifest_hash"]


def _manifest_hash(folder: Path) -> str:
    """The manifest of a folder's files, read here; the digest itself has its own oracle."""
    entries = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - safe_open is no dict
                tensor = tensors.get_tensor(name)
                digest = block_digest(tensor.reshape(len(tensor), -1), name, 0, 0)
                kind = str(tensor.dtype).removeprefix("torch.")
                entries.append(TensorEntry(name, tuple(tensor.shape), kind, digest))
    return WeightManifest(tuple(entries)).hash


def test_the_same_seed_gives_the_same_metrics(run: Finished, data: Path, tmp_path: Path) -> None:
    again = run_warm("again", settings(data, tmp_path, **{"reward.scorers": SCORERS}), tmp_path)
    assert again.code == 0, again.output + again.logs()
    assert _plain(again.rows) == _plain(run.rows)


@pytest.mark.parametrize("layout", [{"rollout.tp": 2}, {"actor.pp": 2}])
def test_another_layout_samples_the_same_tokens(
    run: Finished, data: Path, tmp_path: Path, layout: dict
) -> None:
    overrides = {"actor.tp": 1, "reward.scorers": SCORERS} | layout
    other = run_warm("other", settings(data, tmp_path, **overrides), tmp_path)
    assert other.code == 0, other.output + other.logs()
    hashes = [
        read_lines(each.folder / "versions.jsonl")[0]["weight_manifest_hash"]
        for each in (run, other)
    ]
    assert hashes[0] == hashes[1]
    finished = json.loads((other.folder / "finished.json").read_text())
    assert _manifest_hash(other.folder / "hf") == finished["weight_manifest_hash"]
    assert all(row["policy/first_log_ratio_abs_max"] == 0.0 for row in other.rows)
    first, theirs = run.rows[0], other.rows[0]
    for key in ("reward/mean", "response/tokens", "groups/samples_trained", "eval/accuracy"):
        assert theirs[key] == first[key], key
    for key in ("policy/entropy", "update/grad_norm", "update/loss"):
        assert theirs[key] == pytest.approx(first[key], rel=1e-4, abs=1e-7), key
    assert other.rows[-1]["reward/mean"] == pytest.approx(run.rows[-1]["reward/mean"], abs=0.02)


def test_reward_rises(data: Path, tmp_path: Path) -> None:
    """From random weights the share of digits in a response can only rise by learning."""
    overrides = {
        "reward.scorers": SCORERS,
        "run.iterations": 15,
        "rollout.prompts_per_iteration": 16,
        "actor.lr": 2e-3,
        "data.eval": "null",
        "algorithm.kl.beta": 0.001,
    }
    learned = run_warm("learn", settings(data, tmp_path, **overrides), tmp_path)
    assert learned.code == 0, learned.output + learned.logs()
    rewards = [row["reward/mean"] for row in learned.rows]
    assert sum(rewards[-3:]) / 3 > 2 * sum(rewards[:3]) / 3, rewards
    # A reference is loaded for the KL term: the model it started from, under a version of its own.
    assert learned.rows[-1]["policy/kl"] > learned.rows[0]["policy/kl"] > 0
    versions = read_lines(learned.folder / "versions.jsonl")
    (reference,) = [version for version in versions if version.get("role") == "reference"]
    assert reference["weight_manifest_hash"] == versions[0]["weight_manifest_hash"]
    assert reference["id"] != versions[0]["id"]
