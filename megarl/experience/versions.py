"""`versions.jsonl`: which weights every version id stands for, and what the generator really held.

    {"kind": "version", "id", "iteration", …PolicyVersion, "tensors": [[name, shape, dtype, "0x…"]]}
    {"kind": "loaded", "id", "iteration", "side", "weight_manifest_hash", "tensors", "replicas"}

A `version` line is what the trainer committed (or loaded, for a reference); a `loaded` line is what
the generator's own live parameters digest to after a hand-over, read back from them. Each is
written before the state that needs it is entered. Where every step was skipped, the same id is
committed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from megarl.contracts.lines import LinesError, LinesWriter, read_json_lines
from megarl.contracts.version import PolicyVersion, TensorEntry, WeightManifest

VERSIONS_FILE = "versions.jsonl"
VERSION, LOADED = "version", "loaded"
ROLLOUT = "rollout"
"""The side whose live parameters a `loaded` line is about."""


class VersionsError(ValueError):
    """A version that cannot be told from `versions.jsonl`, or one told wrongly; names the line."""


class VersionLog:
    """Writes a run's versions, on rank 0."""

    def __init__(self, run_folder: Path | None) -> None:
        """`run_folder` is None on every rank but 0: nothing is written."""
        self._lines = None if run_folder is None else LinesWriter(run_folder / VERSIONS_FILE)

    def committed(self, iteration: int, version: PolicyVersion, manifest: WeightManifest) -> None:
        """`version` has the weights of `manifest` from here on; raises `VersionsError` if not."""
        if manifest.hash != version.weight_manifest_hash:
            raise VersionsError(f"{version} is not of the weights {manifest.hash}")
        head = {"kind": VERSION, "id": version.id, "iteration": iteration}
        self._write(head | asdict(version) | {"tensors": tensor_lines(manifest)})

    def loaded(
        self, iteration: int, version: PolicyVersion, manifest: WeightManifest, replicas: int
    ) -> None:
        """`manifest` is what every one of `replicas` generators holds, read back from them."""
        self._write(
            {
                "kind": LOADED,
                "id": version.id,
                "iteration": iteration,
                "side": ROLLOUT,
                "weight_manifest_hash": manifest.hash,
                "tensors": tensor_lines(manifest),
                "replicas": replicas,
            }
        )

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._lines is not None:
            self._lines.write(line)


@dataclass(frozen=True)
class Committed:
    """A version and its weights."""

    version: PolicyVersion
    manifest: WeightManifest
    iterations: tuple[int, ...]
    """In which it was committed; several when steps were skipped."""
    lines: tuple[int, ...]
    """Where the file says so, counted from 1."""


@dataclass(frozen=True)
class Loaded:
    """One hand-over, as the receiving side's own parameters tell it."""

    id: str
    iteration: int
    side: str
    manifest: WeightManifest
    replicas: int
    line: int


@dataclass(frozen=True)
class Versions:
    """All that a run's `versions.jsonl` tells, every line of it checked."""

    path: Path
    committed: dict[str, Committed]
    """By id, in the order of their first commit."""
    loaded: tuple[Loaded, ...]
    torn: bool
    """The last line was cut off, and left out."""

    @staticmethod
    def read(run_folder: Path) -> Versions:
        """Raises `VersionsError` naming the line: an id that is not the hash of its own fields, one
        id with two contents, tensors that are not those of their hash, a hand-over of a version
        that was not committed before, or whose weights are not those committed."""
        path = run_folder / VERSIONS_FILE
        try:
            lines, torn = read_json_lines(path)
        except LinesError as error:
            raise VersionsError(str(error)) from error
        committed: dict[str, Committed] = {}
        loaded: list[Loaded] = []
        for number, line in enumerate(lines, start=1):
            with _naming(f"{path}:{number}"):
                if line["kind"] == VERSION:
                    earlier = committed.get(line["id"])
                    if earlier is not None:
                        _check_same(line, lines[earlier.lines[0] - 1], earlier.lines[0])
                    committed[line["id"]] = _committed(line, number, earlier)
                elif line["kind"] == LOADED:
                    loaded.append(_loaded(line, number, committed))
                else:
                    raise VersionsError(f"kind {line['kind']!r}, not {VERSION} or {LOADED}")
        return Versions(path, committed, tuple(loaded), torn)

    def resolve(self, id_: str) -> Committed:
        """The version and weights that a record's id stands for; raises `VersionsError`."""
        if id_ not in self.committed:
            raise VersionsError(
                f"{self.path}: no version {id_!r}; what names it was made by another run, "
                "or its line is lost"
            )
        return self.committed[id_]


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Every way in which a line can be wrong, as one `VersionsError` that names it."""
    try:
        yield
    except KeyError as error:
        raise VersionsError(f"{where}: the line has no {error}") from error
    except (TypeError, ValueError) as error:  # VersionsError among them
        raise VersionsError(f"{where}: {error}") from error


def _check_same(line: Mapping[str, Any], earlier: Mapping[str, Any], number: int) -> None:
    """One id has one content; only the iteration of its commit may differ."""
    differ = [
        key
        for key in sorted(line.keys() | earlier.keys())
        if key != "iteration" and line.get(key) != earlier.get(key)
    ]
    if differ:
        raise VersionsError(
            f"version {line['id']} has another {', '.join(differ)} than in line {number}"
        )


def _committed(line: Mapping[str, Any], number: int, earlier: Committed | None) -> Committed:
    version = PolicyVersion(**{item.name: line[item.name] for item in fields(PolicyVersion)})
    if version.id != line["id"]:
        raise VersionsError(f"id {line['id']}, but its own fields hash to {version.id}")
    here = Committed(version, manifest_of(line), (line["iteration"],), (number,))
    if earlier is None:
        return here
    return replace(
        earlier,
        iterations=earlier.iterations + here.iterations,
        lines=earlier.lines + here.lines,
    )


def _loaded(line: Mapping[str, Any], number: int, committed: Mapping[str, Committed]) -> Loaded:
    manifest = manifest_of(line)
    if line["id"] not in committed:
        raise VersionsError(f"version {line['id']} was loaded before it was committed")
    differ = committed[line["id"]].manifest.differences(manifest)
    if differ:
        more = f" (and {len(differ) - 1} more)" if len(differ) > 1 else ""
        raise VersionsError(
            f"the generator did not hold version {line['id']}: {differ[0]} as loaded{more}"
        )
    return Loaded(
        id=line["id"],
        iteration=line["iteration"],
        side=line["side"],
        manifest=manifest,
        replicas=line["replicas"],
        line=number,
    )


def manifest_of(line: Mapping[str, Any]) -> WeightManifest:
    """The manifest that a line's `tensors` tell; raises `VersionsError` where they hash to another
    than its `weight_manifest_hash`."""
    manifest = WeightManifest(
        tuple(
            TensorEntry(name, tuple(shape), dtype, int(digest, 16))
            for name, shape, dtype, digest in line["tensors"]
        )
    )
    if manifest.hash != line["weight_manifest_hash"]:
        raise VersionsError(
            f"version {line['id']}: its tensors hash to {manifest.hash}, "
            f"its weight_manifest_hash is {line['weight_manifest_hash']}"
        )
    return manifest


def tensor_lines(manifest: WeightManifest) -> list[list[Any]]:
    """`[name, shape, dtype, digest]` of each tensor, for JSON."""
    return [[t.name, list(t.shape), t.dtype, f"{t.digest:#x}"] for t in manifest.tensors]
