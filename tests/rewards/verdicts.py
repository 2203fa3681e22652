"""The scoring tables in `tests/rewards/tables`, and what graders say about them.

    python -m tests.rewards.verdicts            # every table: ours against math-verify alone
    python -m tests.rewards.verdicts math code  # some

A row's `right` was decided by hand from mathematics, not by running a grader. Rows whose verdict is
a matter of policy (is 28 an answer to 28%? is 6:8 one to 3:4?) are left out.

`math.jsonl`: gold answers and responses as in MATH, AIME and olympiad sets. `gsm8k.jsonl`: the gold
text ends in `#### number`. `choice.jsonl`: a letter. `code.jsonl`: a program and its unit tests.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.rewards.scorer import Response, Scorer, load_scorer, parts_of

TABLES = Path(__file__).parent / "tables"
SCORERS = {"math": "math", "gsm8k": "gsm8k", "choice": "multiple_choice", "code": "code"}
"""Table → built-in scorer."""

OPTIONS: dict[str, dict[str, Any]] = {"code": {"case_seconds": 1.0, "total_seconds": 60.0}}
"""Options of a table's scorer other than its defaults. Of programs that never end one second is
enough; a minute's waiting for a CPU is allowed, so that verdicts come on a busy machine too."""


@dataclass(frozen=True)
class Row:
    table: str
    line: int
    kind: str
    """The row's `class`."""
    gold: str
    """For `code`: the unit tests, as JSON."""
    response: str
    right: bool
    why: str

    @property
    def key(self) -> tuple[str, str, str]:
        """Names the row: its table, gold answer and response."""
        return self.table, self.gold, self.response


def rows_of(table: str) -> list[Row]:
    """The table's rows, in the file's order."""
    rows = []
    path = TABLES / f"{table}.jsonl"
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        row = json.loads(line)
        gold = json.dumps(row["tests"]) if table == "code" else row["gold"]
        rows.append(
            Row(table, number, row["class"], gold, row["response"], row["right"], row["why"])
        )
    return rows


def ours(table: str, threads: int = 1) -> list[bool | str]:
    """The built-in scorer's verdict on each row, or its error's text where it cannot score one."""
    scorer, _ = load_scorer(SCORERS[table], OPTIONS.get(table, {}))
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda row: _verdict(scorer, row), rows_of(table)))


def _verdict(scorer: Scorer, row: Row) -> bool | str:
    try:
        return parts_of(scorer(Response(row.response, row.gold, "", True, "eos")), 0).total == 1.0
    except Exception as error:  # a row that cannot be scored is told apart from a wrong one
        return f"{type(error).__name__}: {error}"


def math_verify_alone(table: str) -> list[bool] | None:
    """math-verify's verdicts in its usual use; None where it has none to give (`code`).

    It sets alarms, so it runs in the main thread only.
    """
    from math_verify import StringExtractionConfig, parse, verify

    letters = [StringExtractionConfig(strings=tuple("ABCDEFGHIJ"))]
    check: dict[str, Callable[[Row], bool]] = {
        "math": lambda row: verify(parse(f"${row.gold}$"), parse(row.response)),
        "gsm8k": lambda row: verify(
            parse(f"${row.gold.rpartition('####')[2].strip()}$"), parse(row.response)
        ),
        "choice": lambda row: verify(parse(row.gold, letters), parse(row.response, letters)),
    }
    return [check[table](row) for row in rows_of(table)] if table in check else None


def wrong(table: str, verdicts: list[bool | str]) -> list[tuple[Row, bool | str]]:
    """The rows on which these verdicts are not the right ones."""
    return [
        (row, verdict)
        for row, verdict in zip(rows_of(table), verdicts, strict=True)
        if verdict is not row.right
    ]


def report(table: str, threads: int) -> str:
    """Rows, our wrong ones and math-verify's by class; then the wrong rows themselves."""
    rows = rows_of(table)
    our = wrong(table, ours(table, threads))
    alone = math_verify_alone(table)
    theirs = None if alone is None else wrong(table, alone)
    lines = [f"{table + ': class':24}{'rows':>6}{'ours wrong':>12}{'math-verify wrong':>19}"]
    for kind in [*dict.fromkeys(row.kind for row in rows), None]:
        counts = [
            "-" if some is None else sum(kind in (None, row.kind) for row in some)
            for some in (rows, _rows(our), _rows(theirs))
        ]
        name = "all" if kind is None else kind
        lines.append(f"{name:24}{counts[0]:>6}{counts[1]:>12}{counts[2]:>19}")
    for who, some in (("ours", our), ("math-verify", theirs or [])):
        for row, said in some:
            verdict = {True: "accepts", False: "refuses"}.get(said, said)  # type: ignore[call-overload]
            lines.append(
                f"{who} {verdict}  {table}.jsonl:{row.line}  {row.gold!r} -> {row.response!r}"
                f"  ({row.why})"
            )
    return "\n".join(lines)


def _rows(pairs: list[tuple[Row, bool | str]] | None) -> list[Row] | None:
    return None if pairs is None else [row for row, _ in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "tables", nargs="*", metavar="TABLE", help=f"of {', '.join(SCORERS)}; none: all of them"
    )
    parser.add_argument("--threads", type=int, default=2, help="for unit tests of programs")
    arguments = parser.parse_args()
    for table in set(arguments.tables) - set(SCORERS):
        parser.error(f"{table!r} is no table")
    for table in arguments.tables or SCORERS:
        print(report(table, arguments.threads if table == "code" else 1) + "\n")


if __name__ == "__main__":
    main()
