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

from megarl.contracts.hashes import bytes_hash, contract_hash, file_hash

READ_BYTES = 1 << 22


@dataclass(frozen=True)
class Sources:
    """Code behind the scorers of one worker."""

    files: dict[str, str]
    """Module → blake3 of its source: the scorers' own and all of megarl's that they brought in, and
    what else is neither an installed package nor Python's. What a scorer imports only while scoring
    is not seen."""
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
        if name in scorer_modules or name.startswith("megarl."):
            files[name] = file_hash(path)
        elif parents & installed:
            packages.add(name.partition(".")[0])
        elif not parents & standard:
            files[name] = file_hash(path)
    libraries = {"python": platform.python_version()}
    if packages:
        owners = packages_distributions()
        names = {owner for package in packages for owner in owners.get(package, ())}
        libraries |= {owner: version(owner) for owner in sorted(names)}
    return Sources(files, libraries)


def named_files(options: Any) -> dict[str, str]:
    """Path → hash of every file that an option names, at any depth, and of every folder whose path
    has a slash: a schema, a model.

    Of a folder it is over the names and contents of all files in it. Raises `OSError` for what
    cannot be read.
    """
    if isinstance(options, str):
        # Not `Path.is_file`, which raises for a text that is too long for a name.
        if os.path.isfile(options):
            return {options: _streamed_hash(options)}
        # "." and "/" are texts; so is a word that a folder happens to be called by.
        last = os.path.basename(os.path.normpath(options)) if "/" in options else ""
        named = last not in ("", ".", "..") and os.path.isdir(options)
        return {options: _folder_hash(options)} if named else {}
    inner = options.values() if isinstance(options, Mapping) else options
    if not isinstance(inner, Iterable):
        return {}
    return {name: hash_ for option in inner for name, hash_ in named_files(option).items()}


def _folder_hash(folder: str) -> str:
    """Over its files, those behind links too: caches of models keep links."""
    hashes: dict[str, str] = {}
    seen: set[str] = set()
    for place, folders, files in os.walk(folder, onerror=_fail, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:  # a link to a folder around it, or to one that is hashed
            folders.clear()
            continue
        seen.add(real)
        folders.sort()  # of two ways to a folder it is always the same one that is gone
        for name in files:
            path = os.path.join(place, name)
            if os.path.isfile(path):  # no socket, no pipe: reading one could last for ever
                hashes[os.path.relpath(path, folder)] = _streamed_hash(path)
            elif os.path.islink(path):  # to nothing, or to none of these
                hashes[os.path.relpath(path, folder)] = os.readlink(path)
    return contract_hash(hashes)


def _streamed_hash(path: str) -> str:
    """Not `file_hash`, whose errors do not name the file."""
    with open(path, "rb") as file:
        return bytes_hash(iter(lambda: file.read(READ_BYTES), b""))


def _fail(error: OSError) -> None:
    raise error
