"""A fault that can be planted in a run, and which checks must find it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from tests.audit.forge import Forger


@dataclass(frozen=True)
class Fault:
    checks: frozenset[str]
    """The checks that find it, all of them."""
    word: str
    """Part of a finding's line."""
    sow: Callable[[Forger], None]
    maybe: frozenset[str] = frozenset()
    """Checks that find it too where the run was slow or quick enough."""

    @property
    def name(self) -> str:
        return self.sow.__name__

    def __call__(self, forger: Forger) -> None:
        self.sow(forger)


def fault(checks: str, word: str, maybe: str = "") -> Callable[[Callable[[Forger], None]], Fault]:
    """Decorates what plants a fault: checks by name, with blanks between."""
    return lambda sow: Fault(frozenset(checks.split()), word, sow, frozenset(maybe.split()))


def faults_of(*modules: ModuleType) -> list[Fault]:
    return [item for module in modules for item in vars(module).values() if isinstance(item, Fault)]
