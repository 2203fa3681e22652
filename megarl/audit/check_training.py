"""Checks of what was decided over the sealed facts: made again from them, and compared."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.audit.again import differences
from megarl.audit.findings import Found
from megarl.audit.losses import FirstLoss, first_loss
from megarl.audit.view import IterationView


def selection(view: IterationView) -> Iterator[Found]:
    """Every row has the verdict and the minibatch that the facts lead to."""
    yield from _different(view, "selection.safetensors", ("verdict", "minibatch"))


def advantages(view: IterationView) -> Iterator[Found]:
    """What was trained on besides facts is, bit for bit, what the facts give."""
    columns = ("advantages", "shaped_rewards", "returns")
    yield from _different(view, "derived_*.safetensors", columns)


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
    """The loss of an iteration's first step, whose ratios are 1, is what the facts give."""
    rows = [line.told for line in view.run.metrics.of(view.number)[:1]]
    for line in view.run.updates.of(view.number)[:1]:
        metrics = rows[0] if rows else {}
        loss = first_loss(view.sealed, view.again, view.recipe, line.told, metrics)
        if isinstance(loss, FirstLoss) and not loss.agrees:
            yield Found(line.where, str(loss), field="steps.loss")


def denominators(view: IterationView) -> Iterator[Found]:
    """Each update step counted the action tokens and sequences that its minibatch has."""
    for line in view.run.updates.of(view.number)[:1]:
        steps, minibatches = line["steps"], view.again.plan.totals
        if len(steps) != len(minibatches):  # told by `updates`
            continue
        for at, (step, totals) in enumerate(zip(steps, minibatches, strict=True)):
            for field in ("tokens", "sequences"):
                if step.get(field) != (value := getattr(totals, field)):
                    what = f"step {at} counted {step.get(field)}, its minibatch has {value}"
                    yield Found(line.where, what, field=f"steps.{field}")
