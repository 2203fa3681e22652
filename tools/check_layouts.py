"""Prove that a model is handed over exactly between every layout of trainer and generator.

Each row is one pair of layouts on one number of ranks, one process a rank, with the real libraries:
the trainer's weights are moved into a generator whose parameters hold nothing but not-a-number,
the digest of every tensor is compared on both sides, and both sides' log-probs of every token with
those of the Hugging Face model in float32. Layouts that do not fit are listed with the reason. Then
the way from Hugging Face files into each of the trainer's layouts and back. See docs/layouts.md.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from megarl.contracts.errors import InputError  # noqa: E402
from tools.layouts.check import BOUND, Options, check  # noqa: E402
from tools.layouts.job import FAULTS  # noqa: E402
from tools.layouts.models import FAMILIES  # noqa: E402

MOST_RANKS = 8


def names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers like 1,2") from error


def bound(text: str) -> float:
    """A positive number; not-a-number would pass every row."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no positive number")
    return value


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__,
        epilog="exit codes: 0 all right; 1 something differs or failed; 2 wrong arguments",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    of = made.add_mutually_exclusive_group()
    of.add_argument(
        "--families",
        type=names,
        default=FAMILIES,
        metavar="NAME,…",
        help=f"tiny random models of these families (default: {','.join(FAMILIES)})",
    )
    of.add_argument("--model", type=Path, metavar="FOLDER", help="an HF model folder instead")
    made.add_argument(
        "--ranks",
        type=numbers,
        default=(1, 2, 3, 4),
        metavar="N,…",
        help="numbers of ranks (default: 1,2,3,4)",
    )
    how_many = made.add_mutually_exclusive_group()
    how_many.add_argument(
        "--quick", action="store_true", help="every family and every kind of layout once"
    )
    how_many.add_argument(
        "--all",
        action="store_true",
        help="every pair; otherwise models with experts take every second one from 4 ranks on",
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="write all rows there")
    made.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of trainer and generator (default: float32); another one needs --bound",
    )
    made.add_argument(
        "--bound",
        type=bound,
        help=f"largest difference of a log-prob from the HF model's (default: {BOUND:.0e})",
    )
    made.add_argument("--fault", choices=FAULTS, help=argparse.SUPPRESS)
    return made


def main(argv: list[str] | None = None) -> int:
    """0: all right, 1: something differs or failed, 2: wrong arguments."""
    top = parser()
    given = top.parse_args(argv)
    unknown = [name for name in given.families if name not in FAMILIES]
    if unknown:
        top.error(f"--families {unknown[0]}: there are {', '.join(FAMILIES)}")
    if not all(1 <= number <= MOST_RANKS for number in given.ranks):
        top.error(f"--ranks {given.ranks}: numbers from 1 to {MOST_RANKS}")
    if given.model is not None and given.quick:
        top.error("--quick is of the tiny models; with --model choose --ranks")
    if given.json is not None and not given.json.resolve().parent.is_dir():
        top.error(f"--json {given.json}: there is no such folder")
    if given.dtype != "float32" and given.bound is None:
        top.error(f"--dtype {given.dtype}: tell --bound too, rounding is of the model")
    options = Options(
        families=given.families,
        model=given.model,
        ranks=tuple(sorted(set(given.ranks))),
        quick=given.quick,
        every=given.all,
        json=given.json,
        dtype=given.dtype,
        bound=BOUND if given.bound is None else given.bound,
        fault=given.fault,
    )
    try:
        return check(options)
    except InputError as error:
        print(f"check_layouts: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
