"""A megatron `torch_dist` folder, read box by box without megatron and without a model.

Its index tells which chunk of which global tensor lies where in which file. An item is what
`torch.save` makes of a chunk: a zip whose record `data/0` holds the elements, row after row.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megarl.convert.boxes import (
    VOCABULARY,
    Address,
    ConvertError,
    addresses,
    parts_of,
    whole_placement,
)
from megarl.convert.reading import Files
from megarl.convert.source import Source, Stored
from megarl.reshard.families import ModelSpec
from megarl.reshard.placement import tiles

INDEX_FILE = ".metadata"
ELEMENTS = "data/0"
"""The zip record that holds a saved tensor's elements."""
NOT_WEIGHTS = ("optimizer.", "rng_state", "rerun_state")
"""How keys begin that are a training's and not the model's."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Item:
    """One stored chunk of a global tensor."""

    path: Path
    offset: int
    length: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class _Index(pickle.Unpickler):
    """Loads an index and nothing that could run code of whoever wrote it."""

    def find_class(self, module: str, name: str) -> Any:
        first = module.split(".")[0]
        plain = (module, name) in {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("collections", "OrderedDict"),
            ("pathlib", "PosixPath"),
        }
        of_index = module.startswith("torch.distributed.checkpoint.")
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        mcore = first == "megatron" and name == "MCoreMetadata"
        if plain or of_index and "." not in name or dtype or mcore:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in an index")


def read_index(folder: Path) -> Metadata:
    """Raises `ConvertError`: missing, or no index."""
    path = folder / INDEX_FILE
    try:
        with path.open("rb") as file:
            index = _Index(file).load()
        if not isinstance(index, Metadata):
            raise pickle.UnpicklingError(f"it holds {type(index).__name__}")
        return index
    except FileNotFoundError as error:
        raise ConvertError(f"{path}: missing; the folder is no whole checkpoint") from error
    except Exception as error:  # a damaged pickle may raise anything
        raise ConvertError(f"{path}: not readable: {_line(error)}") from error


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


class TorchDistSource(Source):
    """The weights of a `torch_dist` folder."""

    kind = "torch_dist folder"

    def __init__(self, folder: Path, spec: ModelSpec, companions: Path) -> None:
        """Raises `ConvertError` naming file and tensor: no index, tensors that are missing,
        unexpected, of another shape, no float, or only in part; files missing or too short."""
        super().__init__(folder, spec, companions)
        self.files = Files()
        index = read_index(folder)
        self.globals: dict[str, TensorStorageMetadata] = {
            key: entry
            for key, entry in index.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not key.startswith(NOT_WEIGHTS)
        }
        self.others = len(index.state_dict_metadata) - len(self.globals)
        """Items that are no weights: optimizer state, random generators."""
        self._items = self._located(index)
        self._starts: dict[Item, int] = {}
        self._heads: dict[tuple[int, torch.dtype, tuple[int, ...]], bytes] = {}
        self._addresses = {
            param: self._address(param, shape)
            for param, shape in whole_placement(spec).params[0].items()
        }
        self._refuse_others()
        self.tensors = {name: self._stored(name) for name in whole_placement(spec).tensors}

    def _located(self, index: Metadata) -> dict[str, list[Item]]:
        lengths = {path.name: path.stat().st_size for path in self.path.iterdir()}
        sizes = {
            (key, tuple(chunk.offsets)): tuple(chunk.sizes)
            for key, entry in self.globals.items()
            for chunk in entry.chunks
        }
        found: dict[str, list[Item]] = {key: [] for key in self.globals}
        for place, info in index.storage_data.items():
            at = (place.fqn, tuple(place.offset or ()))
            if place.fqn not in found or at not in sizes:
                continue
            name, end = info.relative_path, info.offset + info.length
            if lengths.get(name, -1) < end:
                how = "is missing" if name not in lengths else f"ends at byte {lengths[name]}"
                raise ConvertError(
                    f"{self.path / name}: {how}; a part of {place.fqn} goes up to byte {end}"
                )
            if info.transform_descriptors:
                raise ConvertError(f"{self.path / name}: {place.fqn} is stored compressed")
            item = Item(self.path / name, info.offset, info.length, at[1], sizes[at])
            found[place.fqn].append(item)
        for key, items in found.items():
            if not _is_whole(items, tuple(self.globals[key].size)):
                raise ConvertError(f"{self.path / INDEX_FILE}: the parts of {key} do not make it")
            items.sort(key=lambda item: item.offsets)
        return found

    def _address(self, param: str, shape: tuple[int, ...]) -> Address:
        tried = list(addresses(self.spec, param))
        for place in tried:
            if place.key not in self.globals:
                continue
            held = tuple(self.globals[place.key].size)
            lead, own = held[: len(place.lead)], held[len(place.lead) :]
            rows_fit = own[:1] == shape[:1] or (param in VOCABULARY and own[:1] >= shape[:1])
            if lead != place.lengths or not rows_fit or own[1:] != tuple(shape[1:]):
                expected = [*place.lengths, *shape]
                raise ConvertError(
                    f"{self.path}: its {place.key} is {list(held)}, config.json makes it {expected}"
                )
            if self.globals[place.key].properties.dtype not in FLOATS:
                kind = self.globals[place.key].properties.dtype
                raise ConvertError(f"{self.path}: its {place.key} is {kind}, no float handled here")
            return place
        raise ConvertError(f"{self.path}: it has no tensor {tried[0].key}")

    def _refuse_others(self) -> None:
        used = {place.key for place in self._addresses.values()}
        odd = sorted(self.globals.keys() - used)
        if odd:
            raise ConvertError(f"{self.path}: it has {odd[0]}, which the model does not have")

    def _stored(self, name: str) -> Stored:
        shape = tuple(whole_placement(self.spec).tensors[name].shape)
        param, _ = parts_of(self.spec)[name][0]
        return Stored(shape, self.globals[self._addresses[param].key].properties.dtype)

    @property
    def files_of(self) -> Mapping[str, int]:
        """File → bytes of weights in it."""
        found: dict[str, int] = {}
        for items in self._items.values():
            for item in items:
                found[item.path.name] = found.get(item.path.name, 0) + item.length
        return dict(sorted(found.items()))

    def read(self, name: str, row: int, col: int, out: Tensor) -> None:
        rows, cols = out.shape
        for param, part in parts_of(self.spec)[name]:
            top, left = max(row, part.row), max(col, part.col)
            height = min(row + rows, part.row + part.rows) - top
            width = min(col + cols, part.col + part.cols) - left
            if height <= 0 or width <= 0:
                continue
            window = out[top - row : top - row + height, left - col : left - col + width]
            at = (part.at_row + top - part.row, part.at_col + left - part.col)
            self._read_global(self._addresses[param], *at, window)

    def _read_global(self, place: Address, row: int, col: int, out: Tensor) -> None:
        """Fill `out` from the rows and columns of a global tensor."""
        rows, cols = out.shape
        depth = len(place.lead)
        dtype = out.dtype
        for item in self._items[place.key]:
            inside = zip(place.lead, item.offsets, item.sizes, strict=False)
            if not all(first <= index < first + size for index, first, size in inside):
                continue
            first_row, height = item.offsets[depth], item.sizes[depth]
            flat = len(item.sizes) == depth + 1
            first_col, width = (0, 1) if flat else (item.offsets[-1], item.sizes[-1])
            top, left = max(row, first_row), max(col, first_col)
            below, right = min(row + rows, first_row + height), min(col + cols, first_col + width)
            if top >= below or left >= right:
                continue
            before = 0
            for index, first, size in zip(place.lead, item.offsets, item.sizes, strict=False):
                before = before * size + index - first
            start = self._start(item, dtype) + before * height * width * dtype.itemsize
            window = out[top - row : below - row, left - col : right - col]
            at = (top - first_row, left - first_col)
            self.files.fill_box(item.path, start, width, *at, window)

    def _start(self, item: Item, dtype: torch.dtype) -> int:
        """Where an item's elements begin in its file. Items of one length, dtype and shape begin
        alike, byte for byte; raises `ConvertError` where there is no such tensor."""
        if item not in self._starts:
            kind = (item.length, dtype, item.sizes)
            head = self._heads.get(kind)
            if head is None or self.files.read(item.path, item.offset, len(head)) != head:
                head = self._heads[kind] = self._head(item, dtype)
            self._starts[item] = item.offset + len(head)
        return self._starts[item]

    def _head(self, item: Item, dtype: torch.dtype) -> bytes:
        packed = _Window(self.files, item)
        try:
            tensor = torch.load(packed, map_location="meta", weights_only=True)
            if tuple(tensor.shape) != item.sizes or tensor.dtype != dtype:
                raise ValueError(f"it holds {tensor.dtype}{list(tensor.shape)}")
            stored = tensor.untyped_storage().nbytes()
            if not tensor.is_contiguous() or stored != prod(item.sizes) * dtype.itemsize:
                raise ValueError("its elements do not lie one after the other")
            packed.seek(0)
            start = torch._C.PyTorchFileReader(packed).get_record_offset(ELEMENTS)
        except Exception as error:  # a damaged zip may raise anything
            where = f"{item.path}: damaged at bytes {item.offset} … {item.offset + item.length}"
            what = str(error) if isinstance(error, ValueError) else "torch reads no tensor there"
            raise ConvertError(f"{where}: {what}") from error
        return self.files.read(item.path, item.offset, start)

    def close(self) -> None:
        self.files.close()


def _is_whole(items: list[Item], size: tuple[int, ...]) -> bool:
    """Whether chunks make up a global tensor: each leading index, and then rows and columns."""
    if sum(prod(item.sizes) for item in items) != prod(size):
        return False
    depth = max(0, len(size) - 2)
    groups: dict[tuple, list[tuple[int, int, int, int]]] = {}
    for item in items:
        lead = tuple(zip(item.offsets[:depth], item.sizes[:depth], strict=True))
        own = [*zip(item.offsets[depth:], item.sizes[depth:], strict=True), (0, 1)][:2]
        (row, rows), (col, cols) = own
        groups.setdefault(lead, []).append((row, col, rows, cols))
    whole = all(tiles(boxes, *[*size[depth:], 1][:2]) for boxes in groups.values())
    held = [index for lead in groups for index in product(*(range(a, a + n) for a, n in lead))]
    return whole and len(set(held)) == len(held) == prod(size[:depth])


class _Window(io.RawIOBase):
    """An item of a file, as a file of its own."""

    def __init__(self, files: Files, item: Item) -> None:
        super().__init__()
        self._files, self._item, self._at = files, item, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._item.length}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._item.length - self._at))
        if count:
            view = memoryview(buffer).cast("B")[:count]
            self._files.fill(self._item.path, self._item.offset + self._at, view)
        self._at += count
        return count
