"""`tools/show_rollouts.py`: read a run's samples like a person."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from megarl.audit import pages, text
from megarl.audit.choose import SORTS, Choice, Row, grouped, in_order, rows_of
from megarl.audit.source import Words, open_sealed, words_of
from megarl.audit.view import RunView
from megarl.contracts.records import STATUSES
from megarl.contracts.samples import End, EndReason
from megarl.experience.columns import SealError
from megarl.observe.output import close_output, prepare_output
from megarl.observe.runfolder import NotARun
from megarl.recipe import RecipeError
from megarl.rollout.selection import VERDICTS

MOST_SAMPLES = 20
MOST_GROUPS = 5
MOST_CHARACTERS = 1500
ENDS = tuple(name.name.lower() for name in (*End, *EndReason))
HELP = """Read a run's samples: prompts, responses, rewards and what became of them.

Without options: the first samples of the last iteration. Ranges are >=0.5, <10, 1 (exactly),
0.2..0.8 (both ends in) and, for rewards, none (not scored); quote them, the shell reads < and >.
Prompts and sources are named whole or with * and ?.

examples:
  python tools/show_rollouts.py runs/quickstart-s1
  python tools/show_rollouts.py runs/quickstart-s1 --iteration 0-4 --reward 0 --contains "so 80"
  python tools/show_rollouts.py runs/quickstart-s1 --groups --prompt 'sum-47-*'
  python tools/show_rollouts.py runs/quickstart-s1 --last 3 --end truncated --sort length --reverse
  python tools/show_rollouts.py runs/quickstart-s1 --iteration 0- --stats
  python tools/show_rollouts.py runs/quickstart-s1 --verdict zero_variance --json | jq .response
  FORCE_COLOR=1 python tools/show_rollouts.py runs/quickstart-s1 --limit 0 | less -R

What a model wrote is shown with control characters as escapes (\\x1b). The whole story of one
sample: python tools/audit.py explain RUN SAMPLE_ID.

exit codes: 0 shown; 1 a sealed file is damaged; 2 wrong arguments, or no run
"""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python tools/show_rollouts.py",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("folder", metavar="RUN", type=Path, help="a run's folder")
    which = top.add_argument_group("which iterations (default: the last one)")
    chosen = which.add_mutually_exclusive_group()
    chosen.add_argument("--iteration", metavar="A-B", help="3, 2-5, 2- or -5")
    chosen.add_argument("--last", type=_above_zero, metavar="N", help="the last N sealed ones")
    which.add_argument(
        "--before", type=int, metavar="K", help="of the run as it was before its resume K"
    )
    only = top.add_argument_group("which samples (all that are named must hold)")
    only.add_argument("--reward", action="append", default=[], metavar="RANGE")
    only.add_argument(
        "--length", action="append", default=[], metavar="RANGE", help="response tokens"
    )
    only.add_argument("--status", choices=[str(status) for status in STATUSES])
    only.add_argument("--end", choices=ENDS, metavar="END", help=", ".join(ENDS))
    only.add_argument(
        "--verdict",
        choices=[str(verdict) for verdict in VERDICTS],
        metavar="VERDICT",
        help=", ".join(VERDICTS),
    )
    only.add_argument(
        "--trained", action=argparse.BooleanOptionalAction, default=None, help="trained, or not"
    )
    only.add_argument("--prompt", metavar="ID", help="prompt id")
    only.add_argument("--source", metavar="NAME", help="the prompt's source")
    only.add_argument("--contains", metavar="TEXT", help="in the response, upper or lower case")
    how = top.add_argument_group("how")
    how.add_argument("--groups", action="store_true", help="whole groups, side by side")
    how.add_argument("--stats", action="store_true", help="one line an iteration instead")
    how.add_argument("--sort", choices=list(SORTS), help="groups: by their mean")
    how.add_argument("--reverse", action="store_true", help="largest (or last) first")
    how.add_argument(
        "--limit",
        type=_natural,
        metavar="N",
        help=f"show so many (0: all; default {MOST_SAMPLES} samples or {MOST_GROUPS} groups)",
    )
    how.add_argument(
        "--chars",
        type=_characters,
        default=MOST_CHARACTERS,
        metavar="N|all",
        help=f"characters of a response (default {MOST_CHARACTERS})",
    )
    how.add_argument("--json", action="store_true", help="JSON lines, whole responses")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """0: shown, 1: a sealed file is damaged, 2: wrong arguments or not a run."""
    arguments = parser().parse_args(argv)
    prepare_output()
    try:
        show(arguments)
        sys.stdout.flush()
    except SealError as error:
        print(f"show_rollouts: {error}", file=sys.stderr)
        return 1
    except (NotARun, RecipeError, ValueError) as error:
        print(f"show_rollouts: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        close_output()
    except KeyboardInterrupt:
        return 130
    return 0


def show(arguments: argparse.Namespace) -> None:
    """Raises `NotARun`, `RecipeError`, `SealError`, and `ValueError` for a range."""
    choice = _choice(arguments)
    source = open_sealed(arguments.folder, arguments.before)
    numbers = _numbers(arguments, source)
    if arguments.stats:
        _show_statistics(arguments, source, numbers, choice)
        return
    without_words = None
    found: list[Row] = []
    siblings: list[Row] = []
    for number, words in _with_words(source, numbers):
        if words.tokens is None:
            without_words = words.told
        rows = list(rows_of(source.iteration(number).sealed, words))
        mine = [row for row in rows if choice.wants(row)]
        found += mine
        if arguments.groups:
            names = {row.group_id for row in mine}
            siblings += [row for row in rows if row.group_id in names]
    if arguments.groups:
        _show_groups(arguments, siblings, found)
    else:
        _show_samples(arguments, found)
    if without_words is not None and not arguments.json:
        print(f"note: {text.shown(without_words)}", file=sys.stderr)


def _with_words(source: RunView, numbers: list[int]) -> Iterator[tuple[int, Words]]:
    """Iterations with the words that each was made with. Raises `SealError`."""
    words_at = lru_cache(maxsize=None)(lambda hash_: words_of(source, hash_))
    for number in numbers:
        yield number, words_at(source.iteration(number).manifest.header.tokenizer_hash)


def _show_samples(arguments: argparse.Namespace, found: list[Row]) -> None:
    ordered = [
        rows[0] for rows in in_order([[r] for r in found], arguments.sort, arguments.reverse)
    ]
    chosen = _limited(ordered, arguments.limit, MOST_SAMPLES)
    if arguments.json:
        for row in chosen:
            print(json.dumps(row.as_json()))
        return
    pages.print_samples(pages.open_console(), chosen, arguments.chars)
    _tell_count(len(chosen), len(ordered), "samples")


def _show_groups(arguments: argparse.Namespace, siblings: list[Row], found: list[Row]) -> None:
    ordered = in_order(grouped(siblings), arguments.sort, arguments.reverse)
    chosen = _limited(ordered, arguments.limit, MOST_GROUPS)
    wanted = {row.sample_id for row in found}
    if arguments.json:
        for rows in chosen:
            told = {"group_id": rows[0].group_id, "prompt": rows[0].prompt}
            print(json.dumps(told | {"samples": [row.as_json() for row in rows]}))
        return
    pages.print_groups(pages.open_console(), chosen, wanted, arguments.chars)
    _tell_count(len(chosen), len(ordered), "groups")


def _show_statistics(
    arguments: argparse.Namespace,
    source: RunView,
    numbers: list[int],
    choice: Choice,
) -> None:
    lines = []
    for number, words in _with_words(source, numbers):
        rows = [row for row in rows_of(source.iteration(number).sealed, words) if choice.wants(row)]
        if rows:
            lines.append(pages.statistics(rows))
    if arguments.json:
        for line in lines:
            print(json.dumps(line))
    elif lines:
        pages.print_statistics(lines)
    else:
        _tell_count(0, 0, "samples")


def _choice(arguments: argparse.Namespace) -> Choice:
    return Choice(**{name: getattr(arguments, name) for name in Choice.__dataclass_fields__})


def _numbers(arguments: argparse.Namespace, source: RunView) -> list[int]:
    known = list(source.sealed)
    if arguments.iteration is not None:
        return text.iteration_range(arguments.iteration, known)
    return known[-(arguments.last or 1) :]


def _limited(ordered: list, limit: int | None, default: int) -> list:
    limit = default if limit is None else limit
    return ordered[:limit] if limit else ordered


def _tell_count(shown: int, found: int, what: str) -> None:
    if found == 0:
        print(f"no {what} are like this; --stats tells what there is")
    elif shown < found:
        print(f"{shown} of {found} {what} shown; --limit 0 shows all")
    else:
        print(f"{found} {what}")


def _natural(value: str) -> int:
    if not value.isdigit():
        raise argparse.ArgumentTypeError(f"{value!r} is no number of 0 or more")
    return int(value)


def _above_zero(value: str) -> int:
    if not value.isdigit() or int(value) == 0:
        raise argparse.ArgumentTypeError(f"{value!r} is no number above 0")
    return int(value)


def _characters(value: str) -> int | None:
    return None if value == "all" else _above_zero(value)
