"""One hand-over on all ranks: digests on both sides, bytes, and every token's log-prob on both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from megarl.contracts.samples import Sample, SamplingContract
from megarl.contracts.version import PolicyVersion
from megarl.data.packing import build_pack, plan_packs
from megarl.models.roles import Actor
from megarl.reshard.digest import DigestError, DriftError
from megarl.reshard.families.spec import ModelSpec
from megarl.reshard.layout import megatron_placement, sglang_placement
from megarl.reshard.transfer import Resharder
from megarl.rollout.generator import Generator
from megarl.world import World
from tools.layouts.oracle import RESPONSE, Ids, Oracle, as_samples, requests

BUCKET_BYTES = 1 << 16
"""Small: a transfer takes several buckets."""
BUDGET = 80
"""Tokens of a pack: a data-parallel part has several, of several sequences."""


def check(
    world: World,
    spec: ModelSpec,
    actor: Actor,
    generator: Generator,
    oracle: Oracle | None,
    dtype: str,
    bound: float,
    fault: str | None = None,
) -> dict[str, Any]:
    """The row of the table, the same on every rank. Collective.

    `oracle`: rank 0's. `bound`: on every |log-prob − the HF model's|. `fault`: one of `job.FAULTS`.
    """
    if fault == "crash" and world.rank == world.size - 1:
        raise RuntimeError("ends as asked")
    if fault == "trainer":
        _change(actor.named_parameters(), "final_layernorm.weight")
    moved = hand_over(world, spec, actor, generator, dtype, fault)
    if "why" in moved:
        return {"ok": False} | moved
    trainer_gap, generator_gap, tokens = _gaps(world, actor, generator, oracle, moved["version"])
    faults = []
    for side, gap in (("trainer", trainer_gap), ("generator", generator_gap)):
        if not gap <= bound:
            faults.append(f"{side}'s log-probs differ from the HF model's by {gap:.1e}")
    if moved["bytes_sent"] != moved["bytes_bound"]:
        faults.append(f"{moved['bytes_sent']} bytes sent, {moved['bytes_bound']} would do")
    numbers = {key: value for key, value in moved.items() if key != "version"}
    return numbers | {
        "ok": not faults,
        "trainer_gap": trainer_gap,
        "generator_gap": generator_gap,
        "tokens": tokens,
        **({"why": "; ".join(faults)} if faults else {}),
    }


def hand_over(
    world: World,
    spec: ModelSpec,
    actor: Actor,
    generator: Generator,
    dtype: str,
    fault: str | None,
) -> dict[str, Any]:
    """Into parameters that hold nothing but not-a-number, then read back and compared; the new
    version is active. With the key `why`, it is not: digests differ."""
    generator.deactivate()
    live = generator.named_parameters()
    with torch.no_grad():
        for param in live.values():
            param.fill_(torch.nan)
    resharder = Resharder(
        megatron_placement(spec, world.mesh),
        sglang_placement(spec, world.mesh),
        actor.named_parameters(),
        live,
        getattr(torch, dtype),
        BUCKET_BYTES,
        world,
    )
    row: dict[str, Any] = {"digests_equal": False}
    try:
        manifest = resharder.manifest()
        stats = resharder.transfer()
        if fault == "generator" and world.rank == world.size - 1:
            _change(live, "model.norm.weight")
        held = resharder.verify(manifest)
    except (DigestError, DriftError) as error:  # raised on every rank alike
        return row | {"why": str(error)}
    with torch.no_grad():
        for name, (first, last) in generator.padding().items():
            live[name][first:last] = 0  # as in a run, where nobody writes them
    version = PolicyVersion("layouts", 0, 0, held.hash, "none", spec.config_hash)
    generator.activate(version)
    return {
        "digests_equal": held == manifest,
        "tensors": len(held.tensors),
        "bytes_sent": _sent(world, resharder),
        "bytes_bound": stats.bytes_bound,
        "version": version,
    }


def _sent(world: World, resharder: Resharder) -> int:
    """Bytes that the buffers of all ranks take to others, counted where they are packed."""
    mine = sum(
        side.elements * exchange.send_buffers[0].itemsize
        for exchange in resharder.exchanges
        for side in exchange.sends
    )
    return sum(world.gather(mine))


def _change(params: Mapping[str, torch.Tensor], ending: str) -> None:
    with torch.no_grad():
        for name, param in params.items():
            if name.endswith(ending):
                param[0] += 1


def _gaps(
    world: World,
    actor: Actor,
    generator: Generator,
    oracle: Oracle | None,
    version: PolicyVersion,
) -> tuple[float, float, int]:
    """(the trainer's largest |log-prob − HF|, the generator's, tokens that each was asked for).

    Every replica reads and answers all prompts; the trainer scores what replica 0 read and said.
    Not-a-number anywhere is the largest.
    """
    asked = requests(actor.spec.vocab)
    prompts = generator.prompt_log_probs([one.prompt_ids for one in asked], version)
    samples = generator.generate(asked, _sampling(), version)
    mine = [_ids(sample) for sample in samples]
    everyone = world.gather(mine)
    exact = world.gather(
        None if oracle is None else {ids: oracle.of(ids) for each in everyone for ids in each}
    )[0]
    told = [
        np.concatenate([prompt, sample.rollout_log_probs])
        for prompt, sample in zip(prompts, samples, strict=True)
    ]
    gap = _largest([a - exact[ids] for a, ids in zip(told, mine, strict=True)])
    sequences = everyone[0]
    trainer = _trainer_gap(world, actor, sequences, [exact[ids] for ids in sequences])
    tokens = sum(len(ids) - 1 for ids in sequences)
    return world.maximum(trainer), world.maximum(gap), tokens


def _ids(sample: Sample) -> Ids:
    return (*sample.prompt_ids.tolist(), *sample.response_ids.tolist())


def _largest(differences: list[np.ndarray]) -> float:
    return float(np.abs(np.concatenate([np.zeros(1), *differences])).max())


def _trainer_gap(
    world: World, actor: Actor, sequences: list[Ids], exact: list[np.ndarray]
) -> float:
    """This rank's, over the packs of its data-parallel part; all parts together hold all tokens."""
    samples = as_samples(sequences)
    lengths = samples.prompt_lengths + samples.response_lengths
    plan = plan_packs(lengths, world.mesh.dp, BUDGET)[world.dp_index]
    (packs,) = actor.padded([[build_pack(samples, rows) for rows in plan]])
    scores = actor.log_probs(packs)
    flat = np.concatenate(exact)
    scored = sum(len(pack.response_A) for pack in packs)
    total = world.totals({"tokens": float(scored)}, counted=world.leads_owners)["tokens"]
    if total != len(flat):
        raise AssertionError(f"{total:.0f} tokens scored, {len(flat)} asked for")
    return _largest(
        [
            score.log_probs_A.numpy() - flat[pack.response_A.numpy()]
            for score, pack in zip(scores, packs, strict=True)
        ]
    )


def _sampling() -> SamplingContract:
    return SamplingContract(
        n=1,
        temperature=1.0,
        max_response_tokens=RESPONSE,
        stop_token_ids=(),
        seed=7,
        dtype="",
        attention_backend="",
    )
