"""A model folder's config.json, read value by value: nothing is filled in without being told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.contracts.errors import InputError


class FolderError(InputError):
    """A model folder that is missing, incomplete, or of a kind that is not handled."""


@dataclass(frozen=True)
class Config:
    """The values of a config.json; every error is a `FolderError` of one line with its path."""

    path: Path
    values: Mapping[str, Any]

    def fail(self, fault: str) -> FolderError:
        """To be raised."""
        return FolderError(f"{self.path}: {fault}")

    def integer(self, key: str) -> int:
        """A whole number above 0."""
        return self._number(key, (int,), "integer")

    def natural(self, key: str) -> int:
        """A whole number, 0 or above."""
        value = self.values.get(key)
        return value if type(value) is int and value == 0 else self.integer(key)

    def real(self, key: str) -> float:
        """A number above 0."""
        return float(self._number(key, (int, float), "number"))

    def flag(self, key: str, missing: bool) -> bool:
        """`missing` where the key is absent."""
        value = self.values.get(key, missing)
        if not isinstance(value, bool):
            raise self.fail(f"{key} is {value!r}, neither true nor false")
        return value

    def either(self, *keys: str) -> str:
        """The one of `keys` that is there; several of them must hold the same value."""
        found = [key for key in keys if self.values.get(key) is not None]
        if not found:
            raise self.fail(f"{' or '.join(keys)} is missing; it is never left to a default")
        told = {key: self.values[key] for key in found}
        if any(value != told[found[0]] for value in told.values()):
            raise self.fail(f"the same number is told twice and differs: {told}")
        return found[0]

    def _number(self, key: str, kinds: tuple[type, ...], word: str) -> Any:
        value = self.values.get(key)
        if value is None:
            what = "null" if key in self.values else "missing"
            raise self.fail(f"{key} is {what}; it is never left to a default")
        # Not isinstance: True is an int. JSON as Python reads it may hold Infinity and NaN.
        if type(value) not in kinds or not 0 < value < float("inf"):
            raise self.fail(f"{key} is {value!r}, not a positive {word}")
        return value


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of `folder`; `FolderError` says in one line what is missing."""
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise FolderError(
            f"{folder}: there is no such model folder; check model.path, "
            "or make a small one: python tools/make_tiny_model.py --help"
        )
    if not path.is_file():
        raise FolderError(f"{folder}: no config.json; model.path must be an HF checkpoint folder")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FolderError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise FolderError(f"{path}: holds {type(config).__name__}, not an object")
    return config
