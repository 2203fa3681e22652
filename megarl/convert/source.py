"""What is read from: a model's logical (HF-named) tensors, wherever and however they are stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.checkpoint.safetensors_folder import (
    DERIVED_SUFFIX,
    DTYPES,
    EMBEDDING,
    OUTPUT,
    StoredTensor,
    stored_tensors,
)
from megarl.convert.boxes import ConvertError, whole_placement
from megarl.convert.reading import ROWS_BYTES, Files
from megarl.reshard.digest import block_digest
from megarl.reshard.families import ModelSpec, read_spec

FLOAT32_ALWAYS = ".e_score_correction_bias"
"""How a tensor ends that models keep in float32 beside weights of another dtype."""


@dataclass(frozen=True)
class Stored:
    """A logical tensor as it is stored."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def cols(self) -> int:
        return self.shape[1] if len(self.shape) == 2 else 1

    @property
    def bytes(self) -> int:
        return self.rows * self.cols * self.dtype.itemsize


@dataclass
class Source(ABC):
    """A model that is read box by box."""

    path: Path
    spec: ModelSpec
    companions: Path
    """The folder with its config, tokenizer and generation files."""
    tensors: Mapping[str, Stored] = field(init=False)
    """By name, in HF's order."""
    recorded: dict[str, int] = field(init=False, default_factory=dict)
    """Digests in the stored dtype that were written down when the weights were; may be empty."""
    recorded_in: Path | None = field(init=False, default=None)
    config: dict[str, Any] = field(init=False, default_factory=dict)
    """What its config.json says otherwise than that of `companions`."""

    kind = ""
    """What it is, for messages."""

    @abstractmethod
    def read(self, name: str, row: int, col: int, out: Tensor) -> None:
        """Fill `out` [rows, cols], of the stored dtype, from that place of tensor `name` on; a 1-D
        tensor has one column. Raises `OSError`, `ConvertError`."""

    def close(self) -> None:  # noqa: B027 - not every kind has files open
        """Nothing is read after this."""

    @property
    def bytes(self) -> int:
        return sum(stored.bytes for stored in self.tensors.values())

    @property
    def parameters(self) -> int:
        return sum(stored.rows * stored.cols for stored in self.tensors.values())


def blocks(rows: int, width_bytes: int) -> Iterator[slice]:
    """Consecutive rows, some MB at a time."""
    step = max(1, ROWS_BYTES // width_bytes)
    for at in range(0, rows, step):
        yield slice(at, min(at + step, rows))


def digest_of(source: Source, name: str, dtype: torch.dtype | None = None) -> int:
    """Of a whole stored tensor, in the dtype it has or after a cast to `dtype`. Raises as
    `refuse_overflow`."""
    stored = source.tensors[name]
    total = 0
    for rows in blocks(stored.rows, stored.cols * stored.dtype.itemsize):
        block = torch.empty(rows.stop - rows.start, stored.cols, dtype=stored.dtype)
        source.read(name, rows.start, 0, block)
        if dtype is not None:
            cast = block.to(dtype)
            refuse_overflow(source, name, block, cast)
            block = cast
        total += block_digest(block, name, rows.start, 0)
    return total % 2**64


def refuse_overflow(source: Source, name: str, before: Tensor, after: Tensor) -> None:
    """Raises `ConvertError` where a cast made infinite what was finite, in a part of `name`."""
    most = torch.finfo(after.dtype).max
    if torch.finfo(before.dtype).max <= most:
        return
    infinite = after.isinf()
    if infinite.any() and (lost := infinite & before.isfinite()).any():
        raise ConvertError(
            f"{source.path}: {name} has values such as {float(before[lost][0]):.6g}, beyond the "
            f"largest of {_told(after.dtype)}, {most:.6g}; choose another --dtype"
        )


def refuse_mixed(source: Source) -> torch.dtype:
    """The one dtype of all weights, but for those that are float32 always.

    Raises `ConvertError` naming two tensors that differ: megatron joins tensors of several layers
    into one, and its models have one dtype.
    """
    first = ""
    for name, stored in source.tensors.items():
        if name.endswith(FLOAT32_ALWAYS):
            continue
        if first and stored.dtype != source.tensors[first].dtype:
            raise ConvertError(
                f"{source.path}: {first} is {_told(source.tensors[first].dtype)}, {name} is "
                f"{_told(stored.dtype)}; give --dtype to cast all of them to one"
            )
        first = first or name
    return source.tensors[first].dtype


def target_dtypes(source: Source, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """What each tensor is written in: `dtype`, or what it has. Raises as `refuse_mixed`."""
    kept = refuse_mixed(source) if dtype is None else dtype
    return {
        name: stored.dtype if name.endswith(FLOAT32_ALWAYS) else kept
        for name, stored in source.tensors.items()
    }


def _told(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class HFSource(Source):
    """A Hugging Face folder of safetensors files."""

    kind = "Hugging Face folder"

    def __init__(self, folder: Path) -> None:
        """Raises `FolderError` and `ConvertError` naming file and tensor: as `read_spec` and
        `stored_tensors` do, and for tensors that are missing, unexpected, of another shape or no
        float; a repeated output of a tied model that differs from the embedding."""
        super().__init__(folder, read_spec(folder), folder)
        self._stored = stored_tensors(folder)
        self.files = Files()
        expected = whole_placement(self.spec).tensors
        shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
        self._check(shapes)
        self.tensors = {
            name: Stored(shape, getattr(torch, DTYPES[self._stored[name].dtype]))
            for name, shape in shapes.items()
        }
        if OUTPUT in self._stored and OUTPUT not in shapes:
            self._check_tied()

    def _check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        tied = OUTPUT not in shapes
        for name, tensor in self._stored.items():
            derived = name.endswith(DERIVED_SUFFIX) or (tied and name == OUTPUT)
            if name not in shapes and not derived:
                raise ConvertError(f"{tensor.path}: holds {name}, which the model does not have")
        for name, shape in shapes.items():
            if name not in self._stored:
                raise ConvertError(f"{self.path}: no file holds {name}")
            stored = self._stored[name]
            if stored.shape != shape:
                raise ConvertError(
                    f"{stored.path}: {name} is {list(stored.shape)}, "
                    f"config.json makes it {list(shape)}"
                )
            if stored.dtype not in DTYPES:
                raise ConvertError(
                    f"{stored.path}: {name} is {stored.dtype}; handled: {', '.join(DTYPES)}"
                )

    def _check_tied(self) -> None:
        copy, own = self._stored[OUTPUT], self._stored[EMBEDDING]
        differs = (copy.shape, copy.dtype) != (own.shape, own.dtype)
        if not differs:
            width = own.shape[1] * self.tensors[EMBEDDING].dtype.itemsize
            for rows in blocks(own.shape[0], width):
                place, length = rows.start * width, (rows.stop - rows.start) * width
                both = (
                    self.files.read(one.path, one.offset + place, length) for one in (copy, own)
                )
                differs = differs or len(set(both)) > 1
        if differs:
            raise ConvertError(
                f"{copy.path}: {OUTPUT} differs from {EMBEDDING} "
                "though config.json says tie_word_embeddings"
            )

    def stored(self, name: str) -> StoredTensor:
        return self._stored[name]

    def read(self, name: str, row: int, col: int, out: Tensor) -> None:
        stored = self._stored[name]
        width = self.tensors[name].cols
        self.files.fill_box(stored.path, stored.offset, width, row, col, out)

    def close(self) -> None:
        self.files.close()


class MemorySource(Source):
    """A model in memory: what a GGUF file was decoded to."""

    kind = "GGUF file"

    def __init__(self, path: Path, companions: Path, weights: Mapping[str, Tensor]) -> None:
        """Raises `ConvertError` naming tensors that are missing, unexpected or of another shape."""
        super().__init__(path, read_spec(companions), companions)
        expected = whole_placement(self.spec).tensors
        tied = OUTPUT not in expected
        self._weights = {
            name: weight
            for name, weight in weights.items()
            if not (name.endswith(DERIVED_SUFFIX) or (tied and name == OUTPUT))
        }
        odd = sorted(self._weights.keys() ^ expected.keys())
        if odd:
            raise ConvertError(f"{path}: {odd[0]} is in the file or in the model only")
        self.tensors = {
            name: Stored(tuple(tensor.shape), self._weights[name].dtype)
            for name, tensor in expected.items()
        }
        for name, stored in self.tensors.items():
            found = self._weights[name].shape
            if tuple(found) != stored.shape:
                raise ConvertError(
                    f"{path}: {name} is {list(found)}, its config makes it {list(stored.shape)}"
                )

    def read(self, name: str, row: int, col: int, out: Tensor) -> None:
        weight = self._weights[name].detach()
        matrix = weight.unsqueeze(1) if weight.dim() == 1 else weight
        out.copy_(matrix[row : row + out.shape[0], col : col + out.shape[1]])
