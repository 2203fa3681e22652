"""What every benchmark shares: interleaving, repeats, spread, facts of the machine, the output.

What is compared runs in turn (A B, B A, A B, …), so that a machine that grows slower or busier in
between slows both, and a ratio is taken within each turn before it is taken over the turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".bench"
"""Environments and runs that benchmarks make; git ignores it."""

PACKAGES = ("torch", "megatron-core", "sglang", "transformers", "numpy")
LOAD_THAT_DISTURBS = 0.5
"""Load average per core at the start above which a report says that the machine was busy."""


class BenchError(RuntimeError):
    """A benchmark cannot be run here; the message says why and what to do."""


@dataclass(frozen=True)
class Bench:
    """One entry of `tools/bench.py`."""

    name: str
    line: str
    """What it measures, in one line of `--help`."""
    text: str
    """How it measures, for its own `--help`."""
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Mapping[str, Any]]
    """Options → flat keys to numbers, and nested facts."""


@dataclass(frozen=True)
class Spread:
    """Repeated measurements of one quantity."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises `ValueError` for no values."""
        if not values:
            raise ValueError("no measurement")
        return cls(tuple(float(value) for value in values))

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def relative(self) -> float:
        """(max − min) / median; 0 for one value."""
        return (max(self.values) - min(self.values)) / self.median if self.median else 0.0

    def keys(self, name: str, digits: int = 4) -> dict[str, float]:
        """`name`, `name_min`, `name_max` and `name_spread`, rounded."""
        found = {
            name: self.median,
            f"{name}_min": min(self.values),
            f"{name}_max": max(self.values),
            f"{name}_spread": self.relative,
        }
        return {key: round(value, digits) for key, value in found.items()}


def interleaved(
    sides: Mapping[str, Callable[[], Any]], repeats: int, say: Callable[[str], None] | None = None
) -> list[dict[str, Any]]:
    """What each side returned, per turn; every second turn goes backwards."""
    turns = []
    for turn in range(repeats):
        order = list(sides) if turn % 2 == 0 else list(reversed(sides))
        done = {}
        for name in order:
            if say is not None:
                say(f"turn {turn + 1}/{repeats}: {name}")
            done[name] = sides[name]()
        turns.append(done)
    return turns


def say(text: str) -> None:
    """Progress, on standard error: standard output is the report's."""
    print(text, file=sys.stderr, flush=True)


def environment() -> dict[str, Any]:
    """What the numbers were measured on."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0]
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "processor": _processor(),
        "cores": cores,
        "load_average": round(load, 2),
        "busy": load > LOAD_THAT_DISTURBS * cores,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "git": _git(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git() -> str | None:
    """Revision of the checkout, with `+` when it has changes."""
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=12"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def report(bench: Bench, result: Mapping[str, Any], *, as_json: bool) -> None:
    """A table of the flat numbers; with `as_json` the whole result as the last line."""
    flat = {key: value for key, value in result.items() if isinstance(value, int | float)}
    heads = [key for key in flat if f"{key}_min" in flat]
    width = max(map(len, flat), default=0)
    told = {f"{head}_{end}" for head in heads for end in ("min", "max", "spread")}
    for key, value in flat.items():
        if key in told:
            continue
        extent = f"   {flat[f'{key}_min']:g} … {flat[f'{key}_max']:g}" if key in heads else ""
        print(f"{key:<{width}}  {value:g}{extent}")
    if as_json:
        print(json.dumps({"bench": bench.name} | dict(result)), flush=True)
