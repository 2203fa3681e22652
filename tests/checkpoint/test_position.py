"""`position.json`: what a run with a critic adds, what older ones lack, and whose files must be
there. No tensors: those are in `test_two_learners.py`."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.commit import (
    COMMIT_FILE,
    POSITION_FILE,
    CheckpointError,
    Commit,
    checkpoint_folder,
    commit_folder,
    newest_whole,
    read_commit,
    retain,
)
from megarl.checkpoint.position import Position, RolePosition, read_position
from megarl.contracts.version import PolicyVersion, TensorEntry, WeightManifest

ADDED = {"critic", "critic_trainer", "critic_tensor_digests", "critic_model", "kl"}
"""Keys that positions of runs without a critic were once written without."""


def _role(role: str, step: int) -> RolePosition:
    manifest = WeightManifest((TensorEntry("w", (2, 3), "float32", 17 + step),))
    return RolePosition(PolicyVersion("run", step, 0, manifest.hash, "t", "m", role), manifest)


def _position(**changes: Any) -> Position:
    counts = {"steps": 4, "skipped_steps": 0, "skipped_in_a_row": 0, "empty_minibatches": 0}
    position = Position(
        run_id="run",
        iteration=2,
        actor=_role("actor", 4),
        reference=_role("reference", 2),
        reference_refreshed_at=1,
        attempt=0,
        trainer=counts | {"adam_steps": 4},
        tensor_digests={"weights/w": "0x15"},
        cursor={},
        quarantine={},
        best=None,
        contracts={},
        recipe={},
        recipe_hash="none",
        layout={"ranks": 1},
        records={},
        eval_files=[],
        exports=[],
        seconds=1.5,
        packages={},
        critic=_role("critic", 8),
        critic_trainer=counts | {"steps": 8, "adam_steps": 7},
        critic_tensor_digests={"weights/score.weight": "0x7"},
        critic_model={"head": "value"},
        kl={"beta": 0.1 + 0.2, "steps": 12},
    )
    return replace(position, **changes)


def _written(run: Path, position: Position, *roles: str) -> Path:
    """A checkpoint of stand-ins for tensors, not committed."""
    folder = checkpoint_folder(run, position.iteration)
    for role in roles:
        (folder / role).mkdir(parents=True)
        (folder / role / "__0_0.distcp").write_bytes(role.encode())
    position.write(folder)
    return folder


def _committed(run: Path, position: Position, *roles: str) -> Commit:
    return commit_folder(_written(run, position, *roles), "run", position.iteration, "v")


def test_everything_comes_back(tmp_path) -> None:
    position = _position()
    commit = _committed(tmp_path, position, "actor", "critic", "reference")
    found = read_position(read_commit(commit.folder))
    assert found == position
    assert found.critic.version.role == "critic" and found.critic.version.optimizer_step == 8
    assert found.kl["beta"] == 0.30000000000000004


def test_a_position_without_a_critics_keys_is_one_without_a_critic(tmp_path) -> None:
    alone = {"critic": None, "critic_trainer": {}, "critic_tensor_digests": {}}
    position = _position(**alone, critic_model={}, kl={})
    folder = _written(tmp_path, position, "actor", "reference")
    path = folder / POSITION_FILE
    told = json.loads(path.read_text())
    assert told.keys() == {item.name for item in fields(Position)} | {"format"}
    path.write_text(json.dumps({key: told[key] for key in told.keys() - ADDED}))
    commit = commit_folder(folder, "run", 2, "v")
    assert read_position(read_commit(commit.folder)) == position


@pytest.mark.parametrize("lost", ["critic", "critic_trainer", "critic_tensor_digests"])
def test_half_a_critic_is_no_position(tmp_path, lost: str) -> None:
    folder = _written(tmp_path, _position(), "actor", "critic", "reference")
    path = folder / POSITION_FILE
    told = json.loads(path.read_text())
    del told[lost]
    path.write_text(json.dumps(told))
    commit = commit_folder(folder, "run", 2, "v")
    with pytest.raises(CheckpointError, match="do not belong together") as error:
        read_position(commit)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("role", ["actor", "critic", "reference"])
def test_a_role_that_is_told_of_and_not_there(tmp_path, role: str) -> None:
    roles = [name for name in ("actor", "critic", "reference") if name != role]
    folder = _written(tmp_path, _position(), *roles)
    (folder / role).mkdir()
    with pytest.raises(CheckpointError, match=f"{role}: missing, position.json tells of the"):
        commit_folder(folder, "run", 2, "v")
    assert not (folder / COMMIT_FILE).exists()


def test_a_commit_that_lists_nothing_of_the_critic_is_not_whole(tmp_path) -> None:
    older = _committed(tmp_path, _position(iteration=1), "actor", "critic", "reference")
    newer = _committed(tmp_path, _position(iteration=2), "actor", "critic", "reference")
    assert newest_whole(tmp_path).iteration == 2
    shutil.rmtree(newer.folder / "critic")
    with pytest.raises(CheckpointError, match=r"critic/__0_0.distcp: missing"):
        read_commit(newer.folder)
    path = newer.folder / COMMIT_FILE
    told = json.loads(path.read_text())
    told["files"] = {name: n for name, n in told["files"].items() if "critic" not in name}
    path.write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match="tells of the critic"):
        read_commit(newer.folder)
    assert newest_whole(tmp_path) == older
    # What is not whole does not count among those that are kept, and is not removed either.
    assert retain(tmp_path, 1, 0) == [] and newer.folder.is_dir()
