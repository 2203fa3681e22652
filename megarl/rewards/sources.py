"""Which code scores: source hashes and library versions, the code part of a scorer version."""

from __future__ import annotations

import os
import platform
import sys
import sysconfig
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

from megarl.contracts.hashes import file_hash


@dataclass(frozen=True)
class Sources:
    """Code behind the scorers of one worker."""

    files: dict[str, str]
    """Module → blake3 of its source: the scorers' own and all they brought in that is neither an
    installed package nor Python's. What a scorer imports only while scoring is not seen."""
    libraries: dict[str, str]
    """Distribution → version of installed packages they brought in, and Python's own version."""


def changed(before: Sources, after: Sources) -> str:
    """For people: the scorers' code is another one than when the pool started."""
    return (
        "reward.scorers: the code of a scorer changed while it is in use: "
        f"{before} became {after}; one run has one scorer version"
    )


def loaded_since(before: Collection[str], scorer_modules: Sequence[str]) -> Sources:
    """Sources of the scorers' modules and of every module loaded since `before` was taken."""
    paths = sysconfig.get_paths()
    installed = {Path(paths[key]).resolve() for key in ("purelib", "platlib")}
    standard = {Path(paths[key]).resolve() for key in ("stdlib", "platstdlib")}
    files: dict[str, str] = {}
    packages: set[str] = set()
    for name in sorted({*scorer_modules, *(set(sys.modules) - set(before))}):
        origin = getattr(sys.modules.get(name), "__file__", None)
        if origin is None:
            continue
        path = Path(origin).resolve()
        parents = set(path.parents)
        if name in scorer_modules:
            files[name] = file_hash(path)
        elif parents & installed:
            packages.add(name.partition(".")[0])
        elif not parents & standard and not name.startswith("megarl."):
            files[name] = file_hash(path)
    libraries = {"python": platform.python_version()}
    if packages:
        owners = packages_distributions()
        names = {owner for package in packages for owner in owners.get(package, ())}
        libraries |= {owner: version(owner) for owner in sorted(names)}
    return Sources(files, libraries)


def named_files(options: Any) -> dict[str, str]:
    """Path → blake3 of every file that an option names, at any depth: a schema, say."""
    if isinstance(options, str):
        # Not `Path.is_file`, which raises for a text that is too long for a name.
        return {options: file_hash(Path(options))} if os.path.isfile(options) else {}
    inner = options.values() if isinstance(options, Mapping) else options
    if not isinstance(inner, Iterable):
        return {}
    return {name: hash_ for option in inner for name, hash_ in named_files(option).items()}
