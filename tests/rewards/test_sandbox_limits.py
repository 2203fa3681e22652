"""Programs that take all they can get, in real sandboxes of each way that works here (the usual
way only, but for processes, where the other is not `long`).

Not covered: kernels older than 5.14; a real kill by Linux's own out-of-memory killer, of which only
the count is made up here.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.rewards import sandbox, sandbox_watch
from megarl.rewards.code_runner import EXITED, FILES, OUTPUT, SIGNALLED, TIME
from megarl.rewards.sandbox import MEMORY, Maker, SandboxError
from megarl.rewards.sandbox_watch import oom_kills
from tests.rewards.make_pool import child_processes, left_of
from tests.rewards.make_sandbox import OTHER, SMALL, TRY, USUAL, below, case, maker, run, said


@pytest.fixture(params=[USUAL, pytest.param(OTHER, marks=pytest.mark.long)])
def one(request: pytest.FixtureRequest) -> Maker:
    return maker(request.param)


@pytest.fixture(autouse=True)
def _nothing_is_left():
    before = child_processes()
    yield
    assert left_of(before, seconds=0.0) == []


@pytest.mark.parametrize("one", [USUAL, OTHER], indirect=True)
@pytest.mark.parametrize(
    "bomb",
    [
        "while True: attempt(os.fork)",
        "import threading as t, time\n"
        "while True: attempt(t.Thread(target=time.sleep, args=(60,)).start)",
        pytest.param(
            "import subprocess\nwhile True: attempt(subprocess.Popen, ['/usr/bin/sleep', '60'])",
            marks=pytest.mark.long,
        ),
    ],
    ids=["forks", "threads", "commands"],
)
def test_processes_do_not_grow_without_end(one: Maker, bomb: str) -> None:
    with one.start(TRY + bomb, "", replace(SMALL, case_seconds=0.25, processes=8)) as sandbox:
        ended, most = [], 0
        thread = threading.Thread(target=lambda: ended.append(sandbox.run(case())))
        thread.start()
        while thread.is_alive():
            counts = [os.path.exists(f"/proc/{p.pid}/task") and _threads(p.pid) for p in below()]
            most = max(most, sum(counts))
            time.sleep(0.02)
        assert ended[0].how == TIME
        # bubblewrap, the runner and the program's.
        assert 5 <= most <= 2 + 8
        # The next case begins with none of them.
        assert sandbox.run(case(seconds=0.1)).how == TIME


def _threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError):
        return 0


@pytest.mark.parametrize(
    "program",
    [
        "data = []\nwhile True: data.append(bytearray(1 << 20))",
        "import mmap\ndata = []\nwhile True: data.append(mmap.mmap(-1, 1 << 24))",
        "data = 'x' * (1 << 40)",
    ],
)
def test_memory_of_a_process_is_limited(one: Maker, program: str) -> None:
    ended = run(one, program)
    assert (ended.how, ended.code) == (EXITED, 1)
    assert ended.result in (b"key!MemoryError", b"key!OSError")


def test_memory_of_all_processes_is_limited(one: Maker) -> None:
    program = (
        "import os, time\n"
        "for _ in range(5): os.fork() if os.getpid() == FIRST else None\n"
        "data = b'x' * (70 << 20)\n"
        "time.sleep(60)\n"
    )
    program = program.replace("import os, time\n", "import os, time\nFIRST = os.getpid()\n")
    with one.start(program, "", SMALL) as sandbox:
        assert sandbox.run(case()).how == MEMORY and not sandbox.is_open


def test_a_process_that_hides_its_memory_counts_whole(one: Maker) -> None:
    """PR_SET_DUMPABLE: what the kernel tells of it is root's to read."""
    program = (
        "import ctypes, os, time\n"
        "ctypes.CDLL(None).prctl(4, 0)\n"
        "os.fork(); data = b'x' * (90 << 20); time.sleep(60)\n"
    )
    with one.start(program, "", SMALL) as sandbox:
        assert sandbox.run(case()).how == MEMORY


@pytest.mark.parametrize("kills", [0, 1])
def test_a_killed_program_is_no_wrong_one_where_linux_ran_out_of_memory(
    one: Maker, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    """The count of kills moves, or not, while the program ends itself as Linux would."""
    counts = itertools.count(oom_kills(), kills)
    monkeypatch.setattr(sandbox, "oom_kills", lambda: next(counts))
    program = "import os\nif input(): os.kill(os.getpid(), int(input()))\nprint('on')"
    with one.start(program, "", SMALL) as started:
        assert started.run(case("\n")).output == b"on\n"
        assert started.run(case("x\n15\n")).code == signal.SIGTERM
        if kills:
            with pytest.raises(SandboxError, match="ran out of memory.*lower reward.workers or"):
                started.run(case("x\n9\n"))
        else:
            assert started.run(case("x\n9\n")).code == signal.SIGKILL


def test_no_kill_is_counted_where_linux_tells_of_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = tmp_path / "vmstat"
    monkeypatch.setattr(sandbox_watch, "VMSTAT", told)
    assert oom_kills() == 0
    told.write_text("pgfault 7\n")
    assert oom_kills() == 0
    told.write_text("pgfault 7\noom_kill 3\n")
    assert oom_kills() == 3


def test_pages_that_forks_share_count_once(one: Maker) -> None:
    program = (
        "import os, time\n"
        "data = b'x' * (70 << 20)\n"
        "for _ in range(5):\n"
        "    if os.fork() == 0: time.sleep(60)\n"
        "time.sleep(0.3); print('fine')\n"
    )
    assert said(one, program) == ["fine"]


def test_files_are_limited_in_size_and_number(one: Maker) -> None:
    program = TRY + (
        "def fill(path, count):\n"
        "    with open(path, 'wb', buffering=0) as file:\n"
        "        for _ in range(count): file.write(bytes(1 << 20))\n"
        "print(attempt(fill, 'a', 9), attempt(fill, 'b', 1), os.path.getsize('a') >> 20)\n"
        "try:\n"
        "    fill('c', 9)\n"
        "except OSError as error: print(error.errno)\n"
        "print(attempt(open, '/dev/x', 'wb'), open('/dev/null', 'wb').write(b'x'))\n"
        "print(open('/dev/shm/x', 'wb').write(b'x'), attempt(fill, '/tmp/x', 1))\n"
    )
    assert said(one, program) == ["OSError OSError 2", "28", "OSError 1", "1 OSError"]
    many = "import os\nwhile True: os.mkdir(str(n := globals().get('n', 0) + 1))"
    assert run(one, many).how == FILES


def test_a_full_folder_does_not_harm_the_next_case(one: Maker) -> None:
    program = (
        "import os\n"
        "print(input(), os.listdir())\n"
        "os.makedirs('d/e'); os.symlink('/usr', 'link')\n"
        "try:\n"
        "    while True: open('d/x', 'ab', buffering=0).write(bytes(1 << 16))\n"
        "except OSError: pass\n"
    )
    with one.start(program, "", SMALL) as sandbox:
        told = [sandbox.run(case(f"{index}\n")).output for index in range(2)]
    assert told == [b"0 []\n", b"1 []\n"]


@pytest.mark.parametrize("file", [1, 3])
def test_output_without_end_is_cut(one: Maker, file: int) -> None:
    ended = run(one, f"import os\nwhile True: os.write({file}, bytes(1 << 20))")
    assert ended.how == OUTPUT and len(ended.output) <= 1 << 20


@pytest.mark.parametrize(
    ("program", "how", "code"),
    [
        pytest.param(
            "import signal; signal.signal(24, signal.SIG_IGN)\nwhile True: pass",
            SIGNALLED,
            signal.SIGKILL,
            marks=pytest.mark.long,
        ),
        (
            "import os\nos.close(1); os.close(3); os.close(0)\nwhile True: pass",
            SIGNALLED,
            signal.SIGXCPU,
        ),
    ],
    ids=["stubborn", "closed"],
)
def test_cpu_time_is_limited(program: str, how: int, code: int) -> None:
    limits = replace(SMALL, case_seconds=30.0, cpu_seconds=1)
    ended = run(maker(USUAL), program, limits=limits)
    assert (ended.how, ended.code) == (how, code)


def test_wall_time_is_limited_for_the_case_and_what_is_left(one: Maker) -> None:
    began = time.monotonic()
    with one.start("import time; time.sleep(60)", "", SMALL) as sandbox:
        assert [sandbox.run(case(seconds=0.1)).how for _ in range(3)] == [TIME] * 3
    endless = "import os\nwhile True: os.write(2, b'x' * 9999)"
    assert run(one, endless, limits=replace(SMALL, case_seconds=0.2)).how == TIME
    assert time.monotonic() - began < 10
