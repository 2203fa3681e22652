"""The hybrid engine: one process trains, then generates, and proves each hand-over.

    training() ⇄ generating(version) ⇄ scoring()

`generating` is the only way to the generator. It takes the actor's committed weights through
EXPORTING → ROLLOUT_LOADING → ROLLOUT_READY: reshard in place, read the generator's own parameters
back, compare their digests with the version's manifest, flush the KV cache, activate; in that
order. Reading back may be thinned (`verify_every`), never at the first version; the journal then
says `verified: false`. All ranks vote before the first token, and what was read back is written
down before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from megarl.contracts.states import Journal, State
from megarl.contracts.version import PolicyVersion, WeightManifest
from megarl.experience.versions import VersionLog
from megarl.observe.timeline import Stopwatch
from megarl.platforms.offload import Offload
from megarl.reshard.transfer import Resharder, TransferStats
from megarl.rollout.generator import Generator
from megarl.world import World


@dataclass
class HybridEngine:
    """Owns the hand-over between the actor's shards and the generator's parameters."""

    world: World
    journal: Journal
    generator: Generator
    resharder: Resharder
    stopwatch: Stopwatch
    offload: Offload | None = None
    """Keeps optimizer states in host memory outside of training, or None."""
    versions: VersionLog = field(default_factory=lambda: VersionLog(None))
    """Where every hand-over is written down; by default nowhere."""
    verify_every: int = 1
    """Of the versions handed over, the first and every so many-th are read back and compared."""
    frozen: Offload | None = None
    """Keeps the reference's weights in host memory outside of scoring, or None."""
    transferred: TransferStats | None = field(default=None, init=False)
    """What the last hand-over moved."""
    _handed_over: int = field(default=0, init=False)
    """Versions since this process began."""
    _latest: str | None = field(default=None, init=False)
    """Id of the last of them."""
    _stage: str = field(default="training", init=False)

    @contextmanager
    def generating(
        self, iteration: int, version: PolicyVersion, manifest: WeightManifest
    ) -> Iterator[Generator]:
        """The generator, holding exactly `version`, whose weights `manifest` lists.

        Raises what `Resharder.verify` raises when a copy differs, `Disagreement` when ranks do.
        """
        if manifest.hash != version.weight_manifest_hash:
            raise RuntimeError(f"the manifest given is not that of {version}")
        with self._in("generating"):
            if self.offload is not None:
                self.offload.out()
            self.world.enter("reshard")
            with self.stopwatch("reshard"):
                self._publish(iteration, version, manifest)
            yield self.generator
            self.generator.sleep()

    def _publish(self, iteration: int, version: PolicyVersion, manifest: WeightManifest) -> None:
        self.journal.enter(State.EXPORTING, iteration, version)
        self.generator.wake()
        self.transferred = self.resharder.transfer()
        self.journal.enter(
            State.ROLLOUT_LOADING, iteration, version, bytes_sent=self.transferred.bytes_sent
        )
        held = None
        if self._reads_back(version):
            self.world.enter("verify")
            with self.stopwatch("verify"):
                held = self.resharder.verify(manifest)
        self.generator.activate(version)
        self.world.vote(
            State.ROLLOUT_READY,
            {
                "version": version.id,
                "active": self.generator.active == version,
                "weight_manifest_hash": None if held is None else held.hash,
            },
        )
        if held is not None:
            self.versions.loaded(iteration, version, held, self.world.mesh.replicas)
        self.journal.enter(
            State.ROLLOUT_READY,
            iteration,
            version,
            weight_manifest_hash=version.weight_manifest_hash,
            verified=held is not None and held.hash == version.weight_manifest_hash,
        )

    def _reads_back(self, version: PolicyVersion) -> bool:
        """Whether this version's weights are compared where the generator holds them."""
        if version.id != self._latest:
            self._handed_over, self._latest = self._handed_over + 1, version.id
        return (self._handed_over - 1) % self.verify_every == 0

    def manifest(self) -> WeightManifest:
        """The actor's weights as they are, every copy of them compared. Collective."""
        return self.resharder.manifest()

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Forwards without updates: log-probs of the actor and the reference, values."""
        with self._in("scoring"), _at_hand(self.frozen):
            yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """Updates. The generator's weights are stale from the first step on: it is deactivated."""
        with self._in("training"):
            self.generator.deactivate()
            if self.offload is not None:
                self.offload.back()
            yield

    @contextmanager
    def _in(self, stage: str) -> Iterator[None]:
        before, self._stage = self._stage, stage
        if before not in ("training", stage):
            raise RuntimeError(f"{stage}() inside {before}(): one stage at a time")
        yield
        self._stage = "training"


@dataclass
class TrainingOnly:
    """Stands where `HybridEngine` stands in a run that generates nothing."""

    read_manifest: Callable[[], WeightManifest]
    offload: Offload | None = None
    """As `HybridEngine.offload`."""
    frozen: Offload | None = None
    """As `HybridEngine.frozen`."""

    def manifest(self) -> WeightManifest:
        """The actor's weights as they are, every copy of them compared. Collective."""
        return self.read_manifest()

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Forwards without updates; optimizer states stay out."""
        with _at_hand(self.frozen):
            yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """Updates."""
        if self.offload is not None:
            self.offload.back()
        yield
        if self.offload is not None:
            self.offload.out()


@contextmanager
def _at_hand(part: Offload | None) -> Iterator[None]:
    """`part` on the device; behind it in host memory. Where something is raised it stays."""
    if part is not None:
        part.back()
    yield
    if part is not None:
        part.out()
