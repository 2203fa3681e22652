"""Checks of what was decided over the sealed facts: made again from them, and compared."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.algorithms.controller import KlController
from megarl.audit.again import differences
from megarl.audit.findings import Found
from megarl.audit.losses import FirstLoss, first_loss, first_value_loss
from megarl.audit.view import IterationView
from megarl.experience.manifest import DERIVED_FILE
from megarl.experience.parts import DERIVED_COLUMNS


def selection(view: IterationView) -> Iterator[Found]:
    """Every row has the verdict and the minibatch that the facts lead to."""
    yield from _different(view, "selection.safetensors", ("verdict", "minibatch"))


def advantages(view: IterationView) -> Iterator[Found]:
    """What was trained on besides facts is, bit for bit, what the facts give."""
    yield from _different(view, "derived_*.safetensors", DERIVED_COLUMNS)


def _different(view: IterationView, file: str, fields: tuple[str, ...]) -> Iterator[Found]:
    if view.sealed.derived is None:
        return
    for item in differences(view.sealed, view.again):
        if item.field in fields:
            at = "" if item.token is None else f"token {item.token}: "
            more = "" if item.count == 1 else f" ({item.count} differ)"
            what = f"{at}{item.sealed} was sealed, the facts give {item.recomputed}{more}"
            yield Found(view.file(file), what, item.sample_id, item.field)


def ledger_of(view: IterationView) -> Iterator[Found]:
    """The iteration's line of the ledger closes, and is the account that the facts give."""
    run, number = view.run, view.number
    lines = run.ledger.of(number)
    if not lines:
        if number in run.trained:
            yield Found(run.ledger.file, f"no line of iteration {number}, which trained")
        return
    line = lines[0]  # `once` tells of others
    out = sum(line["dropped"].values()) + sum(line["refused"].values())
    if line["sampled"] != line["trained"] + out:
        what = f"{line['sampled']} sampled are not {line['trained']} trained + {out} others"
        yield Found(line.where, what, field="sampled")
    account = {"sampled": len(view.sealed.samples)} if run.only_collects else _account(view)
    for field, value in account.items():
        if line.told.get(field) != value:
            yield Found(line.where, f"{line.told.get(field)}, the facts give {value}", field=field)
    version = view.manifest.header.producers.get("rollout")
    if line["version"] != version:
        what = f"version {line['version']}, the samples are of {version}"
        yield Found(line.where, what, field="version")


def _account(view: IterationView) -> dict:
    """The ledger's account made again."""
    sealed, plan = view.sealed, view.again.plan
    drawn = sealed.drawn.drawn([prompt["source"] for prompt in sealed.prompts])
    longest = view.recipe.rollout.max_response_tokens
    lengths = sealed.samples.response_lengths
    account = plan.account | drawn.account(plan.selection, lengths, longest)
    return account | {"joined": sealed.drawn.joined.account}


def first_losses(view: IterationView) -> Iterator[Found]:
    """The loss of an iteration's first step, whose ratios are 1, is what the facts give; so is the
    critic's, whose values are the sealed ones."""
    rows = [line.told for line in view.run.metrics.of(view.number)[:1]]
    for line in view.run.updates.of(view.number)[:1]:
        metrics = rows[0] if rows else {}
        loss = first_loss(view.sealed, view.again, view.recipe, line.told, metrics)
        if isinstance(loss, FirstLoss) and not loss.agrees:
            yield Found(line.where, str(loss), field="steps.loss")
        value = first_value_loss(view.sealed, view.again, view.recipe, line.told)
        if value is not None and not value.agrees:
            yield Found(line.where, str(value), field="critic.loss")


def denominators(view: IterationView) -> Iterator[Found]:
    """Each update step counted the action tokens and sequences that its minibatch has."""
    for line in view.run.updates.of(view.number)[:1]:
        minibatches = view.again.plan.totals
        for name in ("steps", "critic"):
            for at, step in enumerate(line.told.get(name, [])):
                totals = minibatches[at % len(minibatches)]
                for field in ("tokens", "sequences"):
                    if step.get(field) != (value := getattr(totals, field)):
                        what = f"step {at} counted {step.get(field)}, its minibatch has {value}"
                        yield Found(line.where, what, field=f"{name}.{field}")


def beta(view: IterationView) -> Iterator[Found]:
    """The KL term's weight is the recipe's in the first iteration, and everywhere where it has no
    target; from an iteration with a target the next one's follows by the sealed log-probs."""
    run, number, kl = view.run, view.number, view.recipe.algorithm.kl
    told = None if view.sealed.derived is None else view.sealed.derived.kl_beta
    if told is None:
        return
    begins = number == run.first and run.segments[0].start is None
    if (kl.target is None or begins) and told != kl.beta:
        what = f"{told}, the recipe begins with {kl.beta}" if begins else f"{told}, not {kl.beta}"
        yield Found(view.file(DERIVED_FILE), what, field="kl_beta")
    for line in run.updates.of(number)[:1]:
        if line.told.get("kl_beta", told) != told:
            what = f"{line.told['kl_beta']}, {view.file(DERIVED_FILE)} has {told}"
            yield Found(line.where, what, field="kl_beta")
    if kl.target is None:
        return
    controller, numbers = KlController(told, kl.target, kl.horizon), view.again.credit.numbers
    sequences = int(numbers.get("reference/sequences", 0))
    following = controller.update(numbers.get("reference/kl_sequence", 0.0), sequences)
    for line in run.updates.of(number + 1)[:1]:
        if run.recipe_of(number + 1).algorithm.kl != kl:
            continue  # a resume was allowed another one
        if line.told.get("kl_beta", following) != following:
            what = f"{line.told['kl_beta']}, from {told} of iteration {number} follows {following}"
            yield Found(line.where, what, field="kl_beta")
