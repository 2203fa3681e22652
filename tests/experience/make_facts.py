"""Whole iterations for tests: drawn from a seed, then written by real ranks with the real store."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from megarl.contracts.mesh import Mesh
from megarl.contracts.records import Derived, Prompt, RewardRecord, RewardStatus
from megarl.contracts.samples import Samples, SamplingContract
from megarl.data.join import JoinCounts
from megarl.data.prepare import Prepared
from megarl.experience.drawn import DrawnFacts
from megarl.experience.manifest import SealHeader
from megarl.experience.store import ExperienceStore
from megarl.rollout.selection import VERDICTS, Selection, Verdict
from megarl.world import World
from tests.data.make_samples import make_samples

SCORER, RECIPE = "scorer1", "sha256:recipe"
SAMPLING = SamplingContract(
    n=2,
    temperature=1.0,
    max_response_tokens=8,
    stop_token_ids=(2, 5),
    seed=7,
    dtype="float32",
    attention_backend="auto",
)


@dataclass(frozen=True)
class Facts:
    """One iteration. N rows in canonical order, R response tokens in all."""

    prompts: tuple[Prompt, ...]
    samples: Samples
    records: tuple[RewardRecord, ...]
    """One a row."""
    old: np.ndarray  # float32 [R]
    ref: np.ndarray | None  # float32 [R]
    values: np.ndarray | None  # float32 [R], as all three below
    last_values: np.ndarray | None  # float32 [N]
    shaped_rewards: np.ndarray | None  # float32 [R]
    returns: np.ndarray | None  # float32 [R]
    kl_beta: float
    advantages: np.ndarray  # float32 [R]
    replica: np.ndarray  # int [N], who generated the row
    owner: np.ndarray  # int [N], who trains it, −1 for nobody

    @property
    def drawn(self) -> DrawnFacts:
        """Numbers that follow from the others, so that two iterations' differ."""
        missing = len(self.prompts) * SAMPLING.n - len(self.samples)
        lost = {"aborted": missing - 1, "not_returned": 1} if missing > 1 else {"aborted": missing}
        tokens = len(self.old)
        cursor = {"fingerprint": f"f{tokens}", "seed": 7, "position": tokens, "back": [3, tokens]}
        return DrawnFacts(
            rounds=1 + tokens % 3,
            lost=lost if missing else {},
            joined=JoinCounts(duplicates=tokens % 5, late=tokens % 2),
            cursor=cursor,
        )

    @property
    def minibatch(self) -> np.ndarray:
        return np.where(self.owner >= 0, 0, -1).astype(np.int32)

    @property
    def selection(self) -> Selection:
        """Only what is stored of it counts here."""
        reason = VERDICTS.index(Verdict.ZERO_VARIANCE)
        return Selection(
            draw_index=self.samples.draw_index,
            candidate=self.samples.candidate,
            verdict=np.where(self.owner >= 0, 0, reason).astype(np.int8),
            kept=self.owner >= 0,
            compared=self.owner >= 0,
            equal=self.owner < 0,
            group_size=np.ones(len(self.samples), dtype=np.int64),
            counts={},
        )

    def tokens_of(self, rows: np.ndarray) -> np.ndarray:
        """Places of these rows' tokens in a per-token column."""
        offsets = self.samples.response_offsets
        spans = [np.arange(offsets[row], offsets[row + 1]) for row in rows]
        return np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)


def make_facts(
    seed: int,
    replicas: int,
    owners: int,
    *,
    groups: int = 3,
    with_ref: bool = True,
    with_critic: bool = False,
) -> Facts:
    """Ragged lengths, holes, failed rewards, components that some records lack, spans and step
    rewards, rows anywhere: all of it drawn from `seed`."""
    draw = np.random.default_rng(seed)
    shapes = [
        (group, candidate, int(draw.integers(1, 5)), int(draw.integers(1, 7)))
        for group in range(groups)
        for candidate in range(2)
        if draw.random() < 0.9
    ]
    samples = make_samples(shapes, holes=True)
    tokens = len(samples.response_ids)
    columns = {
        "rollout_log_probs": -draw.random(tokens).astype(np.float32),
        "end_reason": draw.integers(0, 7, len(samples)).astype(np.int8),
        "seed": draw.integers(0, 2**62, len(samples)),
    }
    prompts = tuple(
        Prompt(f"src/{n}", "src", f"what? ü\u2028 {n}", (1, n), str(n), {"level": n})
        for n in range(groups)
    )
    critic = np.random.default_rng(seed + 1) if with_critic else None

    def floats(count: int) -> np.ndarray | None:
        return None if critic is None else critic.standard_normal(count).astype(np.float32)

    return Facts(
        prompts=prompts,
        samples=replace(samples, **columns),
        records=tuple(_record(draw, *shape) for shape in shapes),
        old=-draw.random(tokens).astype(np.float32),
        ref=-draw.random(tokens).astype(np.float32) if with_ref else None,
        values=floats(tokens),
        last_values=floats(len(samples)),
        shaped_rewards=floats(tokens),
        returns=floats(tokens),
        kl_beta=0.0 if critic is None else float(critic.random()),
        advantages=draw.standard_normal(tokens).astype(np.float32),
        replica=draw.integers(0, replicas, len(samples)),
        owner=draw.integers(-1, owners, len(samples)),
    )


def _record(
    draw: np.random.Generator, group: int, candidate: int, prompt: int, response: int
) -> RewardRecord:
    status = draw.choice(list(RewardStatus), p=[0.7, 0.15, 0.15])
    status = RewardStatus(str(status))
    names = [name for name in ("a", "b", "length") if draw.random() < 0.6]
    ok = status is RewardStatus.OK
    return RewardRecord(
        draw_index=group,
        candidate=candidate,
        total=float(draw.standard_normal()) if ok else None,
        components={name: float(draw.standard_normal()) for name in names} if ok else {},
        scorer_version=SCORER,
        status=status,
        detail=str(draw.choice(["", "no_answer", "deadline of 2 s", 'crash: "ü"'])),
        seconds=float(draw.random()),
        applies_to={name: (0, response) for name in names if draw.random() < 0.4},
        step_rewards=tuple(
            (int(at), float(draw.standard_normal()))
            for at in range(response)
            if draw.random() < 0.3
        ),
    )


def header_of(facts: Facts, iteration: int) -> SealHeader:
    producers = {"rollout": "v0", "old": "v0"} | ({} if facts.ref is None else {"ref": "r0"})
    producers |= {} if facts.values is None else {"critic": "c0"}
    return SealHeader(
        run_id="run",
        iteration=iteration,
        producers=producers,
        tokenizer_hash="sha256:tokenizer",
        recipe_hash=RECIPE,
        sampling=SAMPLING,
        scorer_version=SCORER,
        samples=len(facts.samples),
    )


def world_of(size: int, tp: int = 1, rollout_tp: int = 1) -> World:
    return World(Mesh(size, tp=tp, rollout_tp=rollout_tp), torch.device("cpu"), 20.0)


def seal_facts(store: ExperienceStore, world: World, facts: Facts, iteration: int) -> str:
    """This rank's share of sealing: the experience's hash. Rows come out of order."""
    made = np.flatnonzero(facts.replica == world.replica)[::-1]
    records = [facts.records[row] for row in made[::-1]] if world.leads_replica else []
    store.rollout(iteration, facts.samples.select(made), records, SCORER, facts.prompts)
    mine = np.flatnonzero(facts.owner == world.dp_index)
    at = facts.tokens_of(mine)
    prepared = Prepared(
        samples=facts.samples.select(mine),
        packs=[],
        old_log_probs=facts.old[at],
        ref_log_probs=None if facts.ref is None else facts.ref[at],
        values=None if facts.values is None else facts.values[at],
        last_values=None if facts.last_values is None else facts.last_values[mine],
    )
    return store.seal(header_of(facts, iteration), prepared, facts.drawn)


def derive_facts(
    store: ExperienceStore,
    world: World,
    facts: Facts,
    iteration: int,
    experience_hash: str,
    *,
    settle: bool = True,
) -> str:
    """This rank's share of deriving and settling: the hash of `derived.json`."""
    mine = np.flatnonzero(facts.owner == world.dp_index)
    at = facts.tokens_of(mine)
    more = {
        name: None if getattr(facts, name) is None else getattr(facts, name)[at]
        for name in ("shaped_rewards", "returns")
    }
    derived = Derived(experience_hash, RECIPE, facts.advantages[at], **more, kl_beta=facts.kl_beta)
    told = store.derive(
        iteration,
        experience_hash,
        RECIPE,
        facts.selection,
        facts.minibatch,
        facts.samples.select(mine),
        derived,
    )
    derived.advantages[:] = -99  # what was told to be derived is written, not what comes later
    if settle:
        store.settle()
    return told


def write_iterations(
    folder: Path,
    facts: list[Facts],
    tp: int = 1,
    rollout_tp: int = 1,
    first: int = 0,
    keep: int | None = None,
    keep_every: int = 0,
) -> list[tuple[str, str]]:
    """On every rank of a pool: (experience hash, derived hash) of each iteration."""
    size = torch.distributed.get_world_size()
    world = world_of(size, tp, rollout_tp)
    store = ExperienceStore(folder, world, keep, keep_every)
    hashes = []
    for iteration, told in enumerate(facts, first):
        sealed = seal_facts(store, world, told, iteration)
        hashes.append((sealed, derive_facts(store, world, told, iteration, sealed)))
    store.close()
    return hashes
