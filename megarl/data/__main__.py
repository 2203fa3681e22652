"""`python -m megarl.data`: read and check a recipe's prompts as a run does, and report on them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

USAGE = """usage: python -m megarl.data RECIPE [key=value …]

Reads the prompts of data.train and data.eval and makes every check of them that a run makes before
it loads its model. Needs the tokenizer of model.path, no weights, no GPU, and starts no ranks.

For each source it prints
  rows      usable and refused ones, by kind, with the first rows and the reason
  tokens    of the prompts after the template: shortest, median, longest, and the limit
  reward    reward names of the rows, and which of reward.scorers (data.eval: eval.probes too)
            score them
  drawn     its share of an iteration's prompts, and how many times its rows come round
then how many held-out prompts are training prompts, and the first prompt with its special tokens
by name: look whether the question and the header of the assistant are in it.

Notes and errors go to standard error. A row that is refused beyond data.max_refused_share is an
error here too; raise the share on the command line to see all of a file.

  RECIPE     a YAML file; key=value changes one key of it for this command

  python -m megarl.data recipes/mine.yaml
  python -m megarl.data recipes/mine.yaml data.max_refused_share=1
  python -m megarl.data recipes/mine.yaml data.template=chat.jinja data.max_prompt_tokens=1024

What the keys mean: docs/data.md, docs/rewards.md. Exit codes: 0 a run could use the prompts, 2 an
input that cannot be used.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE, end="")
        return 0 if arguments else 2
    # Of transformers, which only reads the tokenizer here.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from megarl.contracts.errors import InputError
    from megarl.data.report import report
    from megarl.data.sets import read_sets
    from megarl.recipe import load_recipe

    unknown = [word for word in arguments if word.startswith("-")]
    try:
        if unknown:
            raise InputError(f"unknown option {unknown[0]}; see python -m megarl.data --help")
        recipe = load_recipe(arguments[0], arguments[1:])
        sets = read_sets(recipe, warn=lambda line: print(f"note: {line}", file=sys.stderr))
    except InputError as error:
        print(f"megarl: error: {error}", file=sys.stderr)
        return 2
    for line in report(recipe, sets):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
