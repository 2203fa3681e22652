"""The layouts of trainer, generator and HF file, for one model on one mesh. Pure: no torch.

Every logical (HF-named) tensor is a rectangle; a `Placement` tells, for each rank, which
rectangles of which logical tensors lie where in which of its own parameters.

Megatron: vocabulary rows padded to a multiple of 128 · tp; `linear_qkv` holds, for each kv group,
[the group's query heads, its key head, its value head]; `linear_fc1` is [gate shard; up shard];
every expert has parameters of its own, cut over expert-tensor-parallel ranks.
SGLang: vocabulary rows padded to a multiple of 64; `qkv_proj` is the rank's [queries; keys;
values], with kv heads replicated when tp exceeds them; `gate_up_proj` is [gate shard; up shard];
`w13_weight` holds [gate shard; up shard] of the rank's experts one below the other, `w2_weight`
their down projections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from megarl.contracts.mesh import Mesh
from megarl.reshard.families import family_rules
from megarl.reshard.families.rules import Part, Rule
from megarl.reshard.families.spec import ModelSpec
from megarl.reshard.placement import (
    LayoutError,
    LogicalTensor,
    Padding,
    Pattern,
    Piece,
    Placed,
    Placement,
    Seat,
)

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
EMBEDDING, TIED_OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


class Cut(NamedTuple):
    """A seat without its rank."""

    row: int
    col: int
    rows: int
    cols: int
    param_row: int
    param_col: int


def padded_vocab(vocab: int, divisor: int) -> int:
    """`vocab` rounded up to a multiple of `divisor`: 50257 and 128 · 2 give 50432."""
    return -(-vocab // divisor) * divisor


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    return (shape[0], 1) if len(shape) == 1 else (shape[0], shape[1])


def _vocab_cut(rule: Rule, padded: int, tp: int, index: int) -> Iterator[Cut]:
    rows = padded // tp
    first = index * rows
    held = min(first + rows, rule.shape[0]) - first
    if held > 0:
        yield Cut(first, 0, held, _matrix(rule.shape)[1], 0, 0)


def _plain_cut(rule: Rule, tp: int, index: int) -> Cut:
    """The cuts that trainer and generator share."""
    rows, cols = _matrix(rule.shape)
    match rule.part:
        case Part.ROWS | Part.GATE:
            return Cut(index * rows // tp, 0, rows // tp, cols, 0, 0)
        case Part.UP:
            return Cut(index * rows // tp, 0, rows // tp, cols, rows // tp, 0)
        case Part.COLUMNS:
            return Cut(0, index * cols // tp, rows, cols // tp, 0, 0)
        case Part.WHOLE:
            return Cut(0, 0, rows, cols, 0, 0)
    raise LayoutError(f"no cut for {rule}")


def _megatron_cut(spec: ModelSpec, rule: Rule, tp: int, index: int) -> Iterator[Cut]:
    if rule.part is Part.VOCAB:
        padded = padded_vocab(spec.vocab, MEGATRON_VOCAB_DIVISOR * tp)
        yield from _vocab_cut(rule, padded, tp, index)
    elif rule.part in (Part.QUERY, Part.KEY, Part.VALUE):
        d, cols = spec.head_dim, _matrix(rule.shape)[1]
        queries = spec.heads // spec.kv_heads * d
        rows, offset = {
            Part.QUERY: (queries, 0),
            Part.KEY: (d, queries),
            Part.VALUE: (d, queries + d),
        }[rule.part]
        groups = spec.kv_heads // tp
        for g in range(groups):
            yield Cut((index * groups + g) * rows, 0, rows, cols, g * (queries + 2 * d) + offset, 0)
    else:
        yield _plain_cut(rule, tp, index)


def _sglang_cut(spec: ModelSpec, rule: Rule, tp: int, index: int) -> Iterator[Cut]:
    if rule.part is Part.VOCAB:
        yield from _vocab_cut(rule, _sglang_vocab(spec, tp), tp, index)
    elif rule.part in (Part.QUERY, Part.KEY, Part.VALUE):
        cols = _matrix(rule.shape)[1]
        queries = spec.heads // tp * spec.head_dim
        if rule.part is Part.QUERY:
            yield Cut(index * queries, 0, queries, cols, 0, 0)
            return
        keys = max(1, spec.kv_heads // tp) * spec.head_dim
        first = index * spec.kv_heads // tp * spec.head_dim
        yield Cut(first, 0, keys, cols, queries + (keys if rule.part is Part.VALUE else 0), 0)
    else:
        yield _plain_cut(rule, tp, index)


def _sglang_vocab(spec: ModelSpec, tp: int) -> int:
    padded = padded_vocab(spec.vocab, SGLANG_VOCAB_DIVISOR)
    # SGLang on a CPU rounds further where the shards would differ; a GPU build refuses that tp.
    return padded if padded % tp == 0 else padded_vocab(spec.vocab, SGLANG_VOCAB_DIVISOR * tp)


Cutter = Callable[[ModelSpec, Rule, int, int], Iterable[Cut]]


class _Patterns:
    """Makes each distinct pattern once."""

    def __init__(self, spec: ModelSpec, cut: Cutter) -> None:
        self._spec, self._cut = spec, cut
        self._made: dict[tuple, Pattern] = {}

    def of(self, rule: Rule, owners: tuple[tuple[tuple[int, int], ...], ...], tp: int) -> Pattern:
        """`owners`: by variant, the (rank, index among `tp`) that hold the tensor."""
        # A fused up projection begins below the gate, so its part is what tells them apart.
        key = (rule.part, rule.shape, owners, tp)
        if key not in self._made:
            cuts = [tuple(self._cut(self._spec, rule, tp, index)) for index in range(tp)]
            self._made[key] = Pattern(
                tuple(
                    Seat(rank, *cut, variant)
                    for variant, holders in enumerate(owners)
                    for rank, index in holders
                    for cut in cuts[index]
                )
            )
        return self._made[key]


def _tensors(spec: ModelSpec) -> dict[str, LogicalTensor]:
    return {rule.hf: LogicalTensor(rule.hf, rule.shape, rule.dtype) for rule in family_rules(spec)}


def _refuse_uneven(spec: ModelSpec, sizes: Mapping[str, int], by: int, key: str) -> None:
    for name, size in sizes.items():
        if size % by:
            raise LayoutError(f"{name} {size} of the {spec.family} model does not divide by {key}")


def _dense_widths(spec: ModelSpec) -> dict[str, int]:
    """Feed-forward widths that are cut over tensor-parallel ranks."""
    widths = {}
    if spec.moe is None or len(spec.moe.layers) < spec.layers:
        widths["intermediate_size"] = spec.ffn
    if spec.moe is not None and spec.moe.shared_ffn:
        widths["shared expert width"] = spec.moe.shared_ffn
    return widths


def _refuse_megatron(spec: ModelSpec, mesh: Mesh) -> tuple[range, ...]:
    """The layers of each model chunk; raises `LayoutError` when the model does not divide."""
    heads = {"kv heads": spec.kv_heads} if spec.mla is None else {"attention heads": spec.heads}
    _refuse_uneven(spec, heads | _dense_widths(spec), mesh.tp, f"actor.tp={mesh.tp}")
    if spec.moe is not None:
        _refuse_uneven(spec, {"experts": spec.moe.experts}, mesh.ep, f"actor.ep={mesh.ep}")
        width = {"moe_intermediate_size": spec.moe.ffn}
        _refuse_uneven(spec, width, mesh.etp, f"actor.expert_tp={mesh.etp}")
    elif mesh.ep > 1 or mesh.expert_tp is not None:
        raise LayoutError(
            f"the {spec.family} model has no experts; leave out actor.ep and actor.expert_tp"
        )
    try:
        return mesh.chunks(spec.layers)
    except ValueError as error:
        raise LayoutError(str(error)) from error


@lru_cache(maxsize=32)
def megatron_placement(spec: ModelSpec, mesh: Mesh) -> Placement:
    """The actor's layout: tp, pp stages or their virtual chunks, ep and expert tp, copies.

    The last stage of a tied model with pp > 1 holds a copy of the embedding as `output_layer`.
    With virtual stages, names begin with the chunk's, `chunk0.`. Raises `LayoutError` when the
    model does not divide.
    """
    chunks = _refuse_megatron(spec, mesh)
    home = {layer: number for number, chunk in enumerate(chunks) for layer in chunk}
    experts = spec.moe.experts // mesh.ep if spec.moe else 1
    prefix = [
        f"chunk{number // mesh.pp}." if mesh.virtual > 1 else "" for number in range(len(chunks))
    ]
    stages: list[list[int]] = [[] for _ in range(mesh.pp)]
    for rank in range(mesh.world):
        stages[mesh.pp_index(rank)].append(rank)
    dense = [tuple((rank, mesh.tp_index(rank)) for rank in ranks) for ranks in stages]
    sparse = [
        [
            tuple((rank, mesh.etp_index(rank)) for rank in ranks if mesh.ep_index(rank) == index)
            for index in range(mesh.ep)
        ]
        for ranks in stages
    ]
    patterns = _Patterns(spec, _megatron_cut)
    vocab = (padded_vocab(spec.vocab, MEGATRON_VOCAB_DIVISOR * mesh.tp) // mesh.tp, spec.hidden)
    fixed: list[dict[str, tuple[int, int]]] = [{} for _ in range(mesh.world)]
    placed: dict[str, Placed] = {}
    for rule in family_rules(spec):
        embeds = rule.megatron == EMBEDDING
        chunk = home[rule.layer] if rule.layer is not None else 0 if embeds else len(chunks) - 1
        stage = chunk % mesh.pp
        local = rule.layer - chunks[chunk].start if rule.layer is not None else 0
        if rule.expert is not None:
            owners, tp = (sparse[stage][rule.expert // experts],), mesh.etp
            names = (rule.megatron.format(layer=local, expert=rule.expert % experts),)
        else:
            owners, tp = (dense[stage],), mesh.tp
            names = (rule.megatron.format(layer=local),)
        names = (prefix[chunk] + names[0],)
        if embeds and spec.tied and mesh.pp > 1:
            owners, names = (*owners, dense[-1]), (*names, prefix[-1] + TIED_OUTPUT)
        placed[rule.hf] = Placed(patterns.of(rule, owners, tp), names)
        if rule.part is Part.VOCAB:
            for holders, name in zip(owners, names, strict=True):
                for rank, _ in holders:
                    fixed[rank][name] = vocab
    return Placement("megatron", mesh.world, _tensors(spec), placed, fixed)


def _refuse_sglang(spec: ModelSpec, mesh: Mesh) -> None:
    if spec.head != "lm":
        raise LayoutError(f"a model with a {spec.head} head generates nothing")
    tp, key = mesh.rollout_tp, f"rollout.tp={mesh.rollout_tp}"
    _refuse_uneven(spec, {"attention heads": spec.heads} | _dense_widths(spec), tp, key)
    if spec.mla is None and spec.kv_heads % tp and tp % spec.kv_heads:
        raise LayoutError(f"kv heads {spec.kv_heads} and {key} do not divide one another")
    if spec.moe is not None:
        ep = mesh.rollout_ep
        _refuse_uneven(spec, {"experts": spec.moe.experts}, ep, f"rollout.ep={ep}")
        width = {"moe_intermediate_size": spec.moe.ffn}
        _refuse_uneven(spec, width, tp // ep, f"rollout.tp / rollout.ep = {tp // ep}")
    elif mesh.rollout_ep > 1:
        raise LayoutError(f"the {spec.family} model has no experts; leave out rollout.ep")


@lru_cache(maxsize=32)
def sglang_placement(spec: ModelSpec, mesh: Mesh) -> Placement:
    """The rollout's layout: replicas of `mesh.rollout_tp` ranks over the whole world.

    Raises `LayoutError` when the model does not divide.
    """
    _refuse_sglang(spec, mesh)
    tp, moe_tp = mesh.rollout_tp, mesh.rollout_tp // mesh.rollout_ep
    dense = tuple((rank, rank % tp) for rank in range(mesh.world))
    sparse = [
        tuple((rank, index % moe_tp) for rank, index in dense if index // moe_tp == block)
        for block in range(mesh.rollout_ep)
    ]
    patterns = _Patterns(spec, _sglang_cut)
    vocab = (_sglang_vocab(spec, tp) // tp, spec.hidden)
    fixed: dict[str, tuple[int, int]] = {}
    placed: dict[str, Placed] = {}
    for rule in family_rules(spec):
        if rule.expert is None:
            pattern = patterns.of(rule, (dense,), tp)
            placed[rule.hf] = Placed(pattern, (rule.sglang,), rule.sglang_row)
            if rule.part is Part.VOCAB:
                fixed[rule.sglang] = vocab
            continue
        experts = spec.moe.experts // mesh.rollout_ep
        gates = rule.part in (Part.GATE, Part.UP)
        height = 2 * rule.shape[0] // moe_tp if gates else rule.shape[0]
        placed[rule.hf] = Placed(
            patterns.of(rule, (sparse[rule.expert // experts],), moe_tp),
            (rule.sglang,),
            rule.expert % experts * height,
        )
    return Placement("sglang", mesh.world, _tensors(spec), placed, (fixed,) * mesh.world)


@lru_cache(maxsize=32)
def hf_placement(spec: ModelSpec, mesh: Mesh) -> Placement:
    """The HF file's layout: rank 0 holds every tensor whole, under its HF name."""
    whole = {
        (rows, cols): Pattern((Seat(0, 0, 0, rows, cols, 0, 0),))
        for rows, cols in {_matrix(rule.shape) for rule in family_rules(spec)}
    }
    placed = {
        rule.hf: Placed(whole[_matrix(rule.shape)], (rule.hf,)) for rule in family_rules(spec)
    }
    return Placement("hf", mesh.world, _tensors(spec), placed, ({},) * mesh.world)
