"""How a rank ends (`megarl.failure`): one line, whatever arrives while it is torn down.

Whole runs that fail: tests/launch/test_faults.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

RANK = """
    import atexit, sys, time
    from pathlib import Path
    from megarl.failure import Failure
    from megarl.observe.logs import captured
    from megarl.stages import StageBoard

    log, fails = Path(sys.argv[1]), sys.argv[2] == "fails"

    def leave():
        print("leaving", flush=True)
        time.sleep(60)

    atexit.register(leave)
    with captured(log) as terminal:
        failure = Failure(terminal, StageBoard(0))
        failure.watch_signals()
        with failure.told():
            if fails:
                raise RuntimeError("no luck")
        failure.leave_signals()
"""


@pytest.mark.parametrize("ending", ["fails", "succeeds"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_rank_shuts_down_says_nothing_more(
    ending: str, number: signal.Signals, tmp_path: Path
) -> None:
    """torchrun sends SIGTERM to the ranks beside a failed one, also to one that is on its way
    out and has given its standard error back."""
    rank = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(RANK), str(tmp_path / "rank_0.log"), ending],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "RANK"},
    )
    assert rank.stdout.readline() == "leaving\n"
    rank.send_signal(number)
    _, errors = rank.communicate(timeout=30)
    assert rank.returncode == -number
    told = f"megarl: error: no luck (traceback in {tmp_path / 'rank_0.log'})\n"
    assert errors == (told if ending == "fails" else "")


WRONG = """
    import sys
    from pathlib import Path
    from megarl.contracts.errors import InputError
    from megarl.contracts.states import Journal, State
    from megarl.contracts.version import PolicyVersion
    from megarl.failure import Failure
    from megarl.observe.console import Console
    from megarl.observe.logs import captured
    from megarl.stages import StageBoard

    log, when = Path(sys.argv[1]), sys.argv[2]
    with captured(log) as terminal:
        failure = Failure(terminal, StageBoard(0))
        journal = Journal(None)
        if when != "at once":
            failure.attach(journal, Console("off"))
        with failure.told():
            if when == "later":
                version = PolicyVersion("run", 0, 0, *"abc", "actor")
                journal.enter(State.ACTOR_COMMITTED, 0, version, weight_manifest_hash="a")
            raise (RuntimeError if when == "otherwise" else InputError)("no such scorer")
"""


@pytest.mark.parametrize(
    ("when", "code"), [("at once", 2), ("before", 2), ("later", 1), ("otherwise", 1)]
)
def test_wrong_input_ends_with_2_until_there_are_weights(
    when: str, code: int, tmp_path: Path
) -> None:
    rank = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WRONG), str(tmp_path / "rank_0.log"), when],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "RANK"},
        check=False,
    )
    assert rank.returncode == code, rank.stderr
    assert rank.stderr.startswith("megarl: error: no such scorer (traceback in ")
