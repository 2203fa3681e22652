"""Held-out evaluation of a checkpoint, a model folder or the recipe's own model, by itself.

    python -m megarl.evaluate RECIPE [key=value …] [--checkpoint WHAT …]
    torchrun --nproc_per_node N -m megarl.evaluate RECIPE …

Where no rank's environment is given it checks what was asked, and then starts the recipe's ranks of
itself on this machine (`megarl.launcher`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate on this rank, or start the ranks that do; returns the exit code."""
    from megarl import process
    from megarl.contracts.errors import InputError
    from megarl.evaluation.arguments import USAGE, read_evaluation
    from megarl.evaluation.folder import refuse_folder
    from megarl.observe.logs import fail

    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE, end="")
        return 0 if arguments else 2
    if "RANK" not in os.environ:
        try:
            launch = read_evaluation(arguments)
            process.check_inputs(launch, started=False)
            refuse_folder(launch.recipe.run_folder, launch.evaluation)
        except InputError as error:
            fail(str(error))
            return 2
        ranks = launch.recipe.world.ranks
        if ranks > 1:
            for target in launch.evaluation.targets:
                for line in target.passed_over:  # which the ranks are not told
                    print(f"megarl: {line}", file=sys.stderr, flush=True)
            # All ranks take what was found here, whatever a run that trains saves meanwhile.
            start_ranks(ranks, launch.evaluation.explicit(arguments, launch.recipe.run_folder))
    return process.run_rank(lambda: read_evaluation(arguments))


def start_ranks(ranks: int, arguments: Sequence[str]) -> None:
    """Takes this process's place with a launcher of `ranks` ranks; never returns."""
    from megarl import stop

    stop.hold()  # a SIGUSR1 would end Python before the launcher holds it
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    given = os.environ | {"PYTHONPATH": path}
    given.setdefault("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "megarl.launcher", str(ranks), "megarl.evaluate", *arguments]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, command, given)


if __name__ == "__main__":
    import signal

    # Until the boundary takes signals over, Ctrl-C ends this process at once and silently.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main())
