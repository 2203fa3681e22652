"""Actor and critic with everything that PPO carries over, saved in one layout, loaded in others.

The critic is another model than the actor: of other sizes, with a value head. What is compared is
assembled by `layouts.look` and `gather_logical`, which know nothing of digests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megarl.checkpoint.commit import newest_whole
from tests.checkpoint.layouts import Layout, forget, look, train

KL = {"beta": 0.1 + 0.2, "updates": 3}
"""Of a controller; no short decimal."""
COUNTERS = {"skipped_steps": 2, "empty_minibatches": 1}


def build(models: Path, run: Path, layout: Layout, **options: Any) -> Any:
    """A checkpointer of actor, critic and reference; collective."""
    from tests.checkpoint.saving import checkpointer, critic_of, reference_of

    actor = layout.actor(models / "actor")
    critic = critic_of(models / "critic", actor, lr=3e-3)
    reference = reference_of(models / "actor", actor)
    return checkpointer(run, actor, critic=critic, reference=reference, **options)


def looks(saver: Any) -> dict[str, Any]:
    """All that must come back, of each role. Collective."""
    from tests.models.support import gather_logical

    told = {name: look(learner) for name, learner in saver.learners.items()}
    for name, learner in saver.learners.items():
        told[name]["counters"] = learner.trainer.state
    weights = gather_logical(saver.reference, saver.reference.named_parameters())
    return told | {"reference": {"weights": weights, "step": saver.reference.optimizer_step}}


def gone_on(saver: Any) -> dict[str, Any]:
    """The weights of both learners after one more step. Collective."""
    from tests.models.support import gather_logical

    found = {}
    for name, learner in saver.learners.items():
        train(learner, 1)
        found[name] = gather_logical(learner, learner.named_parameters())
    return found


def saved(models: Path, run: Path, layout: Layout) -> dict[str, Any]:
    """Different steps of each, a refreshed reference; the counters are what nothing else tells."""
    from megarl.models.build import destroy_mesh
    from tests.checkpoint.saving import save

    saver = build(models, run, layout)
    train(saver.actor, 1)
    saver.reference.refresh_from(saver.actor)
    train(saver.actor, 1)
    train(saver.critic, 3)
    for learner in saver.learners.values():
        learner.trainer.restore(learner.trainer.state | COUNTERS)
    told = looks(saver)
    told["need"] = sum(saver.world.gather(saver._bytes()))
    save(saver, 2, refreshed=1, kl=KL)
    saver.settle(wait=True)
    saver.close()
    told["gone on"] = gone_on(saver)
    destroy_mesh()
    return told


def loaded(models: Path, run: Path, layouts: list[Layout]) -> list[dict[str, Any]]:
    """The same of each of `layouts`, of one number of ranks, with the position's own."""
    from megarl.models.build import destroy_mesh
    from tests.checkpoint.saving import restore

    found = []
    for layout in layouts:
        saver = build(models, run, layout)
        forget(saver.actor), forget(saver.critic), forget(saver.reference)
        position = restore(saver, newest_whole(run))
        told = looks(saver) | {"kl": position.kl, "refreshed": position.reference_refreshed_at}
        told["gone on"] = gone_on(saver)
        saver.close()
        found.append(told)
        destroy_mesh()
    return found


def anchored(models: Path, run: Path, layout: Layout) -> list[str]:
    """A frozen reference at a resume: its own folder, then another one; what each told."""
    from megarl.checkpoint.commit import CheckpointError
    from megarl.models.build import destroy_mesh
    from tests.checkpoint.saving import checkpointer, reference_of, restore, save

    actor = layout.actor(models / "actor")
    saver = checkpointer(run, actor, reference=reference_of(models / "actor", actor))
    save(saver, 1)
    saver.settle(wait=True)
    saver.close()
    told = []
    for name in ("actor", "other"):
        destroy_mesh()
        actor = layout.actor(models / "actor")
        frozen = reference_of(models / name, actor)
        saver = checkpointer(run, actor, reference=frozen)
        try:
            restore(saver, newest_whole(run), models / name)
            told.append("restored")
        except CheckpointError as error:
            told.append(str(error))
        saver.close()
    destroy_mesh()
    return told


def without(models: Path, run: Path, layout: Layout) -> list[str]:
    """A position of an actor alone, taken up by a run with a critic: that begins as it was built.
    And the other way round."""
    from megarl.models.build import destroy_mesh
    from tests.checkpoint.saving import checkpointer, critic_of, fingerprint, restore, save

    actor = layout.actor(models / "actor")
    alone = checkpointer(run / "alone", actor)
    both = checkpointer(run / "both", actor, critic=critic_of(models / "critic", actor))
    train(actor, 1)
    built = fingerprint(both)
    for saver in (alone, both):
        save(saver, 1)
        saver.settle(wait=True)
        saver.close()
    train(actor, 1)
    restore(both, newest_whole(run / "alone"))
    told = [built, fingerprint(both), fingerprint(alone)]
    train(actor, 1)
    restore(alone, newest_whole(run / "both"))
    told.append(fingerprint(alone))
    destroy_mesh()
    return told


def frozen_routers(models: Path, run: Path, layouts: list[Layout]) -> list[dict[str, Any]]:
    """Saved in the first layout, loaded in all: weights, those of routers among them, and the state
    of what is trained."""
    from megarl.models.build import destroy_mesh
    from tests.checkpoint.saving import checkpointer, restore, save

    found = []
    for layout in layouts:
        actor = layout.actor(models)
        saver = checkpointer(run, actor)
        if layout is layouts[0]:
            train(actor, 2)
            save(saver, 1)
            saver.settle(wait=True)
            found.append(look(actor) | {"need": sum(actor.world.gather(saver._bytes()))})
        forget(actor)
        restore(saver, newest_whole(run))
        saver.close()
        found.append(look(actor))
        params = dict(actor.model.named_parameters())
        routers = {n for n in params if n.endswith("router.weight")}
        found[-1]["routers"] = len(routers)
        found[-1]["trained"] = sorted(n for n in routers if params[n].requires_grad)
        with torch.no_grad():
            assert all(torch.isfinite(param).all() for param in params.values())
        destroy_mesh()
    return found
