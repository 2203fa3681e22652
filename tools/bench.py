"""Benchmarks. Each compares or splits up real runs and tells how far its numbers spread.

python tools/bench.py NAME [--json] [options]
python tools/bench.py NAME --help
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.bench import (  # noqa: E402
    checkpoint,
    convert,
    experience,
    invariance,
    logprobs,
    loop,
    packing,
    peer_trl,
    reshard,
    reshard_growth,
    scoring,
)
from tools.bench.harness import Bench, BenchError, report  # noqa: E402

BENCHES: dict[str, Bench] = {
    module.BENCH.name: module.BENCH
    for module in (
        loop,
        peer_trl,
        experience,
        checkpoint,
        convert,
        reshard,
        reshard_growth,
        logprobs,
        packing,
        invariance,
        scoring,
    )
}


def parser() -> argparse.ArgumentParser:
    width = max(map(len, BENCHES))
    listed = "\n".join(f"  {name:<{width}}  {bench.line}" for name, bench in BENCHES.items())
    top = argparse.ArgumentParser(
        prog="python tools/bench.py",
        description=f"{__doc__}\nbenches:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = top.add_subparsers(dest="name", metavar="NAME", required=True)
    for name, bench in BENCHES.items():
        own = names.add_parser(
            name,
            description=f"{bench.line}\n\n{bench.text}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        own.add_argument("--json", action="store_true", help="one JSON object as the last line")
        bench.add_options(own)
    return top


def main(argv: list[str] | None = None) -> int:
    top = parser()
    options = top.parse_args(argv)
    for name, value in vars(options).items():
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            top.error(f"--{name.replace('_', '-')} {value}: at least 1")
    bench = BENCHES[options.name]
    try:
        result = bench.run(options)
    except BenchError as error:
        print(f"bench {bench.name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    report(bench, result, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
