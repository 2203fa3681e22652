"""Make the quickstart's model and data: a small model that can add, and rarely does.

Writes models/quickstart-s<seed>/model (a Hugging Face folder) and data/train.jsonl, eval.jsonl;
with another --family than llama, models/quickstart-<family>-s<seed>.
About half a minute on one core; a folder made before with the same seed is kept.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from megarl.reshard.families import FAMILIES  # noqa: E402
from tools.quickstart.folder import FolderError, is_complete, replaced_when_done  # noqa: E402

PLAIN_EVERY = 50


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1, help="drives everything (default: 1)")
    parser.add_argument(
        "--family", choices=tuple(FAMILIES), default="llama", help="its layout (default: llama)"
    )
    parser.add_argument("--out", type=Path, help="folder to make (default: as above)")
    parser.add_argument("--force", action="store_true", help="make it anew even when it is there")
    arguments = parser.parse_args(argv)
    seed, family = arguments.seed, arguments.family
    name = "quickstart" if family == "llama" else f"quickstart-{family}"
    folder = (arguments.out or Path(f"models/{name}-s{seed}")).absolute()
    if not arguments.force and is_complete(folder, seed, family):
        print(f"{_shown(folder)} is there, complete; --force makes it anew")
        return 0
    try:
        with replaced_when_done(folder, seed, family) as temporary:
            _make(temporary, seed, folder, family)
    except FolderError as error:
        print(f"make_tiny_model: {error}", file=sys.stderr)
        return 1
    return 0


def _make(temporary: Path, seed: int, folder: Path, family: str) -> None:
    started = time.monotonic()
    print(f"making {_shown(folder)}: tokenizer, data, and a short supervised warm-up", flush=True)
    # Imported here: torch and transformers take seconds, and a folder that is there needs neither.
    from tools.quickstart.build import build
    from tools.quickstart.warmup import WarmUp

    settings = WarmUp()
    with _progress(settings.steps) as on_step:
        built = build(temporary, seed, settings, on_step, family)
    print(
        f"{_shown(folder)}: {built.parameters:,} parameters, {built.train_rows} training and "
        f"{built.eval_rows} held-out rows, {time.monotonic() - started:.0f} s\n"
        f"held-out accuracy before GRPO: greedy {built.greedy:.3f}, sampled {built.sampled:.3f}"
    )


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[int, float], None]]:
    """Shows steps, loss and the time left: a bar on a terminal, a line now and then elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeRemaining

    console = Console()
    if not console.is_terminal:
        started = time.monotonic()

        def print_line(step: int, loss: float) -> None:
            done = step + 1
            if done % PLAIN_EVERY == 0 or done == steps:
                left = (time.monotonic() - started) / done * (steps - done)
                print(f"warm-up {done}/{steps}  loss {loss:.3f}  {left:.0f} s left", flush=True)

        yield print_line
        return
    columns = TextColumn("warm-up"), BarColumn(), MofNCompleteColumn()
    shown = TextColumn("loss {task.fields[loss]:.3f}"), TimeRemaining(), TextColumn("left")
    with Progress(*columns, *shown, console=console) as progress:
        task = progress.add_task("warm-up", total=steps, loss=float("nan"))
        yield lambda step, loss: progress.update(task, completed=step + 1, loss=loss)


def _shown(folder: Path) -> str:
    """Relative to the working directory where it lies inside."""
    here = Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)


if __name__ == "__main__":
    sys.exit(main())
