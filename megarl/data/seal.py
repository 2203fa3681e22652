"""Sealing: one hash over every rank's facts of an iteration, before anything is learnt from them.

UPDATING_FROM needs this hash; ranks that own the same data-parallel part must hold the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from megarl.contracts.hashes import bytes_hash, contract_hash
from megarl.contracts.records import Experience, Identities, Scores
from megarl.contracts.samples import SamplingContract
from megarl.data.prepare import Prepared
from megarl.world import Disagreement, World

_SAMPLE_COLUMNS = (
    "draw_index",
    "candidate",
    "prompt_ids",
    "prompt_offsets",
    "response_ids",
    "response_offsets",
    "action_mask",
    "rollout_log_probs",
    "end_reason",
    "seed",
)


def facts_hash(scores: Scores, prepared: Prepared) -> str:
    """Hash of one rank's facts: every sample column but the clock's, rewards and log-probs."""
    samples = prepared.samples
    chunks = [getattr(samples, name).tobytes() for name in _SAMPLE_COLUMNS]
    chunks += [scores.total.tobytes(), ",".join(scores.status).encode()]
    chunks += [scores.components[name].tobytes() for name in sorted(scores.components)]
    for name, column in (("old", prepared.old_log_probs), ("ref", prepared.ref_log_probs)):
        chunks.append(name.encode() + (b"-" if column is None else column.tobytes()))
    return bytes_hash(chunks)


def seal(
    world: World,
    identities: Identities,
    sampling: SamplingContract,
    scores: Scores,
    prepared: Prepared,
    producers: Mapping[str, str],
) -> Experience:
    """Collective. Returns this rank's experience with the hash over all parts.

    `producers` maps a role to the version that made its column. Raises `Disagreement` naming the
    ranks when owners of one part hold different facts.
    """
    mine = facts_hash(scores, prepared)
    parts = world.gather(mine)
    by_owner: dict[int, str] = {}
    for rank, part in enumerate(parts):
        expected = by_owner.setdefault(world.mesh.dp_index(rank), part)
        if part != expected:
            raise Disagreement(
                f"rank {rank} holds other facts than the other owners of its part: {part} against "
                f"{expected}; they must score the same tokens with the same weights"
            )
    manifest = {
        "identities": asdict(identities),
        "sampling": asdict(sampling),
        "scorer_version": scores.scorer_version,
        "producers": dict(producers),
        "parts": [by_owner[index] for index in sorted(by_owner)],
    }
    return Experience(
        samples=prepared.samples,
        scores=scores,
        old_log_probs=prepared.old_log_probs,
        ref_log_probs=prepared.ref_log_probs,
        values=None,
        producers=dict(producers),
        hash=contract_hash(manifest),
    )
