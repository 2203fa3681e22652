"""What a conversion says when it is through."""

from __future__ import annotations

from pathlib import Path

from megarl.contracts.version import WeightManifest
from megarl.convert.companions import has_tokenizer
from megarl.convert.processes import Processes
from megarl.convert.progress import human
from megarl.convert.source import Source
from megarl.convert.stored import TorchDistSource


def wrote(out: Path, source: Source, manifest: WeightManifest, crew: Processes) -> None:
    """One line, from the first process."""
    if not crew.is_main:
        return
    files = [path for path in out.iterdir() if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    dtypes = "/".join(sorted({entry.dtype for entry in manifest.tensors}))
    without = "" if has_tokenizer(out) else "; without a tokenizer, as the source"
    if isinstance(source, TorchDistSource) and not source.recorded:
        without += "; the source has no record to be held against"
    print(
        f"{out}: {len(manifest.tensors)} tensors, {source.parameters:,} parameters, {dtypes}, "
        f"{human(size)} in {len(files)} files; weights {manifest.hash}{without}"
    )
