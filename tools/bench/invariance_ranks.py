"""What every rank of `bench.py invariance` does: losses and whole gradients of one minibatch.

    torchrun … -m tools.bench.invariance_ranks JOB.json

One rank takes the first cut, writes its log-probs, shifted by noise, as the facts of the minibatch,
and its losses and gradients for the ranks of later starts to compare theirs with. Rank 0 writes
the differences to the job's `result`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.importance import importance_weights
from megarl.algorithms.objectives import actor_loss
from megarl.algorithms.reduction import Totals, token_weights
from megarl.algorithms.values import critic_loss
from megarl.contracts.mesh import Mesh
from megarl.contracts.samples import EndReason, Sample, Samples
from megarl.data.packing import MicroBatch, Pack, ValueBatch, build_pack, pad_pack, plan_packs
from megarl.models.build import destroy_mesh
from megarl.models.critic_spec import critic_spec
from megarl.models.roles import Actor, Critic, Learner
from megarl.platforms.megatron_patches import install
from megarl.reshard.families import read_spec
from megarl.reshard.layout import megatron_placement
from megarl.world import World, process_group
from tools.bench.harness import BenchError, say
from tools.bench.invariance_cuts import (
    Layout,
    LossCase,
    Packing,
    layouts_of,
    loss_cases,
    packings_of,
)

ROWS = 12
"""Samples; every number of data-parallel parts here divides them."""
LONGEST = 14
NOISE = 0.3
"""Standard deviation of what log-probs are shifted by: on both sides of every clip."""
HEAD = 0.2
CPU = torch.device("cpu")


def section(**changes: Any) -> SimpleNamespace:
    values: dict[str, Any] = {
        "lr": 1e-3,
        "lr_schedule": "constant",
        "lr_warmup_steps": 0,
        "min_lr": 0.0,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "clip_grad": 0.0,
        "distributed_optimizer": False,
        "logprob_chunk_tokens": changes.pop("chunk", 1024),
        "recompute": "none",
        "sequence_parallel": False,
        "max_skipped_steps": 3,
        "router": "trained",
        "router_aux_loss": 0.0,
        "replay_routing": False,
    }
    return SimpleNamespace(**values | changes)


def make_samples(vocab: int) -> Samples:
    """Lengths of 1 to `LONGEST`, a fifth of the tokens no action."""
    draw = np.random.default_rng(4)
    rows = []
    for row in range(ROWS):
        length = int(draw.integers(1, LONGEST + 1))
        mask = draw.random(length) > 0.2
        rows.append(
            Sample(
                draw_index=row,
                candidate=0,
                prompt_ids=draw.integers(0, vocab, draw.integers(2, 9)),
                response_ids=draw.integers(0, vocab, length),
                action_mask=mask,
                rollout_log_probs=np.zeros(length, np.float32),
                end=0,
                end_reason=EndReason.EOS,
                seed=row,
                started=0.0,
                finished=1.0,
            )
        )
    return Samples.from_rows(rows, "bench")


def rows_of_packs(samples: Samples, packing: Packing, dp: int) -> list[list[np.ndarray]]:
    """`[part][pack]`."""
    lengths = samples.prompt_lengths + samples.response_lengths
    if packing.budget is not None:
        return plan_packs(lengths, dp, packing.budget)
    number = ROWS // dp if packing.packs < 0 else packing.packs
    order = np.random.default_rng(dp).permutation(ROWS)
    cut = np.array_split(order, number * dp)
    return [cut[part::dp] for part in range(dp)]


def packs_of(samples: Samples, packing: Packing, role: Learner) -> list[Pack]:
    world = role.world
    rows = rows_of_packs(samples, packing, world.mesh.dp)[world.mesh.dp_index(world.rank)]
    packs = [build_pack(samples, pack) for pack in rows]
    if packing.padding is not None:
        longest = max(len(pack.token_ids_T) for pack in packs) + packing.padding
        packs = [pad_pack(pack, longest) for pack in packs]
    (padded,) = role.padded([packs])
    return padded


def batch_of(pack: Pack, case: LossCase, facts: Mapping[str, Tensor], totals: Totals) -> Any:
    """The pack's `MicroBatch` or `ValueBatch`."""
    own = {name: column[pack.response_A] for name, column in facts.items()}
    weights = token_weights(
        case.settings.reduction, pack.action_mask_A, pack.sequence_A, totals, LONGEST
    )
    if case.critic:
        return ValueBatch(pack, own["values"], own["returns"], weights)
    importance = importance_weights(
        own["old"], own["rollout"], weights != 0, pack.sequence_A, case.settings.importance
    )
    return MicroBatch(
        pack=pack,
        old_log_probs_A=own["old"],
        ref_log_probs_A=own["ref"],
        rollout_log_probs_A=own["rollout"],
        advantages_A=own["advantages"],
        weights_A=weights,
        importance_A=importance,
    )


def loss_of(case: LossCase, outputs: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    if case.critic:
        return critic_loss(outputs, batch, case.settings)
    return actor_loss(outputs, batch, case.settings, beta=case.beta)


class Taken:
    """The loss and the whole gradient of one case under one cut; nobody steps.

    `size`: Σ |weight · term of a token|, where the cut is whole; a loss is linear in the weights,
    so a token's part is its weight times the derivative.
    """

    def __init__(self, role: Learner, case: LossCase, packs: list[Pack], facts: Any) -> None:
        self.role, self.size = role, 0.0
        self.gradient = torch.zeros(0)
        totals: Totals = facts["totals"]
        batches = [batch_of(pack, case, facts["columns"], totals) for pack in packs]

        def loss(outputs: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
            value, sums = loss_of(case, outputs, batch)
            with torch.enable_grad():
                weights = batch.weights_A.clone().requires_grad_()
                part, _ = loss_of(case, _detached(outputs), replace(batch, weights_A=weights))
                (terms,) = torch.autograd.grad(part, weights)
            self.size += float((terms * batch.weights_A).abs().double().sum())
            return value, sums

        result = role.update(batches, loss, veto=self._look)
        if not result.stopped:
            raise BenchError(f"{case.name}: no gradient to look at: {result.skipped_reason}")
        speaks = role.world.leads_owners
        self.loss = sum(role.world.gather(result.loss if speaks else 0.0))
        self.size = sum(role.world.gather(self.size if speaks else 0.0))

    def _look(self, sums: Mapping[str, float]) -> str:
        self.gradient = whole_gradient(self.role)
        return "only the gradient is asked for"


def _detached(outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        return outputs.detach()
    return SimpleNamespace(
        log_probs_A=outputs.log_probs_A.detach(), entropy_A=outputs.entropy_A.detach()
    )


def whole_gradient(role: Learner) -> Tensor:
    """float64, all tensors in their Hugging Face shapes, one after the other. Collective.

    Raises `BenchError` where two ranks that hold the same elements have different gradients.
    """
    own = {
        name: (tensor.main_grad if tensor.requires_grad else torch.zeros_like(tensor)).detach()
        for name, tensor in role.named_parameters().items()
    }
    placement = megatron_placement(role.spec, role.world.mesh)
    everyone = role.world.gather({name: tensor.clone() for name, tensor in own.items()})
    whole = {
        name: torch.full((tensor.rows, tensor.cols), torch.nan, dtype=torch.float64)
        for name, tensor in sorted(placement.tensors.items())
    }
    for rank, parts in enumerate(everyone):
        for piece in placement.pieces[rank]:
            part = parts[piece.param].double()
            matrix = part[:, None] if part.dim() == 1 else part
            block = matrix[piece.param_row :, piece.param_col :][: piece.rows, : piece.cols]
            target = whole[piece.tensor][piece.row :, piece.col :][: piece.rows, : piece.cols]
            held = ~target.isnan()
            if not torch.equal(target[held], block[held]):
                raise BenchError(f"rank {rank} has another gradient of {piece.tensor}")
            target.copy_(block)
    flat = torch.cat([tensor.flatten() for tensor in whole.values()])
    if flat.isnan().any():
        raise BenchError("an element of the gradient is on no rank, or not a number")
    return flat


def make_role(folder: Path, layout: Layout, *, critic: bool) -> Learner:
    """The critic's head is no zero, so that its body has a gradient."""
    mesh = Mesh(layout.world, **{"tp": 1} | layout.mesh)
    world = World(mesh, CPU, 600)
    spec = read_spec(folder)
    changes = dict(layout.section)
    if spec.moe is not None and mesh.tp > 1:
        changes["sequence_parallel"] = True
    common = SimpleNamespace(dtype="float32"), section(**changes), 0.8, 10
    if not critic:
        return Actor(spec, folder, world, *common)
    own, fresh = critic_spec(folder, spec)
    role = Critic(own, folder, world, *common, fresh_head=fresh)
    for name, tensor in role.named_parameters().items():
        if "value_head" in name:
            draw = torch.Generator().manual_seed(8)
            tensor.data.copy_(torch.randn(tensor.shape, generator=draw) * HEAD)
    return role


def make_facts(actor: Learner, samples: Samples) -> dict[str, Any]:
    """Columns [R] of the minibatch, and its totals; from one rank's log-probs."""
    pack = build_pack(samples, np.arange(ROWS))
    (scores,) = actor.log_probs([pack])
    draw = torch.Generator().manual_seed(6)

    def noise(scale: float) -> Tensor:
        return torch.randn(len(pack.target_A), generator=draw) * scale

    old = scores.log_probs_A + noise(NOISE)
    columns = {
        "old": old,
        "ref": scores.log_probs_A + noise(NOISE),
        "rollout": old + noise(NOISE),
        "advantages": noise(1.0),
        "values": noise(0.5),
        "returns": noise(1.0),
    }
    mask = pack.action_mask_A
    totals = Totals(int(mask.sum()), len(torch.unique(pack.sequence_A[mask])))
    return {"columns": columns, "totals": totals}


class Model:
    """One model of the job on this world: its cuts, and what they are compared with."""

    def __init__(self, job: Mapping[str, Any], name: str, world: int, note: Any) -> None:
        self.folder = Path(job["folder"]) / name / "float32"
        self.kept = Path(job["folder"]) / name / "kept.pt"
        self.name, self.note, self.quick = name, note, job["quick"]
        spec = read_spec(self.folder)
        self.samples = make_samples(spec.vocab)
        self.layouts = layouts_of(world, experts=spec.moe is not None, quick=self.quick)
        self.kept_facts: dict[str, Any] = {}
        if self.kept.exists():
            self.kept_facts = torch.load(self.kept, weights_only=False)
        self.is_first = not self.kept_facts

    def differences(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for critic in (False, True):
            cases = [case for case in loss_cases(self.quick) if case.critic is critic]
            for layout in self.layouts:
                self.note(f"{self.name}: {'critic' if critic else 'actor'}, {layout.name}")
                role = make_role(self.folder, layout, critic=critic)
                if not self.kept_facts:
                    self.kept_facts = {"facts": make_facts(role, self.samples), "cases": {}}
                for packing in packings_of(layout, self.quick):
                    rows += self._cut(role, layout, packing, cases)
                destroy_mesh()
        if self.is_first:
            torch.save(self.kept_facts, self.kept)
        return rows

    def _cut(
        self, role: Learner, layout: Layout, packing: Packing, cases: list[LossCase]
    ) -> list[dict[str, Any]]:
        packs = packs_of(self.samples, packing, role)
        rows = []
        for case in cases:
            taken = Taken(role, case, packs, self.kept_facts["facts"])
            kept = self.kept_facts["cases"]
            if case.name not in kept:
                kept[case.name] = taken.loss, taken.size, taken.gradient
                continue
            loss, size, gradient = kept[case.name]
            rows.append(
                {
                    "cut": f"{self.name}: {layout.name}, {packing.name}",
                    "loss": case.name,
                    "rel_loss": abs(taken.loss - loss) / size,
                    "rel_grad": float((taken.gradient - gradient).norm() / gradient.norm()),
                }
            )
        return rows


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    install()
    with process_group("gloo", 600):
        world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        note = say if rank == 0 else lambda text: None
        rows = []
        for name in job["models"]:
            rows += Model(job, name, world, note).differences()
        if rank == 0:
            Path(job["result"]).write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
