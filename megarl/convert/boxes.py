"""Where a model's elements lie in a `torch_dist` checkpoint: boxes of its global tensors. No torch.

A `torch_dist` checkpoint holds *global* tensors: the parameter of a model on one rank, whatever
layout wrote it. Those of a layer, or of an expert, lie either all in one tensor, with the number of
the layer and the expert as leading indices, or each under a name that has the number in it:

    decoder.layers.self_attention.linear_qkv.weight      [layers, rows, columns]
    decoder.layers.7.self_attention.linear_qkv.weight    [rows, columns]

Megatron stores the norms of a layer under the names they have where they are fused with the linear
layer behind them (`sharded_state_dict_keys_map` of its layer specs).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import lcm
from typing import NamedTuple

from megarl.contracts.errors import InputError
from megarl.contracts.mesh import Mesh
from megarl.reshard.families import ModelSpec
from megarl.reshard.layout import MEGATRON_VOCAB_DIVISOR, megatron_placement, padded_vocab
from megarl.reshard.placement import Piece, Placement

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(mlp\.experts\.)local_experts\.(\d+)\.(.+)")
_CHUNK = re.compile(r"chunk\d+\.")
RENAMED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""How a name begins within a layer → how its key does."""
GATE_AND_UP = "linear_fc1.weight"
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Parameters whose rows are padded by the layout."""


class ConvertError(InputError):
    """What cannot be converted: one line, what and where."""


class Address(NamedTuple):
    """A parameter of the one-rank model in a global tensor."""

    key: str
    lead: tuple[int, ...]
    """Its indices in the dimensions before rows and columns."""
    lengths: tuple[int, ...]
    """The extents of those dimensions."""


class Part(NamedTuple):
    """A rectangle of a logical tensor and where it lies in a global one, or in a chunk of it."""

    tensor: str
    row: int
    col: int
    rows: int
    cols: int
    at_row: int
    at_col: int


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a global tensor that one rank writes."""

    param: str
    """Of the one-rank model."""
    row: int
    col: int
    rows: int
    cols: int
    parts: tuple[Part, ...]
    """At their row and column in the chunk. What they leave is padding."""

    @property
    def elements(self) -> int:
        return self.rows * self.cols


@lru_cache(maxsize=8)
def whole_placement(spec: ModelSpec) -> Placement:
    """The model on one rank: its parameters are the global tensors."""
    return megatron_placement(spec, Mesh(1, tp=1))


@lru_cache(maxsize=8)
def parts_of(spec: ModelSpec) -> Mapping[str, tuple[tuple[str, Part], ...]]:
    """Logical tensor → (parameter of the one-rank model, part) for each of its pieces there."""
    found: dict[str, list[tuple[str, Part]]] = {}
    for piece in whole_placement(spec).pieces[0]:
        box = (piece.row, piece.col, piece.rows, piece.cols, piece.param_row, piece.param_col)
        found.setdefault(piece.tensor, []).append((piece.param, Part(piece.tensor, *box)))
    return {name: tuple(parts) for name, parts in found.items()}


def addresses(spec: ModelSpec, param: str) -> Iterator[Address]:
    """Every place where a checkpoint may have `param`, a parameter of the one-rank model."""
    in_layer = _LAYER.fullmatch(param)
    if in_layer is None:
        yield Address(param, (), ())
        return
    layer, rest = int(in_layer[1]), in_layer[2]
    names = [
        new + rest.removeprefix(old) for old, new in RENAMED.items() if rest.startswith(old)
    ] + [rest]
    for name in names:
        stacked = Address(f"decoder.layers.{name}", (layer,), (spec.layers,))
        single = Address(f"decoder.layers.{layer}.{name}", (), ())
        expert = _EXPERT.fullmatch(name)
        for place in (stacked, single) if _stacks_layers(spec) else (single, stacked):
            if expert is None:
                yield place
                continue
            before = place.key.removesuffix(name) + expert[1] + "experts."
            number, count = int(expert[2]), spec.moe.experts
            yield Address(before + expert[3], (*place.lead, number), (*place.lengths, count))
            yield Address(f"{before}{number}.{expert[3]}", place.lead, place.lengths)


def _stacks_layers(spec: ModelSpec) -> bool:
    """Whether megatron puts all layers into one tensor: those of a model whose layers differ, as a
    list in `moe_layer_freq` says, it does not."""
    return spec.moe is None


def own_address(spec: ModelSpec, param: str) -> Address:
    """Where megarl's model has it, and so where a checkpoint is given it."""
    return next(addresses(spec, param))


def smallest_world(tp: int, pp: int, ep: int, expert_tp: int | None) -> int:
    """Ranks of the smallest mesh with these sizes."""
    return pp * lcm(tp, ep * (tp if expert_tp is None else expert_tp))


def rank_chunks(spec: ModelSpec, mesh: Mesh, rank: int) -> list[Chunk]:
    """The chunks of global tensors that `rank` holds, copies of other ranks' among them."""
    placement = megatron_placement(spec, mesh)
    whole = whole_placement(spec)
    by_param: dict[str, list[Piece]] = {}
    for piece in placement.pieces[rank]:
        by_param.setdefault(piece.param, []).append(piece)
    padding = {pad.param: pad for pad in placement.padding[rank]}
    chunks = []
    for param, shape in placement.params[rank].items():
        found = _runs(spec, by_param.get(param, ()))
        pad = padding.get(param)
        if pad is not None:
            found = _padded(whole, param, shape[0] * mesh.tp_index(rank), pad, found)
        chunks += found
    return chunks


def _runs(spec: ModelSpec, pieces: tuple[Piece, ...] | list[Piece]) -> list[Chunk]:
    """The pieces of one parameter, joined where they lie one below the other both there and in the
    global tensor."""
    boxes = [box for piece in pieces for box in _in_whole(spec, piece)]
    boxes.sort(key=lambda box: (box[1], box[0]))
    runs: list[tuple[str, int, int, int, int, int, list[Part]]] = []
    for param_row, param_col, param, part in boxes:
        if runs:
            name, first, col, last, at_row, at_col, parts = runs[-1]
            follows = (name, col, last, at_row + (last - first), at_col, parts[0].cols) == (
                param,
                param_col,
                param_row,
                part.at_row,
                part.at_col,
                part.cols,
            )
            # Megatron writes the gate and the up projection of one parameter as two chunks.
            halves = name.endswith(GATE_AND_UP) and parts[-1].tensor != part.tensor
            if follows and not halves:
                parts.append(part._replace(at_row=param_row - first, at_col=0))
                runs[-1] = (name, first, col, param_row + part.rows, at_row, at_col, parts)
                continue
        own = part._replace(at_row=0, at_col=0)
        below = param_row + part.rows
        runs.append((param, param_row, param_col, below, part.at_row, part.at_col, [own]))
    return [
        Chunk(name, at_row, at_col, last - first, parts[0].cols, tuple(parts))
        for name, first, _, last, at_row, at_col, parts in runs
    ]


def _in_whole(spec: ModelSpec, piece: Piece) -> Iterator[tuple[int, int, str, Part]]:
    """(row and column in the rank's parameter, one-rank parameter, part at its place there)."""
    for param, part in parts_of(spec)[piece.tensor]:
        row, col = max(piece.row, part.row), max(piece.col, part.col)
        rows = min(piece.row + piece.rows, part.row + part.rows) - row
        cols = min(piece.col + piece.cols, part.col + part.cols) - col
        if rows > 0 and cols > 0:
            place = (part.at_row + row - part.row, part.at_col + col - part.col)
            own = (piece.param_row + row - piece.row, piece.param_col + col - piece.col)
            yield *own, param, Part(piece.tensor, row, col, rows, cols, *place)


def _padded(
    whole: Placement, param: str, first: int, pad: tuple, found: list[Chunk]
) -> list[Chunk]:
    """The chunk of a vocabulary's rows with the padding below them; `first`: its global row."""
    _, _, _, rows, cols = pad
    if found:
        (run,) = found
        return [Chunk(run.param, run.row, run.col, run.rows + rows, run.cols, run.parts)]
    name = _CHUNK.sub("", param)
    # A tied model's second copy of the embedding is no tensor of its own.
    name = name if name in whole.params[0] else VOCABULARY[0]
    return [Chunk(name, first, 0, rows, cols, ())]


def global_shape(spec: ModelSpec, param: str, tp: int) -> tuple[int, ...]:
    """Of the global tensor's rows and columns, as a layout of `tp` writes it."""
    shape = tuple(whole_placement(spec).params[0][param])
    if param not in VOCABULARY:
        return shape
    return (padded_vocab(spec.vocab, MEGATRON_VOCAB_DIVISOR * tp), *shape[1:])
