"""Facts by the hundred thousand for the `experience` bench, and what is done with them, timed.

Imports torch: import it inside of a measurement only.
"""

from __future__ import annotations

import gc
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megarl.contracts.mesh import Mesh
from megarl.contracts.records import Prompt, RewardRecord, RewardStatus
from megarl.contracts.samples import Samples, SamplingContract
from megarl.data.exchange import exchange, gather_table
from megarl.data.join import JoinCounts
from megarl.data.prepare import Prepared
from megarl.experience.drawn import DrawnFacts
from megarl.experience.manifest import SealHeader, iteration_folder
from megarl.experience.store import ExperienceStore
from megarl.rollout.account import ledger
from megarl.rollout.selection import select_groups
from megarl.world import World

GROUP, PROMPT_TOKENS, VOCABULARY = 8, 64, 32_000
SCORER = "bench"


@dataclass(frozen=True)
class Made:
    samples: Samples
    records: list[RewardRecord]
    """One a row, in another order."""


def make(samples: int, tokens: int) -> Made:
    """Groups of eight with half of the rewards 1, responses of 1 to 2·`tokens` tokens."""
    draw = np.random.default_rng(1)
    lengths = draw.integers(1, 2 * tokens, samples)
    prompts = np.full(samples, PROMPT_TOKENS)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    total = int(offsets[-1])
    rows = Samples(
        draw_index=np.arange(samples) // GROUP,
        candidate=np.arange(samples) % GROUP,
        prompt_ids=draw.integers(0, VOCABULARY, samples * PROMPT_TOKENS),
        prompt_offsets=np.concatenate([[0], np.cumsum(prompts)]),
        response_ids=draw.integers(0, VOCABULARY, total),
        response_offsets=offsets,
        action_mask=np.ones(total, dtype=bool),
        rollout_log_probs=-draw.random(total, dtype=np.float32),
        end_reason=np.zeros(samples),
        seed=draw.integers(0, 2**62, samples),
        started=np.full(samples, 1.7e9),
        finished=1.7e9 + draw.random(samples),
        version_id="bench",
    )
    right = draw.random(samples) < 0.5
    records = [
        RewardRecord(
            draw_index=row // GROUP,
            candidate=row % GROUP,
            total=float(right[row]),
            components={"exact": float(right[row])},
            scorer_version=SCORER,
            status=RewardStatus.OK,
            seconds=1e-4,
        )
        for row in draw.permutation(samples).tolist()
    ]
    return Made(rows, records)


def _world() -> World:
    return World(Mesh(1, tp=1), torch.device("cpu"), 600.0)


class Sealing:
    """Seals the same facts as one iteration after the other."""

    def __init__(self, folder: Path, made: Made) -> None:
        folder.mkdir(parents=True)
        self._folder, self._made, self._iteration = folder, made, -1
        self._store = ExperienceStore(folder, _world(), None, 0)
        samples = made.samples
        old = -np.random.default_rng(2).random(len(samples.response_ids), dtype=np.float32)
        self._prepared = Prepared(samples, [], old_log_probs=old, ref_log_probs=None)
        self._prompts = [
            Prompt(f"bench/{n}", "bench", f"What is {n} and {n}?", (1,), str(2 * n))
            for n in range(-(-len(samples) // GROUP))
        ]
        lost = len(self._prompts) * GROUP - len(samples)
        cursor = {"fingerprint": "", "seed": 1, "position": len(self._prompts), "back": []}
        told = {"aborted": lost} if lost else {}
        self._drawn = DrawnFacts(1, told, JoinCounts(), cursor)

    def once(self) -> float:
        """Seconds from the samples in memory to EXPERIENCE_SEALED."""
        self._iteration += 1
        shutil.rmtree(iteration_folder(self._folder, self._iteration - 2), ignore_errors=True)
        samples, records = self._made.samples, self._made.records
        header = SealHeader(
            run_id="bench",
            iteration=self._iteration,
            producers={"rollout": "bench", "old": "bench"},
            tokenizer_hash="",
            recipe_hash="",
            sampling=_SAMPLING,
            scorer_version=SCORER,
            samples=len(samples),
        )
        os.sync()
        started = time.perf_counter()
        self._store.rollout(self._iteration, samples, records, SCORER, self._prompts)
        self._store.seal(header, self._prepared, self._drawn)
        return time.perf_counter() - started

    def bodies(self) -> dict[str, bytes]:
        """File name → bytes, of the newest iteration."""
        folder = iteration_folder(self._folder, self._iteration)
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}

    def close(self) -> None:
        self._store.close()


class Raw:
    """Writes given bytes to files and the disk, and nothing else."""

    def __init__(self, folder: Path, bodies: dict[str, bytes]) -> None:
        folder.mkdir(parents=True)
        self._folder, self._bodies, self._times = folder, bodies, 0

    def once(self) -> float:
        self._times += 1
        folder = self._folder / str(self._times)
        folder.mkdir()
        shutil.rmtree(self._folder / str(self._times - 2), ignore_errors=True)
        os.sync()
        started = time.perf_counter()
        for name, body in self._bodies.items():
            with open(folder / name, "wb", buffering=0) as file:
                file.write(body)
                os.fsync(file.fileno())
        return time.perf_counter() - started


@dataclass(frozen=True)
class Joined:
    """Seconds from one replica's samples and records to its owner's."""

    steps: dict[str, float]
    cpu: float
    """Of the process's own: what a busy machine does not change much."""

    @property
    def seconds(self) -> float:
        return sum(self.steps.values())


def join(made: Made) -> Joined:
    world = _world()
    gc.collect()
    gc.disable()  # as long as a run: what lives for all of it is frozen there
    try:
        cpu = time.process_time()
        times = [time.perf_counter()]
        table = gather_table(world, made.samples, made.records)
        times.append(time.perf_counter())
        selection = select_groups(table.scores, table.end, GROUP, "drop", "drop")
        times.append(time.perf_counter())
        account = ledger(selection)
        times.append(time.perf_counter())
        owner = np.where(selection.kept, 0, -1)
        owned = exchange(world, made.samples, table, owner)
        times.append(time.perf_counter())
        cpu = time.process_time() - cpu
    finally:
        gc.enable()
    if account["trained"] != len(owned.samples):
        raise RuntimeError(f"{len(owned.samples)} samples came, the ledger says {account}")
    names = ("gather_table", "select_groups", "ledger", "exchange")
    return Joined(dict(zip(names, np.diff(times).tolist(), strict=True)), cpu)


_SAMPLING = SamplingContract(
    n=GROUP,
    temperature=1.0,
    max_response_tokens=1024,
    stop_token_ids=(2,),
    seed=1,
    dtype="float32",
    attention_backend="auto",
)
