"""One small iteration, ready to be sealed: samples, rewards, plan, packs and log-probs, for tests.

Three prompts, two candidates each, rewards 1 and 0, two minibatches; the last response is cut off.
With `name="ppo"` there is a critic, with values and packs.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megarl.algorithms.credit import credit
from megarl.contracts.mesh import Mesh
from megarl.contracts.records import Derived, Experience, Identities, RewardRecord, Scores
from megarl.contracts.samples import END_OF_REASON, EndReason, Sample, Samples, SamplingContract
from megarl.contracts.version import PolicyVersion
from megarl.data.everyone import everyone_of
from megarl.data.exchange import exchange, gather_table
from megarl.data.guards import Guard
from megarl.data.packing import build_pack
from megarl.data.prepare import Prepared
from megarl.data.table import SampleTable
from megarl.rollout.groups import IterationPlan, plan_iteration
from megarl.world import World
from tests.data.make_rules import make_rules
from tests.data.make_samples import make_record

PROMPTS, GROUP, EOS, LIMIT, VOCABULARY, UNKNOWN = 3, 2, 2, 5, 64, 63
VERSION = PolicyVersion("run", 4, 0, "weights", "tokenizer", "config")
REFERENCE = replace(VERSION, optimizer_step=0, role="reference")
CRITIC = replace(VERSION, optimizer_step=8, role="critic")
PRODUCERS = {"rollout": VERSION.id, "old": VERSION.id, "ref": REFERENCE.id}
SAMPLING = SamplingContract(GROUP, 1.0, LIMIT, (EOS,), 1, "float32", "auto")


def recipe(**algorithm: Any) -> SimpleNamespace:
    keys = {"minibatches": 2} | algorithm
    return make_rules(group_size=GROUP, prompts=PROMPTS, tokens=16, longest=LIMIT, **keys)


def prompt_ids(draw: int) -> tuple[int, ...]:
    return tuple(range(10 + draw, 12 + 2 * draw))


def one_sample(draw: int, candidate: int) -> Sample:
    """Responses of 2 to 5 tokens that end with EOS, but the last, which is cut at the limit."""
    cut = (draw, candidate) == (PROMPTS - 1, GROUP - 1)
    length = LIMIT if cut else 2 + (draw + candidate) % 3
    ids = 30 + 8 * draw + 4 * candidate + np.arange(length) % 4
    if not cut:
        ids[-1] = EOS
    reason = EndReason.MAX_TOKENS if cut else EndReason.EOS
    return Sample(
        draw_index=draw,
        candidate=candidate,
        prompt_ids=np.array(prompt_ids(draw)),
        response_ids=ids,
        action_mask=np.ones(length, dtype=bool),
        rollout_log_probs=-np.arange(1, length + 1, dtype=np.float32) / 10,
        end=END_OF_REASON[reason],
        end_reason=reason,
        seed=draw,
        started=0.0,
        finished=1.0,
    )


def guard(it: Iteration, **changes: Any) -> Guard:
    known = np.ones(VOCABULARY, dtype=bool)
    has_critic = it.prepared.values is not None
    known[UNKNOWN] = False
    names = tuple(f"p{draw}" for draw in range(PROMPTS))
    values = {
        "world": it.world,
        "actor": SimpleNamespace(optimizer_step=it.actor_step),
        "identities": Identities("run", 3, names),
        "prompt_ids": tuple(prompt_ids(draw) for draw in range(PROMPTS)),
        "version": VERSION,
        "reference": REFERENCE,
        "critic": SimpleNamespace(optimizer_step=it.critic_step) if has_critic else None,
        "critic_version": CRITIC if has_critic else None,
        "sampling": SAMPLING,
        "known_ids": known,
        "recipe_hash": "recipe",
        "algorithm": recipe().algorithm,
    }
    return Guard(**(values | changes))


@dataclass
class Iteration:
    """This rank's part of it."""

    world: World
    prepared: Prepared
    scores: Scores
    table: SampleTable
    plan: IterationPlan
    experience: Experience
    derived: Derived
    producers: dict[str, str]
    actor_step: int = VERSION.optimizer_step
    critic_step: int = CRITIC.optimizer_step


def make_iteration(records: list[RewardRecord] | None = None, **algorithm: Any) -> Iteration:
    """Collective over the default group; every rank is a data-parallel part and a replica."""
    import torch.distributed as dist

    world = World(Mesh(dist.get_world_size(), tp=1), torch.device("cpu"), 20.0)
    pairs = [(draw, candidate) for draw in range(PROMPTS) for candidate in range(GROUP)]
    mine = [pair for at, pair in enumerate(pairs) if at % world.size == world.rank]
    if records is None:
        records = [make_record(draw, candidate, float(candidate)) for draw, candidate in pairs]
    records = [record for record in records if (record.draw_index, record.candidate) in mine]
    generated = Samples.from_rows([one_sample(*pair) for pair in mine], VERSION.id)
    table = gather_table(world, generated, records)
    rules = recipe(**algorithm)
    plan = plan_iteration(table, rules, world.mesh.dp, prompts=PROMPTS, invalid=table.invalid)
    owned = exchange(world, generated, table, plan.update.owner)
    samples, scores = owned.samples, owned.scores
    tokens = len(samples.response_ids)
    packs = [
        [build_pack(samples, rows) for rows in part]
        for part in plan.update.local_packs(world.dp_index)
    ]
    old = -np.arange(1, tokens + 1, dtype=np.float32) / 10
    facts, producers = (old, old - np.float32(0.1)), dict(PRODUCERS)
    values = last_values = None
    if rules.algorithm.needs_values:
        values = np.linspace(-1, 1, tokens, dtype=np.float32)
        last_values = np.linspace(0, 1, len(samples), dtype=np.float32)
        producers["critic"] = CRITIC.id
    critic_packs = None if values is None else packs
    prepared = Prepared(samples, packs, *facts, values, last_values, critic_packs)
    facts = tuple(column.copy() for column in facts)
    experience = Experience(samples, scores, *facts, values, producers, "h", last_values)
    everyone = everyone_of(world, table, samples)
    derived = credit(experience, "recipe", table, plan, rules.algorithm, everyone, 0.0).derived
    return Iteration(world, prepared, scores, table, plan, experience, derived, producers)


def spoilt(record: Any, **columns: Any) -> Any:
    """A copy of a record with other columns, past its own checks: what a fault in memory leaves."""
    other = copy.copy(record)
    for cached in vars(other).keys() - {item.name for item in fields(other)}:
        del vars(other)[cached]
    for name, value in columns.items():
        object.__setattr__(other, name, value)
    return other


def put(column: np.ndarray, at: Any, value: Any) -> np.ndarray:
    """A copy of `column` with `value` at `at`."""
    other = column.copy()
    other[at] = value
    return other
