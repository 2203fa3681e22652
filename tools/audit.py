"""Audit a run after the fact: is it whole, where did a sample come from, do two runs differ?

python tools/audit.py COMMAND RUN …
python tools/audit.py COMMAND --help
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megarl.audit import diff, explain, recompute, verify  # noqa: E402
from megarl.experience.columns import SealError  # noqa: E402
from megarl.observe.runfolder import NotARun  # noqa: E402
from megarl.recipe import RecipeError  # noqa: E402

COMMANDS = {"verify": verify, "explain": explain, "recompute": recompute, "diff": diff}
"""Each a module with `LINE`, `HELP`, `add_arguments(parser)` and `run(arguments) -> exit code`."""
EXAMPLES = """examples:
  python tools/audit.py verify runs/quickstart-s1
  python tools/audit.py explain runs/quickstart-s1 3/sum-47-33-1/0
  python tools/audit.py recompute runs/quickstart-s1 algorithm.group_std=none
  python tools/audit.py diff runs/a runs/b

exit codes: 0 fine; 1 findings; 2 wrong arguments or not a run
"""


def parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {item.LINE}" for name, item in COMMANDS.items())
    top = argparse.ArgumentParser(
        prog="python tools/audit.py",
        description=f"{__doc__}\ncommands:\n{listed}",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        own = names.add_parser(
            name,
            description=module.HELP,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(own)
    return top


def _take_overrides(arguments: argparse.Namespace, later: list[str]) -> bool:
    """`RUN --out FILE key=value`: argparse takes up no list of positionals again behind an option.
    False unless the command has overrides and `later` is nothing else."""
    if not hasattr(arguments, "overrides"):
        return False
    arguments.overrides = [*arguments.overrides, *later]
    return all("=" in word and not word.startswith("-") for word in later)


def main(argv: list[str] | None = None) -> int:
    """0: fine, 1: findings, 2: wrong arguments or not a run."""
    top = parser()
    arguments, later = top.parse_known_args(argv)
    if later and not _take_overrides(arguments, later):
        top.error(f"unrecognized arguments: {' '.join(later)}")
    try:
        code = COMMANDS[arguments.command].run(arguments)
        sys.stdout.flush()
        return code
    except (NotARun, RecipeError) as error:
        print(f"audit {arguments.command}: {error}", file=sys.stderr)
        return 2
    except SealError as error:
        print(f"audit {arguments.command}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever read the output has seen enough; nothing is left to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
