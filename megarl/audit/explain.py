"""`audit explain`: one sample's whole story, found by its id or by its numbers."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from pathlib import Path

import numpy as np

from megarl.audit import text
from megarl.audit.earlier import EarlierView, rolled_back
from megarl.audit.source import NotThere, open_sealed, words_of
from megarl.audit.story import story
from megarl.audit.tell import tell
from megarl.audit.view import RunView
from megarl.experience.columns import SealError
from megarl.experience.load import SealedIteration
from megarl.observe.output import prepare_output
from megarl.observe.runfolder import NotARun
from megarl.recipe import RecipeError

LINE = "the whole story of one sample: prompt, tokens, reward, group, advantage, update, weights"
HELP = f"""{LINE}

A sample is named run/iteration/prompt/candidate, as metrics, show_rollouts and errors name it; the
run may be left out. Its numbers do as well: --iteration 3 --draw 7 --candidate 0.

examples:
  python tools/audit.py explain runs/quickstart-s1 quickstart-s1/3/sum-47-33-1/0
  python tools/audit.py explain runs/quickstart-s1 3/sum-47-33-1/0
  python tools/audit.py explain runs/quickstart-s1 --iteration 3 --draw 7 --candidate 0
  python tools/audit.py explain runs/quickstart-s1 3/sum-47-33-1/0 --json | jq .advantage

An iteration that a resume rolled back was made again; what it first was lies in resumes/, and
--before K tells of the run as it was before resume K.

exit codes: 0 told; 1 a sealed file is damaged; 2 no such run or sample
"""
MOST_TOKENS = 64
NEAREST = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN", type=Path, help="a run's folder")
    parser.add_argument(
        "sample_id", metavar="SAMPLE_ID", nargs="?", help="[run/]iteration/prompt/candidate"
    )
    parser.add_argument("--iteration", type=int, metavar="N", help="with --draw and --candidate")
    parser.add_argument("--draw", type=int, metavar="D", help="the prompt's place in its iteration")
    parser.add_argument("--candidate", type=int, metavar="C", help="which response to the prompt")
    parser.add_argument(
        "--before", type=int, metavar="K", help="the run as it was before its resume K"
    )
    parser.add_argument(
        "--tokens",
        type=_most_tokens,
        default=MOST_TOKENS,
        metavar="N|all",
        help=f"tokens told in the table (default {MOST_TOKENS})",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Prints the story; returns the exit code."""
    prepare_output()
    try:
        source = open_sealed(arguments.folder, arguments.before)
        sealed, row = locate(source, arguments)
        words = words_of(source, sealed.manifest.header.tokenizer_hash)
        told = story(source, sealed, row, words)
    except (NotThere, NotARun, RecipeError) as error:
        print(f"audit explain: {error}", file=sys.stderr)
        return 2
    except SealError as error:
        print(f"audit explain: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(told, allow_nan=False))
    else:
        print("\n".join(tell(told, text.width(), arguments.tokens)))
    return 0


def _most_tokens(value: str) -> int | None:
    if value == "all":
        return None
    if not value.isdigit() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value!r} is neither a number above 0 nor all")
    return int(value)


def locate(source: RunView, arguments: argparse.Namespace) -> tuple[SealedIteration, int]:
    """(iteration, canonical row) of the sample that is asked for.

    Raises `NotThere` in one line, with ids that are near.
    """
    numbers = (arguments.iteration, arguments.draw, arguments.candidate)
    if arguments.sample_id is None:
        if None in numbers:
            raise NotThere(
                "name a sample, [run/]iteration/prompt/candidate, or give all three of "
                "--iteration, --draw and --candidate"
            )
        sealed = _iteration(source, arguments.iteration)
        draw = arguments.draw
        if not 0 <= draw < len(sealed.prompts):
            raise NotThere(
                f"--draw {draw}: iteration {arguments.iteration} has draws 0 to "
                f"{len(sealed.prompts) - 1}"
            )
        return sealed, _row(sealed, draw, arguments.candidate)
    if numbers != (None, None, None):
        raise NotThere("give a sample id or --iteration, --draw and --candidate, not both")
    iteration, prompt_id, candidate = parse(source, arguments.sample_id)
    sealed = _iteration(source, iteration)
    names = [prompt["prompt_id"] for prompt in sealed.prompts]
    if prompt_id not in names:
        raise NotThere(_no_prompt(source, iteration, prompt_id, names))
    return sealed, _row(sealed, names.index(prompt_id), candidate)


def parse(source: RunView, sample_id: str) -> tuple[int, str, int]:
    """(iteration, prompt id, candidate); a prompt id may hold slashes itself."""
    head, *rest = sample_id.split("/")
    name = str(source.recipe.run.name)
    if head == name and len(rest) >= 3 and rest[0].isdigit():
        head, *rest = rest
    if not head.isdigit() and len(rest) >= 3 and rest[0].isdigit():
        raise NotThere(f"{sample_id}: a sample of run {head}; {source.folder} is run {name}")
    if len(rest) < 2 or not head.isdigit() or not rest[-1].isdigit():
        raise NotThere(
            f"{sample_id}: a sample id is [run/]iteration/prompt/candidate, "
            f"like {name}/{source.sealed[0]}/PROMPT/0"
        )
    return int(head), "/".join(rest[:-1]), int(rest[-1])


def _iteration(source: RunView, iteration: int) -> SealedIteration:
    if iteration not in source.sealed:
        raise NotThere(
            f"iteration {iteration} is not on the disk; {source.folder} has "
            f"{text.ranges(list(source.sealed))}{_aside(source, iteration)}"
        )
    return source.iteration(iteration).sealed


def _aside(source: RunView, iteration: int) -> str:
    """Where an iteration lies that a resume rolled back."""
    views = [] if isinstance(source, EarlierView) else rolled_back(source, iteration)
    told = (f"{view.file('')} (--before {view.resumed.number})" for view in views)
    return f"; it was rolled back, and lies in {' and '.join(told)}" if views else ""


def _row(sealed: SealedIteration, draw: int, candidate: int) -> int:
    samples = sealed.samples
    rows = np.flatnonzero((samples.draw_index == draw) & (samples.candidate == candidate))
    if len(rows):
        return int(rows[0])
    there = samples.candidate[samples.draw_index == draw].tolist()
    group = sealed.identities.group_id(draw)
    if 0 <= candidate < sealed.manifest.header.sampling.n:
        raise NotThere(f"{group}/{candidate}: was never made; there are {text.ranges(there)}")
    raise NotThere(f"{group} has no candidate {candidate}; there are {text.ranges(there)}")


def _no_prompt(source: RunView, iteration: int, prompt_id: str, names: list[str]) -> str:
    told = f"iteration {iteration} drew no prompt {prompt_id}"
    others = [
        number
        for number in source.sealed
        if number != iteration
        and any(prompt["prompt_id"] == prompt_id for prompt in source.iteration(number).prompts)
    ]
    if others:
        told += f"; it was drawn in iteration {text.ranges(others)}"
    near = difflib.get_close_matches(prompt_id, names, n=NEAREST, cutoff=0.5)
    if near:
        told += f"; near it are {', '.join(near)}"
    return text.shown(told)
