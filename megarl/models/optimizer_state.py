"""The optimizer state of a trainer as whole parameters, whichever optimizer and layout hold it.

With the distributed optimizer a data-parallel rank holds flat ranges of parameters that need not
end where a parameter ends. `OptimizerState.gather` brings every parameter's state whole to one
*owner* among the data-parallel ranks, the one that holds most of it, and `scatter` takes it back:
each element moves at most once, and nobody ever holds more than its share of whole parameters.

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


class OptimizerState:
    """The state of one trainer's optimizer. Collective over the data-parallel group to build.

    State that no step has made yet is made, as zeros at step 0, which is what the first step would
    start from.
    """

    def __init__(self, trainer: Any) -> None:
        self._device = trainer.world.device
        self._optimizers = list(trainer.optimizer.chained_optimizers)
        for optimizer in self._optimizers:
            _make_state(optimizer)
        names = {param: name for name, param in trainer.model.named_parameters()}
        self.parts: list[StatePart] = sorted(
            (part for optimizer in self._optimizers for part in _parts(optimizer, names)),
            key=lambda part: part.name,
        )
        self._group = parallel_state.get_data_parallel_group()
        self._rank, self._size = dist.get_rank(self._group), dist.get_world_size(self._group)
        ranges = {part.name: (part.start, part.end) for part in self.parts}
        keys = {tuple(sorted(part.tensors)) for part in self.parts}
        table: list[Any] = [None] * self._size
        dist.all_gather_object(table, (ranges, keys), group=self._group)
        self._ranges: list[dict[str, tuple[int, int]]] = [held for held, _ in table]
        # A rank that holds nothing, as the last ones may of a tiny model, takes part all the same.
        (self._keys,) = set().union(*(keys for _, keys in table)) or {()}
        self._sizes = {name: param.numel() for param, name in names.items()}
        self._owners = _owners(self._ranges, self._sizes)

    @property
    def owners(self) -> dict[str, int]:
        """Parameter name → data-parallel rank to which its state comes whole."""
        return dict(self._owners)

    def owns(self, name: str) -> bool:
        """Whether the state of parameter `name` comes whole to this rank."""
        return self._owners[name] == self._rank

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
        parts = {part.name: part for part in self.parts}
        found: dict[str, dict[str, Tensor]] = {}
        for name, owner in self._owners.items():
            if owner != self._rank:
                continue
            part = parts[name]
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

    @torch.no_grad()
    def gather(self) -> dict[str, dict[str, Tensor]]:
        """The state of every parameter that this rank owns, flat, whole. Collective over the
        data-parallel group. Live tensors where the rank holds all of a parameter: copy them."""
        whole = self.whole()
        if self._moves(back=False):
            ranks = range(self._size)
            out = [self._between(self._rank, rank, back=False) for rank in ranks]
            into = [self._between(rank, self._rank, back=False) for rank in ranks]
            for key in self.keys:
                blocks = self._exchanged([self._cut(ranges, key) for ranges in out], into)
                for ranges, block in zip(into, blocks, strict=True):
                    at = 0
                    for name, start, end in ranges:
                        whole[name][key][start:end] = block[at : at + end - start]
                        at += end - start
        return whole

    @torch.no_grad()
    def scatter(self, whole: dict[str, dict[str, Tensor]]) -> None:
        """Take state as `whole()` shaped it and its caller filled it, to the ranks that hold it.
        Collective over the data-parallel group."""
        if not self._moves(back=True):
            return
        parts = {part.name: part for part in self.parts}
        ranks = range(self._size)
        out = [self._between(rank, self._rank, back=True) for rank in ranks]
        into = [self._between(self._rank, rank, back=True) for rank in ranks]
        for key in self.keys:
            sent = [
                _joined([whole[name][key][start:end] for name, start, end in ranges])
                for ranges in out
            ]
            for ranges, block in zip(into, self._exchanged(sent, into), strict=True):
                at = 0
                for name, start, end in ranges:
                    parts[name].tensors[key].copy_(block[at : at + end - start])
                    at += end - start

    def _travels(self, name: str, holder: int, back: bool) -> bool:
        """Whether what `holder` has of a parameter goes to the owner, or `back` from it.

        An owner that holds all of it needs nothing; copies elsewhere still need it back.
        """
        owner = self._owners[name]
        start, end = self._ranges[owner].get(name, (0, 0))
        return end - start < self._sizes[name] or (back and holder != owner)

    def _moves(self, back: bool) -> bool:
        """Whether any element must travel; the same on every rank."""
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
            if self._owners[name] == owner and self._travels(name, holder, back)
        ]

    def _cut(self, wanted: Sequence[tuple[str, int, int]], key: str) -> Tensor:
        parts = {part.name: part for part in self.parts}
        return _joined([parts[name].tensors[key] for name, _, _ in wanted])

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
