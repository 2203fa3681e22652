"""Ctrl-C and SIGTERM end a conversion by an exception, so that what it wrote is removed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """`number` of the signal that came, or None.

    A library may turn the exception into one of its own, such as that of a file it could not
    finish: what was the cause is told by `number` alone.
    """

    number: int | None = None

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        # Those that follow would end the removal half-way; torchrun sends one after Ctrl-C's.
        if self.number is None:
            self.number = number
            raise KeyboardInterrupt


@contextmanager
def noticed() -> Iterator[Interrupt]:
    """Within the block, the first of `SIGNALS` raises `KeyboardInterrupt`. A signal that whoever
    started the process has it ignore stays ignored; outside of the main thread nothing changes."""
    interrupt = Interrupt()
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in SIGNALS}
    kept = (signal.SIG_IGN, None)
    installed = {number: handler for number, handler in before.items() if handler not in kept}
    for number in installed:
        signal.signal(number, interrupt)
    try:
        yield interrupt
    finally:
        for number, handler in installed.items():
            signal.signal(number, handler)
