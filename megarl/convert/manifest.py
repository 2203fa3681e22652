"""`manifest.json`, beside the weights of every folder that is written: what they are and were."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import megarl
from megarl.checkpoint.model_fit import as_words, numbers_of
from megarl.contracts.hashes import contract_hash
from megarl.contracts.version import TensorEntry, WeightManifest
from megarl.convert.boxes import ConvertError
from megarl.convert.source import Source
from megarl.experience.versions import tensor_lines

MANIFEST = "manifest.json"
FORMAT = 1
FIELDS: Mapping[str, tuple[type, ...]] = {
    "tool": (str,),
    "source": (str,),
    "config_hash": (str,),
    "model": (dict,),
    "layout": (dict, type(None)),
    "weight_manifest_hash": (str,),
    "tensors": (list,),
}
"""Field that is read → what it may be."""


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
    kind: str,
    source: Source,
    manifest: WeightManifest,
    layout: Mapping[str, Any] | None,
    config: str,
) -> str:
    """The file's text. `kind`: of the folder; `layout`: sizes of the mesh that it was cut for;
    `config`: text of the config.json beside it."""
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
        "config_hash": contract_hash(json.loads(config)),
        "model": numbers_of(source.spec),
        "layout": None if layout is None else dict(layout),
        "cast": [f"{a} to {b}" for a, b in sorted(set(casts.values()))],
        "weight_manifest_hash": manifest.hash,
        "tensors": tensor_lines(manifest),
    }
    return json.dumps(fields, indent=1) + "\n"


def read_manifest(folder: Path) -> tuple[dict[str, Any], WeightManifest] | None:
    """All that the file says and its weights; None where there is none.

    Raises `ConvertError`: not readable, a field of another kind than `manifest_text` writes, or its
    tensors do not make its hash.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        _refuse_malformed(fields)
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
        raise ConvertError(
            f"{path}: not a manifest: {error}; convert again, or remove it"
        ) from error


def _refuse_malformed(fields: Any) -> None:
    """Raises `ValueError` for a field that is read and is not of its kind."""
    if not isinstance(fields, dict):
        raise ValueError(f"it holds {type(fields).__name__}, not an object")
    if fields.get("format") != FORMAT:
        raise ValueError(f"its format is {fields.get('format')!r}, read is {FORMAT}")
    for name, kinds in FIELDS.items():
        value = fields.get(name)
        if not isinstance(value, kinds):
            raise ValueError(f"its {name} is {json.dumps(value)[:40]}")
    for entry in fields["tensors"]:
        kinds = [type(part) for part in entry] if isinstance(entry, list) else []
        if kinds != [str, list, str, str] or any(type(size) is not int for size in entry[1]):
            raise ValueError(f"its tensors have {json.dumps(entry)[:40]}")


def take_recorded(source: Source, folder: Path) -> None:
    """What the manifest of `folder` says of the weights that `source` has, for tensors of the dtype
    it was taken in.

    Raises `ConvertError` where it is of another config.json than lies beside it, or of a model of
    other numbers than those of `source.companions`.
    """
    found = read_manifest(folder)
    if found is None:
        return
    refuse_other_numbers(source, found[0]["model"], folder / MANIFEST)
    own = source.companions == folder
    if own and found[0]["config_hash"] != source.spec.config_hash:
        raise ConvertError(
            f"{folder / 'config.json'}: not the one that {folder / MANIFEST} records; put it back, "
            f"or, where it was changed on purpose, remove {MANIFEST}"
        )
    source.recorded_in = folder / MANIFEST
    source.recorded = {
        entry.name: entry.digest
        for entry in found[1].tensors
        if entry.name in source.tensors and told(source.tensors[entry.name].dtype) == entry.dtype
    }


def refuse_other_numbers(source: Source, numbers: Mapping[str, Any], where: Path) -> None:
    """Raises `ConvertError` naming those of the model's numbers (`numbers_of`) that `where` tells
    otherwise; what it does not tell is not compared."""
    differing = {
        name: (numbers[name], value)
        for name, value in numbers_of(source.spec).items()
        if name in numbers and numbers[name] != value
    }
    if differing:
        before, now = as_words(differing)
        raise ConvertError(
            f"{source.companions / 'config.json'}: of another model: {now}; {where} has {before}; "
            "name the folder with this model's config by --hf-files, or put the config back"
        )


def told(dtype: torch.dtype) -> str:
    """`bfloat16`."""
    return str(dtype).removeprefix("torch.")
