"""Where every element of every logical tensor lies: patterns, pieces, paddings, their checks.

Every logical (HF-named) tensor is a rectangle; a 1-D tensor of n elements is n × 1. Many tensors of
a model lie alike but for the names of the parameters that hold them (the query weights of a stage's
layers): they share one `Pattern`, so a layout of a thousand ranks is small. What one rank holds is
worked out when it is asked for. Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from megarl.contracts.errors import InputError


class LayoutError(InputError):
    """A model that does not fit a mesh, or a placement that does not tile its parameters."""


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """One tensor under its HF name and shape (1-D or 2-D)."""

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None
    """What it is held in whatever the model's dtype is; None: in that."""

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def cols(self) -> int:
        return self.shape[1] if len(self.shape) == 2 else 1


class Seat(NamedTuple):
    """A rectangle of a tensor, and where it lies in one of a rank's parameters."""

    rank: int
    row: int
    col: int
    rows: int
    cols: int
    param_row: int
    param_col: int
    variant: int = 0
    """Which of the tensor's parameter names this rank knows it by."""


@dataclass(frozen=True, eq=False)
class Pattern:
    """How the tensors of one kind lie over all ranks. Compared by identity."""

    seats: tuple[Seat, ...]

    @cached_property
    def by_rank(self) -> dict[int, list[Seat]]:
        """The seats of each rank that has any."""
        found: dict[int, list[Seat]] = {}
        for seat in self.seats:
            found.setdefault(seat.rank, []).append(seat)
        return found

    @cached_property
    def groups(self) -> dict[tuple[tuple[int, int, int, int], ...], tuple[int, ...]]:
        """Rectangles (row, column, rows, columns) → the ranks that hold just these."""
        found: dict[tuple[tuple[int, int, int, int], ...], list[int]] = {}
        for rank, seats in self.by_rank.items():
            found.setdefault(tuple(sorted(seat[1:5] for seat in seats)), []).append(rank)
        return {boxes: tuple(ranks) for boxes, ranks in found.items()}


class Placed(NamedTuple):
    """One tensor: the pattern it lies in, and the parameters that hold it."""

    pattern: Pattern
    params: tuple[str, ...]
    """By a seat's `variant`."""
    base_row: int = 0
    """Added to the parameter row of every seat."""


class Piece(NamedTuple):
    """Rows `row … row + rows − 1` and columns `col …` of `tensor`, where they lie on `rank`."""

    rank: int
    tensor: str
    row: int
    col: int
    rows: int
    cols: int
    param: str
    param_row: int
    param_col: int


class Padding(NamedTuple):
    """A rectangle of a local parameter that holds no element of any logical tensor."""

    param: str
    param_row: int
    param_col: int
    rows: int
    cols: int


@dataclass(frozen=True, slots=True)
class RankLayout:
    """What one rank holds."""

    pieces: tuple[Piece, ...]
    params: Mapping[str, tuple[int, ...]]
    """Local parameter name → its shape as a matrix, (rows, columns); of 1-D ones (rows,)."""
    padding: tuple[Padding, ...]


class ByRank(Sequence):
    """One field of every rank's layout, each worked out when it is read."""

    def __init__(self, placement: Placement, field: str) -> None:
        self._placement, self._field = placement, field

    def __len__(self) -> int:
        return self._placement.world

    def __getitem__(self, rank: int) -> Any:
        if not 0 <= rank < len(self):
            raise IndexError(rank)
        return getattr(self._placement.on(rank), self._field)


class Placement:
    """Where every element of a model lies, on every rank of a world.

    Compared by identity, so that plans can be cached. Reading a rank raises `LayoutError` when its
    pieces and paddings do not tile its parameters exactly or leave the logical tensors.
    """

    def __init__(
        self,
        kind: str,
        world: int,
        tensors: Mapping[str, LogicalTensor],
        placed: Mapping[str, Placed],
        fixed: Sequence[Mapping[str, tuple[int, int]]],
    ) -> None:
        """`kind`: `megatron`, `sglang`, `hf`, for messages. `fixed`: by rank, the parameters whose
        (rows, columns) are given; rows beyond their pieces are padding.
        """
        self.kind, self.world = kind, world
        self.tensors, self.placed = tensors, placed
        self._fixed = fixed
        self._ranks: dict[int, RankLayout] = {}

    @classmethod
    def of_pieces(
        cls,
        kind: str,
        tensors: Mapping[str, LogicalTensor],
        pieces: Sequence[Sequence[Piece]],
        params: Sequence[Mapping[str, tuple[int, ...]]],
        padding: Sequence[Sequence[Padding]],
    ) -> Placement:
        """A placement told piece by piece, by rank; every rank is checked."""
        seats: dict[str, list[Seat]] = {name: [] for name in tensors}
        names: dict[str, list[str]] = {name: [] for name in tensors}
        for held in pieces:
            for piece in held:
                known = names[piece.tensor]
                if piece.param not in known:
                    known.append(piece.param)
                box = (piece.rank, *piece[2:6], piece.param_row, piece.param_col)
                seats[piece.tensor].append(Seat(*box, known.index(piece.param)))
        placed = {name: Placed(Pattern(tuple(seats[name])), tuple(names[name])) for name in tensors}
        made = cls(kind, len(pieces), tensors, placed, ())
        for rank, held in enumerate(pieces):
            made._ranks[rank] = RankLayout(tuple(held), params[rank], tuple(padding[rank]))
            made._check(rank)
        return made

    @property
    def pieces(self) -> Sequence[tuple[Piece, ...]]:
        """By rank."""
        return ByRank(self, "pieces")

    @property
    def params(self) -> Sequence[Mapping[str, tuple[int, ...]]]:
        """By rank: local parameter name → its shape as a matrix; of 1-D ones (rows,)."""
        return ByRank(self, "params")

    @property
    def padding(self) -> Sequence[tuple[Padding, ...]]:
        """By rank."""
        return ByRank(self, "padding")

    def on(self, rank: int) -> RankLayout:
        """What `rank` holds, checked."""
        if rank not in self._ranks:
            self._ranks[rank] = self._layout_of(rank)
            self._check(rank)
        return self._ranks[rank]

    def _layout_of(self, rank: int) -> RankLayout:
        pieces: list[Piece] = []
        extent: dict[str, tuple[int, int]] = {}
        flat: set[str] = set()
        for name, (pattern, params, base) in self.placed.items():
            for _, row, col, rows, cols, at, param_col, variant in pattern.by_rank.get(rank, ()):
                param, param_row = params[variant], base + at
                pieces.append(Piece(rank, name, row, col, rows, cols, param, param_row, param_col))
                most = extent.get(param, (0, 0))
                extent[param] = (
                    max(most[0], param_row + rows),
                    max(most[1], param_col + cols),
                )
                if len(self.tensors[name].shape) == 1:
                    flat.add(param)
        padding = []
        for param, (rows, cols) in self._fixed[rank].items():
            held = extent.get(param, (0, cols))[0]
            if held < rows:
                padding.append(Padding(param, held, 0, rows - held, cols))
            extent[param] = (max(rows, held), cols)
        shapes = {
            param: (rows,) if param in flat else (rows, cols)
            for param, (rows, cols) in extent.items()
        }
        return RankLayout(tuple(pieces), shapes, tuple(padding))

    def _check(self, rank: int) -> None:
        layout = self._ranks[rank]
        boxes: dict[str, list[tuple[int, int, int, int]]] = {name: [] for name in layout.params}
        for piece in layout.pieces:
            tensor = self.tensors[piece.tensor]
            if piece.row + piece.rows > tensor.rows or piece.col + piece.cols > tensor.cols:
                raise LayoutError(f"{piece} leaves {tensor}")
            boxes[piece.param].append((piece.param_row, piece.param_col, piece.rows, piece.cols))
        for pad in layout.padding:
            boxes[pad.param].append((pad.param_row, pad.param_col, pad.rows, pad.cols))
        for name, shape in layout.params.items():
            if not tiles(boxes[name], shape[0], shape[1] if len(shape) == 2 else 1):
                raise LayoutError(
                    f"{self.kind} layout of rank {rank}: {name} {list(shape)} is not tiled "
                    "exactly by its pieces and paddings"
                )

    @cached_property
    def copies(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """For each logical tensor, its disjoint parts, each with the ranks that hold that part.

        The ranks of one part hold the same elements. Raises `LayoutError` when the parts of a
        tensor do not make it up exactly: then no digest over them would be its digest.
        """
        proven: dict[tuple[Pattern, int, int], tuple[tuple[int, ...], ...]] = {}
        parts: dict[str, tuple[tuple[int, ...], ...]] = {}
        for name, tensor in self.tensors.items():
            pattern = self.placed[name].pattern
            key = (pattern, tensor.rows, tensor.cols)
            if key not in proven:
                boxes = (box for group in pattern.groups for box in group)
                if not tiles(boxes, tensor.rows, tensor.cols):
                    raise LayoutError(
                        f"{self.kind} layout: the parts of {name} {list(tensor.shape)} on ranks "
                        f"{sorted(pattern.by_rank)} do not make it up exactly"
                    )
                proven[key] = tuple(pattern.groups.values())
            parts[name] = proven[key]
        return parts


def tiles(boxes: Iterable[tuple[int, int, int, int]], rows: int, cols: int) -> bool:
    """True when the (row, col, rows, cols) boxes cover rows × cols exactly, without overlap."""
    ordered = sorted(boxes)
    area = 0
    for index, (row, col, height, width) in enumerate(ordered):
        if min(row, col) < 0 or height <= 0 or width <= 0:
            return False
        if row + height > rows or col + width > cols:
            return False
        area += height * width
        for other in ordered[index + 1 :]:
            if other[0] >= row + height:
                break
            if other[1] < col + width and col < other[1] + other[3]:
                return False
    return area == rows * cols
