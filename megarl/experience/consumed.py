"""What a run has trained on already: an experience trains exactly once, also across restarts.

An experience counts as used from UPDATING_FROM on, even where no commit followed: from there its
gradients may be in the weights. The journal's line is flushed before that state counts, so a torn
last line was never acted upon.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from megarl.contracts.lines import LinesError, read_json_lines
from megarl.contracts.states import JOURNAL_FILE, State
from megarl.experience.updates import UPDATES_FILE, read_updates


class AlreadyTrained(RuntimeError):
    """An experience that was trained on before; names the iteration and where that is written."""


@dataclass(frozen=True, slots=True)
class Use:
    """One update from an experience."""

    iteration: int
    where: str
    """The file and line that tell it."""


@dataclass
class Consumed:
    """The one use of every experience, by its hash."""

    _uses: dict[str, Use] = field(default_factory=dict)

    @staticmethod
    def read(run_folder: Path) -> Consumed:
        """What the run's journal and updates tell; nothing where there is neither.

        Raises `AlreadyTrained` where they tell of one experience twice, `LinesError` naming a
        broken line.
        """
        begun, ended = Consumed(), Consumed()
        path = run_folder / JOURNAL_FILE
        lines = read_json_lines(path)[0] if path.exists() else []
        for number, line in enumerate(lines, start=1):
            if line.get("state") == State.UPDATING_FROM:
                where = f"{path}:{number}"
                if not {"experience_hash", "iteration"} <= line.keys():
                    raise LinesError(f"{where}: {State.UPDATING_FROM} of an unnamed experience")
                begun.use(line["experience_hash"], Use(line["iteration"], where))
        path = run_folder / UPDATES_FILE
        updates = read_updates(run_folder)[0] if path.exists() else []
        for number, update in enumerate(updates, start=1):
            use = Use(update.iteration, f"{path}:{number}")
            ended.use(update.experience_hash, use)
            # The line that ends an update tells of the same use as the one that began it.
            first = begun.use_of(update.experience_hash)
            if first is None or first.iteration != use.iteration:
                begun.use(update.experience_hash, use)
        return begun

    def use_of(self, experience_hash: str) -> Use | None:
        return self._uses.get(experience_hash)

    def refusal(self, experience_hash: str, iteration: int) -> str | None:
        """Why iteration `iteration` may not train on this experience; None where it may."""
        earlier = self.use_of(experience_hash)
        if earlier is None:
            return None
        return (
            f"iteration {iteration} would train on experience {experience_hash}, but iteration "
            f"{earlier.iteration} did already ({earlier.where}); an experience trains exactly "
            "once: sample again"
        )

    def use(self, experience_hash: str, use: Use) -> None:
        """It is trained on from here on; raises `AlreadyTrained` where it was before."""
        refusal = self.refusal(experience_hash, use.iteration)
        if refusal is not None:
            raise AlreadyTrained(f"{use.where}: {refusal}")
        self._uses[experience_hash] = use
