"""The layouts of trainer, generator and HF file, for one model on one mesh. Pure: no torch.

Every logical (HF-named) tensor is a rectangle; a `Placement` tells, for each rank, which
rectangles of which logical tensors lie where in which of its own parameters.

Megatron: vocabulary rows padded to a multiple of 128 · tp; `linear_qkv` holds, for each kv group,
[the group's query heads, its key head, its value head]; `linear_fc1` is [gate shard; up shard].
SGLang: vocabulary rows padded to a multiple of 64; `qkv_proj` is the rank's [queries; keys;
values], with kv heads replicated when tp exceeds them; `gate_up_proj` is [gate shard; up shard].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from megarl.contracts.mesh import Mesh
from megarl.reshard.families import family_rules
from megarl.reshard.families.rules import Part, Rule
from megarl.reshard.families.spec import ModelSpec
from megarl.reshard.placement import LayoutError, LogicalTensor, Padding, Piece, Placement

__all__ = [
    "LayoutError",
    "LogicalTensor",
    "Padding",
    "Piece",
    "Placement",
    "hf_placement",
    "megatron_placement",
    "padded_vocab",
    "sglang_placement",
]

MEGATRON_VOCAB_DIVISOR = 128
SGLANG_VOCAB_DIVISOR = 64
SGLANG_CPU_FFN_DIVISOR = 32


class Cut(NamedTuple):
    """A piece without its names."""

    row: int
    col: int
    rows: int
    cols: int
    param_row: int
    param_col: int


def padded_vocab(vocab: int, divisor: int) -> int:
    """`vocab` rounded up to a multiple of `divisor`: 50257 and 128 · 2 give 50432."""
    return -(-vocab // divisor) * divisor


def _vocab_cut(spec: ModelSpec, padded: int, tp: int, index: int) -> list[Cut]:
    rows = padded // tp
    first = index * rows
    held = min(first + rows, spec.vocab) - first
    return [Cut(first, 0, held, spec.hidden, 0, 0)] if held > 0 else []


def _plain_cut(part: Part, spec: ModelSpec, tp: int, index: int) -> list[Cut]:
    """The cuts that trainer and generator share."""
    heads, ffn = spec.heads * spec.head_dim // tp, spec.ffn // tp
    match part:
        case Part.GATE:
            return [Cut(index * ffn, 0, ffn, spec.hidden, 0, 0)]
        case Part.UP:
            return [Cut(index * ffn, 0, ffn, spec.hidden, ffn, 0)]
        case Part.ATTENTION_OUT:
            return [Cut(0, index * heads, spec.hidden, heads, 0, 0)]
        case Part.FFN_OUT:
            return [Cut(0, index * ffn, spec.hidden, ffn, 0, 0)]
        case Part.NORM:
            return [Cut(0, 0, spec.hidden, 1, 0, 0)]
    raise LayoutError(f"no cut for {part}")


def _megatron_cut(part: Part, spec: ModelSpec, tp: int, index: int) -> list[Cut]:
    if part is Part.VOCAB:
        padded = padded_vocab(spec.vocab, MEGATRON_VOCAB_DIVISOR * tp)
        return _vocab_cut(spec, padded, tp, index)
    if part not in (Part.QUERY, Part.KEY, Part.VALUE):
        return _plain_cut(part, spec, tp, index)
    d = spec.head_dim
    queries = spec.heads // spec.kv_heads * d
    rows, offset = {
        Part.QUERY: (queries, 0),
        Part.KEY: (d, queries),
        Part.VALUE: (d, queries + d),
    }[part]
    groups = spec.kv_heads // tp
    return [
        Cut((index * groups + g) * rows, 0, rows, spec.hidden, g * (queries + 2 * d) + offset, 0)
        for g in range(groups)
    ]


def _sglang_cut(part: Part, spec: ModelSpec, tp: int, index: int) -> list[Cut]:
    if part is Part.VOCAB:
        return _vocab_cut(spec, _sglang_vocab(spec, tp), tp, index)
    if part not in (Part.QUERY, Part.KEY, Part.VALUE):
        return _plain_cut(part, spec, tp, index)
    queries = spec.heads // tp * spec.head_dim
    if part is Part.QUERY:
        return [Cut(index * queries, 0, queries, spec.hidden, 0, 0)]
    keys = max(1, spec.kv_heads // tp) * spec.head_dim
    first = index * spec.kv_heads // tp * spec.head_dim
    return [Cut(first, 0, keys, spec.hidden, queries + (keys if part is Part.VALUE else 0), 0)]


def _sglang_vocab(spec: ModelSpec, tp: int) -> int:
    padded = padded_vocab(spec.vocab, SGLANG_VOCAB_DIVISOR)
    # SGLang on a CPU rounds further where the shards would differ; a GPU build refuses that tp.
    return padded if padded % tp == 0 else padded_vocab(spec.vocab, SGLANG_VOCAB_DIVISOR * tp)


@dataclass
class _Builder:
    """Collects the pieces of one rank and the shapes they imply."""

    spec: ModelSpec
    rank: int
    vocab_rows: int
    """Rows of the vocabulary-parallel parameters, padding included."""

    def __post_init__(self) -> None:
        self.pieces: list[Piece] = []
        self.params: dict[str, tuple[int, ...]] = {}
        self.padding: list[Padding] = []

    def add(self, rule: Rule, param: str, cuts: list[Cut]) -> None:
        shape = self.params.get(param, (0,) if len(rule.shape(self.spec)) == 1 else (0, 0))
        one_column = len(shape) == 1
        rows, cols = shape[0], 1 if one_column else shape[1]
        for cut in cuts:
            width = 1 if one_column else cut.cols
            rows = max(rows, cut.param_row + cut.rows)
            cols = max(cols, cut.param_col + width)
            self.pieces.append(
                Piece(
                    self.rank,
                    rule.hf,
                    cut.row,
                    cut.col,
                    cut.rows,
                    width,
                    param,
                    cut.param_row,
                    cut.param_col,
                )
            )
        if rule.part is Part.VOCAB:
            if rows < self.vocab_rows:
                pad = Padding(param, rows, 0, self.vocab_rows - rows, self.spec.hidden)
                self.padding.append(pad)
            rows, cols = self.vocab_rows, self.spec.hidden
        self.params[param] = (rows,) if one_column else (rows, cols)


def _placement(kind: str, spec: ModelSpec, builders: list[_Builder]) -> Placement:
    return Placement(
        kind=kind,
        tensors={rule.hf: LogicalTensor(rule.hf, rule.shape(spec)) for rule in family_rules(spec)},
        pieces=tuple(tuple(builder.pieces) for builder in builders),
        params=tuple(builder.params for builder in builders),
        padding=tuple(tuple(builder.padding) for builder in builders),
    )


def _refuse_uneven(spec: ModelSpec, sizes: dict[str, int], tp: int, key: str) -> None:
    for name, size in sizes.items():
        if size % tp:
            raise LayoutError(f"{name} {size} of the {spec.family} model does not divide by {key}")


@lru_cache(maxsize=32)
def megatron_placement(spec: ModelSpec, mesh: Mesh) -> Placement:
    """The actor's layout: tp, pp stages of equal depth, data-parallel copies.

    The last stage of a tied model with pp > 1 holds a copy of the embedding as `output_layer`.
    Raises `LayoutError` when the model does not divide.
    """
    tp = mesh.tp
    _refuse_uneven(
        spec, {"kv heads": spec.kv_heads, "intermediate_size": spec.ffn}, tp, f"actor.tp={tp}"
    )
    _refuse_uneven(spec, {"layers": spec.layers}, mesh.pp, f"actor.pp={mesh.pp}")
    depth = spec.layers // mesh.pp
    vocab_rows = padded_vocab(spec.vocab, MEGATRON_VOCAB_DIVISOR * tp) // tp
    cuts = _cuts(_megatron_cut, spec, tp)
    builders = []
    for rank in range(mesh.world):
        builder = _Builder(spec, rank, vocab_rows)
        stage, index = mesh.pp_index(rank), mesh.tp_index(rank)
        last = stage == mesh.pp - 1
        for rule in family_rules(spec):
            cut = cuts[rule.part, index]
            if rule.layer is not None:
                if rule.layer // depth == stage:
                    builder.add(rule, rule.megatron.format(layer=rule.layer % depth), cut)
                continue
            embeds = rule.megatron == "embedding.word_embeddings.weight"
            if stage == 0 if embeds else last:
                builder.add(rule, rule.megatron, cut)
            if embeds and spec.tied and last and mesh.pp > 1:
                builder.add(rule, "output_layer.weight", cut)
        builders.append(builder)
    return _placement("megatron", spec, builders)


@lru_cache(maxsize=32)
def sglang_placement(spec: ModelSpec, mesh: Mesh, device: str | None = None) -> Placement:
    """The rollout's layout: replicas of `mesh.rollout_tp` ranks over the whole world.

    Raises `LayoutError` when the model does not divide, and with `device="cpu"` also where
    SGLang's CPU build would pad heads or the feed-forward width, or ignore the head size: none of
    it is described here.
    """
    tp = mesh.rollout_tp
    key = f"rollout.tp={tp}"
    _refuse_uneven(spec, {"attention heads": spec.heads, "intermediate_size": spec.ffn}, tp, key)
    if spec.kv_heads % tp and tp % spec.kv_heads:
        raise LayoutError(f"kv heads {spec.kv_heads} and {key} do not divide one another")
    if device == "cpu":
        if spec.family == "qwen2" and spec.head_dim * spec.heads != spec.hidden:
            raise LayoutError(
                f"SGLang on CPU ignores the head_dim {spec.head_dim} of a qwen2 model and takes "
                f"hidden_size / heads = {spec.hidden}/{spec.heads}; choose another model"
            )
        _refuse_uneven(spec, {"kv heads": spec.kv_heads}, tp, f"{key}, as SGLang on CPU needs")
        # On one rank the width is padded as well.
        width = SGLANG_CPU_FFN_DIVISOR * tp
        _refuse_uneven(
            spec,
            {"intermediate_size": spec.ffn},
            width,
            f"{width}, as SGLang on CPU with {key} needs",
        )
    vocab_rows = _sglang_vocab(spec, tp) // tp
    cuts = _cuts(_sglang_cut, spec, tp)
    builders = []
    for rank in range(mesh.world):
        builder = _Builder(spec, rank, vocab_rows)
        for rule in family_rules(spec):
            builder.add(rule, rule.sglang, cuts[rule.part, rank % tp])
        builders.append(builder)
    return _placement("sglang", spec, builders)


@lru_cache(maxsize=32)
def hf_placement(spec: ModelSpec, mesh: Mesh) -> Placement:
    """The HF file's layout: rank 0 holds every tensor whole, under its HF name."""
    builders = [_Builder(spec, rank, spec.vocab) for rank in range(mesh.world)]
    for rule in family_rules(spec):
        tensor = LogicalTensor(rule.hf, rule.shape(spec))
        builders[0].add(rule, rule.hf, [Cut(0, 0, tensor.rows, tensor.cols, 0, 0)])
    return _placement("hf", spec, builders)


def _cuts(
    cut: Callable[[Part, ModelSpec, int, int], list[Cut]], spec: ModelSpec, tp: int
) -> dict[tuple[Part, int], list[Cut]]:
    return {(part, index): cut(part, spec, tp, index) for part in Part for index in range(tp)}
