"""torchrun for one machine, quiet when a rank fails: that rank has told its error in one line.

    python -m megarl.launcher NPROC MODULE [argument …]

Starts `NPROC` ranks of `python -m MODULE argument …` and ends with the failed rank's exit code.
"""

from __future__ import annotations

import logging
import os
import sys

SHUTDOWN_SECONDS = 10
"""After one rank failed, how long the others may take to end before they are killed."""


def main(arguments: list[str]) -> int:
    ranks, module, *rest = arguments
    # The agent's warnings repeat what the failed rank has said; TORCH_CPP keeps its own level.
    os.environ.setdefault("TORCHELASTIC_LOG_LEVEL", "CRITICAL")
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    options = ["--standalone", "--nproc_per_node", ranks]
    options += ["--shutdown_timeout", str(SHUTDOWN_SECONDS), "-m", module, *rest]
    try:
        run(parse_args(options))
    except ChildFailedError as error:
        return _exit_code(error)
    except SignalException as error:
        return 128 + int(error.sigval)
    except KeyboardInterrupt:
        return 130
    return 0


def _exit_code(error: object) -> int:
    """Of the rank that failed first. A rank that a signal killed said nothing, so say it here."""
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        name = failure.signal_name()
        print(f"megarl: error: rank {rank} was killed by {name}", file=sys.stderr, flush=True)
        return 128 - failure.exitcode
    return failure.exitcode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
