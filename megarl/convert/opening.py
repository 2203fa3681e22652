"""What a path is, opened as a source: HF folder, GGUF file, `torch_dist` folder, checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.checkpoint.commit import COMMIT_FILE, POSITION_FILE, CheckpointError, read_commit
from megarl.checkpoint.commit import FOLDER as CHECKPOINTS
from megarl.checkpoint.model_fit import numbers_of
from megarl.checkpoint.position import RolePosition
from megarl.checkpoint.safetensors_folder import INDEX
from megarl.convert.boxes import ConvertError
from megarl.convert.companions import refuse_broken_companions
from megarl.convert.manifest import MANIFEST, refuse_other_numbers, take_recorded, told
from megarl.convert.source import HFSource, Source
from megarl.convert.stored import INDEX_FILE, TorchDistSource
from megarl.reshard.families import FAMILIES, read_spec

ACTOR, CRITIC, REFERENCE = "actor", "critic", "reference"
HF, GGUF, TORCH_DIST, CHECKPOINT = "hf", "gguf", "torch_dist", "checkpoint"


def kind_of(path: Path) -> str:
    """Raises `ConvertError` for a path that is none of what is handled."""
    if path.is_file() and path.suffix == ".gguf":
        return GGUF
    if not path.is_dir():
        raise ConvertError(f"{path}: {'no model file' if path.exists() else 'no such path'}")
    if (path / COMMIT_FILE).is_file() or (path / POSITION_FILE).is_file():
        return CHECKPOINT
    above = path.absolute().parent
    if path.name in (ACTOR, CRITIC, REFERENCE) and any(
        (above / name).is_file() for name in (COMMIT_FILE, POSITION_FILE)
    ):
        if path.name != ACTOR:
            return CHECKPOINT
        raise ConvertError(f"{path}: a checkpoint's part; name the checkpoint, {above}")
    if (path / INDEX_FILE).is_file() or any(path.glob("*.distcp")):
        return TORCH_DIST
    if (path / "config.json").is_file() or (path / INDEX).is_file():
        return HF
    if any(path.glob("*.safetensors")):
        return HF
    hint = ""
    if (path / CHECKPOINTS).is_dir():
        hint = f"; it is a run: name one of its {CHECKPOINTS}/iter_N"
    elif found := sorted(path.glob("*.gguf")):
        hint = f"; name the file: {found[0]}"
    raise ConvertError(
        f"{path}: neither Hugging Face folder, torch_dist folder nor megarl checkpoint{hint}"
    )


def open_source(path: Path, hf_files: Path | None = None) -> Source:
    """`hf_files`: the folder with config and tokenizer, for weights that lie without them.

    Raises `ConvertError` and `FolderError` naming file, tensor, or number of the config.
    """
    kind = kind_of(path)
    if hf_files is not None and not (hf_files / "config.json").is_file():
        how = "no config.json in it" if hf_files.is_dir() else "no folder"
        raise ConvertError(f"--hf-files {hf_files}: {how}; name the folder that config.json is in")
    if kind == GGUF:
        from megarl.convert.gguf import open_gguf

        source: Source = open_gguf(path)
    elif kind == CHECKPOINT:
        source = _open_checkpoint(path, hf_files)
    elif kind == TORCH_DIST:
        companions = path if hf_files is None else hf_files
        if not (companions / "config.json").is_file():
            raise ConvertError(f"{companions}: no config.json; name its folder with --hf-files")
        source = TorchDistSource(path, read_spec(companions), companions)
        own = path / "config.json"
        if hf_files is not None and own.is_file() and not (path / MANIFEST).is_file():
            refuse_other_numbers(source, numbers_of(read_spec(path)), own)
        take_recorded(source, path)
    else:
        source = HFSource(path)
        take_recorded(source, path)
    return source


@contextmanager
def opened(path: Path, hf_files: Path | None = None) -> Iterator[Source]:
    source = open_source(path, hf_files)
    try:
        refuse_broken_companions(source.companions, source.spec.vocab)
        yield source
    finally:
        source.close()


def _open_checkpoint(path: Path, hf_files: Path | None) -> TorchDistSource:
    """The actor's weights of a training checkpoint, or those of its critic or reference where
    `path` is that folder in it, with the digests that the position has."""
    whole = any((path / name).is_file() for name in (COMMIT_FILE, POSITION_FILE))
    folder, role = (path, ACTOR) if whole else (path.absolute().parent, path.name)
    try:
        read_commit(folder)
        position = json.loads((folder / POSITION_FILE).read_text(encoding="utf-8"))
        if role != ACTOR and position.get(role) is None:
            raise ConvertError(f"{folder / POSITION_FILE}: tells of no {role}")
        model = (position["recipe"].get("model") or {}).get("path")
        if role != ACTOR:
            model = (position["recipe"].get(role) or {}).get("path") or model
        # Of a reference no numbers are written down.
        numbers = position.get({ACTOR: "model", CRITIC: "critic_model"}.get(role, ""))
        recorded = _recorded(position, role)
    except CheckpointError as error:
        raise ConvertError(str(error)) from error
    except ConvertError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConvertError(f"{folder / POSITION_FILE}: not a position: {error!r}") from error
    companions = Path(model or "") if hf_files is None else hf_files
    if not (companions / "config.json").is_file():
        where = f"the model folder {model}" if model else "a model folder that it does not name"
        raise ConvertError(
            f"{path}: trained from {where}, which has no config.json here; name one with --hf-files"
        )
    spec, config = read_spec(companions), {}
    if role == CRITIC and spec.head == "lm":  # it began with a head of its own
        spec, config = replace(spec, head="value", tied=False), _value_config(spec.family)
    source = TorchDistSource(folder / role, spec, companions)
    refuse_other_numbers(source, dict(numbers or {}), folder / POSITION_FILE)
    source.kind = ("" if role == ACTOR else f"{role} of a ") + "training checkpoint"
    kept = source.tensors
    source.recorded = {
        name: digest
        for name, (digest, dtype) in recorded.items()
        if dtype is None or (name in kept and dtype == told(kept[name].dtype))
    }
    source.recorded_in = folder / POSITION_FILE
    source.config = config
    return source


def _recorded(position: dict[str, Any], role: str) -> dict[str, tuple[int, str | None]]:
    """Digest of each tensor that a position has of a role's weights, and the dtype it is of: None
    for the stored one. A reference's are of the rollout's dtype."""
    if role == REFERENCE:
        manifest = RolePosition.of(position[role]).manifest
        return {entry.name: (entry.digest, entry.dtype) for entry in manifest.tensors}
    digests = position["critic_tensor_digests" if role == CRITIC else "tensor_digests"]
    return {
        name.removeprefix("weights/"): (int(digest, 16), None)
        for name, digest in digests.items()
        if name.startswith("weights/")
    }


def _value_config(family: str) -> dict[str, Any]:
    """What makes the config of a causal model that of one with a value head without a bias."""
    return {
        "architectures": [f"{FAMILIES[family].prefix}ForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }


def dtypes_of(source: Source) -> str:
    """`float32`, or several."""
    return ", ".join(sorted({told(stored.dtype) for stored in source.tensors.values()}))
