"""The optimizer state of a trainer as whole parameters, whichever optimizer and layout hold it.

With the distributed optimizer each of the ranks that hold a parameter has a flat range of its
state, which need not end where a parameter ends. `OptimizerState.gather` brings every parameter's
state whole to one *owner* among these ranks, the one that holds most of it, and `scatter` takes it
back: each element moves at most once, and nobody ever holds more than its share of whole
parameters.

The ranks that hold a parameter are those of the data-parallel group, for an expert those of the
expert-data-parallel group; its *holders* here, whose ranks are counted within the group.

Handles megatron's distributed, mixed-precision and fp32 optimizers around torch's AdamW or
Transformer Engine's FusedAdam.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

MASTER = "fp32_param"
"""The fp32 master weights; absent where the model's own weights are the masters."""
MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "step"


@dataclass(frozen=True)
class StatePart:
    """What this rank holds of one parameter's state."""

    name: str
    param: nn.Parameter
    start: int
    end: int
    """Range of the flattened parameter."""
    tensors: dict[str, Tensor]
    """Live, flat, float32, `end − start` elements: `MOMENTS`, and `MASTER` where there is one."""

    @property
    def is_whole(self) -> bool:
        return self.end - self.start == self.param.numel()


def is_expert(weight: Tensor) -> bool:
    """Whether it is an expert's, as megatron marks it: reduced over other ranks than the rest."""
    return not getattr(weight, "allreduce", True)


def holders_of(weight: Tensor) -> dist.ProcessGroup:
    """The ranks that hold this rank's shard of a parameter or buffer, each a copy of it."""
    if is_expert(weight):
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group()


class OptimizerState:
    """The state of one trainer's optimizer. Collective over the holders of all parameters to build.

    State that no step has made yet is made, as zeros at step 0, which is what the first step would
    start from.
    """

    def __init__(self, trainer: Any) -> None:
        self._optimizers = list(trainer.optimizer.chained_optimizers)
        for optimizer in self._optimizers:
            _make_state(optimizer)
        # A frozen one has no state: megatron's optimizers leave it out.
        params = {n: param for n, param in trainer.model.named_parameters() if param.requires_grad}
        names = {param: name for name, param in params.items()}
        self.parts: list[StatePart] = sorted(
            (part for optimizer in self._optimizers for part in _parts(optimizer, names)),
            key=lambda part: part.name,
        )
        groups = {False: parallel_state.get_data_parallel_group()}
        # By the model and not by what this rank holds of it: all ranks must ask alike.
        if trainer.model.spec.moe is not None:
            groups[True] = parallel_state.get_expert_data_parallel_group()
        self._shared = [
            _Shared(
                [part for part in self.parts if is_expert(part.param) == experts],
                {n: param.numel() for n, param in params.items() if is_expert(param) == experts},
                group,
                trainer.world.device,
            )
            for experts, group in groups.items()
        ]
        # A rank that holds nothing, as the last ones may of a tiny model, learns it from others.
        (self._keys,) = set().union(*(shared.keys for shared in self._shared)) or {()}
        self._owners = {
            name: owner for shared in self._shared for name, owner in shared.owners.items()
        }
        self._owned = {name for shared in self._shared for name in shared.owned}

    @property
    def owners(self) -> dict[str, int]:
        """Name of each trained parameter of this rank → the rank among its holders to which its
        state comes whole."""
        return dict(self._owners)

    def owns(self, name: str) -> bool:
        """Whether the state of parameter `name` comes whole to this rank."""
        return name in self._owned

    def carries(self, name: str, weight: Tensor) -> bool:
        """Whether this rank writes and reads a weight for all that hold it: the owner of its state,
        and of what is not trained (a buffer, a frozen parameter) the first of the holders."""
        return dist.get_rank(holders_of(weight)) == self._owners.get(name, 0)

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the state tensors; the same for every parameter, on every rank."""
        return self._keys

    @property
    def step(self) -> int:
        """Adam's step count, which corrects the moments' bias. Raises `RuntimeError` if parameters
        differ in it, or this rank holds none of them; the first one never does."""
        steps = {int(value) for optimizer in self._optimizers for value in _steps(optimizer)}
        if not steps:
            raise RuntimeError("this rank holds no parameter's state; ask the first one")
        if len(steps) != 1:
            raise RuntimeError(f"the optimizer's parameters are at steps {sorted(steps)}")
        return steps.pop()

    @step.setter
    def step(self, value: int) -> None:
        for optimizer in self._optimizers:
            _set_step(optimizer, value)

    def whole(self, fill: float | None = None) -> dict[str, dict[str, Tensor]]:
        """For each parameter that this rank owns: its state, flat. Live where the rank holds all of
        it, else new tensors, filled with `fill` if given."""
        return {
            name: tensors for shared in self._shared for name, tensors in shared.whole(fill).items()
        }

    @torch.no_grad()
    def gather(self) -> dict[str, dict[str, Tensor]]:
        """The state of every parameter that this rank owns, flat, whole. Collective over the
        holders. Live tensors where the rank holds all of a parameter: copy them."""
        whole = self.whole()
        for shared in self._shared:
            shared.gather(whole, self.keys)
        return whole

    @torch.no_grad()
    def scatter(self, whole: dict[str, dict[str, Tensor]]) -> None:
        """Take state as `whole()` shaped it and its caller filled it, to the ranks that hold it.
        Collective over the holders."""
        for shared in self._shared:
            shared.scatter(whole, self.keys)


class _Shared:
    """The parameters that one group of ranks holds together. Collective over it to build."""

    def __init__(
        self,
        parts: Sequence[StatePart],
        sizes: dict[str, int],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """`parts`: this rank's; `sizes`: elements of each parameter."""
        self._parts = {part.name: part for part in parts}
        self._sizes, self._group, self._device = sizes, group, device
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        ranges = {part.name: (part.start, part.end) for part in parts}
        table: list[Any] = [None] * self._size
        keys = {tuple(sorted(part.tensors)) for part in parts}
        dist.all_gather_object(table, (ranges, keys), group=group)
        self._ranges: list[dict[str, tuple[int, int]]] = [held for held, _ in table]
        self.keys: set[tuple[str, ...]] = set().union(*(keys for _, keys in table))
        """Of the group's parameters; one, or none where it has no parameters."""
        self.owners = _owners(self._ranges, sizes)
        self.owned = [name for name, owner in self.owners.items() if owner == self._rank]

    def whole(self, fill: float | None) -> dict[str, dict[str, Tensor]]:
        """As `OptimizerState.whole`."""
        found: dict[str, dict[str, Tensor]] = {}
        for name in self.owned:
            part = self._parts[name]
            if part.is_whole:
                found[name] = part.tensors
                continue
            found[name] = {
                key: torch.empty(self._sizes[name], dtype=tensor.dtype, device=tensor.device)
                for key, tensor in part.tensors.items()
            }
            if fill is not None:
                for tensor in found[name].values():
                    tensor.fill_(fill)
        return found

    def gather(self, whole: dict[str, dict[str, Tensor]], keys: Sequence[str]) -> None:
        """Fill what this rank owns and does not hold all of."""
        if not self._moves(back=False):
            return
        ranks = range(self._size)
        out = [self._between(self._rank, rank, back=False) for rank in ranks]
        into = [self._between(rank, self._rank, back=False) for rank in ranks]
        for key in keys:
            sent = [
                _joined([self._parts[name].tensors[key] for name, _, _ in ranges]) for ranges in out
            ]
            for ranges, block in zip(into, self._exchanged(sent, into), strict=True):
                at = 0
                for name, start, end in ranges:
                    whole[name][key][start:end] = block[at : at + end - start]
                    at += end - start

    def scatter(self, whole: dict[str, dict[str, Tensor]], keys: Sequence[str]) -> None:
        """Fill what this rank holds from what the owners have."""
        if not self._moves(back=True):
            return
        ranks = range(self._size)
        out = [self._between(rank, self._rank, back=True) for rank in ranks]
        into = [self._between(self._rank, rank, back=True) for rank in ranks]
        for key in keys:
            sent = [
                _joined([whole[name][key][start:end] for name, start, end in ranges])
                for ranges in out
            ]
            for ranges, block in zip(into, self._exchanged(sent, into), strict=True):
                at = 0
                for name, start, end in ranges:
                    self._parts[name].tensors[key].copy_(block[at : at + end - start])
                    at += end - start

    def _travels(self, name: str, holder: int, back: bool) -> bool:
        """Whether what `holder` has of a parameter goes to the owner, or `back` from it.

        An owner that holds all of it needs nothing; copies elsewhere still need it back.
        """
        owner = self.owners[name]
        start, end = self._ranges[owner].get(name, (0, 0))
        return end - start < self._sizes[name] or (back and holder != owner)

    def _moves(self, back: bool) -> bool:
        """Whether any element must travel; the same on every rank of the group."""
        return any(
            self._travels(name, holder, back)
            for holder, held in enumerate(self._ranges)
            for name in held
        )

    def _between(self, holder: int, owner: int, back: bool) -> list[tuple[str, int, int]]:
        """What travels between the two: ranges that `holder` has of what `owner` owns."""
        return [
            (name, start, end)
            for name, (start, end) in self._ranges[holder].items()
            if self.owners[name] == owner and self._travels(name, holder, back)
        ]

    def _exchanged(
        self, sent: list[Tensor], into: Sequence[Sequence[tuple[str, int, int]]]
    ) -> list[Tensor]:
        """`sent[r]` to rank r of the group; what each rank sent here for `into[r]`, by rank."""
        sizes = [sum(end - start for _, start, end in ranges) for ranges in into]
        block = torch.empty(sum(sizes), dtype=torch.float32, device=self._device)
        dist.all_to_all_single(
            block,
            torch.cat([part.to(self._device) for part in sent]),
            sizes,
            [part.numel() for part in sent],
            group=self._group,
        )
        return list(block.split(sizes))


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors) if tensors else torch.empty(0, dtype=torch.float32)


def _owners(ranges: list[dict[str, tuple[int, int]]], sizes: dict[str, int]) -> dict[str, int]:
    """The rank that holds most of each parameter; among equals the one that owns least so far."""
    owned = [0] * len(ranges)
    owners = {}
    for name in sorted(sizes):
        held = [end - start for start, end in (held.get(name, (0, 0)) for held in ranges)]
        most = max(held)
        owner = min((rank for rank, n in enumerate(held) if n == most), key=lambda r: (owned[r], r))
        owners[name] = owner
        owned[owner] += sizes[name]
    return owners


def _parts(optimizer: Any, names: dict[nn.Parameter, str]) -> Iterator[StatePart]:
    for param, main, start, end in _held(optimizer):
        tensors = {key: optimizer.optimizer.state[main][key].view(-1) for key in MOMENTS}
        if main.untyped_storage().data_ptr() != param.untyped_storage().data_ptr():
            tensors[MASTER] = main.detach().view(-1)
        yield StatePart(names[param], param, start, end, tensors)


def _held(optimizer: Any) -> Iterator[tuple[nn.Parameter, Tensor, int, int]]:
    """(model parameter, what the inner optimizer steps, range of the flattened parameter)."""
    if hasattr(optimizer, "model_param_group_index_map"):  # DistributedOptimizer
        for param, (group, order) in optimizer.model_param_group_index_map.items():
            held = optimizer._get_model_param_range_map(param)["param"]
            main = optimizer.optimizer.param_groups[group]["params"][order]
            yield param, main, held.start, held.end
        return
    masters = {}
    if hasattr(optimizer, "float16_groups"):  # Float16OptimizerWithFloat16Params
        for models, mains in zip(
            optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True
        ):
            masters |= dict(zip(mains, models, strict=True))
    for group in optimizer.optimizer.param_groups:
        for main in group["params"]:
            yield masters.get(main, main), main, 0, main.numel()


def _make_state(optimizer: Any) -> None:
    inner = optimizer.optimizer
    optimizer.init_state_fn(inner, optimizer.config)
    for group in inner.param_groups:
        if isinstance(inner, torch.optim.Adam):
            for param in group["params"]:
                inner.state[param].setdefault(STEP, torch.zeros((), dtype=torch.float32))
        else:
            group.setdefault(STEP, 0)


def _steps(optimizer: Any) -> Iterator[Any]:
    inner = optimizer.optimizer
    for group in inner.param_groups:
        if isinstance(inner, torch.optim.Adam):
            yield from (inner.state[param][STEP] for param in group["params"])
        elif group["params"]:
            yield group[STEP]


def _set_step(optimizer: Any, value: int) -> None:
    inner = optimizer.optimizer
    for group in inner.param_groups:
        if isinstance(inner, torch.optim.Adam):
            for param in group["params"]:
                inner.state[param][STEP].fill_(value)
        else:
            group[STEP] = value
