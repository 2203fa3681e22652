"""From the actor's live shards into the generator's live parameters, and the proof that it worked.

    manifest()   every copy of the actor's weights digested where it lies and compared
    transfer()   the plan, in bounded buckets, in place
    verify()     the generator's own parameters digested through the inverse map, against it

All three are collective over the default group; an error is raised on every rank alike.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.contracts.version import TensorEntry, WeightManifest
from megarl.platforms import platform_of
from megarl.reshard.digest import (
    BITS,
    Digester,
    DigestError,
    DriftError,
    drift_message,
    joined,
)
from megarl.reshard.exchange import Exchange
from megarl.reshard.matrix import held_as, window
from megarl.reshard.placement import LayoutError, Placement
from megarl.reshard.plan import Plan, make_plan
from megarl.world import World

MOST_DIAGNOSED = 4
"""Tensors compared element by element once a digest differs."""


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Bytes are those of the whole world, after the cast."""

    bytes_sent: int
    """Between ranks."""
    bytes_local: int
    """Within ranks."""
    bytes_bound: int
    """The fewest that any transfer between the two layouts must send."""
    seconds: float
    """This rank's, its device waited for."""


class Resharder:
    """Writes one model's source parameters into target parameters of another layout.

    Making one is collective. Raises `LayoutError` on every rank, naming rank and parameter, when a
    live parameter of either side is in no layout, missing, or of another shape, and when a target
    parameter is not of `dtype`; `PlanError` when the layouts do not make a complete transfer.
    """

    def __init__(
        self,
        source: Placement,
        target: Placement,
        source_params: Mapping[str, Tensor],
        target_params: Mapping[str, Tensor],
        dtype: torch.dtype,
        bucket_bytes: int,
        world: World,
    ) -> None:
        """`source_params` and `target_params`: every live parameter of this rank's two models.

        `dtype` is the target's: source elements are cast to it, rounded to nearest even, before
        they are sent and before they are digested. The transfer holds four buffers of half of
        `bucket_bytes`.
        """
        self.source, self.target = source, target
        self.target_params = target_params
        self.source_params = source_params
        self.dtype, self.bucket_bytes, self.world = dtype, bucket_bytes, world
        faults = param_faults(source, world.rank, source_params)
        faults += param_faults(target, world.rank, target_params, dtype)
        told = [line for lines in world.gather(faults) for line in lines]
        if told:
            more = f" (and {len(told) - 3} more)" if len(told) > 3 else ""
            raise LayoutError("; ".join(told[:3]) + more)
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
        self.plan = make_plan(source, target, ranks_per_node)
        self.exchanges = self._exchanges(self.plan, target_params)
        self.source_digester = Digester(source, world.rank, source_params, dtype)
        self.target_digester = Digester(target, world.rank, target_params, dtype)

    def manifest(self) -> WeightManifest:
        """The source's weights in the target's dtype, one digest for each logical tensor.

        Raises `DriftError` naming tensor and ranks when copies of a part differ.
        """
        return weight_manifest(self.source, self.source_digester, self.dtype, self.world)

    def transfer(self) -> TransferStats:
        """Write every target parameter of this rank in place; padding stays as it is."""
        began = time.perf_counter()
        for exchange in self.exchanges:
            exchange.run()
        platform_of(self.world.device.type).synchronize(self.world.device)
        plans = self._by_dtype(self.plan)
        return TransferStats(
            bytes_sent=sum(plan.elements_sent * kind.itemsize for kind, plan in plans.items()),
            bytes_local=sum(plan.elements_local * kind.itemsize for kind, plan in plans.items()),
            bytes_bound=sum(plan.bound * kind.itemsize for kind, plan in plans.items()),
            seconds=time.perf_counter() - began,
        )

    def verify(self, manifest: WeightManifest) -> WeightManifest:
        """Read the target's live parameters back and compare every copy with `manifest`.

        Returns what was read: the target's own manifest, of its own layout and live parameters.
        Raises `DigestError` naming tensors, ranks and first elements.
        """
        expected = {entry.name: entry.digest for entry in manifest.tensors}
        if expected.keys() != self.target.tensors.keys():
            odd = sorted(expected.keys() ^ self.target.tensors.keys())
            raise DigestError(f"the manifest is of another model: {odd[0]} is on one side only")
        whole, torn = joined(self.target, everywhere(self.target_digester, self.world))
        wrong = [name for name in expected if name in torn or whole[name] != expected[name]]
        if wrong:
            raise DigestError(self._diagnosis(wrong))
        held = _manifest_of(self.target, whole, self.dtype)
        if held != manifest:  # the same bits, under another shape or dtype
            raise DigestError("; ".join(manifest.differences(held)[:3]))
        return held

    def _by_dtype(self, plan: Plan) -> dict[torch.dtype, Plan]:
        """The parts of `plan` that move tensors of one dtype; one part but for few families."""
        names: dict[torch.dtype, set[str]] = {}
        for share in plan.shares:
            for _, name, _, _ in share.members:
                names.setdefault(held_as(self.target.tensors[name], self.dtype), set()).add(name)
        if len(names) == 1:
            return dict.fromkeys(names, plan)
        return {dtype: plan.only(part) for dtype, part in names.items()}

    def _exchanges(self, plan: Plan, target_params: Mapping[str, Tensor]) -> list[Exchange]:
        return [
            Exchange(
                part,
                self.world.rank,
                self.source_params,
                target_params,
                dtype,
                self.bucket_bytes,
                self.world.device,
            )
            for dtype, part in self._by_dtype(plan).items()
        ]

    def _diagnosis(self, wrong: list[str]) -> str:
        """What differs, where, on which ranks: the wrong tensors sent once more, and compared."""
        told: list[str] = []
        for name in wrong[:MOST_DIAGNOSED]:
            by_rank = self.world.gather(self._difference(name))
            lines = [f"{name} on rank {rank}: {line}" for rank, line in enumerate(by_rank) if line]
            told += lines or [f"{name}: the actor's own weights changed after the manifest"]
        more = len(wrong) - MOST_DIAGNOSED
        rest = f"; and {more} more tensors" if more > 0 else ""
        return f"the {self.target.kind} weights differ from the manifest: " + "; ".join(told) + rest

    def _difference(self, name: str) -> str | None:
        plan = self.plan.only({name})
        dtype = held_as(self.target.tensors[name], self.dtype)
        mine = [copy for copy in plan.copies if copy.target == self.world.rank]
        scratch = {
            copy.target_param: torch.empty_like(self.target_params[copy.target_param])
            for copy in mine
        }
        for exchange in self._exchanges(plan, scratch):
            exchange.run()
        differ, total, first = 0, 0, None
        for copy in mine:
            box = (copy.target_row, copy.target_col, copy.rows, copy.cols)
            live, right = (
                window(params[copy.target_param], *box).view(BITS[dtype.itemsize])
                for params in (self.target_params, scratch)
            )
            places = (live != right).nonzero()
            differ, total = differ + len(places), total + copy.elements
            if len(places) and first is None:
                row, col = places[0].tolist()
                first = f"row {copy.row + row}, column {copy.col + col}"
        return f"{differ} of {total} elements differ, first at {first}" if differ else None


def everywhere(digester: Digester, world: World) -> list[list[int]]:
    """Every rank's shares, by rank, in the order of logical tensors: one small all-gather."""
    mine = digester.digest()
    shares = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(shares, mine, group=world.control)
    return [share.tolist() for share in shares]


def source_digests(source: Placement, digester: Digester, world: World) -> dict[str, int]:
    """The digest of every logical tensor; `DriftError` when copies of a part differ. Collective."""
    whole, torn = joined(source, everywhere(digester, world))
    if torn:
        raise DriftError(drift_message(source.kind, torn))
    return whole


def weight_manifest(
    placement: Placement, digester: Digester, dtype: torch.dtype, world: World
) -> WeightManifest:
    """One model's manifest with digests taken in `dtype`. Collective; raises `DriftError`."""
    return _manifest_of(placement, source_digests(placement, digester, world), dtype)


def _manifest_of(
    placement: Placement, whole: Mapping[str, int], dtype: torch.dtype
) -> WeightManifest:
    return WeightManifest(
        tuple(
            TensorEntry(
                name,
                tuple(tensor.shape),
                str(held_as(tensor, dtype)).removeprefix("torch."),
                whole[name],
            )
            for name, tensor in placement.tensors.items()
        )
    )


def _flat_shape(param: Tensor) -> tuple[int, ...]:
    """As layouts tell shapes: 1-D as it is, else a matrix whose rows are all leading dimensions."""
    shape = tuple(param.shape)
    return shape if len(shape) == 1 else (math.prod(shape[:-1]), *shape[-1:])


def param_faults(
    placement: Placement,
    rank: int,
    params: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
) -> list[str]:
    """One line for each live parameter of `rank` that is not as `placement` says, and with `dtype`,
    the model's, held in what it should be."""
    expected = placement.params[rank]
    kinds = {
        piece.param: held_as(placement.tensors[piece.tensor], dtype)
        for piece in (placement.pieces[rank] if dtype is not None else ())
    }
    faults = []
    for name in sorted(expected.keys() | params.keys()):
        where = f"rank {rank}, {name}"
        if name not in expected:
            faults.append(f"{where}: in no {placement.kind} layout, nothing would write or read it")
        elif name not in params:
            faults.append(f"{where}: the live {placement.kind} model has no such parameter")
        elif _flat_shape(params[name]) != tuple(expected[name]):
            faults.append(
                f"{where}: the live parameter is {list(params[name].shape)}, "
                f"the {placement.kind} layout says {list(expected[name])}"
            )
        elif params[name].dtype != kinds.get(name, dtype or params[name].dtype):
            kind = kinds.get(name, dtype)
            faults.append(f"{where}: the live parameter is {params[name].dtype}, not {kind}")
        elif not params[name].is_floating_point():
            faults.append(f"{where}: {params[name].dtype} is no float dtype")
    return faults
