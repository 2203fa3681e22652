"""Transfers and their proof between gloo ranks, on models made of named tensors.

Not covered here: real megatron-core and SGLang models (the whole loop's tests), CUDA and NCCL.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megarl.contracts.mesh import Mesh
from megarl.reshard.digest import DigestError, DriftError
from megarl.reshard.layout import megatron_placement, sglang_placement
from megarl.reshard.placement import LayoutError
from megarl.reshard.plan import Copy, Plan
from megarl.reshard.transfer import Resharder
from megarl.world import World
from tests.reshard.models import in_param, make_shards, make_spec, make_whole, same_bits

pytestmark = pytest.mark.dist
FAULTY = "model.layers.1.mlp.up_proj.weight"


def make_resharder(
    tp: int,
    rollout_tp: int,
    dtype: torch.dtype = torch.float32,
    bucket_bytes: int = 1 << 20,
    seed: int = 0,
    pp: int = 1,
    **changes,
) -> tuple[Resharder, dict]:
    mesh = Mesh(dist.get_world_size(), tp=tp, pp=pp, rollout_tp=rollout_tp)
    world = World(mesh, torch.device("cpu"), timeout=30)
    spec = make_spec(**changes)
    source, target = megatron_placement(spec, mesh), sglang_placement(spec, mesh)
    whole = make_whole(source, seed)
    resharder = Resharder(
        source,
        target,
        make_shards(source, world.rank, whole),
        make_shards(target, world.rank, dtype=dtype),
        dtype,
        bucket_bytes,
        world,
    )
    return resharder, whole


def _transfer(*arguments, **changes) -> tuple:
    resharder, whole = make_resharder(*arguments, **changes)
    rank = resharder.world.rank
    manifest = resharder.manifest()
    first = resharder.transfer()
    held = resharder.verify(manifest)
    assert held == manifest and held is not manifest
    right = make_shards(resharder.target, rank, whole, resharder.dtype)
    written = same_bits(resharder.target_params, right)
    for param in resharder.source_params.values():  # an optimizer's step, in place
        param.mul_(1.5)
    before = {name: param.data_ptr() for name, param in resharder.target_params.items()}
    second = resharder.transfer()
    resharder.verify(resharder.manifest())
    whole = {name: tensor * 1.5 for name, tensor in whole.items()}
    right = make_shards(resharder.target, rank, whole, resharder.dtype)
    again = same_bits(resharder.target_params, right)
    in_place = before == {name: p.data_ptr() for name, p in resharder.target_params.items()}
    assert (first.bytes_sent, first.bytes_bound) == (second.bytes_sent, second.bytes_bound)
    return written, again, in_place, first.bytes_sent - first.bytes_bound, manifest.hash


@pytest.mark.parametrize("world, tp, rollout_tp", [(2, 2, 1), (2, 1, 2), (2, 2, 2), (4, 2, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_live_target_parameters_hold_the_casted_source(ranks, world, tp, rollout_tp, dtype) -> None:
    results = ranks.run(world, _transfer, tp, rollout_tp, dtype)
    assert {result[:4] for result in results} == {(True, True, True, 0)}
    assert len({result[4] for result in results}) == 1


def _from_pipeline(tp: int, pp: int, rollout_tp: int, tied: bool) -> tuple:
    return _transfer(tp, rollout_tp, torch.float32, pp=pp, tied=tied)


@pytest.mark.parametrize("tied", [True, False])
def test_a_pipeline_writes_the_same_elements_each_once(ranks, tied: bool) -> None:
    """Also from a tied one, which holds its embedding on both end stages."""
    hashes = set()
    for world, tp, pp, rollout_tp in ((2, 2, 1, 1), (2, 1, 2, 1), (4, 2, 2, 2), (4, 1, 2, 1)):
        for result in ranks.run(world, _from_pipeline, tp, pp, rollout_tp, tied):
            assert result[:4] == (True, True, True, 0)
            hashes.add(result[4])
    assert len(hashes) == 1


def _drifted_copy(tied_copy: str) -> str:
    resharder, _ = make_resharder(1, 1, pp=2, tied=True)
    if resharder.world.rank == 1:
        resharder.source_params[tied_copy][3, 5] += 1.0
    try:
        resharder.manifest()
    except DriftError as error:
        return str(error)
    return "nothing found"


def test_a_tied_copy_that_drifted_on_the_last_stage_is_found(ranks) -> None:
    for told in ranks.run(2, _drifted_copy, "output_layer.weight"):
        assert "model.embed_tokens.weight" in told and "1" in told


def test_small_buckets_and_layouts_change_no_bit_and_no_digest(ranks) -> None:
    hashes = set()
    for tp, rollout_tp, bucket_bytes in ((2, 1, 1 << 20), (2, 1, 800), (2, 1, 80), (1, 2, 8)):
        # Buckets of a hundred, of ten and of one element: parts of rows travel too.
        for result in ranks.run(2, _transfer, tp, rollout_tp, torch.float32, bucket_bytes):
            assert result[:4] == (True, True, True, 0)
            hashes.add(result[4])
    assert len(hashes) == 1


def _flip(piece_of: dict, resharder: Resharder, tensor: str, row: int, col: int) -> bool:
    """Flip the lowest bit of one logical element where this rank holds it."""
    placement, params = piece_of
    for piece in placement.pieces[resharder.world.rank]:
        inside = (
            piece.tensor == tensor
            and piece.row <= row < piece.row + piece.rows
            and piece.col <= col < piece.col + piece.cols
        )
        if inside:
            bits = in_param(params[piece.param], piece).view(torch.int32)
            bits[row - piece.row, col - piece.col] ^= 1
            return True
    return False


def _flipped_target(tp: int, rollout_tp: int, rank: int, tensor: str, row: int, col: int) -> str:
    resharder, _ = make_resharder(tp, rollout_tp)
    manifest = resharder.manifest()
    resharder.transfer()
    if resharder.world.rank == rank:
        assert _flip((resharder.target, resharder.target_params), resharder, tensor, row, col)
    try:
        resharder.verify(manifest)
    except DigestError as error:
        return str(error)
    return "nothing found"


@pytest.mark.parametrize("tp, rollout_tp", [(2, 1), (1, 2)])
@pytest.mark.parametrize(
    "tensor, row, col",
    [
        (FAULTY, 33, 7),
        ("model.layers.0.self_attn.k_proj.bias", 23, 0),
        ("model.norm.weight", 5, 0),
    ],
)
def test_one_flipped_bit_is_named_with_tensor_rank_and_element(
    ranks, tp, rollout_tp, tensor, row, col
) -> None:
    told = set(ranks.run(2, _flipped_target, tp, rollout_tp, 1, tensor, row, col))
    assert len(told) == 1
    line = told.pop()
    assert f"{tensor} on rank 1: 1 of " in line and f"row {row}, column {col}" in line, line
    assert "rank 0" not in line and "\n" not in line


class _Lossy(Plan):
    """A plan that forgets one tensor on its way to rank 0."""

    @staticmethod
    def _kept(copies: list[Copy]) -> list[Copy]:
        return [copy for copy in copies if not (copy.tensor == FAULTY and copy.target == 0)]

    def of(self, rank: int) -> list[Copy]:
        return self._kept(super().of(rank))

    def buckets(self, capacity: int, rank: int | None = None) -> list[list[Copy]]:
        return [self._kept(bucket) for bucket in super().buckets(capacity, rank)]


def _not_written() -> str:
    resharder, _ = make_resharder(2, 1)
    manifest = resharder.manifest()
    plan = resharder.plan
    lossy = _Lossy(plan.world, plan.shares)
    resharder.exchanges = resharder._exchanges(lossy, resharder.target_params)
    resharder.transfer()
    try:
        resharder.verify(manifest)
    except DigestError as error:
        return str(error)
    return "nothing found"


def test_a_tensor_that_was_not_written_is_named_with_its_rank(ranks) -> None:
    for line in ranks.run(2, _not_written):
        assert f"{FAULTY} on rank 0: 960 of 960 elements differ, first at row 0, column 0" in line
        assert line.count("rank") == 1


def _stale(stale_ranks: tuple[int, ...]) -> str:
    resharder, _ = make_resharder(1, 2)
    resharder.transfer()
    old = {name: param.clone() for name, param in resharder.target_params.items()}
    for param in resharder.source_params.values():
        param.add_(0.25)
    manifest = resharder.manifest()
    resharder.transfer()
    if resharder.world.rank in stale_ranks:
        for name, param in resharder.target_params.items():
            param.copy_(old[name])
    try:
        resharder.verify(manifest)
    except DigestError as error:
        return str(error)
    return "nothing found"


def test_a_stale_replica_is_named(ranks) -> None:
    for line in ranks.run(4, _stale, (2, 3)):
        assert "rank 2" in line and "rank 3" in line, line
        assert "rank 0" not in line and "rank 1" not in line, line


def _drift(tp: int, drifted: int, tensor: str) -> str:
    resharder, _ = make_resharder(tp, 1)
    if resharder.world.rank == drifted:
        assert _flip((resharder.source, resharder.source_params), resharder, tensor, 0, 0)
    try:
        resharder.manifest()
    except DriftError as error:
        return str(error)
    return "nothing found"


def test_a_drifted_copy_of_the_actor_is_named(ranks) -> None:
    # Data-parallel copies, with a majority and without; a norm that tp ranks replicate.
    for line in ranks.run(4, _drift, 1, 2, FAULTY):
        assert f"{FAULTY}: rank 2 drifted from ranks 0, 1, 3" in line, line
    for line in ranks.run(2, _drift, 1, 1, FAULTY):
        assert f"{FAULTY}: rank 0 against rank 1, no majority" in line, line
    for line in ranks.run(2, _drift, 2, 1, "model.norm.weight"):
        assert "model.norm.weight: rank 0 against rank 1" in line, line


def _actor_moved() -> str:
    resharder, _ = make_resharder(2, 1)
    manifest = resharder.manifest()
    for param in resharder.source_params.values():
        param.add_(1.0)
    resharder.transfer()
    try:
        resharder.verify(manifest)
    except DigestError as error:
        return str(error)
    return "nothing found"


def test_an_actor_that_moved_after_its_manifest_is_told(ranks) -> None:
    for line in ranks.run(2, _actor_moved):
        assert "the actor's own weights changed after the manifest" in line, line


def _refused(case: str) -> str:
    mesh = Mesh(dist.get_world_size(), tp=2, rollout_tp=1)
    world = World(mesh, torch.device("cpu"), timeout=30)
    spec = make_spec()
    source, target = megatron_placement(spec, mesh), sglang_placement(spec, mesh)
    source_params = make_shards(source, world.rank, make_whole(source))
    target_params = make_shards(target, world.rank)
    if world.rank == 1:
        if case == "extra":
            target_params["model.extra.weight"] = torch.zeros(3)
        elif case == "missing":
            del target_params["model.norm.weight"]
        elif case == "shape":
            target_params["model.norm.weight"] = torch.zeros(25)
        elif case == "dtype":
            target_params["model.norm.weight"] = torch.zeros(24, dtype=torch.bfloat16)
        else:
            source_params["decoder.layers.0.self_attention.linear_proj.bias"] = torch.zeros(24)
    try:
        Resharder(source, target, source_params, target_params, torch.float32, 1 << 20, world)
    except LayoutError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    "case, words",
    [
        ("extra", "rank 1, model.extra.weight: in no sglang layout"),
        ("missing", "rank 1, model.norm.weight: the live sglang model has no such parameter"),
        ("shape", "rank 1, model.norm.weight: the live parameter is [25], the sglang layout says"),
        ("dtype", "rank 1, model.norm.weight: the live parameter is torch.bfloat16"),
        ("source", "linear_proj.bias: in no megatron layout"),
    ],
)
def test_live_models_that_differ_from_the_layout_are_refused_on_every_rank(
    ranks, case, words
) -> None:
    for line in ranks.run(2, _refused, case):
        assert words in line, line


def _moved_storage() -> bool:
    resharder, whole = make_resharder(2, 1)
    resharder.transfer()
    for name, param in resharder.target_params.items():
        param.data = torch.full_like(param, float("nan"))
        assert name in resharder.target.params[resharder.world.rank]
    resharder.transfer()
    right = make_shards(resharder.target, resharder.world.rank, whole)
    return same_bits(resharder.target_params, right)


def test_parameters_whose_storage_moved_are_still_written(ranks) -> None:
    assert ranks.run(2, _moved_storage) == [True, True]
