"""What every rank of `bench.py checkpoint` does: save, load, and the same bytes plainly.

    torchrun … -m tools.bench.checkpoint_ranks JOB.json

Every measurement begins and ends at a barrier; rank 0 writes its seconds to the job's `result`.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.checkpoint.commit import checkpoint_folder, newest_whole
from megarl.checkpoint.position import (
    LearnerPosition,
    Position,
    RolePosition,
    read_position,
)
from megarl.checkpoint.restore import restore_roles
from megarl.checkpoint.saver import ACTOR, Checkpointer, layout_of
from megarl.checkpoint.tensor_digests import manifest_of_role
from megarl.checkpoint.torch_dist import read_whole
from megarl.contracts.mesh import Mesh
from megarl.contracts.samples import EndReason, Sample, Samples
from megarl.contracts.version import PolicyVersion
from megarl.data.packing import MicroBatch, build_pack
from megarl.models.roles import Actor
from megarl.platforms.megatron_patches import install
from megarl.recipe.sections import CheckpointSection
from megarl.reshard.families import read_spec
from megarl.world import World, process_group
from tools.bench.harness import interleaved, say

BLOCK = 16 * 2**20
"""Bytes of one plain read or write."""
SETTLED_AFTER = 1.0
"""Seconds that a disk goes on discarding the blocks of files that are gone."""
RESPONSE = 32
"""Tokens of the one sample that a rank learns from while a save is written."""


def actor_section() -> SimpleNamespace:
    return SimpleNamespace(
        lr=1e-4,
        lr_schedule="constant",
        lr_warmup_steps=0,
        min_lr=0.0,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.0,
        clip_grad=1.0,
        distributed_optimizer=True,
        logprob_chunk_tokens=64,
        recompute="none",
        sequence_parallel=False,
        max_skipped_steps=3,
        router="trained",
        router_aux_loss=0.0,
        replay_routing=False,
    )


class Bench:
    """One rank's actor, its checkpoints, and plain files of the same bytes."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.folder = Path(job["folder"])
        model = Path(job["model"])
        mesh = Mesh(torch.distributed.get_world_size(), tp=job["tp"], pp=1)
        self.world = World(mesh, torch.device("cpu"), 600)
        spec = read_spec(model)
        self.actor = Actor(
            spec, model, self.world, SimpleNamespace(dtype="float32"), actor_section(), 1.0, 1000
        )
        self.saver = self._saver(background=False)
        self.behind = self._saver(background=True)
        self.iteration = 0
        self.room = 2**27
        """Bytes that are touched before a measurement."""
        self.batch = self._batch(spec.vocab)
        self.step()
        self.raw: np.ndarray | None = None

    def _saver(self, background: bool) -> Checkpointer:
        section = CheckpointSection(keep=1, background=background)
        note = say if self.world.is_main else (lambda text: None)
        return Checkpointer(self.world, self.folder, "bench", section, self.actor, None, note=note)

    def _batch(self, vocab: int) -> MicroBatch:
        draw = np.random.default_rng(self.world.dp_index)
        sample = Sample(
            draw_index=0,
            candidate=0,
            prompt_ids=draw.integers(0, vocab, 4),
            response_ids=draw.integers(0, vocab, RESPONSE),
            action_mask=np.ones(RESPONSE, bool),
            rollout_log_probs=np.zeros(RESPONSE, np.float32),
            end=0,
            end_reason=EndReason.EOS,
            seed=0,
            started=0.0,
            finished=1.0,
        )
        weights = torch.full((RESPONSE,), 1 / RESPONSE / self.world.mesh.dp)
        zeros = torch.zeros(RESPONSE)
        pack = build_pack(Samples.from_rows([sample], "bench"), [0])
        return MicroBatch(pack, zeros, None, zeros, torch.ones(RESPONSE), weights)

    def step(self) -> None:
        def loss(scores: Any, batch: MicroBatch) -> tuple[Tensor, dict]:
            return -(batch.weights_A * scores.log_probs_A).sum(), {}

        self.actor.update([self.batch], loss)

    def timed(self, do: Callable[[], Any]) -> float:
        """Seconds until the last rank is through, with memory at hand and nothing else going on.

        A virtual machine may have given free memory back to its host within seconds; writing the
        page cache anew would then be measured, and only for whichever side comes after a pause.
        """
        for saver in (self.saver, self.behind):
            saver.wait_for_removal()
        time.sleep(SETTLED_AFTER)
        self.world.barrier("bench")
        touched = np.ones(self.room, np.uint8)
        del touched
        self.world.barrier("bench")
        began = time.perf_counter()
        do()
        self.world.barrier("bench")
        return time.perf_counter() - began

    def position(self, manifest: Any, learners: Mapping[str, LearnerPosition]) -> Position:
        actor = learners[ACTOR]
        version = PolicyVersion("bench", actor.trainer["steps"], 0, manifest.hash, "none", "none")
        return Position(
            run_id="bench",
            iteration=self.iteration,
            actor=RolePosition(version, manifest),
            reference=None,
            reference_refreshed_at=0,
            attempt=0,
            trainer=actor.trainer,
            tensor_digests=actor.tensor_digests,
            cursor={},
            quarantine={},
            best=None,
            contracts={},
            recipe={},
            recipe_hash="none",
            layout=dict(layout_of(self.world)),
            records={},
            eval_files=[],
            exports=[],
            seconds=0.0,
            packages={},
        )

    def begin(self, saver: Checkpointer) -> None:
        self.iteration += 1
        manifest = self.manifest
        position = partial(self.position, manifest)
        saver.save(self.iteration, "bench", position, manifests={ACTOR: manifest})

    def save(self) -> float:
        self.step()
        self.manifest = manifest_of_role(self.actor, "float32", self.world)
        return self.timed(lambda: self.begin(self.saver))

    def save_behind(self) -> tuple[float, float]:
        """(seconds from the call to the commit, those that the loop waited for); steps go on."""
        self.step()
        self.manifest = manifest_of_role(self.actor, "float32", self.world)
        self.world.barrier("bench")
        began = time.perf_counter()
        self.begin(self.behind)
        waited = time.perf_counter() - began
        while self.behind.is_pending:
            self.step()
            here = time.perf_counter()
            self.behind.settle(wait=False)
            waited += time.perf_counter() - here
        return time.perf_counter() - began, waited

    def own_files(self) -> list[Path]:
        folder = checkpoint_folder(self.folder, self.iteration)
        return sorted(folder.glob(f"*/__{self.world.rank}_*.distcp"))

    def take_bytes(self) -> int:
        """Keep in memory what this rank's part of the last checkpoint is."""
        parts = [np.fromfile(path, np.uint8) for path in self.own_files()]
        self.raw = np.concatenate(parts)
        self.room = self.raw.nbytes * 3 // 2
        return self.raw.nbytes

    def raw_write(self) -> float:
        path = self.folder / f"raw{self.world.rank}"
        # As a save does: beside the one before, whose memory it cannot have.
        path = path.with_suffix(".new")

        def write() -> None:
            with open(path, "xb", buffering=0) as file:
                whole = memoryview(self.raw)
                for at in range(0, len(whole), BLOCK):
                    file.write(whole[at : at + BLOCK])
                os.fsync(file.fileno())

        seconds = self.timed(write)
        path.replace(path.with_suffix(""))
        return seconds

    def raw_read(self) -> float:
        path = self.folder / f"raw{self.world.rank}"

        def read() -> None:
            with open(path, "rb", buffering=0) as file:
                whole = memoryview(self.raw)
                for at in range(0, len(whole), BLOCK):
                    file.readinto(whole[at : at + BLOCK])

        return self.timed(read)

    def load(self) -> float:
        """Until the last tensor is where it belongs."""

        def load() -> None:
            folder = newest_whole(self.folder).folder / ACTOR
            read_whole(self.saver.state_of(ACTOR), self.actor.model, folder, {})

        return self.timed(load)

    def load_proven(self) -> float:
        """Until every tensor is known, by its digest, to be the one that was saved."""

        def load() -> None:
            commit = newest_whole(self.folder)
            position = read_position(commit)
            restore_roles(commit.folder, position, self.saver)

        return self.timed(load)

    def files(self) -> list[Path]:
        return [*self.own_files(), self.folder / f"raw{self.world.rank}"]

    def drop_cache(self) -> None:
        """Nothing of the checkpoint and of the plain file is in the page cache."""
        for path in self.files():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def cold(self, do: Callable[[], float]) -> float:
        self.drop_cache()
        return do()

    def warm(self, do: Callable[[], float]) -> float:
        for path in self.files():
            with open(path, "rb", buffering=0) as file:
                while file.read(BLOCK):
                    pass
        return do()


def measure(job: dict[str, Any]) -> dict[str, Any]:
    bench = Bench(job)
    gc.collect()
    gc.freeze()  # as a run does: what lives for all of it is not looked at again and again
    told = say if bench.world.is_main else None
    first = bench.save()
    size = bench.take_bytes()
    sizes = bench.world.gather(size)
    bench.raw_write()
    bench.save_behind()
    saves = interleaved({"save": bench.save, "raw_write": bench.raw_write}, job["repeats"], told)
    behind = interleaved({"behind": bench.save_behind}, job["repeats"], told)
    bench.save()
    bench.take_bytes()
    bench.raw_write()
    loads = interleaved(
        {
            "load": lambda: bench.cold(bench.load),
            "raw_read": lambda: bench.cold(bench.raw_read),
            "load_proven": lambda: bench.cold(bench.load_proven),
            "load_warm": lambda: bench.warm(bench.load),
            "raw_read_warm": lambda: bench.warm(bench.raw_read),
        },
        job["repeats"],
        told,
    )
    turns = {name: [turn[name] for turn in saves + loads if name in turn] for name in SIDES}
    for saver in (bench.saver, bench.behind):
        saver.close()
    return {
        "first_save": first,
        "bytes": sum(sizes),
        "bytes_per_rank": sizes,
        "seconds": turns,
        "behind": [turn["behind"] for turn in behind],
    }


SIDES = (
    "save",
    "raw_write",
    "load",
    "raw_read",
    "load_proven",
    "load_warm",
    "raw_read_warm",
)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    install()
    with process_group("gloo", 600):
        result = measure(job)
        if torch.distributed.get_rank() == 0:
            Path(job["result"]).write_text(json.dumps(result), encoding="utf-8")
            shutil.rmtree(job["folder"])


if __name__ == "__main__":
    main()
