"""A real Slurm of one node, on this machine and in a temporary folder, ended with its context."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

NODE = "node1"
NEEDED = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol", "scancel")
START_SECONDS = 30

CONFIG = """
ClusterName=megarl
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SwitchType=switch/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
KillWait=10
MinJobAge=300
NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=main Nodes={name} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def missing() -> str | None:
    """Why no Slurm can be started here, or None."""
    lacking = [name for name in NEEDED if shutil.which(name, path=_path()) is None]
    if lacking:
        return f"not installed: {', '.join(lacking)} (Debian: slurm-wlm munge)"
    return None if os.geteuid() == 0 else "Slurm's daemons are started as root here"


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


@dataclass(frozen=True)
class Job:
    """What Slurm says of a job."""

    state: str
    """`COMPLETED`, `FAILED`, `RUNNING`, …"""
    exit_code: int
    signal: int


class Slurm:
    """Commands of the cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        self.environment = kept | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}

    def call(self, *command: str, cwd: Path | None = None, **variables: str) -> str:
        done = subprocess.run(
            command,
            cwd=cwd or self.folder,
            env=self.environment | variables,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *arguments: str, cwd: Path, **variables: str) -> str:
        """The id of a new job: `sbatch` with these arguments in the folder `cwd`."""
        return self.call("sbatch", "--parsable", *arguments, cwd=cwd, **variables).strip()

    def job(self, job: str) -> Job:
        shown = self.call("scontrol", "show", "job", job)
        fields = dict(pair.split("=", 1) for pair in shown.split() if "=" in pair)
        code, _, number = fields["ExitCode"].partition(":")
        return Job(fields["JobState"], int(code), int(number))

    def wait(self, job: str, *states: str, seconds: float = 120) -> Job:
        """Until the job is in one of `states` (default: any in which it is over)."""
        wanted = states or ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        until = time.monotonic() + seconds
        while (found := self.job(job)).state not in wanted:
            assert time.monotonic() < until, f"{found}\n{self.logs()}"
            time.sleep(0.3)
        return found

    def logs(self) -> str:
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{file.name}: {file.read_text()[-2000:]}" for file in files)


@contextmanager
def cluster(folder: Path) -> Iterator[Slurm]:
    """A node that is idle."""
    with ExitStack() as stack:
        for name in ("munge", "state", "spool"):
            (folder / name).mkdir(mode=0o755)
        key = folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        controller, node = _free_ports(2)
        values = {"folder": folder, "host": socket.gethostname(), "name": NODE}
        text = CONFIG.format(**values, controller=controller, node=node)
        (folder / "slurm.conf").write_text(text)
        slurm = Slurm(folder)
        munge = [f"--key-file={key}"]
        for option in ("socket", "pid-file", "log-file", "seed-file"):
            munge.append(f"--{option}={folder}/munge/{option.partition('-')[0]}")
        for command in (
            ["munged", "--foreground", "--force", *munge],
            ["slurmctld", "-D", "-i"],
            ["slurmd", "-D", "-N", NODE],
        ):
            _daemon(stack, command, slurm)
        _until_idle(slurm)
        yield slurm


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        servers = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [server.getsockname()[1] for server in servers]


def _daemon(stack: ExitStack, command: list[str], slurm: Slurm) -> None:
    log = slurm.folder / f"{command[0]}.out.log"
    output = stack.enter_context(log.open("w"))
    process = subprocess.Popen(
        command, env=slurm.environment, stdout=output, stderr=output, start_new_session=True
    )

    def end() -> None:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(end)
    if command[0] == "munged":
        socket_file = slurm.folder / "munge" / "socket"
        until = time.monotonic() + START_SECONDS
        while not socket_file.exists():
            assert time.monotonic() < until and process.poll() is None, slurm.logs()
            time.sleep(0.1)


def _until_idle(slurm: Slurm) -> None:
    until, shown = time.monotonic() + START_SECONDS, ""
    while "idle" not in shown:
        assert time.monotonic() < until, f"{shown}\n{slurm.logs()}"
        time.sleep(0.3)
        done = subprocess.run(
            ["sinfo", "--noheader", "--format=%T"],
            env=slurm.environment,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        shown = done.stdout + done.stderr
