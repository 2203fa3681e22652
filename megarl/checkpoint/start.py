"""A start that goes on: compared with where it goes on, the folder cut back, the state restored.

start = take_up(…)              once inputs are loaded; every rank takes rank 0's word
start.restore_roles(…)          once models are built
start.restore_data(…)           cursor, curriculum's history and quarantine
start.restore_controller(…)     the KL term's weight
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.checkpoint.begin import begin
from megarl.checkpoint.commit import CheckpointError
from megarl.checkpoint.position import Position
from megarl.checkpoint.restore import restore_roles
from megarl.checkpoint.resume import Resume, ResumeRefused, contents, let_through
from megarl.checkpoint.saver import Checkpointer, layout_of
from megarl.data.curriculum import KEY
from megarl.data.cursor import PromptCursor
from megarl.exports import Exports
from megarl.observe.console import Console
from megarl.recipe import Recipe
from megarl.rewards.quarantine import Quarantine
from megarl.world import World

if TYPE_CHECKING:
    from megarl.algorithms.controller import KlController

KL_BETA, KL_TARGET = "algorithm.kl.beta", "algorithm.kl.target"


@dataclass
class Start:
    """Where this start goes on."""

    resume: Resume
    position: Position | None
    """None: at iteration 0 again, with everything of the earlier attempt set aside."""

    @property
    def iteration(self) -> int:
        """The first one to run."""
        return self.resume.iteration

    def restore_roles(self, checkpointer: Checkpointer, recipe: Recipe) -> None:
        """Weights, optimizers and random generators, proven by digest. Collective; raises as
        `restore.restore_roles` does."""
        if self.position is None:
            return
        checkpointer.world.enter("build_actor")
        declared = Path(recipe.reference.path or recipe.model.path)
        restore_roles(Path(self.resume.checkpoint), self.position, checkpointer, declared)

    def restore_controller(self, controller: KlController) -> None:
        """β goes on from the one that was saved, where there is one: not where this start was
        allowed another β, or to let it stand still."""
        if self.position is None or not self.position.kl:
            return
        changes = self.resume.changes
        stands_still = KL_TARGET in changes and changes[KL_TARGET][1] is None
        if KL_BETA not in changes and not stands_still:
            controller.restore(self.position.kl)

    def restore_data(
        self, cursor: PromptCursor, quarantine: Quarantine, note: Callable[[str], None]
    ) -> None:
        """What was drawn, how that went, and what is drawn no more. Another data set or seed, where
        it was allowed, is drawn from its beginning."""
        if self.position is None:
            return
        mine, stored = cursor.state, self.position.cursor
        changed = [key for key in ("fingerprint", "seed") if mine[key] != stored[key]]
        if changed:
            what = " and ".join("data" if key == "fingerprint" else key for key in changed)
            note(
                f"another {what}, as allowed: prompts are drawn from the beginning of the new order"
            )
        else:
            cursor.restore(stored)
        if "fingerprint" not in changed:
            quarantine.restore(self.position.quarantine)
            cursor.restore_history(self.position.curriculum)
        if cursor.curriculum is not None and not cursor.curriculum.history.known:
            note(
                f"{KEY}: {cursor.curriculum.name} knows nothing of the {self.iteration} iterations "
                "before: every prompt counts as one that was never drawn"
            )

    def restore_exports(self, exports: Exports, note: Callable[[str], None]) -> None:
        """The best export as the position knows it. Collective."""
        best = None if self.position is None else self.position.best
        line = exports.restore(best, own=self.resume.own)
        if line is not None:
            note(line)


def take_up(
    recipe: Recipe,
    world: World,
    resume: Resume | None,
    mine: Mapping[str, str],
    console: Console,
    facts: Callable[[], Mapping[str, Any]] | None = None,
) -> Start | None:
    """Rank 0's decision, checked against the contents `mine` and carried out. Collective.

    `facts` is what `data.json` would say, for a refusal that names what of the data differs.

    None for a new run. Raises `ResumeRefused` on every rank, with the run's folder as it was;
    `CheckpointError` where the folder could not be cut back.
    """
    resume = world.from_main(resume)
    if resume is None:
        return None
    folder, layout = recipe.run_folder, layout_of(world)
    differ: dict[str, tuple[str, str]] = {}
    lines: list[str] = []
    _on_main(
        world,
        ResumeRefused,
        lambda: differ.update(contents(recipe, resume, mine, folder, facts)),
    )
    _on_main(
        world,
        CheckpointError,
        lambda: lines.extend(begin(recipe, resume, folder, layout, differ)),
    )
    # Rank 0 has read it just now; another rank's view of a shared folder may be older.
    position = world.from_main(resume.position() if world.is_main else None)
    where = "the start" if position is None else resume.checkpoint
    console.note(
        f"going on at iteration {resume.iteration} from {where} (resume {resume.number}, "
        f"update attempt {resume.attempt})"
    )
    for line in (*let_through(resume, differ), *resume.notes):
        console.note(line)
    if lines:
        console.note(f"set aside in {resume.folder_name}: {'; '.join(lines)}")
    return Start(resume, position)


def _on_main(world: World, error_type: type[Exception], do: Callable[[], Any]) -> None:
    """Rank 0 does it, and every rank raises `error_type` where it could not. Collective."""
    problem: Exception | None = None
    if world.is_main:
        try:
            do()
        except (OSError, ValueError, CheckpointError) as error:
            problem = error
    told = world.from_main("" if problem is None else str(problem))
    if told:
        raise error_type(told) from problem
