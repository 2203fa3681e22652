"""Hostile programs in real sandboxes, in each way of making one that works here.

Not covered: kernels older than 5.14, a real kill by Linux's out-of-memory killer, machines without
a filter of system calls, faults of the kernel or of bubblewrap.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from megarl.rewards import code_runner
from megarl.rewards.code_runner import SIGNALLED
from megarl.rewards.sandbox import ROOT, USER, Maker, SandboxError
from megarl.rewards.sandbox_filter import seccomp_program
from megarl.rewards.sandbox_setup import find_maker, why_not
from tests.rewards.make_pool import child_processes, is_running, left_of
from tests.rewards.make_sandbox import OTHER, SMALL, TRY, USUAL, below, case, maker, said

REPOSITORY = Path(__file__).resolve().parents[2]

SYSCALLS = TRY + (
    "import ctypes\n"
    "libc = ctypes.CDLL(None, use_errno=True)\n"
    "def call(name, *args):\n"
    "    return getattr(libc, name)(*args), ctypes.get_errno()\n"
)


@pytest.fixture(params=[ROOT, USER])
def one(request: pytest.FixtureRequest) -> Maker:
    return maker(request.param)


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = child_processes()
    yield
    assert left_of(before, seconds=0.0) == []


def test_no_file_of_the_machine_can_be_seen_or_changed(one: Maker, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("here")
    paths = ["/etc/shadow", "/etc/passwd", str(REPOSITORY), __file__, code_runner.__file__]
    paths += [
        str(mine),
        os.path.expanduser("~/.bashrc"),
        "/proc/1/environ",
        "/sys",
        "/work",
        "/run",
    ]
    program = TRY + (
        f"print([path for path in {paths!r} if os.path.exists(path)])\n"
        "print(*(name for name in os.listdir('/') if name[:3] not in ('bin', 'sbi', 'lib')))\n"
        "print(*(attempt(open, path + '/x', 'w') for path in ('/', '/usr', '/usr/bin', '/etc')))\n"
        "print(*os.listdir('/tmp'), open('/tmp/x', 'w').write('fine'))\n"
        "import shutil\n"
        "for path in ('/tmp', '/usr/bin', '/etc', '/dev'):\n"
        "    shutil.rmtree(path, ignore_errors=True)\n"
        "print(os.listdir('/tmp'), os.path.exists('/usr/bin/env'))\n"
    )
    before = len(os.listdir("/usr/bin"))
    seen, root, refused, own, after = said(one, program)
    assert seen == "[]"
    outside = {Path(prefix).parts[1] for prefix in one.prefixes}
    assert set(root.split()) == {"dev", "etc", "tmp", "usr"} | outside
    assert set(refused.split()) <= {"OSError", "PermissionError"}
    assert own == "4" and after == "[] True"
    assert mine.read_text() == "here" and len(os.listdir("/usr/bin")) == before


def test_nothing_of_the_environment_is_told(one: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "secret")
    names, group = said(one, "import os\nprint(*sorted(os.environ))\nprint(os.getgroups())")
    assert names == "HOME LANG PATH PWD PYTHONHASHSEED"
    if one.way == ROOT:
        assert group == "[]"


def test_no_connection_leaves(one: Maker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        name = f"\0megarl-{os.getpid()}-{time.monotonic_ns()}"
        local.bind(name)
        for listening in (server, local):
            listening.listen()
            listening.setblocking(False)
        program = TRY + (
            "import socket as s\n"
            f"print(attempt(s.create_connection, ('127.0.0.1', {server.getsockname()[1]}), 1))\n"
            "print(attempt(s.create_connection, ('192.0.2.1', 80), 1))\n"
            f"print(attempt(s.socket(s.AF_UNIX).connect, {name!r}))\n"
            "print(*(attempt(s.socket, family, kind) for family, kind in\n"
            "    ((40, s.SOCK_STREAM), (16, s.SOCK_RAW), (17, s.SOCK_RAW), (38, 5))))\n"
            "print(len(s.socketpair()))\n"
        )
        told = said(one, program)
        assert told[:3] == ["ConnectionRefusedError", "OSError", "ConnectionRefusedError"]
        assert told[3].split() == ["PermissionError"] * 4  # vsock, netlink, packet, kernel crypto
        for listening in (server, local):
            with pytest.raises(BlockingIOError):
                listening.accept()


def test_it_is_an_ordinary_user_without_capabilities(one: Maker) -> None:
    with one.start("import time; time.sleep(60)", "", SMALL) as sandbox:
        thread = threading.Thread(target=sandbox.run, args=(case(seconds=0.4),))
        thread.start()
        until = time.monotonic() + 10
        while len(found := below()) < 3 and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.2)
        status = Path(f"/proc/{found[-1].pid}/status").read_text()
        thread.join()
    rows = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert all(int(rows[name], 16) == 0 for name in ("CapEff", "CapPrm", "CapAmb"))
    assert (rows["NoNewPrivs"], rows["Seccomp"]) == ("1", "2")
    assert "0" not in rows["Uid"].split()


def test_what_it_leaves_running_ends_with_the_case(one: Maker) -> None:
    program = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0: time.sleep(60)\n"
        "    os._exit(0)\n"
        "time.sleep(0.1); print('fine')\n"
    )
    with one.start(program, "", SMALL) as sandbox:
        before = len(below())
        for _ in range(2):
            assert sandbox.run(case()).output == b"fine\n"
            assert len(below()) == before


@pytest.mark.parametrize("target", ["os.getppid(), 9", "1, 2", "-1, 9", "0, 9"])
def test_it_cannot_end_its_runner(one: Maker, target: str) -> None:
    program = f"import os\ntry:\n    os.kill({target})\nexcept OSError: pass\nprint('on')"
    with one.start(program, "", SMALL) as sandbox:
        for _ in range(2):
            ended = sandbox.run(case())
            assert ended.output == b"on\n" or (ended.how, ended.code) == (SIGNALLED, 9)


def test_system_calls_that_lead_out_are_refused(one: Maker) -> None:
    program = SYSCALLS + (
        "print(call('ptrace', 16, 1, 0, 0), call('process_vm_readv', 1, 0, 0, 0, 0, 0))\n"
        "print(call('unshare', 0x10000000), call('unshare', 0x20000), call('setns', 0, 0))\n"
        "print(call('mount', b'x', b'/tmp', b'tmpfs', 0, 0), call('memfd_create', b'x', 0))\n"
        "print(call('prlimit', 1, 7, b'\\0' * 16, 0), call('shmget', 0, 1 << 20, 0o1600))\n"
        "print(call('setpriority', 0, 1, 19), call('sched_setscheduler', 1, 5, b'\\0' * 8))\n"
        "print(call('syscall', 56 if os.uname().machine == 'x86_64' else 220, 0x10000011, 0, 0))\n"
        "print(call('setuid', 0)[0], call('prlimit', 0, 7, 0, 0)[0])\n"
    )
    *refused, last = said(one, program)
    assert " ".join(refused) == " ".join(["(-1, 1)"] * 12) and last == "-1 0"


def test_the_filter_is_of_known_machines() -> None:
    assert len(seccomp_program("x86_64")) == len(seccomp_program("aarch64"))
    with pytest.raises(ValueError, match="no system call filter for riscv64; it runs on x86_64"):
        seccomp_program("riscv64")


@pytest.mark.parametrize("one", [USUAL, pytest.param(OTHER, marks=pytest.mark.long)], indirect=True)
def test_it_is_told_no_other_standard_input_and_its_hashes_are_the_same(one: Maker) -> None:
    text = "x" * 300_000 + "\nlast\n"
    program = "import sys\nprint(len(input()), sys.stdin.read(), hash('text'), __name__, sys.argv)"
    assert said(one, program, text=text) == said(one, program, text=text)
    assert said(one, "print('unread')", text=text) == ["unread"]


@pytest.mark.parametrize("one", [USUAL, pytest.param(OTHER, marks=pytest.mark.long)], indirect=True)
def test_many_leave_nothing_behind(one: Maker) -> None:
    folders = [Path(tempfile.gettempdir()), Path("/dev/shm"), Path.cwd()]
    before = [set(folder.iterdir()) for folder in folders]
    mounts, files = Path("/proc/self/mountinfo").read_text(), len(os.listdir("/proc/self/fd"))
    for index in range(4):
        assert said(one, f"open('x{index}', 'w'); print({index})") == [str(index)]
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert len(os.listdir("/proc/self/fd")) == files
    own = [folder for folder, seen in zip(folders, before, strict=True)
           if any(path.name.startswith("x") for path in set(folder.iterdir()) - seen)]  # fmt: skip
    assert own == []


SCRIPT = """
import sys
sys.path[:0] = [{root!r}]
from megarl.rewards.sandbox_setup import find_maker
from tests.rewards.make_sandbox import SMALL, TRY, below, case, maker, said
with find_maker().start("import os, time; os.fork(); time.sleep(60)", "", SMALL) as sandbox:
    sandbox._send(case(seconds=60.0))
    print("ready", flush=True)
    sandbox._receive(1, 60.0)
"""


def test_a_killed_worker_takes_its_sandbox_along() -> None:
    maker(ROOT if os.getuid() == 0 else USER)
    worker = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(root=str(REPOSITORY))],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert worker.stdout.readline() == b"ready\n"
    until = time.monotonic() + 10
    while len(found := psutil.Process(worker.pid).children(recursive=True)) < 4:
        assert time.monotonic() < until
        time.sleep(0.02)
    os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
    worker.stdout.close()
    until = time.monotonic() + 5
    while (alive := [p.pid for p in found if is_running(p.pid)]) and time.monotonic() < until:
        time.sleep(0.02)
    assert alive == []


def test_a_sandbox_that_ends_by_itself_is_an_error(one: Maker) -> None:
    with one.start("print(1)", "", SMALL) as sandbox:
        for process in below():
            process.kill()
        with pytest.raises(SandboxError, match=r"the sandbox ended \(exit code -?\d+\)"):
            sandbox.run(case())


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = maker(ROOT if os.getuid() == 0 else USER)
    assert "interpreter's folder is /," in why_not(replace(one, prefixes=("/",)))
    told = why_not(replace(one, python="/usr/bin/no-python"))
    assert "bwrap: execvp /usr/bin/no-python: No such file" in told
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="bubblewrap is missing.*apt-get install bubblewrap"):
        find_maker()


def _as_another(user: list[str], then: str = "") -> str:
    """What `find_maker` and a run say in a process that is started by the command `user`."""
    program = (
        f"import sys; sys.path[:0] = [{str(REPOSITORY)!r}]\n{then}\n"
        "from megarl.rewards.sandbox_setup import find_maker\n"
        "from megarl.rewards.sandbox import Limits\n"
        "try: maker = find_maker()\n"
        "except ValueError as error: print(error); sys.exit()\n"
        "started = maker.start('import os; print(os.getuid())', '', Limits(9, 5, 128, 2, 8))\n"
        "with started as sandbox:\n"
        "    ended = sandbox.run({'input': b'', 'key': b'k', 'seconds': 9.0})\n"
        "print(maker.way, ended.output.decode())\n"
    )
    python = f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
    for needed in (user[0], python):
        if shutil.which(needed) is None:
            pytest.skip(f"no {needed}")
    done = subprocess.run(
        [*user, python, "-S", "-B", "-c", program], capture_output=True, text=True, cwd="/"
    )
    if "Permission denied" in done.stderr and str(REPOSITORY) in done.stderr:
        pytest.skip("another user cannot read the repository")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_ordinary_user_makes_one_too() -> None:
    if os.getuid() != 0:
        pytest.skip("only root can be another user; as one, all tests here run so")
    maker(USER)
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    assert _as_another(nobody) == "user 1000"


def test_where_users_may_make_no_namespace_the_switch_is_named() -> None:
    """In a namespace of its own, which makes this process root there, and none further."""
    maker(USER)
    within = ["unshare", "--user", "--map-root-user"]
    assert _as_another(within) == "user 1000"
    said = _as_another(within, "open('/proc/sys/user/max_user_namespaces', 'w').write('0')")
    assert said.startswith("no sandbox: the sandbox ended (exit code 1): bwrap: ")
    assert "user.max_user_namespaces is 0 and must be not 0" in said and "\n" not in said
