"""A sample's story (`story.py`) as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from megarl.audit.tell_credit import formula, trained_on
from megarl.audit.text import number, shown

INDENT = "  "
LABEL = 13
PIECE = 14
TAIL = 8
"""Tokens shown of a cut-off table's end."""

Story = dict[str, Any]


def tell(story: Story, width: int, most_tokens: int | None = None) -> Iterator[str]:
    """Lines of at most about `width` columns; the token table shows `most_tokens` (None: all)."""
    place = story["experience"]
    yield f"sample {shown(story['sample_id'])}"
    yield from _fields(
        width,
        ("place", f"iteration {story['iteration']}, draw {story['draw_index']}, candidate "
         f"{story['candidate']}"),
        ("sealed", f"{place['sealed_at']} in {place['folder']}"),
        ("experience", place["experience_hash"]),
        ("words", story["words"]),
        ("samples of", _origin_told(story["origin"])),
        ("made", _attempts_told(story["attempts"])),
    )  # fmt: skip
    yield from _prompt(story["prompt"], width)
    yield from _response(story["response"], width)
    yield from _table(story["token_table"], most_tokens)
    yield from _generation(story, width)
    yield from _reward(story["reward"], width)
    yield from _group(story, width)
    yield from _training(story["training"], width)
    yield from _versions(story["versions"], width)
    yield from _recipe(story, width)


def _origin_told(origin: Story | None) -> str | None:
    return origin and f"{origin['run']} iteration {origin['iteration']}, scored again"


def _attempts_told(attempts: Story) -> str | None:
    """None in a run that was never resumed."""
    told = []
    if attempts["resume"] is not None:
        attempt = attempts["update_attempt"]
        told.append(f"after resume {attempts['resume']}, update attempt {attempt}")
    if attempts["from_facts_sealed_before"]:
        told.append("from the facts that were sealed before it")
    for resume, place in attempts["rolled_back"].items():
        told.append(f"what resume {resume} rolled back lies in {place} (--before {resume})")
    return "; ".join(told)


def _heading(name: str, told: str = "") -> Iterator[str]:
    yield ""
    yield f"{name}  {told}".rstrip()


def _fields(width: int, *pairs: tuple[str, Any]) -> Iterator[str]:
    """`label  value`, wrapped; pairs without a value are left out."""
    for label, value in pairs:
        if value is None or value == "":
            continue
        yield from _wrapped(f"{label:<{LABEL}}", shown(str(value)), width)


def _wrapped(label: str, text: str, width: int) -> list[str]:
    lead = INDENT + label
    return textwrap.wrap(
        text,
        max(width, len(lead) + 20),
        initial_indent=lead,
        subsequent_indent=" " * len(lead),
        break_on_hyphens=False,
    ) or [lead.rstrip()]


def _quoted(text: str, width: int) -> Iterator[str]:
    """What somebody wrote, line by line, behind a bar."""
    for line in shown(text, lines=True).split("\n"):
        bar = INDENT + "│ "
        yield from textwrap.wrap(
            line,
            max(width, 30),
            initial_indent=bar,
            subsequent_indent=bar,
            drop_whitespace=False,
            replace_whitespace=False,
        ) or [bar.rstrip()]


def _prompt(prompt: Story, width: int) -> Iterator[str]:
    told = f"{shown(prompt['prompt_id'])}, source {shown(prompt['source'])}"
    yield from _heading("PROMPT", f"{told}, {prompt['tokens']} tokens as executed")
    yield from _quoted(prompt["text"], width)
    metadata = ", ".join(f"{key}={value!r}" for key, value in prompt["metadata"].items())
    yield from _fields(
        width,
        ("answer", prompt["answer"]),
        ("metadata", metadata),
        ("executed", prompt["executed"]),
        ("ids", " ".join(map(str, prompt["token_ids"]))),
    )


def _response(response: Story, width: int) -> Iterator[str]:
    yield from _heading(
        "RESPONSE",
        f"{response['tokens']} tokens, {response['actions']} of them actions; "
        f"{response['end']} ({response['end_reason']})",
    )
    if response["text"] is not None:
        yield from _quoted(response["text"], width)


_COLUMNS = (
    ("rollout_log_prob", "rollout", 11, "{:.6f}"),
    ("old_log_prob", "old", 11, "{:.6f}"),
    ("gap", "gap", 9, "{:+.1e}"),
    ("ref_log_prob", "ref", 11, "{:.6f}"),
    ("kl", "kl", 9, "{:.2e}"),
    ("step_reward", "step", 9, "{:.4f}"),
    ("value", "value", 10, "{:.5f}"),
    ("shaped_rewards", "reward", 10, "{:.5f}"),
    ("returns", "return", 10, "{:.5f}"),
    ("advantages", "advantage", 11, "{:+.6f}"),
)


def _table(tokens: Sequence[Story], most: int | None) -> Iterator[str]:
    columns = [column for column in _COLUMNS if column[0] in tokens[0]]
    yield ""
    head = "".join(f"{name:>{wide}}" for _, name, wide, _ in columns)
    yield f"{INDENT}{'token':>5} {'id':>7}  {'piece':<{PIECE}}{head}  action"
    cut = most is not None and len(tokens) > most
    first = max(most - TAIL, 1) if cut else len(tokens)
    for at, token in enumerate(tokens):
        if cut and first <= at < len(tokens) - (most - first):
            if at == first:
                yield f"{INDENT}  … {len(tokens) - most} tokens left out; --tokens all shows them"
            continue
        cells = "".join(
            f"{'-' if token[key] is None else form.format(token[key]):>{wide}}"
            for key, _, wide, form in columns
        )
        piece = "" if token["piece"] is None else shown(token["piece"])
        piece = piece if len(piece) < PIECE else piece[: PIECE - 2] + "…"
        action = "yes" if token["action"] else "no"
        yield f"{INDENT}{token['token']:>5} {token['id']:>7}  {piece:<{PIECE}}{cells}  {action}"


def _generation(story: Story, width: int) -> Iterator[str]:
    made, of = story["generation"], story["generation"]["seed_of"]
    yield from _heading("GENERATION")
    same = made["seed"] == made["seed_recomputed"]
    seed = (
        f"{made['seed']} = 63 bits of sha256(run seed {of['run_seed']}, iteration "
        f"{of['iteration']}, prompt {of['prompt_id']}, candidate {of['candidate']})"
    )
    seed += ", recomputed: equal" if same else f"; by this rule {made['seed_recomputed']}"
    sampling = ", ".join(f"{key} {value}" for key, value in made["sampling"].items())
    yield from _fields(
        width,
        ("version", made["version"]),
        ("replica", made["replica"]),
        ("seed", seed),
        ("sampling", sampling),
        ("time", f"{made['started']} to {made['finished']}, {made['seconds']:.3f} s"),
    )


def _reward(reward: Story, width: int) -> Iterator[str]:
    total = "none" if reward["total"] is None else number(reward["total"])
    yield from _heading("REWARD", f"{total}, status {reward['status']} ({reward['kind']})")
    for name, part in reward["components"].items():
        weight = part["weight"]
        counted = "no weight in the recipe" if weight is None else f"× weight {number(weight)}"
        if weight == 0:
            counted += " (reported, not counted)"
        elif weight is not None:
            counted += f" = {number(part['score'] * weight)}"
        if part["applies_to"]:
            counted += f", on tokens {part['applies_to'][0]} to {part['applies_to'][1] - 1}"
        yield f"{INDENT}{shown(name):<{LABEL}}{number(part['score'])} {counted}"
    yield from _fields(width, ("sum", _sum_told(reward)), ("detail", reward["detail"]))
    steps = ", ".join(f"token {at}: {number(value)}" for at, value in reward["step_rewards"])
    yield from _fields(
        width,
        ("steps", steps),
        ("seconds", f"{reward['seconds']:.4f}"),
        ("scorer", reward["scorer_version"]),
    )


def _sum_told(reward: Story) -> str | None:
    total, weighted = reward["total"], reward["weighted_sum"]
    if weighted is None or total is None:
        return None
    if total == weighted:
        return f"{number(weighted)}, the total"
    return f"{number(weighted)}; the total is {number(total)}, by another rule of the recipe's"


def _group(story: Story, width: int) -> Iterator[str]:
    group, own = story["group"], story["candidate"]
    yield from _heading(
        "GROUP",
        f"{shown(group['group_id'])}: {len(group['siblings'])} of {group['asked_for']} candidates, "
        f"{group['compared']} compared",
    )
    yield f"{INDENT}  cand.    reward  status   tokens  end         verdict           advantage"
    for other in group["siblings"]:
        mark = ">" if other["candidate"] == own else " "
        yield (
            f"{INDENT}{mark} {other['candidate']:>5} {number(other['reward']):>9}  "
            f"{other['status']:<8} {other['tokens']:>6}  {other['end']:<11} "
            f"{other['verdict'] or '-':<17} {number(other['advantage']):>9}"
        )
    yield from _fields(
        width,
        ("mean", number(group["mean"], 10)),
        ("std", None if group["std"] is None else f"{number(group['std'], 10)} (ddof 1)"),
        (
            "advantage" if story["advantage"]["trained_on"] is not None else "it would be",
            formula(story["advantage"], group),
        ),
        ("trained on", trained_on(story["advantage"])),
    )


def _training(training: Story, width: int) -> Iterator[str]:
    yield from _heading("TRAINING", training["words"])
    if training["minibatch"] is None:
        return
    update = training["update"]
    weight = (
        f"{training['reduction']}: an action token counts 1/{training['token_weight_is_one_over']} "
        f"of the loss ({training['minibatch_tokens']} tokens, "
        f"{training['minibatch_sequences']} sequences)"
    )
    if update is None:
        told = "none is recorded in updates.jsonl: the run ended before, or the line is missing"
    elif not update["steps"]:
        told = f"{update['from']} → {update['to']}, but no step of this minibatch is recorded"
    else:
        steps = "; ".join(map(_step, update["steps"]))
        told = f"{update['from']} → {update['to']}; {steps}"
    if training["times_trained"] > 1:
        told += f"; RECORDED {training['times_trained']} TIMES"
    yield from _fields(
        width,
        ("minibatch", f"{training['minibatch']} of {training['minibatches']} (from 0)"),
        ("weight", weight),
        ("update", told),
        ("critic", update and "; ".join(map(_step, update["critic_steps"]))),
    )


def _step(step: Story) -> str:
    done = "stepped" if step["stepped"] else f"no step: {step['skipped_reason']}"
    epoch = f"pass {step['epoch']}: " if step.get("epoch") else ""
    return (
        f"{epoch}{done}, loss {number(step['loss'])}, gradient norm {number(step['grad_norm'])}, "
        f"learning rate {number(step['lr'])}"
    )


def _versions(versions: Story, width: int) -> Iterator[str]:
    yield from _heading("VERSIONS", "by whom the columns were made, and what was learnt from them")
    roles: dict[str, list[str]] = {}
    for role, version_id in versions["roles"].items():
        roles.setdefault(version_id, []).append(role)
    for version_id, made in roles.items():
        line = versions["known"].get(version_id)
        label = ", ".join(made)
        if line is None:
            yield from _fields(width, (label, f"{version_id}: UNKNOWN to versions.jsonl"))
            continue
        told = (
            f"{version_id}: {line['role']} at optimizer step {line['optimizer_step']}, attempt "
            f"{line['update_attempt']}; weights {line['weight_manifest_hash']}"
        )
        if "rollout" in made:
            held, same = line["generator_held"], line["weight_manifest_hash"]
            if held is None:
                told += "; unverified: not read back from the generator (rollout.verify_every)"
            else:
                told += "; the generator held " + ("the same" if held == same else "OTHERS")
        yield from _fields(width, (label, told))


def _recipe(story: Story, width: int) -> Iterator[str]:
    sealed = "the sealed one" if story["recipe_is_sealed_one"] else "NOT THE HASH OF recipe.yaml"
    yield from _heading("RECIPE", f"{story['recipe_hash']} ({sealed})")
    told = ", ".join(
        f"{key}={value}" for key, value in story["recipe"].items() if value is not None
    )
    yield from _wrapped("", shown(told), width)
