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
exit codes: 0 done; 1 verify found differences; 2 could not be done, one line says why
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
    """0: done, 1: differences, 2: could not be done."""
    arguments = parser().parse_args(argv)
    crew = Processes()
    try:
        with processes() as crew:
            try:
                code = COMMANDS[arguments.command].run(arguments, crew)
            except InputError as error:  # on every process
                if crew.is_main:
                    print(f"convert {arguments.command}: {error}", file=sys.stderr, flush=True)
                # torchrun ends the others with the first that is gone: not before it is told.
                crew.gather(None)
                return 2
        sys.stdout.flush()
        return code
    except (InputError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # Whoever read the output has seen enough; nothing is left to flush at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        told = str(error) if isinstance(error, InputError) else one_line(error)
        if crew.is_main:
            print(f"convert {arguments.command}: {told}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
