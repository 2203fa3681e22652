"""A user's own function, named in the recipe by its import path, and the hash of its code."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from megarl.contracts.errors import InputError
from megarl.contracts.hashes import contract_hash, file_hash
from megarl.rewards.scorer import said


def is_own(name: str) -> bool:
    """Whether `name` is an import path: no built-in's name has a dot or a colon."""
    return "." in name or ":" in name


@cache
def load_own(key: str, name: str) -> Callable[..., Any]:
    """The function `name` (`import.path:function` or `import.path.function`) of recipe key `key`.

    Raises `InputError`, one line that names the key, when it cannot be imported or is no function.
    """
    return _import(key, name)[1]


def code_hash(key: str, name: str) -> str:
    """Hash of the source of the module that `name` names, and of the one that defines the
    function, where that is another. What these import in turn is not seen.

    Raises `InputError` as `load_own`, or when there is no source file to hash.
    """
    module, function = _import(key, name)
    defined = _source_file(inspect.unwrap(function)) or _source_file(type(function))
    named = getattr(module, "__file__", None)
    paths = {Path(path).resolve() for path in (named, defined) if path is not None}
    files = [path for path in paths if path.suffix == ".py" and path.is_file()]
    if not files:
        raise InputError(f"{key}: {name} has no source file, so a run could not tell its code")
    return contract_hash(sorted(file_hash(path) for path in files))


def _source_file(code: Any) -> str | None:
    try:
        return inspect.getsourcefile(code)
    except TypeError:  # built in, or an object: then its class is asked
        return None


def _import(key: str, name: str) -> tuple[ModuleType, Callable[..., Any]]:
    path, _, attribute = name.rpartition(":" if ":" in name else ".")
    if not path or not attribute:
        raise InputError(
            f"{key}: {name!r} is no import path; give your function as import.path:function"
        )
    try:
        module = importlib.import_module(path)
        function = getattr(module, attribute)
    except BaseException as error:  # foreign code may end in any way while it is imported
        if isinstance(error, KeyboardInterrupt):
            raise
        raise InputError(f"{key}: cannot import {name}: {said(error)}") from error
    if not callable(function):
        raise InputError(f"{key}: {name} is a {type(function).__name__}, not a function")
    return module, function
