"""The processes of one conversion: one, or those that torchrun started. All of them stop alike."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

from megarl.contracts.errors import InputError
from megarl.convert.boxes import ConvertError

T = TypeVar("T")
TIMEOUT = 1800.0
"""Seconds that a process waits for the others."""


class Processes:
    """`rank` of `size`; alone, nothing is exchanged."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Every process's `value`, by rank, on every one."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def each(self, act: Callable[[], T]) -> T:
        """What `act` returns here, once it is through everywhere. Raises `ConvertError` in the same
        words on every process where one raised it, `OSError` or torch's own failure to write."""
        problem: BaseException | None = None
        result: Any = None
        try:
            result = act()
        except (InputError, OSError, RuntimeError) as error:
            problem = error
        told = [line for line in self.gather("" if problem is None else one_line(problem)) if line]
        if told:
            raise ConvertError("; ".join(dict.fromkeys(told))) from problem
        return result

    def on_main(self, act: Callable[[], Any]) -> None:
        """The first process does it, and all raise what it raises."""
        self.each(act if self.is_main else lambda: None)

    @contextmanager
    def opened(self, opening: Callable[[], AbstractContextManager[T]]) -> Iterator[T]:
        """What `opening` opens, on every process or on none; raises as `each`."""
        with ExitStack() as stack:
            yield self.each(lambda: stack.enter_context(opening()))


@contextmanager
def processes() -> Iterator[Processes]:
    """Those of torchrun's environment, joined by gloo, or this one alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Processes()
        return
    import torch.distributed as dist

    from megarl.world import process_group

    with process_group("gloo", TIMEOUT):
        yield Processes(dist.get_rank(), dist.get_world_size())


def one_line(error: BaseException) -> str:
    """Of the operating system's error behind torch's own, where there is one."""
    if isinstance(error, InputError):
        return str(error)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            where = f"{cause.filename}: " if cause.filename is not None else ""
            return f"{where}{cause.strerror or cause}"
        cause = cause.__cause__ or cause.__context__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
