"""Convert model folders between formats, prove that two are the same, look into one.

python tools/convert_ckpt.py COMMAND …
python tools/convert_ckpt.py COMMAND --help
"""

from __future__ import annotations

import argparse
import os
import sys

from megarl.contracts.errors import InputError
from megarl.convert import hf_to_megatron, inspect, megatron_to_hf, reshard, verify
from megarl.convert.interrupts import noticed
from megarl.convert.processes import Processes, one_line, processes

COMMANDS = {
    "hf-to-megatron": hf_to_megatron,
    "megatron-to-hf": megatron_to_hf,
    "reshard": reshard,
    "verify": verify,
    "inspect": inspect,
}
"""Each a module with `LINE`, `HELP`, `add_arguments(parser)` and `run(arguments, processes)`."""
EXAMPLES = """examples:
  python tools/convert_ckpt.py hf-to-megatron models/qwen out/qwen
  python tools/convert_ckpt.py verify models/qwen out/qwen --logits
  python tools/convert_ckpt.py megatron-to-hf runs/mine-s1/checkpoints/iter_000030 out/mine
  python tools/convert_ckpt.py reshard out/qwen out/qwen-tp4 --tp 4
  python tools/convert_ckpt.py inspect out/qwen --tensors

An output appears under its name when it is whole; one that exists is never touched.
exit codes: 0 done; 1 verify found differences; 2 could not be done, one line says why;
130, 143 interrupted by Ctrl-C, SIGTERM
"""


def parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {item.LINE}" for name, item in COMMANDS.items())
    top = argparse.ArgumentParser(
        prog="python tools/convert_ckpt.py",
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


def main(argv: list[str] | None = None) -> int:
    """0: done, 1: differences, 2: could not be done, 130 or 143: interrupted."""
    arguments = parser().parse_args(argv)
    crew = Processes()
    with noticed() as interrupt:
        try:
            with processes() as crew:
                try:
                    code = COMMANDS[arguments.command].run(arguments, crew)
                except InputError as error:  # on every process
                    if interrupt.number is not None:
                        raise
                    _say(arguments, crew, str(error))
                    # torchrun ends the others with the first that is gone: not before it is told.
                    crew.gather(None)
                    return 2
            sys.stdout.flush()
            return code
        except BaseException as error:
            if interrupt.number is not None:
                _say(arguments, crew, _how_it_ended(arguments))
                return 128 + interrupt.number
            if isinstance(error, BrokenPipeError):
                # Whoever read the output has seen enough; nothing is left to flush at exit.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return 0
            if not isinstance(error, InputError | OSError):
                raise
            _say(arguments, crew, one_line(error))
            return 2


def _say(arguments: argparse.Namespace, crew: Processes, line: str) -> None:
    if crew.is_main:
        print(f"convert {arguments.command}: {line}", file=sys.stderr, flush=True)


def _how_it_ended(arguments: argparse.Namespace) -> str:
    out = getattr(arguments, "out", None)
    if out is None:
        return "interrupted"
    return f"interrupted; {out} is there" if out.exists() else "interrupted; nothing was left"
