"""docs/metrics.md names every number that a row has, and no other.

Not covered: that what the page says of a number is so.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.audit import losses
from megarl.observe import metrics, row
from megarl.rollout.groups import select
from megarl.rollout.requests import LostReason
from megarl.rollout.selection import VERDICTS
from tests.algorithms.make_credit import Row, make_facts
from tests.data.make_rules import make_rules

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
NAMES = re.findall(
    r"`([a-z_]+/[^`\s]+|iteration)`", "\n".join(re.findall(r"^\| (`.*?) \| ", PAGE, re.M))
)
PLACE = r"<[a-z]+>"
WRITERS = (
    "observe/row.py",
    "observe/timeline.py",
    "algorithms/credit_numbers.py",
    "evaluation/numbers.py",
    "run.py",
    "run_outputs.py",
    "modes/only.py",
    "modes/score_again.py",
)
"""Where rows get their names."""
FILLED_IN = {
    "reward/{name}": ["reward/exact_match"],
    "reward/{name}/scored": ["reward/exact_match/scored"],
    "reward/unscored/{status}": ["reward/unscored/timeout", "reward/unscored/error"],
    "{name}/min": ["reward/min", "reward/exact_match/min"],
    "{name}/max": ["reward/max", "reward/exact_match/max"],
    "rollout/epoch/{name}": ["rollout/epoch/train"],
    "rollout/prompts/source/{name}": ["rollout/prompts/source/train"],
    "reward/source/{name}": ["reward/source/train"],
    "response/length/source/{name}": ["response/length/source/train"],
    "response/truncated/source/{name}": ["response/truncated/source/train"],
    "groups/zero_variance/source/{name}": ["groups/zero_variance/source/train"],
    "groups/{name}": [],  # of a selection, below
    "lost/{reason}": ["lost/aborted"],
    "drop_rate/{label}/{name}": ["drop_rate/source/train", "drop_rate/length/1-4"],
    "{group}/loss": ["update/loss", "critic/loss"],
    "{group}/grad_norm": ["update/grad_norm", "critic/grad_norm"],
    "{group}/lr": ["update/lr", "critic/lr"],
    "{name}/mean": ["advantage/mean", "return/mean"],
    "{name}/std": ["advantage/std", "return/std", "reward/std", "reward/exact_match/std"],
    "eval/accuracy{suffix}": ["eval/accuracy", "eval/accuracy_sampled"],
    "eval/unscored{suffix}": ["eval/unscored", "eval/unscored_sampled"],
    "eval/lost{suffix}": ["eval/lost", "eval/lost_sampled"],
    "eval/total{suffix}": ["eval/total", "eval/total_sampled"],
    "eval/response_length{suffix}": ["eval/response_length", "eval/response_length_sampled"],
    "eval/truncated{suffix}": ["eval/truncated", "eval/truncated_sampled"],
    "eval/pass@{k}": ["eval/pass@4"],
    "eval/pass@{k}/left_out": ["eval/pass@4/left_out"],
    "{name}/low": ["eval/accuracy/low", "eval/accuracy_sampled/low", "eval/pass@4/low"],
    "{name}/high": ["eval/accuracy/high", "eval/accuracy_sampled/high", "eval/pass@4/high"],
    "eval/probe/{name}{suffix}": ["eval/probe/format", "eval/probe/format_sampled"],
    "eval/probe/{name}/unscored{suffix}": [
        "eval/probe/format/unscored",
        "eval/probe/format/unscored_sampled",
    ],
    "eval/prompts/source/{source}": ["eval/prompts/source/sums"],
    "eval/accuracy{suffix}/source/{source}": [
        "eval/accuracy/source/sums",
        "eval/accuracy_sampled/source/sums",
    ],
    "eval/probe/{name}{suffix}/source/{source}": ["eval/probe/format_sampled/source/sums"],
    "eval/pass@{k}/source/{source}": ["eval/pass@4/source/sums"],
    "eval/final/{key.removeprefix('eval/')}": ["eval/final/accuracy"],
    "before/{key}": ["before/reward/mean"],
}
"""What a name with braces stands for in rows."""


def pattern(name: str) -> str:
    """What a name of the page stands for, as a regular expression."""
    parts = re.split(PLACE, name)
    return ".+".join(re.escape(part) for part in parts)


def on_the_page(name: str) -> bool:
    return any(re.fullmatch(pattern(known), name) for known in NAMES)


def written(path: Path) -> Iterator[str]:
    """Names of metrics among a file's texts; what is filled in stands in braces."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    filled = [node for node in nodes if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for node in filled for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            text = ast.unparse(node)[2:-1]
        elif isinstance(node, ast.Constant) and id(node) not in parts:
            text = node.value
        else:
            continue
        if isinstance(text, str) and re.fullmatch(r"(\{\w+\}|[a-z_]+)/[\w{}/.'()@]+", text):
            yield text


@pytest.mark.parametrize("path", WRITERS)
def test_every_name_that_is_written_is_on_the_page(path: str) -> None:
    names = list(written(ROOT / "megarl" / path))
    assert names
    for name in names:
        for text in FILLED_IN[name] if "{" in name else [name]:
            assert on_the_page(text), text


def test_the_names_that_are_shown_or_asked_for_are_on_the_page() -> None:
    assert all(on_the_page(name) for name in metrics.SHOWN)
    assert on_the_page(losses.LOG_RATIO)
    means = [*row._POLICY_MEANS.values(), *row._CRITIC_MEANS.values()]
    assert all(on_the_page(name) for name in means)


def test_the_page_names_every_verdict_and_reason_of_a_loss() -> None:
    for key, values in (("groups/samples_<verdict>", VERDICTS), ("lost/<reason>", LostReason)):
        (line,) = [line for line in PAGE.splitlines() if f"`{key}`" in line]
        assert set(re.findall(r"`([a-z_]+)`", line)) == {str(value) for value in values}


def test_the_page_names_every_number_of_samples_and_groups() -> None:
    facts = make_facts([Row(0, 0, 1.0), Row(0, 1, 0.0), Row(1, 0, 1.0), Row(1, 1, None)])
    selection = select(facts.table, make_rules(group_size=2, prompts=2, longest=8))
    for name in selection[0].counts:
        assert on_the_page(f"groups/{name}"), name
