"""Known faults of checkpoints and resuming: what is right, with the catalogue's numbers.

Elsewhere: a gradient that is not finite, and the schedule's own numbers, in `test_models.py`; the
cursor's order alone in `test_data.py`; kills at random moments in `tests/checkpoint/test_kill.py`.
Not covered: power loss.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.commit import (
    COMMIT_FILE,
    checkpoint_folder,
    clean,
    commit_folder,
    newest_whole,
    whole_checkpoints,
)
from megarl.contracts.tokens import Tokens
from megarl.data.cursor import PromptCursor
from megarl.data.prompts import PromptError, PromptSet
from megarl.recipe.data import DataSection
from tests.contracts.tokenizer_folders import character_folder
from tests.models.support import write_hf_model
from tests.warm import forking

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def _cursor(folder: Path, answer: str = "1", seed: int = 3) -> PromptCursor:
    """Of 10 prompts, 2 an iteration."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"p{n}", "answer": answer, "id": str(n)} for n in range(10)]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokens = Tokens.load(character_folder(folder / "model", TEMPLATE))
    section = DataSection(train=str(path), max_prompt_tokens=12)
    return PromptCursor(
        PromptSet.load(section.training, tokens, section), seed=seed, per_iteration=2
    )


def _draw(cursor: PromptCursor) -> list[str]:
    cursor.begin()
    return [row.prompt_id for row in cursor.draw(2)]


def _draw_and_save(folder: Path, run: Path, drawn: Any) -> None:
    """Saves after step 2, begins to save after step 3, and waits to be killed."""
    cursor = _cursor(folder)
    for step in (1, 2, 3):
        drawn.send(_draw(cursor))
        if step == 1:
            continue
        saved = checkpoint_folder(run, step)
        saved.mkdir(parents=True)
        (saved / "position.json").write_text(json.dumps({"cursor": cursor.state}))
        if step == 2:
            commit_folder(saved, "run", step, "v2")
    drawn.send(None)
    time.sleep(60)


def test_a_killed_run_goes_on_with_the_prompts_that_come_next(tmp_path) -> None:
    """10 prompts, 2 a step, saved after step 2, killed in step 3: 0 … 9 once each, in the order of
    an uninterrupted run, and the second epoch too; what step 3 drew is drawn again."""
    context = forking()
    mine, theirs = context.Pipe(duplex=False)
    run = tmp_path / "run"
    process = context.Process(target=_draw_and_save, args=(tmp_path / "a", run, theirs))
    process.start()
    theirs.close()
    drawn = list(iter(mine.recv, None))
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL and len(drawn) == 3
    commit = newest_whole(run)
    assert commit.iteration == 2, "the one of step 3 was never committed"
    state = json.loads((commit.folder / "position.json").read_text())["cursor"]
    resumed = _cursor(tmp_path / "b")
    resumed.restore(state)
    both = drawn[:2] + [_draw(resumed) for _ in range(8)]
    assert both[2] == drawn[2]
    uninterrupted = _cursor(tmp_path / "c")
    assert both == [_draw(uninterrupted) for _ in range(10)]
    epochs = [sorted(sum(both[start : start + 5], [])) for start in (0, 5)]
    assert epochs == [[str(n) for n in range(10)]] * 2 and both[:5] != both[5:]
    for other, key in ((_cursor(tmp_path / "d", answer="2"), "fingerprint"), (None, "seed")):
        other = other or _cursor(tmp_path / "e", seed=4)
        with pytest.raises(PromptError, match=f"with {key} .*resume with the same data"):
            other.restore(state)


def _weighted(folder: Path, *weights: float) -> PromptCursor:
    """5 prompts of source a and 4 of source b, 3 an iteration, weighted."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = []
    for name, count, weight in zip("ab", (5, 4), weights, strict=True):
        path = folder / f"{name}.jsonl"
        rows = [{"prompt": f"p{n}", "answer": "1", "id": f"{name}{n}"} for n in range(count)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources.append({"path": str(path), "weight": weight})
    tokens = Tokens.load(character_folder(folder / "model", TEMPLATE))
    section = DataSection(train=sources, max_prompt_tokens=12)
    return PromptCursor(PromptSet.load(section.training, tokens, section), seed=3, per_iteration=3)


def test_weighted_sources_go_on_where_each_of_them_stood(tmp_path) -> None:
    """3 prompts a step, 2 of a and 1 of b, stopped after each of 12 steps: the draws go on as
    uninterrupted ones, every source through epochs of its own; of other weights they do not."""

    def draw(cursor: PromptCursor) -> list[str]:
        cursor.begin()
        return [row.prompt_id for row in cursor.draw(3)]

    whole = _weighted(tmp_path / "a", 2, 1)
    uninterrupted = [draw(whole) for _ in range(12)]
    told = [each for drawn in uninterrupted for each in drawn]
    for name, count in (("a", 5), ("b", 4)):
        mine = [each for each in told if each.startswith(name)]
        assert len(mine) == {"a": 24, "b": 12}[name]
        for start in range(0, len(mine) - count + 1, count):
            assert len(set(mine[start : start + count])) == count
    states, going = [], _weighted(tmp_path / "a", 2, 1)
    for _ in range(12):
        states.append(json.loads(json.dumps({"cursor": going.state}))["cursor"])
        draw(going)
    for step, state in enumerate(states):
        resumed = _weighted(tmp_path / "b", 2, 1)
        resumed.restore(state)
        assert [draw(resumed) for _ in range(step, 12)] == uninterrupted[step:]
    with pytest.raises(PromptError, match="with fingerprint .*resume with the same data"):
        _weighted(tmp_path / "c", 1, 1).restore(states[3])


def _schedule(model: Path, run: Path) -> list[Any]:
    """Warm-up 10 to 1e-6, stopped at 25 and resumed: lr of step 26, and all that it starts from."""
    from megarl.models.build import destroy_mesh
    from tests.checkpoint.saving import checkpointer, fingerprint, restore, save, step
    from tests.models.support import make_actor, make_world

    section = {"lr": 1e-6, "lr_warmup_steps": 10}
    saver = checkpointer(run, make_actor(model, make_world(2), **section), background=False)
    for _ in range(25):
        step(saver.actor)
    before = fingerprint(saver)
    save(saver, 25)
    saver.close()
    destroy_mesh()
    fresh = checkpointer(run, make_actor(model, make_world(2), **section))
    restarted = fresh.actor.trainer.learning_rate()
    restore(fresh, newest_whole(run))
    told = [fresh.actor.trainer.learning_rate(), restarted, fingerprint(fresh) == before]
    told += [fresh.state_of("actor").step, fresh.actor.trainer.steps]
    destroy_mesh()
    return told


@pytest.mark.dist
def test_a_schedule_goes_on_with_the_optimizer_that_it_belongs_to(ranks, tmp_path) -> None:
    """Moments and step count come back bit for bit; a restarted schedule would give 1e-7."""
    write_hf_model(tmp_path)
    told = ranks.run(2, _schedule, tmp_path, tmp_path / "run")
    assert told == [[1e-6, pytest.approx(1e-7), True, 25, 25]] * 2


def _killed_in_its_write(rank: int, store: str, model: Path, run: Path, tell: Any) -> None:
    """Rank 1 stops in the middle of its file, and is killed there; rank 0 looks for a commit."""
    from megarl.checkpoint import torch_dist
    from tests.checkpoint.killed_ranks import join
    from tests.checkpoint.saving import checkpointer, save, step
    from tests.models.support import make_actor, make_world

    join(rank, 2, store)
    saver = checkpointer(run, make_actor(model, make_world(2)), background=True)
    step(saver.actor)
    save(saver, 1)
    saver.settle(wait=True)
    if rank == 1:

        def half(bucket: Any, transforms: Any) -> Any:
            path, _, (_, tensors) = bucket
            with open(path, "wb") as file:
                file.write(tensors[0][1].numpy().tobytes())
                file.flush()
                os.fsync(file.fileno())
            tell.send("half")
            time.sleep(60)

        torch_dist.write_bucket = half
    save(saver, 2)
    if rank == 0:
        saver._pending.writing.result()
        tell.send("written")
    saver.settle(wait=True)
    tell.send("settled")


@pytest.mark.launch
def test_a_checkpoint_counts_when_every_rank_has_written(tmp_path) -> None:
    """Rank 1 is killed while it writes, rank 0 has written: the one before is what a resume finds,
    the half-written folder is reported, then removed. (A slow rank: `test_saver.py`.)"""
    write_hf_model(tmp_path / "model")
    context = forking()
    run, crew = tmp_path / "run", []
    for rank in range(2):
        mine, theirs = context.Pipe(duplex=False)
        given = (rank, str(tmp_path / "store"), tmp_path / "model", run, theirs)
        crew.append((context.Process(target=_killed_in_its_write, args=given), mine))
        crew[rank][0].start()
        theirs.close()
    assert crew[0][1].recv() == "written" and crew[1][1].recv() == "half"
    crew[1][0].kill()
    with pytest.raises(EOFError):
        crew[0][1].recv()  # rank 0 ends in an error; it never tells of a commit
    for process, _ in crew:
        process.join()
    assert crew[0][0].exitcode == 1 and crew[1][0].exitcode == -signal.SIGKILL
    half = checkpoint_folder(run, 2)
    assert sorted(path.name for path in half.rglob("*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
    whole, others = whole_checkpoints(run)
    assert [commit.iteration for commit in whole] == [1] and newest_whole(run) == whole[0]
    assert others == [f"{half}: half-written, there is no {COMMIT_FILE}"]
    assert clean(run) == [f"{half}: half-written, removed"] and not half.exists()
    assert newest_whole(run) == whole[0]
