"""What reaches the person and what reaches the log, in processes of their own.

Not covered: the noise of the real libraries (the launch tests see it), several machines, and a
process that dies by a signal (its last words are in the log, torchrun names the signal).
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megarl.observe.logs import one_line

NOISE = """
import logging, os, subprocess, sys, warnings
from pathlib import Path
from megarl.observe.logs import captured, quiet_libraries

def noise():
    from tqdm import tqdm
    os.write(2, b"noise-c-stderr\\n")
    os.write(1, b"noise-c-stdout\\n")
    warnings.warn("noise-warning")
    logging.getLogger("somelib").info("noise-info")
    logging.getLogger("somelib").warning("noise-logging")
    own = logging.StreamHandler(sys.stderr)
    logging.getLogger("ownhandler").addHandler(own)
    logging.getLogger("ownhandler").error("noise-own-handler")
    print("noise-print")
    print("noise-print-error", file=sys.stderr)
    for _ in tqdm(range(3), desc="noise-bar"):
        pass
    subprocess.run([sys.executable, "-c", "print('noise-child')"], check=True)
"""
KINDS = (
    "c-stderr",
    "c-stdout",
    "warning",
    "info",
    "logging",
    "own-handler",
    "print",
    "print-error",
    "bar",
    "child",
)


def run(body: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK",)}
    return subprocess.run(
        [sys.executable, "-c", NOISE + textwrap.dedent(body), str(folder / "rank_0.log")],
        capture_output=True,
        text=True,
        env=kept | environment,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("way", ["captured", "quiet_libraries"])
def test_noise_goes_to_the_log_and_only_our_words_to_the_terminal(tmp_path: Path, way: str) -> None:
    body = {
        "captured": """
            with captured(Path(sys.argv[1])) as terminal:
                noise()
                print("our words", file=terminal.stdout)
            print("after", flush=True)
            """,
        "quiet_libraries": """
            terminal = quiet_libraries(Path(sys.argv[1]))
            noise()
            print("our words", file=terminal.stdout)
            """,
    }[way]
    done = run(body, tmp_path)
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout == "our words\n" + ("after\n" if way == "captured" else "")
    log = (tmp_path / "rank_0.log").read_text()
    assert [kind for kind in KINDS if f"noise-{kind}" not in log] == []


@pytest.mark.parametrize("way", ["captured", "quiet_libraries"])
def test_an_exception_is_one_line_on_stderr_and_a_traceback_in_the_log(
    tmp_path: Path, way: str
) -> None:
    body = {
        "captured": """
            with captured(Path(sys.argv[1])):
                noise()
                raise RuntimeError("tensor lm_head.weight was not written\\nby anyone")
            """,
        "quiet_libraries": """
            quiet_libraries(Path(sys.argv[1]))
            noise()
            raise RuntimeError("tensor lm_head.weight was not written\\nby anyone")
            """,
    }[way]
    done = run(body, tmp_path)
    log_file = tmp_path / "rank_0.log"
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        f"megarl: error: tensor lm_head.weight was not written … (traceback in {log_file})\n"
    )
    assert "Traceback (most recent call last)" in log_file.read_text()


def test_interrupt_is_one_line_and_exit_code_130(tmp_path: Path) -> None:
    done = run(
        """
        with captured(Path(sys.argv[1])):
            raise KeyboardInterrupt
        """,
        tmp_path,
    )
    assert done.returncode == 130
    assert done.stderr == f"megarl: interrupted (log in {tmp_path / 'rank_0.log'})\n"


def test_the_log_of_an_earlier_run_is_kept(tmp_path: Path) -> None:
    for word in ("first", "second"):
        run(f"with captured(Path(sys.argv[1])): print('{word}')", tmp_path)
    log = (tmp_path / "rank_0.log").read_text()
    assert log.index("first") < log.index("second")
    assert log.count("=== rank 0, process") == 2


def _torchrun_environment(folder: Path, rank: int) -> dict[str, str]:
    own = folder / "attempt_0" / str(rank)
    own.mkdir(parents=True)
    return {"RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(own / "error.json")}


@pytest.mark.parametrize("first", [0, 1])
def test_one_rank_tells_the_cause_and_not_the_one_that_lost_its_peer(
    tmp_path: Path, first: int
) -> None:
    body = f"""
        import time
        rank = int(os.environ["RANK"])
        cause = rank == {first}
        time.sleep(0.3 if cause else 0.0)  # the one without fault notices first
        with captured(Path(sys.argv[1]).with_name(f"rank_{{rank}}.log")):
            if cause:
                raise RuntimeError("a bit flipped in model.norm.weight")
            raise RuntimeError("[tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234")
        """
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", NOISE + textwrap.dedent(body), str(tmp_path / "rank_0.log")],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | _torchrun_environment(tmp_path, rank),
        )
        for rank in (0, 1)
    ]
    told = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    log = tmp_path / f"rank_{first}.log"
    line = f"megarl: error: rank {first}: a bit flipped in model.norm.weight (traceback in {log})"
    assert "".join(told) == line + "\n"


@pytest.mark.parametrize(("rank", "told"), [("0", "megarl: error: no such recipe\n"), ("1", "")])
def test_errors_that_all_ranks_meet_are_told_by_rank_0(
    tmp_path: Path, rank: str, told: str
) -> None:
    body = "from megarl.observe.logs import fail\nfail('no such recipe')"
    assert run(body, tmp_path, RANK=rank).stderr == told


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_under_torchrun_the_first_rank_to_meet_them_tells_them(
    tmp_path: Path, order: tuple[int, int]
) -> None:
    body = "from megarl.observe.logs import fail\nfail('no such recipe')"
    told = [run(body, tmp_path, **_torchrun_environment(tmp_path, rank)).stderr for rank in order]
    assert told == ["megarl: error: no such recipe\n", ""]


def test_one_line_names_the_type_unless_the_text_speaks_for_itself() -> None:
    assert one_line(ValueError("set x to 2")) == "set x to 2"
    assert one_line(KeyError("x")) == "KeyError: 'x'"
    assert one_line(AssertionError()) == "AssertionError"
    assert one_line(FileNotFoundError(2, "No such file", "a")).startswith("FileNotFoundError: ")
