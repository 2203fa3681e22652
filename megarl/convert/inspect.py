"""`inspect`: what a path is, and what it holds."""

from __future__ import annotations

import argparse
import json
from typing import Any

from megarl.convert import options
from megarl.convert.boxes import ConvertError
from megarl.convert.manifest import read_manifest, told
from megarl.convert.opening import dtypes_of, opened
from megarl.convert.processes import Processes
from megarl.convert.progress import human
from megarl.convert.source import HFSource, Source
from megarl.convert.stored import TorchDistSource

LINE = "what a folder or file is: numbers, files, tensors, manifest"
HELP = """Say what a path is and what it holds: a Hugging Face folder, a GGUF file, a torch_dist
folder or a training checkpoint. Headers and indexes are checked, weights are not read.

  python tools/convert_ckpt.py inspect out/qwen
  python tools/convert_ckpt.py inspect out/qwen --tensors
  python tools/convert_ckpt.py inspect out/qwen --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", type=options.path)
    options.add_hf_files(parser)
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(arguments: argparse.Namespace, crew: Processes) -> int:
    if crew.size > 1:
        raise ConvertError("inspect runs in one process; start it without torchrun")
    with opened(arguments.path, arguments.hf_files) as source:
        facts = facts_of(source)
    if not arguments.tensors:
        del facts["tensors"]
    if arguments.json:
        print(json.dumps(facts, indent=1))
        return 0
    tensors = facts.pop("tensors", ())
    width = max(map(len, facts))
    for key, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{name} {_short(item)}" for name, item in value.items())
        elif key == "bytes":
            value = human(value)
        elif key == "parameters":
            value = f"{value:,}"
        print(f"{key:<{width}}  {value}")
    for name, shape, dtype, size in tensors:
        print(f"{dtype:<9} {human(size):>9}  {'×'.join(map(str, shape)):<14} {name}")
    return 0


def facts_of(source: Source) -> dict[str, Any]:
    """What is told, `tensors` as [name, shape, dtype, bytes]. Raises `ConvertError` for a manifest
    that cannot be read."""
    fields = source.spec.__dataclass_fields__
    numbers = {name: _plain(getattr(source.spec, name)) for name in fields}
    facts: dict[str, Any] = {
        "path": str(source.path),
        "kind": source.kind,
        "config": {name: value for name, value in numbers.items() if value is not None},
        "parameters": source.parameters,
        "bytes": source.bytes,
        "dtype": dtypes_of(source),
    }
    if isinstance(source, TorchDistSource):
        facts["files"] = {name: human(size) for name, size in source.files_of.items()}
    elif isinstance(source, HFSource):
        paths = sorted({source.stored(name).path for name in source.tensors})
        facts["files"] = {path.name: human(path.stat().st_size) for path in paths}
    found = read_manifest(source.path) if source.path.is_dir() else None
    if found is not None:
        written, manifest = found
        if written.get("layout"):
            facts["layout"] = written["layout"]
        facts["written_by"] = written.get("tool")
        facts["written_from"] = written.get("source")
        facts["weight_manifest_hash"] = manifest.hash
    facts["tensors"] = [
        [name, list(stored.shape), told(stored.dtype), stored.bytes]
        for name, stored in source.tensors.items()
    ]
    return facts


def _plain(value: Any) -> Any:
    """A number of a spec as JSON takes it; what is a record is a dict."""
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return list(value) if isinstance(value, tuple) else value


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{name} {_short(item)}" for name, item in value.items()) + ")"
    return str(value)
