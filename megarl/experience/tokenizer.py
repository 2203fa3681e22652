"""The tokenizer that a run's ids mean something in, kept in the run's own folder.

Tokenizer, special tokens and chat template are one contract with one hash (`Tokens.hash`). A run
keeps a copy of the files behind it, so that a run that was moved still explains its ids; what
would join, replay or resume under another contract is refused.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megarl.contracts.hashes import file_hash
from megarl.contracts.tokens import TOKENIZER_FILES, Tokens, TokensError
from megarl.experience.columns import UNFINISHED, sync_folder, write_whole
from megarl.experience.store import SealHeader
from megarl.observe.runfolder import TOKENIZER_FOLDER

CONFIG_FILES = ("config.json", "generation_config.json")
"""The model's, read for the number of ids and for those that end a response."""
_CONFIG_KEYS = ("vocab_size", "bos_token_id", "eos_token_id")


def keep_tokenizer(tokens: Tokens, run_folder: Path) -> None:
    """Copy the files behind `tokens` to `tokenizer/` of the run, read-only; all of them or none.

    Raises `TokensError` where the run has others already: it was begun under another contract.
    """
    target = run_folder / TOKENIZER_FOLDER
    if target.is_dir():
        differ = differing_files(target, tokens.folder)
        if differ:
            raise TokensError(
                f"{run_folder} was begun with another tokenizer than that of {tokens.folder}: "
                f"{'; '.join(differ)}; restore those files, or begin another run (run.name=…)"
            )
        return
    unfinished = target.with_name(TOKENIZER_FOLDER + UNFINISHED)
    unfinished.mkdir(exist_ok=True)
    for name in (*TOKENIZER_FILES, *CONFIG_FILES):
        if (tokens.folder / name).is_file():
            write_whole(unfinished / name, (tokens.folder / name).read_bytes())
    os.rename(unfinished, target)
    sync_folder(run_folder)


def check_same_contract(header: SealHeader, tokens: Tokens, run_folder: Path | None = None) -> None:
    """Raise `TokensError` naming both hashes unless experience was made under `tokens`.

    `run_folder` is the experience's run, where its `tokenizer/` tells which files differ.
    """
    if header.tokenizer_hash == tokens.hash:
        return
    copy = None if run_folder is None else run_folder / TOKENIZER_FOLDER
    told = ""
    if copy is not None and copy.is_dir():
        differ = differing_files(copy, tokens.folder)
        told = f" ({'; '.join(differ)})" if differ else f" (yet {copy} has the same files)"
    raise TokensError(
        f"iteration {header.iteration} of {header.run_id} was made with tokenizer "
        f"{header.tokenizer_hash}, {tokens.folder} is {tokens.hash}{told}: its ids would mean "
        "other text; use the model folder it was made with"
    )


def differing_files(before: Path, after: Path) -> list[str]:
    """One line for each file by which two folders' contracts differ, for people to read.

    Of the model's configs only what the contract reads of them counts.
    """
    told = []
    for name in TOKENIZER_FILES:
        there = [(folder / name).is_file() for folder in (before, after)]
        if there == [True, False]:
            told.append(f"{name} is missing in {after}")
        elif there == [False, True]:
            told.append(f"{name} is only in {after}")
        elif there[0] and file_hash(before / name) != file_hash(after / name):
            told.append(f"{name} differs")
    for name in CONFIG_FILES:
        was, is_ = _read(before / name), _read(after / name)
        for key in _CONFIG_KEYS:
            if _value(was, key) != _value(is_, key):
                told.append(f"{name} has {key} {_value(is_, key)}, it was {_value(was, key)}")
    return told


def _read(path: Path) -> dict[str, Any]:
    """Read before by `Tokens.load`, which says what is wrong with a file that is no JSON."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _value(config: dict[str, Any], key: str) -> Any:
    value = config.get(key)
    return config.get("text_config", {}).get(key) if value is None else value
