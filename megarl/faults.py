"""Test-only fault injection: one rank does something bad when it enters a stage.

    MEGARL_FAULT="kill@generate:rank=1:visit=2"     kind@stage, then what to narrow it to

`rank` defaults to 1, `visit` (the how-manieth time the stage is entered) to 1, `seconds` (of
`stuck`, `slow`, `frozen`, `kill_inside`) to an hour, 5, 2.5 and 0.05. Any stage of `stages.STAGES`,
or `vote <STATE>`. `kill` comes before the stage's work. `kill_inside` comes `seconds` later, from a
thread, whatever the rank does by then: also in the background write that the stage began, and in
the next stage where this one is shorter.
`lose` is for a stage that generates and `rollout.tp` 1: as long as the stage lasts, SGLang is told
to abort the rank's first request at every attempt.
Refused unless MEGARL_FAULT_TESTING=1, so that no run is broken by a forgotten variable.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from megarl.contracts.errors import InputError

VARIABLE = "MEGARL_FAULT"
PERMISSION = "MEGARL_FAULT_TESTING"
STRUCK = "megarl: fault"
"""Begins the line in the rank's log that says when it happened."""


class FaultRefused(InputError):
    """A fault that is not understood or not allowed here."""


class InjectedFault(RuntimeError):
    """What a rank with the fault `raise` raises."""


def _kill(fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_later(fault: Fault) -> None:
    timer = threading.Timer(fault.seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True  # a rank that ends earlier does not wait for it
    timer.start()


def _freeze(fault: Fault) -> None:
    time.sleep(fault.seconds)  # until the other ranks have seen which stage this one is in
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise(fault: Fault) -> None:
    raise InjectedFault(f"injected fault in {fault.stage}")


def _lose(fault: Fault) -> None:
    fault.is_losing = True


def _sleep(fault: Fault) -> None:
    time.sleep(fault.seconds)


KINDS: Mapping[str, tuple[Callable[[Fault], None], float]] = MappingProxyType(
    {
        "kill": (_kill, 0.0),
        "kill_inside": (_kill_later, 0.05),
        "raise": (_raise, 0.0),
        "lose": (_lose, 0.0),
        "stuck": (_sleep, 3600.0),
        "slow": (_sleep, 5.0),
        "frozen": (_freeze, 2.5),
    }
)
"""What each kind does, and its default `seconds`. `frozen` stops all threads of the rank."""


@dataclass
class Fault:
    """One planned fault of this rank."""

    kind: str
    stage: str
    rank: int = 1
    visit: int = 1
    seconds: float = 0.0
    is_losing: bool = field(default=False, init=False)
    _visits: int = field(default=0, init=False)

    def strike(self, stage: str) -> None:
        """Called at each stage this rank enters; acts on the planned visit of the planned one."""
        self.is_losing = False
        if stage != self.stage:
            return
        self._visits += 1
        if self._visits == self.visit:
            print(f"{STRUCK} {self.kind}@{stage} {time.time():.3f}", flush=True)
            KINDS[self.kind][0](self)


def parse(text: str) -> Fault:
    """Raises `FaultRefused` for what is no `kind@stage[:key=value …]`."""
    what, *narrowed = text.split(":")
    kind, at, stage = what.partition("@")
    if kind not in KINDS or not at or not stage:
        raise FaultRefused(f"{VARIABLE}={text}: write kind@stage, kinds are {', '.join(KINDS)}")
    fault = Fault(kind, stage, seconds=KINDS[kind][1])
    for setting in narrowed:
        key, _, value = setting.partition("=")
        if key not in ("rank", "visit", "seconds") or not value.replace(".", "", 1).isdigit():
            raise FaultRefused(f"{VARIABLE}={text}: {setting} is none of rank=, visit=, seconds=")
        setattr(fault, key, float(value) if key == "seconds" else int(value))
    return fault


def planned(rank: int) -> Fault | None:
    """The fault that the environment plans for this rank, None for nearly everybody."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    if os.environ.get(PERMISSION) != "1":
        raise FaultRefused(
            f"{VARIABLE} is set, which breaks a run for megarl's own tests; unset it"
        )
    fault = parse(text)
    return fault if fault.rank == rank else None
