"""What the ranks of the pool do in the tests of saving and loading: train, save, load, look.

A look assembles everything that must come back, whole and under HF's names, from what each rank
holds, with code of its own (`tests/models/support.py`); it knows nothing of digests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.contracts.mesh import Mesh
from megarl.reshard.families.spec import ModelSpec
from tests.models.runs import merged
from tests.models.support import (
    gather_logical,
    local_packs,
    make_actor,
    make_samples,
    make_world,
    micro_batch,
    policy_gradient,
)

Logical = dict[str, Tensor]
"""HF name → matrix, float64: holds any float32 exactly."""


@dataclass(frozen=True)
class Layout:
    """How many ranks, in which mesh, with which options of the recipe's `actor`."""

    world: int
    tp: int = 1
    pp: int = 1
    sharded: bool = True
    """With the distributed optimizer."""
    dtype: str = "float32"
    section: dict[str, Any] = field(default_factory=dict, hash=False)
    more: dict[str, Any] = field(default_factory=dict, hash=False)
    """Further numbers of its `Mesh`."""

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.world, tp=self.tp, pp=self.pp, **self.more)

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "pp": self.pp, "dp": self.mesh.dp} | self.more
        parts = [f"{name}{size}" for name, size in sizes.items()]
        return "·".join(parts) + (" sharded" if self.sharded else "")

    def actor(self, source: Path, spec: ModelSpec | None = None) -> Any:
        """Collective. Under tensor parallelism the model is sequence parallel, as experts need it,
        where the mesh says more than `tp` and `pp`. `spec`: the folder's own if not given."""
        world = make_world(self.tp, self.pp, **self.more)
        options = {"distributed_optimizer": self.sharded}
        options |= {"sequence_parallel": bool(self.more) and self.tp > 1} | self.section
        return make_actor(source, world, dtype=self.dtype, spec=spec, **options)


def flat_ranges(actor: Any, key: str) -> list[tuple[str, int, int, Tensor]]:
    """(parameter, start, end, values) that this rank's optimizer holds; `key` "grad": of the
    summed gradients, which are right in the same ranges only."""
    from megarl.models.optimizer_state import OptimizerState

    return [
        (
            part.name,
            part.start,
            part.end,
            (part.param.main_grad.view(-1)[part.start : part.end] if key == "grad" else None)
            if key not in part.tensors
            else part.tensors[key].clone(),
        )
        for part in OptimizerState(actor.trainer).parts
    ]


def logical(actor: Any, key: str) -> Logical:
    """Whole tensors of one key of the state, or "grad"; every copy must be equal. Collective."""
    world = actor.world
    named = actor.model.named_parameters()
    params = {name: param for name, param in named if param.requires_grad}
    own = {name: torch.full((param.numel(),), float("nan")) for name, param in params.items()}
    for rank, ranges in enumerate(world.gather(flat_ranges(actor, key))):
        for name, start, end, values in ranges:
            if place_of(world.mesh, rank, name) != place_of(world.mesh, world.rank, name):
                continue
            held = own[name][start:end]
            known = ~held.isnan()
            assert torch.equal(held[known], values[known]), (name, "data-parallel copies differ")
            held.copy_(values)
    for name, param in params.items():
        assert not own[name].isnan().any(), (name, "nobody holds a part of it")
        own[name] = own[name].view(param.shape)
    return trained(actor, own)


def trained(actor: Any, tensors: dict[str, Tensor]) -> Logical:
    """`gather_logical` of what is shaped like the trained parameters, and nothing of the rest: a
    router's bias, or a frozen router, which no step changes. Collective."""
    others = {n: weight for n, weight in actor.named_parameters().items() if n not in tensors}
    whole = gather_logical(actor, tensors | others)
    frozen = ["e_score_correction_bias"]
    if any(name.endswith("router.weight") for name in others):
        frozen.append("mlp.gate.weight")
    return {n: tensor for n, tensor in whole.items() if not n.endswith(tuple(frozen))}


def place_of(mesh: Mesh, rank: int, name: str) -> tuple[int, ...]:
    """What of the model the parameter `name` of `rank` is: at one place all have copies."""
    if "local_experts" in name:
        return (mesh.etp_index(rank), mesh.ep_index(rank), mesh.pp_index(rank))
    return (mesh.tp_index(rank), mesh.pp_index(rank))


def plain_state(actor: Any, key: str) -> Logical:
    """As `logical`, straight from torch's optimizer; for fp32 and without the distributed one."""
    names = {param: name for name, param in actor.model.named_parameters()}
    found = {}
    for optimizer in actor.trainer.optimizer.chained_optimizers:
        inner = optimizer.optimizer
        for group in inner.param_groups:
            found |= {names[param]: inner.state[param][key] for param in group["params"]}
    return trained(actor, found)


def same_bits(mine: Logical, theirs: Logical) -> bool:
    """Of the float32 values; −0 is not 0."""
    assert mine.keys() == theirs.keys()
    return all(
        torch.equal(mine[name].float().view(torch.int32), theirs[name].float().view(torch.int32))
        for name in mine
    )


def packs_of(actor: Any, samples: Any) -> list[Any]:
    (packs,) = actor.padded([local_packs(samples, actor.world.mesh, actor.world.rank, 60)])
    return packs


def loss_of(actor: Any) -> Callable[..., Any]:
    return squared_error if actor.has_values else policy_gradient


def squared_error(values_A: Tensor, batch: Any) -> tuple[Tensor, dict]:
    """Σ w (v − advantage)², of a model with a value head."""
    loss = (batch.weights_A * (values_A - batch.advantages_A) ** 2).sum()
    return loss, {"squares": loss}


def train(actor: Any, steps: int, look: Callable[[], None] | None = None) -> list[Any]:
    """So many steps, each on samples of its own number; `look` runs before each is taken."""
    take = actor.trainer.step

    def step(lr: float, norm: float) -> None:
        if look is not None:
            look()
        take(lr, norm)

    actor.trainer.step = step
    results = []
    for _ in range(steps):
        samples = make_samples(100 + actor.trainer.steps, 12)
        batches = [micro_batch(pack, samples) for pack in packs_of(actor, samples)]
        results.append(actor.update(batches, loss_of(actor)))
        assert results[-1].stepped, results[-1]
    actor.trainer.step = take
    return results


def save(actor: Any, folder: Path) -> int:
    """Collective; returns the bytes that this rank wrote."""
    from megarl.checkpoint import torch_dist
    from megarl.models.optimizer_state import OptimizerState

    state = OptimizerState(actor.trainer)
    if actor.world.is_main:
        folder.mkdir(parents=True)
    actor.world.barrier("folder")
    shards = torch_dist.model_tensors(actor.model, state.owners)
    shards |= torch_dist.state_tensors(actor.model, state.gather())
    shards["random"] = torch_dist.rank_object("random", {"rank": actor.world.rank})
    pending = torch_dist.begin_save(shards, folder, torch_dist.Staging())
    written = pending.write()
    pending.finish()
    return written


@torch.no_grad()
def forget(actor: Any) -> None:
    """Every weight becomes NaN; the padding of the vocabulary stays what it is."""
    from megarl.reshard.layout import megatron_placement

    params = actor.named_parameters()
    for piece in megatron_placement(actor.spec, actor.world.mesh).pieces[actor.world.rank]:
        matrix = params[piece.param].view(len(params[piece.param]), -1)
        rows = matrix[piece.param_row : piece.param_row + piece.rows]
        rows[:, piece.param_col : piece.param_col + piece.cols] = float("nan")


def load(actor: Any, folder: Path, steps: int) -> None:
    """Collective; `steps` is what the position beside the tensors tells."""
    from megarl.checkpoint import torch_dist
    from megarl.models.optimizer_state import OptimizerState

    state = OptimizerState(actor.trainer)
    torch_dist.read_whole(state, actor.model, folder, {})
    state.step = steps
    actor.trainer.steps = steps


def look(actor: Any) -> dict[str, Any]:
    """All that must come back. Collective; the same on every rank."""
    from megarl.checkpoint.state_digest import state_digests
    from megarl.models.optimizer_state import OptimizerState

    samples = make_samples(99, 12)
    packs = packs_of(actor, samples)
    if actor.has_values:
        scores = [values.values_A for values in actor.values(packs)]
    else:
        scores = [score.log_probs_A for score in actor.log_probs(packs)]
    state = OptimizerState(actor.trainer)
    cut = [part.name for part in state.parts if not part.is_whole]
    told = {
        "weights": gather_logical(actor, actor.named_parameters()),
        "state": {key: logical(actor, key) for key in state.keys},
        "digests": state_digests(actor.spec, actor.world.mesh, state, actor.world),
        "log_probs": merged(actor, packs, scores, samples),
        "cut": {name for names in actor.world.gather(cut) for name in names},
        "adam_step": state.step,
        "steps": actor.trainer.steps,
    }
    if not actor.trainer.section.distributed_optimizer and actor.model.config.bf16 is False:
        told["plain"] = {key: plain_state(actor, key) for key in state.keys}
    return told


def _go_on(actor: Any, told: dict[str, Any]) -> dict[str, Any]:
    """Two more steps: the first one's gradient, lr and norm, and the weights after each."""
    gradients: list[Logical] = []
    (first,) = train(actor, 1, lambda: gradients.append(logical(actor, "grad")))
    told |= {
        "gradient": gradients[0],
        "lr": first.lr,
        "norm": first.grad_norm,
        "after 1": gather_logical(actor, actor.named_parameters()),
    }
    train(actor, 1)
    return told | {"after 2": gather_logical(actor, actor.named_parameters())}


def train_and_save(source: Path, folder: Path, layout: Layout, steps: int = 3) -> dict | None:
    """Everything of the saver at its position and two steps on; on rank 0."""
    from megarl.models.build import destroy_mesh

    actor = layout.actor(source)
    train(actor, steps)
    told = look(actor)
    save(actor, folder)
    told = _go_on(actor, told)
    destroy_mesh()
    return told if actor.world.is_main else None


def load_and_go_on(
    source: Path, folder: Path, layouts: list[Layout], steps: int = 3
) -> list[dict] | None:
    """The same, of each of `layouts`, which have one number of ranks; on rank 0."""
    from megarl.models.build import destroy_mesh

    found = []
    for layout in layouts:
        actor = layout.actor(source)
        forget(actor)
        load(actor, folder, steps)
        found.append(_go_on(actor, look(actor)))
        destroy_mesh()
    return found if actor.world.is_main else None
