"""A sandbox of namespaces and limits, made with bubblewrap, in which one program is run on cases.

Inside are a Python interpreter with its standard library, a small folder `/tmp` in memory and
nothing else: no network, no file of the machine but the system's libraries, no process but its own,
no capability, no environment. Limits hold for each process (CPU time, address space, size of a
file), for the user (processes) and for all together (memory, watched from outside; wall time;
output; number of files).

The program runs as a user that nobody else is, so that limits per user are its own: for root, a
number drawn for each sandbox; for others, one of a user namespace, which Linux counts by itself
from 5.14 on. On an older Linux only the watch from outside limits processes for those.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.rewards import code_runner
from megarl.rewards.limits import children_of
from megarl.rewards.sandbox_filter import seccomp_program
from megarl.rewards.sandbox_users import FIRST_UID, UIDS, can_be_others, counts_by_namespace
from megarl.rewards.sandbox_waits import Waits
from megarl.rewards.sandbox_watch import below, oom_kills, threads_of, uses_more

ROOT, USER = "root", "user"
"""Ways to make one: root starts it and the program is another user; or in a user namespace."""

START_SECONDS = 20.0
GRACE_SECONDS = 10.0
"""What the runner gets beyond a case's time to end what it runs and to answer."""

WATCH_SECONDS = 0.05
MEMORY, PROCESSES = "memory", "processes"
MIB = 1 << 20
RUNNER_PROCESSES = 1

RUNNER = marshal.dumps(
    compile(Path(code_runner.__file__).read_bytes(), "code_runner.py", "exec", optimize=0)
)
BOOT = (
    "import marshal, os, sys\n"
    "count, parts = int(sys.argv[1]), []\n"
    "while count:\n"
    "    parts.append(os.read(0, count))\n"
    "    count -= len(parts[-1])\n"
    "scope = {'__name__': 'runner'}\n"
    "exec(marshal.loads(b''.join(parts)), scope)\n"
    "scope['main']()\n"
)


class SandboxError(RuntimeError):
    """A sandbox that could not be made or that failed by itself; one line. Nothing is known of the
    program."""


@dataclass(frozen=True)
class Limits:
    """What a program may use."""

    case_seconds: float
    """Wall time of one case, without that in which it waited for a CPU (`sandbox_waits.py`)."""
    cpu_seconds: int
    """CPU time of one process on one case."""
    memory_mb: int
    """Address space of a process, and memory of all together."""
    file_mb: int
    """Size of a file, and of all together."""
    processes: int
    """Processes and threads at once."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended on a case."""

    how: int | str
    """`code_runner.EXITED`, …, or `MEMORY`, `PROCESSES` when the watch ended the sandbox."""
    code: int = 0
    """Exit code or signal."""
    output: bytes = b""
    """What it wrote to its standard output."""
    result: bytes = b""
    """What it wrote to the runner, after `STARTED`: the key, a letter, the rest. A program that
    looks for the pipe can write there too: a value in it is no more than what the program says."""
    seconds: float = 0.0
    """Wall time of the case."""
    counted: float = 0.0
    """Of it, what counts against `Limits.case_seconds`; the rest is waiting for a CPU."""


@dataclass(frozen=True)
class Maker:
    """Makes sandboxes with one interpreter, in one of the ways, `ROOT` or `USER`."""

    way: str
    python: str = field(default_factory=lambda: os.path.realpath(sys._base_executable))
    prefixes: tuple[str, ...] = field(
        default_factory=lambda: tuple(
            {os.path.realpath(path) for path in (sys.base_prefix, sys.base_exec_prefix)}
        )
    )
    """Folders of the interpreter and its library."""

    def start(self, program: str, function: str, limits: Limits, most_output: int = MIB) -> Sandbox:
        """A sandbox for a program that is run as a script, or whose function is called when one is
        named. Of its output on a case, and of its result, `most_output` bytes are read.

        Use it as a context, in one thread: Linux kills it when the thread ends that started it.
        Raises `SandboxError`.
        """
        return Sandbox(self, program, function, limits, most_output)

    def command(self, filter_file: int, room: int) -> list[str]:
        """bubblewrap's command line, up to the command that it runs."""
        words = ["bwrap", "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"]
        words += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
        words += ["--unshare-cgroup-try", "--cap-drop", "ALL"]
        if self.way == USER:
            words += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
        else:
            for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_KILL"):
                words += ["--cap-add", capability]
        # Folders that bubblewrap has to make for what is put into them are their owner's alone.
        above = [path for prefix in self.prefixes for path in reversed(Path(prefix).parents[:-1])]
        for folder in dict.fromkeys(map(str, [*above, "/dev", "/etc"])):
            words += ["--perms", "0755", "--dir", folder]
        words += ["--ro-bind", "/usr", "/usr", "--ro-bind-try", *["/etc/ld.so.cache"] * 2]
        for folder in ("/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin"):
            if os.path.islink(folder):
                words += ["--symlink", os.readlink(folder), folder]
            else:
                words += ["--ro-bind-try", folder, folder]
        for prefix in self.prefixes:
            if not Path(prefix).is_relative_to("/usr"):
                words += ["--ro-bind", prefix, prefix]
        for device in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"):
            words += ["--dev-bind", device, device]
        words += ["--perms", "1777", "--size", str(room), "--tmpfs", "/tmp"]
        words += ["--symlink", "/tmp", "/dev/shm", "--remount-ro", "/", "--chdir", "/tmp"]
        environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
        environment["PYTHONHASHSEED"] = "0"  # the same verdict on the same program
        for name, value in environment.items():
            words += ["--setenv", name, value]
        return [*words, "--seccomp", str(filter_file)]


class Sandbox(contextlib.AbstractContextManager):
    """One program in its sandbox; ended, with all that runs in it, by `close`."""

    def __init__(
        self, maker: Maker, program: str, function: str, limits: Limits, most_output: int
    ) -> None:
        self._limits = limits
        uid = FIRST_UID + secrets.randbelow(UIDS) if can_be_others() else 0
        settings = {
            "program": program,
            "function": function,
            "uid": uid if maker.way == ROOT else 0,
            "seconds": limits.case_seconds,
            "cpu": limits.cpu_seconds,
            "memory": limits.memory_mb * MIB,
            "file": limits.file_mb * MIB,
            "processes": limits.processes
            if maker.way == ROOT or counts_by_namespace()
            else 1 << 30,
            "most_output": most_output,
        }
        self._process = _spawn(maker, uid, limits.file_mb * MIB)
        self._poller = select.poll()
        self._poller.register(self._process.stdout, select.POLLIN)
        self._received = bytearray()
        try:
            self._write(RUNNER)
            self._send(settings)
            if (said := self._receive(len(code_runner.READY), START_SECONDS)) is None:
                raise SandboxError(f"the sandbox did not start within {START_SECONDS:.0f} s")
            if said != code_runner.READY:
                raise SandboxError(f"the sandbox's runner began with {said!r}")
        except BaseException:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        return self._process.returncode is None

    def run(self, case: Mapping[str, Any]) -> Ended:
        """The program on one case: `input` (bytes, its standard input), `key` (bytes, before
        its result), `seconds` (its wall time, waiting for a CPU or not) and, for a function, `args`
        and `kwargs`.

        Raises `SandboxError` when the sandbox fails by itself, and when the program was ended by
        SIGKILL while Linux ran out of memory. A sandbox that the watch ended is no longer open.
        """
        kills = oom_kills()
        self._send(dict(case))
        waits, began = Waits(), time.monotonic()
        until = began + self._limits.case_seconds + GRACE_SECONDS
        while True:
            header = self._receive(code_runner.ANSWER.size, WATCH_SECONDS)
            if header is None:
                pids = below(self._process.pid)
                if over := self._over(pids):
                    self.close()
                    seconds = time.monotonic() - began
                    return Ended(over, seconds=seconds, counted=waits.counted(seconds))
                if time.monotonic() > until:
                    raise SandboxError("the sandbox did not end a case that is over its time")
                waits.look(pids[1:])  # the first is the runner
                continue
            how, code, seconds, output, result = code_runner.ANSWER.unpack(header)
            if how != code_runner.LATE:
                break
            waits.look(below(self._process.pid)[1:])
            more = waits.more(seconds, self._limits.case_seconds, case["seconds"])
            self._send(more)
            until = time.monotonic() + more + GRACE_SECONDS
        texts = [self._receive(length, GRACE_SECONDS) for length in (output, result)]
        if None in texts:
            raise SandboxError("the sandbox's answer broke off")
        if not texts[1].startswith(code_runner.STARTED):
            raise SandboxError(f"the sandbox could not confine the program (exit code {code})")
        # Programs go first where memory is short, whoever took it. One that took more than its
        # limit is ended by the watch, or by its own `MemoryError`.
        if (how, code) == (code_runner.SIGNALLED, signal.SIGKILL) and oom_kills() != kills:
            raise SandboxError(
                "the machine ran out of memory while the program ran, and Linux may have killed "
                "it; lower reward.workers or memory_mb"
            )
        said = texts[1].removeprefix(code_runner.STARTED)
        return Ended(how, code, texts[0], said, seconds, waits.counted(seconds))

    def close(self) -> None:
        """End everything in it; idempotent. Nothing of it runs on return."""
        if not self.is_open:
            return
        # The end of the first process ends all others before it is reported. bubblewrap ends then.
        for first in children_of(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(first, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_SECONDS)
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            pipe.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, value: dict[str, Any] | float) -> None:
        body = marshal.dumps(value)
        self._write(len(body).to_bytes(4, "little") + body)

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._process.stdin.fileno(), rest) :]
        except BrokenPipeError:
            raise self._failure() from None

    def _receive(self, count: int, seconds: float) -> bytes | None:
        """The next bytes, None when they are not there within `seconds`."""
        until = time.monotonic() + seconds
        while len(self._received) < count:
            if not self._poller.poll(max(0.0, until - time.monotonic()) * 1e3):
                return None
            if not (part := os.read(self._process.stdout.fileno(), 1 << 16)):
                raise self._failure()
            self._received += part
        found = bytes(self._received[:count])
        del self._received[:count]
        return found

    def _failure(self) -> SandboxError:
        """What became of a sandbox that hung up, by what it wrote to standard error."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_SECONDS)
        os.set_blocking(self._process.stderr.fileno(), False)
        lines = (self._process.stderr.read() or b"").decode("utf-8", "replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        code = self._process.returncode
        why = f": {said[-1][:300]}" if said else ""
        return SandboxError(f"the sandbox ended (exit code {code}){why}")

    def _over(self, pids: Sequence[int]) -> str | None:
        """Which limit of all processes together is passed."""
        if threads_of(pids) > self._limits.processes + RUNNER_PROCESSES:
            return PROCESSES
        return MEMORY if uses_more(pids, self._limits.memory_mb * MIB) else None


def _spawn(maker: Maker, uid: int, room: int) -> subprocess.Popen:
    filter_file = os.memfd_create("seccomp")
    try:
        os.write(filter_file, seccomp_program())
        os.lseek(filter_file, 0, os.SEEK_SET)
        command = maker.command(filter_file, room)
        command += [maker.python, "-s", "-S", "-P", "-B", "-X", "utf8", "-c", BOOT]
        other_user = {"user": uid, "group": uid, "extra_groups": []}
        return subprocess.Popen(
            [*command, str(len(RUNNER))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd="/",
            pass_fds=[filter_file],
            **(other_user if uid and maker.way == USER else {}),
        )
    except FileNotFoundError:
        raise SandboxError(
            "bubblewrap is missing (no `bwrap` on the path): apt-get install bubblewrap"
        ) from None
    finally:
        os.close(filter_file)
