"""Sealing: one hash over every rank's facts of an iteration, before anything is learnt from them.

UPDATING_FROM needs this hash; ranks that own the same data-parallel part must hold the same bytes.
"""

from __future__ import annotations

from megarl.contracts.hashes import bytes_hash
from megarl.contracts.records import Experience, Scores
from megarl.data.prepare import Prepared
from megarl.experience.columns import CLOCK_COLUMNS
from megarl.experience.drawn import DrawnFacts
from megarl.experience.parts import EXPERTS_COLUMNS, SAMPLE_COLUMNS
from megarl.experience.store import ExperienceStore, SealHeader
from megarl.world import Disagreement, World

_FACTS = tuple(name for name in SAMPLE_COLUMNS if name not in CLOCK_COLUMNS)


def facts_hash(scores: Scores, prepared: Prepared) -> str:
    """Hash of one rank's facts: every sample column but the clock's, rewards with those of steps,
    log-probs and the critic's values."""
    samples = prepared.samples
    chunks = [getattr(samples, name).tobytes() for name in (*_FACTS, *EXPERTS_COLUMNS)]
    chunks += [scores.total.tobytes(), scores.status_code.tobytes()]
    chunks += [scores.components[name].tobytes() for name in sorted(scores.components)]
    steps = scores.steps
    chunks += [steps.offsets.tobytes(), steps.token.tobytes(), steps.value.tobytes()]
    for name, column in (
        ("old", prepared.old_log_probs),
        ("ref", prepared.ref_log_probs),
        ("values", prepared.values),
        ("last_values", prepared.last_values),
    ):
        chunks.append(name.encode() + (b"-" if column is None else column.tobytes()))
    return bytes_hash(chunks)


def seal(
    world: World,
    store: ExperienceStore,
    header: SealHeader,
    scores: Scores,
    prepared: Prepared,
    drawn: DrawnFacts,
) -> Experience:
    """Collective: the facts go to disk, and come back as this rank's immutable share of them.

    `store.rollout` was called before. Raises `Disagreement` naming the ranks when owners of one
    part hold different facts, or ranks say differently how they were `drawn`: one of them writes.
    """
    told = world.gather((facts_hash(scores, prepared), drawn.line))
    odd = [rank for rank, (_, line) in enumerate(told) if line != told[0][1]]
    if odd:
        raise Disagreement(
            f"ranks {odd} drew otherwise than rank 0: {told[odd[0]][1]} against {told[0][1]}"
        )
    by_owner: dict[int, str] = {}
    for rank, (part, _) in enumerate(told):
        expected = by_owner.setdefault(world.mesh.dp_index(rank), part)
        if part != expected:
            raise Disagreement(
                f"rank {rank} holds other facts than the other owners of its part: {part} against "
                f"{expected}; they must score the same tokens with the same weights"
            )
    return Experience(
        samples=prepared.samples,
        scores=scores,
        old_log_probs=prepared.old_log_probs,
        ref_log_probs=prepared.ref_log_probs,
        values=prepared.values,
        last_values=prepared.last_values,
        producers=dict(header.producers),
        hash=store.seal(header, prepared, drawn),
    )
