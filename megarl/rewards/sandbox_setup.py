"""Which way of making a sandbox works on this machine, and what to do where none does."""

from __future__ import annotations

import os
from pathlib import Path

from megarl.rewards import code_runner
from megarl.rewards.sandbox import ROOT, USER, Limits, Maker, SandboxError
from megarl.rewards.sandbox_users import can_be_others

TRIAL = Limits(case_seconds=10.0, cpu_seconds=5, memory_mb=256, file_mb=1, processes=4)
PROGRAM = "import json, os, select\nprint(6 * 7, os.getuid() != 0, os.listdir('/tmp'))\n"
PRINTS = b"42 True []\n"

SWITCHES = {
    "kernel.unprivileged_userns_clone": "1",
    "kernel.apparmor_restrict_unprivileged_userns": "0",
    "user.max_user_namespaces": "not 0",
}
"""sysctl → the value that lets users make namespaces. Not every kernel has each."""


def find_maker() -> Maker:
    """A maker that has run a program, with this process's interpreter.

    Raises `ValueError`, one line that names what is missing.
    """
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        raise ValueError(
            "no sandbox: /proc does not tell a process's children, so it can't be watched"
        )
    reasons: dict[str, str] = {}
    for way in (ROOT, USER) if can_be_others() else (USER,):
        reason = why_not(Maker(way))
        if reason is None:
            return Maker(way)
        reasons[way] = reason
    told = "; ".join(dict.fromkeys(reasons.values()))
    raise ValueError(f"no sandbox: {told}{_advice(told)}")


def why_not(maker: Maker) -> str | None:
    """What a trial program met; None when it ran as it should."""
    refused = [path for path in maker.prefixes if path in ("/", os.path.expanduser("~"))]
    if refused:
        return f"the interpreter's folder is {refused[0]}, too much to show to a program"
    try:
        with maker.start(PROGRAM, "", TRIAL) as sandbox:
            ended = sandbox.run({"input": b"", "key": b"", "seconds": TRIAL.case_seconds})
    except (SandboxError, PermissionError) as error:
        return str(error)
    if (ended.how, ended.code, ended.output) != (code_runner.EXITED, 0, PRINTS):
        return f"a trial program ended as {ended}"
    return None


def _advice(told: str) -> str:
    if "namespace" not in told and "uid map" not in told and "Operation not permitted" not in told:
        return ""
    values = {name: Path("/proc/sys", *name.split(".")) for name in SWITCHES}
    found = [
        f"{name} is {path.read_text().strip()} and must be {SWITCHES[name]}"
        for name, path in values.items()
        if path.exists()
    ]
    return (
        f". Users must be able to make namespaces (sysctl: {', '.join(found)}); a container must "
        "allow its processes to (docker: --privileged, or --security-opt seccomp=unconfined "
        "--security-opt apparmor=unconfined)"
    )
