"""`manifest.json` of a sealed iteration, and where iterations lie in a run's folder.

    experience/iter_000007/   parts, `manifest.json` over the facts, `derived.json` over the rest

A folder without a manifest was never sealed. A manifest names its files relative to itself, so a
run's folder may be moved.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from megarl.contracts.hashes import bytes_hash, canonical_json, contract_hash
from megarl.contracts.samples import SamplingContract
from megarl.experience.columns import Part, SealError, write_whole

FOLDER = "experience"
MANIFEST_FILE = "manifest.json"
DERIVED_FILE = "derived.json"
LOCK_FILE = ".writer.lock"
SOURCE_FILE = "source.json"
"""In an iteration's folder: it is made of another run's facts (`source.py`)."""
PROMPTS_FILE = "prompts.jsonl"
DRAWN_FILE = "drawn.json"
FORMAT = 2
_NAME = re.compile(r"iter_(\d{6,})")


def iteration_folder(run_folder: Path, iteration: int) -> Path:
    return run_folder / FOLDER / f"iter_{iteration:06d}"


def sealed_iterations(run_folder: Path) -> Iterator[int]:
    """Numbers of the iterations that were sealed, rising."""
    for number, folder in iteration_folders(run_folder):
        if (folder / MANIFEST_FILE).exists():
            yield number


def iteration_folders(run_folder: Path) -> list[tuple[int, Path]]:
    """(number, folder) of every iteration, sealed or not, by number."""
    found = ((_NAME.fullmatch(path.name), path) for path in (run_folder / FOLDER).glob("iter_*"))
    numbers = ((int(match[1]), path) for match, path in found if match)
    return sorted(
        (number, path) for number, path in numbers if path == iteration_folder(run_folder, number)
    )


def is_kept(iteration: int, newest: int, keep: int | None, keep_every: int) -> bool:
    """Whether retention keeps an iteration once `newest` is there."""
    if keep is None or iteration > newest - keep:
        return True
    return keep_every > 0 and iteration % keep_every == 0


@dataclass(frozen=True)
class SealHeader:
    """What holds for all rows of one iteration; the same on every rank."""

    run_id: str
    iteration: int
    producers: dict[str, str]
    """Role (`rollout`, `old`, `ref`, `critic`) → id of the version that made its column."""
    tokenizer_hash: str
    recipe_hash: str
    sampling: SamplingContract
    scorer_version: str
    samples: int
    """Rows over all replicas."""


@dataclass(frozen=True)
class Manifest:
    """`manifest.json` of a sealed iteration."""

    header: SealHeader
    experience_hash: str
    previous: str | None
    """Hash of the manifest before it in the run, None for the first."""
    sealed_at: float
    parts: tuple[Part, ...]
    hash: str
    """blake3 of this manifest's own file: what the next one calls `previous`."""


def read_manifest(folder: Path) -> Manifest:
    """Raises `SealError`: no manifest, another format, or words that are not those sealed."""
    path = folder / MANIFEST_FILE
    told, hashed = read_json(path)
    try:
        header = {item.name: told[item.name] for item in fields(SealHeader)}
        sampling = header["sampling"] | {
            "stop_token_ids": tuple(told["sampling"]["stop_token_ids"])
        }
        manifest = Manifest(
            header=SealHeader(**header | {"sampling": SamplingContract(**sampling)}),
            experience_hash=told["experience_hash"],
            previous=told["previous"],
            sealed_at=told["sealed_at"],
            parts=tuple(parts_of(told)),
            hash=hashed,
        )
        listed = {part.file: part.content for part in manifest.parts}
        sampling_hash, found = told["sampling_hash"], experience_hash_of(told)
        contents = told["contents"]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SealError(f"{path}: not a manifest of sealed experience: {fault(error)}") from error
    if len(listed) != len(manifest.parts):
        raise SealError(f"{path}: lists a part twice")
    if contents != listed:
        raise SealError(f"{path}: its contents are not those of the parts it lists")
    if found != manifest.experience_hash:
        raise SealError(f"{path}: its experience_hash is not that of what it lists")
    if manifest.header.sampling.hash != sampling_hash:
        raise SealError(f"{path}: its sampling_hash is not that of its sampling contract")
    return manifest


def parts_of(told: Mapping[str, Any]) -> list[Part]:
    """The parts that a manifest or `derived.json` lists; raises `KeyError` and `TypeError`."""
    listed, kinds = [Part(**part) for part in told["parts"]], get_type_hints(Part)
    for part in listed:
        for name, kind in kinds.items():
            value = getattr(part, name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise TypeError(f"parts: {name} is {value!r}")
    return listed


def fault(error: Exception) -> str:
    """Why a JSON value is not what it should be, without the interpreter's own words."""
    match error:
        case KeyError():
            return f"it has no {error.args[0]!r}"
        case IndexError():
            return "a number in it points beyond its list"
        case TypeError() if str(error).startswith("parts: "):
            return str(error)
        case TypeError() | AttributeError():
            return "a value in it is of another kind, or a field is missing or not known"
        case _:
            return str(error)


def facts_of(header: SealHeader, listed: Sequence[Part]) -> dict[str, Any]:
    """What the experience's hash is over, and the first keys of its manifest."""
    return asdict(header) | {
        "sampling": asdict(header.sampling),
        "sampling_hash": header.sampling.hash,
        "contents": {part.file: part.content for part in listed},
    }


def experience_hash_of(manifest: Mapping[str, Any]) -> str:
    """The hash that a manifest's own words lead to."""
    names = [*SealHeader.__dataclass_fields__, "sampling_hash", "contents"]
    return contract_hash({name: manifest[name] for name in names})


def json_bytes(value: Any) -> bytes:
    return (canonical_json(value) + "\n").encode()


def write_json(path: Path, value: Any) -> str:
    """Returns the hash of the file's bytes."""
    body = json_bytes(value)
    write_whole(path, body)
    return bytes_hash([body])


def read_json(path: Path) -> tuple[dict[str, Any], str]:
    """(value, hash of the file's bytes)."""
    try:
        body = path.read_bytes()
        value = json.loads(body)
    except FileNotFoundError as error:
        raise SealError(f"{path}: {error.strerror}: the iteration was never sealed") from error
    except OSError as error:
        raise SealError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise SealError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        found = value.get("format") if isinstance(value, dict) else None
        told = f"format {found!r}" if found is not None else "no format"
        raise SealError(
            f"{path}: {told}, not format {FORMAT} of sealed experience; read it with the megarl "
            "that wrote it, or sample again"
        )
    return value, bytes_hash([body])
