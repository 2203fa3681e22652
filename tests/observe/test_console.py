"""The console: plain lines in a text buffer, the live panel in a pseudo-terminal of its own.

Not covered: how the panel looks on a given terminal; only what is in it and what is left behind.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import textwrap

import pytest

from megarl.observe.console import Console

ROW = {
    "iteration": 0,
    "reward/mean": 0.25,
    "parity/logprob_gap_max": 1.5e-5,
    "time/iteration": 2.0,
    "time/tokens_per_second": 12345.6,
    "eval/accuracy": 0.5,
}
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


def test_plain_mode_is_a_heading_and_one_aligned_line_an_iteration() -> None:
    out = io.StringIO()
    with Console("plain", 3, stream=out) as console:
        console.stage("build actor")
        console.start()
        console.stage("generate")
        console.iteration(ROW)
        console.note("a note")
        console.iteration({"iteration": 1})
    lines = out.getvalue().splitlines()
    assert lines[0] == "build actor …"
    heading, first, note, second = lines[1:]
    assert " ".join(first.split()) == "1/3 0.2500 0.5000 - 12,346 1.5e-05 - - 2.00 0:04"
    assert note == "a note"
    assert " ".join(second.split()) == "2/3 - - - - - - - - 0:02"
    assert len(heading) == len(first) == len(second) <= 100


def test_the_last_line_shows_the_final_evaluation() -> None:
    out = io.StringIO()
    with Console("plain", 2, stream=out) as console:
        console.iteration(ROW)
        console.iteration({"iteration": 1, "eval/final/accuracy": 0.75})
        assert console._accuracy()[0] == "greedy 0.500 → 0.750"
    assert out.getvalue().splitlines()[-1].split()[:3] == ["2/2", "-", "0.7500"]


def test_plain_mode_tells_progress_every_ten_seconds() -> None:
    out, now = io.StringIO(), [0.0]
    console = Console("plain", 3, stream=out, clock=lambda: now[0])
    console.stage("load data")
    for second in range(25):
        now[0] = float(second)
        console.progress(f"load data: {second} rows")
    told = out.getvalue().splitlines()
    assert told == ["load data …", "load data: 10 rows …", "load data: 20 rows …"]
    Console("off", stream=out).progress("nothing")
    assert out.getvalue().splitlines() == told


def test_plain_columns_stay_apart_when_numbers_are_large() -> None:
    out = io.StringIO()
    console = Console("plain", 10_000, stream=out)
    big = {key: -123456789.125 for key in ROW} | {"iteration": 9_998}
    console.iteration(big | {"policy/entropy": 1e9, "reference/kl": float("nan")})
    heading, line = out.getvalue().splitlines()
    assert len(line.split()) == 10
    assert len(line) == len(heading) <= 100


def test_a_stage_is_printed_once_and_only_before_the_heading() -> None:
    out = io.StringIO()
    console = Console("auto", 2, stream=out)
    for name in ("load data", "load data", "generate"):
        console.stage(name)
    console.iteration({"iteration": 0})
    console.stage("update")
    assert [line for line in out.getvalue().splitlines() if "…" in line] == [
        "load data …",
        "generate …",
    ]


def test_an_evaluation_is_told_when_it_is_done() -> None:
    out = io.StringIO()
    Console("plain", stream=out).evaluated({"eval/accuracy": 0.875})
    assert out.getvalue() == "held-out accuracy 0.8750 greedy, - sampled\n"


def test_off_is_silent_and_an_unknown_mode_is_refused() -> None:
    out = io.StringIO()
    with Console("off", 2, stream=out) as console:
        console.start()
        console.stage("generate")
        console.iteration(ROW)
        console.evaluated(ROW)
        console.note("x")
    assert out.getvalue() == ""
    with pytest.raises(ValueError, match="choose one of auto, plain, rich"):
        Console("fancy")


def _own_the_terminal() -> None:
    """As a shell does for its command, so that the terminal's Ctrl-C reaches it."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def in_terminal(body: str, columns: int = 80, type_at: str | None = None) -> tuple[str, int]:
    """What a program writes to a terminal of that width, and its exit code.

    Ctrl-C is typed once it has written `type_at`.
    """
    ours, theirs = pty.openpty()
    program = "import os, signal, sys\nfrom megarl.observe.console import Console\n"
    process = subprocess.Popen(
        [sys.executable, "-c", program + textwrap.dedent(body)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "24"},
        preexec_fn=_own_the_terminal,
    )
    os.close(theirs)
    parts = []
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # what Linux says when the last writer is gone
            break
        if not part:
            break
        parts.append(part)
        if type_at is not None and type_at in b"".join(parts).decode(errors="ignore"):
            os.write(ours, b"\x03")
            type_at = None
    os.close(ours)
    return b"".join(parts).decode(), process.wait(timeout=30)


def test_auto_in_a_terminal_is_a_panel_with_everything_in_it() -> None:
    written, code = in_terminal(
        f"""
        row = {ROW!r}
        with Console("auto", 40, title="quickstart-s1") as console:
            console.stage("generate")
            console.start()
            for iteration in range(3):
                console.iteration(row | {{"iteration": iteration, "reward/mean": iteration / 2}})
            print("a print above")
            console.note("a [note] above")
        print("after")
        """
    )
    assert code == 0
    last = written[written.rindex("╭") :]
    for text in ("megarl quickstart-s1", "3/40", "1.0000   ▁▅█", "greedy 0.500", "12,346 tokens/s"):
        assert text in last
    for text in ("parity gap 1.5e-05", "entropy -", "2.00 s an iteration", "1:14 to go", "after"):
        assert text in last
    above = written[: written.rindex("╭")]
    assert "a print above" in above and "a [note] above" in above
    assert written.rindex(SHOW) > written.rindex(HIDE)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("raise RuntimeError('boom')", 1),
        ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_the_terminal_is_usable_however_a_run_ends(end: str, code: int) -> None:
    written, returned = in_terminal(
        f"""
        with Console("auto", 40) as console:
            console.stage("update")
            console.iteration({ROW!r})
            {end}
        """
    )
    assert returned == code
    assert HIDE in written and written.rindex(SHOW) > written.rindex(HIDE)
    assert "update" in written[written.rindex("╭") :]


@pytest.mark.parametrize("columns", [78, 60, 40, 24, 12])
def test_a_narrow_terminal_keeps_labels_and_first_values(columns: int) -> None:
    written, code = in_terminal(
        f"""
        row = {ROW!r}
        with Console("auto", 40, title="quickstart-s1") as console:
            console.stage("generate")
            for iteration in range(30):
                console.iteration(row | {{"iteration": iteration, "reward/mean": iteration / 9}})
        """,
        columns,
    )
    assert code == 0
    panel = written[written.rindex("╭") : written.rindex("╯") + 1].split("\r\n")
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in panel]
    assert {len(line) for line in lines} == {min(columns, 78)}
    assert len(lines) == 8
    if columns >= 40:
        for line, label in zip(
            lines[1:], ["iteration  30/40", "reward     3.2222   "], strict=False
        ):
            assert label in line
        assert "…" not in "".join(lines)
    if columns >= 60:
        assert "parity gap 1.5e-05" in lines[4] and "2.00 s an iteration" in lines[6]


def test_ctrl_c_leaves_the_panel_the_line_and_a_clean_terminal() -> None:
    written, code = in_terminal(
        f"""
        import time
        from pathlib import Path
        from megarl.observe.logs import captured
        with captured(Path(os.devnull), 0), Console("auto", 40) as console:
            console.stage("update")
            console.iteration({ROW!r})
            time.sleep(30)
        """,
        type_at="1/40",
    )
    assert code == 130
    below = written[written.rindex("╯") :]
    assert "megarl: interrupted" in below and "Traceback" not in written
    assert written.rindex(SHOW) > written.rindex(HIDE)


def test_an_error_is_told_below_the_panel() -> None:
    written, code = in_terminal(
        f"""
        from pathlib import Path
        from megarl.observe.logs import captured
        with captured(Path(os.devnull), 0), Console("auto", 40) as console:
            console.stage("update")
            console.iteration({ROW!r})
            raise RuntimeError("boom")
        """
    )
    assert code == 1
    assert "megarl: error: boom" in written[written.rindex("╯") :]
    assert "Traceback" not in written


def test_an_error_of_another_rank_stands_below_the_panel(tmp_path) -> None:
    """That rank's own line was drawn over: the panel's process knows nothing of it."""
    written, code = in_terminal(
        f"""
        from pathlib import Path
        from megarl import torchrun
        from megarl.observe.logs import captured
        torchrun.told = lambda: "rank 1: boom"
        with captured(Path({str(tmp_path / "log")!r}), 0), Console("auto", 40) as console:
            console.stage("update")
            console.iteration({ROW!r})
            raise RuntimeError("Connection closed by peer")
        """
    )
    assert code == 1
    assert "megarl: error: rank 1: boom" in written[written.rindex("╯") :]
