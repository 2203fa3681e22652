"""The quickstart folder as a whole: complete or not there. Imports nothing heavy."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from megarl.contracts.hashes import contract_hash, file_hash

MARKER = "COMPLETE.json"


class FolderError(RuntimeError):
    """A folder that this tool will not touch; one line."""


def recipe_hash(seed: int, family: str) -> str:
    """Over all that decides the content: the code here, seed, family, the libraries' versions."""
    code = sorted(Path(__file__).parent.glob("*.py"))
    libraries = ("torch", "transformers", "sentencepiece")
    return contract_hash(
        {
            "seed": seed,
            "family": family,
            "code": {path.name: file_hash(path) for path in code},
            "libraries": {name: version(name) for name in libraries},
        }
    )


def is_complete(folder: Path, seed: int, family: str = "llama") -> bool:
    """Whether `folder` was made whole by this very code, with this seed and family."""
    return _made_by(folder) == recipe_hash(seed, family)


@contextmanager
def replaced_when_done(folder: Path, seed: int, family: str = "llama") -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its place on success, and goes on failure.

    Raises `FolderError` when something stands in the place that this tool did not make.
    """
    if folder.exists() and _made_by(folder) is None:
        raise FolderError(
            f"{folder} exists and holds no {MARKER}: this tool did not make it; choose another "
            "--out, or remove it"
        )
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        marker = {"made_by": "tools/make_tiny_model.py", "hash": recipe_hash(seed, family)}
        (temporary / MARKER).write_text(json.dumps(marker, indent=2) + "\n")
        if folder.exists():
            old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
            folder.rename(old)
            temporary.rename(folder)
            shutil.rmtree(old)
        else:
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _made_by(folder: Path) -> str | None:
    path = folder / MARKER
    return json.loads(path.read_text())["hash"] if path.is_file() else None
