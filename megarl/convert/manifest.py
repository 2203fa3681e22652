"""`manifest.json`, beside the weights of every folder that is written: what they are and were."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import megarl
from megarl.contracts.version import TensorEntry, WeightManifest
from megarl.convert.boxes import ConvertError
from megarl.convert.source import Source
from megarl.experience.versions import tensor_lines

MANIFEST = "manifest.json"
FORMAT = 1


def weight_manifest(
    source: Source, dtypes: Mapping[str, torch.dtype], digests: Mapping[str, int]
) -> WeightManifest:
    """Of the tensors that were written, as megarl's own models tell theirs."""
    return WeightManifest(
        tuple(
            TensorEntry(name, stored.shape, told(dtypes[name]), digests[name] % 2**64)
            for name, stored in source.tensors.items()
        )
    )


def manifest_text(
    kind: str, source: Source, manifest: WeightManifest, layout: Mapping[str, Any] | None
) -> str:
    """The file's text. `kind`: of the folder; `layout`: sizes of the mesh that it was cut for."""
    casts = {
        entry.name: (told(source.tensors[entry.name].dtype), entry.dtype)
        for entry in manifest.tensors
        if told(source.tensors[entry.name].dtype) != entry.dtype
    }
    fields = {
        "format": FORMAT,
        "tool": f"megarl {megarl.__version__}",
        "kind": kind,
        "source": str(source.path.absolute()),
        "source_kind": source.kind,
        "config_hash": source.spec.config_hash,
        "layout": None if layout is None else dict(layout),
        "cast": [f"{a} to {b}" for a, b in sorted(set(casts.values()))],
        "weight_manifest_hash": manifest.hash,
        "tensors": tensor_lines(manifest),
    }
    return json.dumps(fields, indent=1) + "\n"


def read_manifest(folder: Path) -> tuple[dict[str, Any], WeightManifest] | None:
    """All that the file says and its weights; None where there is none.

    Raises `ConvertError`: not readable, or its tensors do not make its hash.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        manifest = WeightManifest(
            tuple(
                TensorEntry(name, tuple(shape), dtype, int(digest, 16))
                for name, shape, dtype, digest in fields["tensors"]
            )
        )
        if manifest.hash != fields["weight_manifest_hash"]:
            raise ValueError(f"its tensors hash to {manifest.hash}")
        return fields, manifest
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConvertError(f"{path}: not a manifest: {type(error).__name__}: {error}") from error


def take_recorded(source: Source, folder: Path) -> None:
    """What the manifest of `folder` says of the weights that `source` has, for tensors of the dtype
    it was taken in."""
    found = read_manifest(folder)
    if found is None:
        return
    source.recorded_in = folder / MANIFEST
    source.recorded = {
        entry.name: entry.digest
        for entry in found[1].tensors
        if entry.name in source.tensors and told(source.tensors[entry.name].dtype) == entry.dtype
    }


def told(dtype: torch.dtype) -> str:
    """`bfloat16`."""
    return str(dtype).removeprefix("torch.")
