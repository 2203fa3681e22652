"""`code`: 1 when the program in the response passes its row's unit tests; else 0, or their share.

The program runs in a sandbox (`sandbox.py`), which knows inputs and arguments but no expected
output: what comes out is compared outside of it. What the program does, however bad, is its score;
a sandbox that fails by itself is an error, and so is a machine that is too busy to run the program,
or out of memory.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass

from megarl.rewards import code_runner
from megarl.rewards.code_tests import Case, UnitTests, read_tests, same_text, same_value
from megarl.rewards.exact import NOT_FINISHED
from megarl.rewards.options import check_flag, check_number, check_text, check_whole, check_word
from megarl.rewards.sandbox import (
    MEMORY,
    MIB,
    PROCESSES,
    Ended,
    Limits,
    Maker,
    Sandbox,
    SandboxError,
)
from megarl.rewards.sandbox_setup import find_maker
from megarl.rewards.scorer import NO_ANSWER, Response, RewardParts, Scorer

PASSED = ""
PYTHON_TAGS = ("", "python", "python3", "py")
FENCE = re.compile(r"^([ \t]*)(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*$")
DEEPER = 3
"""Columns by which the line that closes a block may stand deeper than the one that opens it; one
that stands deeper, as in a docstring, is a line of the program (CommonMark 0.31, section 4.5)."""

KILLED_FOR = {
    code_runner.TIME: "time_limit",
    code_runner.OUTPUT: "output_limit",
    code_runner.FILES: "files_limit",
    MEMORY: "memory_limit",
    PROCESSES: "process_limit",
}
XCPU = 24
"""Signal of a process that is over its CPU time."""

STARVED_SHARE = 0.1
"""Of `total_seconds`: when it is up and the program waited longer than this for a CPU, the machine
is to blame."""


def make(
    *,
    tests_key: str = "tests",
    take: str = "block",
    score: str = "all",
    case_seconds: float = 4.0,
    total_seconds: float = 8.0,
    cpu_seconds: int = 4,
    memory_mb: int = 512,
    file_mb: int = 16,
    processes: int = 16,
    tolerance: float = 0.0,
    finished: bool = True,
) -> Scorer:
    """Options:

    - `tests_key`: the row's key that holds its tests; a row without it has them as its answer.
      Either `{"style": "stdin", "cases": [{"input": "…", "output": "…"}]}`: the program is a script
      that reads its standard input and writes its standard output; or `{"style": "call",
      "function": "f", "cases": [{"args": […], "kwargs": {…}, "output": …}]}`: the program is
      imported as `solution` and its function called; where it has none of this name, the method of
      its class `Solution`, which is made without arguments. An object, or JSON text of one.
    - `take`: `block`, the last closed block between ```python (or ~~~python) and ``` is the
      program, without one the last between ``` and ```; or `whole`, the response is.
    - `score`: `all`, 1 when every case is passed and else 0, or `share`, the share that is.
    - `case_seconds`: wall time of a case, without that in which it could run but others had the
      CPUs. A case that does not end in it is failed.
    - `total_seconds`: wall time of all cases of a response together, with the waiting. A case that
      does not end in it is failed, unless the program waited more than a tenth of it for a CPU:
      nothing is known of it then. Keep the total below `reward.deadline_seconds`.
    - `cpu_seconds`: CPU time of a process on a case.
    - `memory_mb`: of a process (address space), and of all together.
    - `file_mb`: of a file, and of all together; they are in memory.
    - `processes`: processes and threads at once.
    - `tolerance`: by how much floats of a call may differ, absolutely or relatively.
    - `finished`: a response that was cut off scores 0.

    Outputs are compared line by line, without white space at the ends of lines and without empty
    lines at the end; a script must also end with exit code 0. Results are compared as JSON values.
    Only the standard library can be imported. Each case starts afresh, in an empty folder.

    Raises `ValueError` for a bad option, and when no sandbox can be made here. The scorer raises it
    for tests of another form, and `SandboxError` when a sandbox fails, or the machine is too busy
    or out of memory. Waiting that `sandbox_waits.py` does not see counts as the program's time.
    """
    check_text("tests_key", tests_key)
    check_word("take", take, ("block", "whole"))
    check_word("score", score, ("all", "share"))
    check_flag("finished", finished)
    check_number("case_seconds", case_seconds, 0.01)
    check_number("total_seconds", total_seconds, 0.01)
    for name, count, least in (
        ("cpu_seconds", cpu_seconds, 1),
        ("memory_mb", memory_mb, 64),
        ("file_mb", file_mb, 1),
        ("processes", processes, 1),
    ):
        check_whole(name, count, least)
    check_number("tolerance", tolerance, 0)
    limits = Limits(case_seconds, cpu_seconds, memory_mb, file_mb, processes)
    return _Code(
        find_maker(), limits, total_seconds, tolerance, tests_key, take, score == "share", finished
    )


@dataclass(frozen=True)
class _Code:
    """The scorer with its options."""

    maker: Maker
    limits: Limits
    total_seconds: float
    tolerance: float
    tests_key: str
    take: str
    shares: bool
    finished: bool

    def __call__(self, response: Response) -> RewardParts:
        tests = read_tests(response.answer, response.metadata, self.tests_key)
        if self.finished and not response.finished:
            return RewardParts(0.0, NOT_FINISHED)
        program = response.text if self.take == "whole" else last_block(response.text)
        if program is None or not program.strip():
            return RewardParts(0.0, NO_ANSWER)
        count, passed, failure = len(tests.cases), 0, ""
        told = outcomes(self.maker, program, tests, self.limits, self.total_seconds, self.tolerance)
        with closing(told):
            for said in told:
                passed += said == PASSED
                failure = failure or said
                if failure and not self.shares:
                    break
        if not self.shares:
            return RewardParts(float(passed == count), failure)
        detail = f"passed {passed}/{count}: {failure}" if failure else ""
        return RewardParts(passed / count, detail)


def last_block(text: str) -> str | None:
    """The last closed block that is marked as Python, without one the last that is not marked;
    without its indentation.

    Fences are ``` or, with a mark, ~~~.
    """
    found: dict[bool, str] = {}
    opened = None
    for line in text.splitlines():
        fence = FENCE.match(line)
        if opened is None:
            # A line of tildes alone is more often an ornament.
            if fence and (fence[2][0] == "`" or fence[3].lower() in PYTHON_TAGS[1:]):
                opened, lines = fence, []
        elif fence and _closes(fence, opened):
            if (tag := opened[3].lower()) in PYTHON_TAGS:
                found[bool(tag)] = "\n".join(lines) + "\n"
            opened = None
        else:
            lines.append(line.removeprefix(opened[1]))
    return found.get(True, found.get(False))


def _closes(fence: re.Match[str], opened: re.Match[str]) -> bool:
    deep, start = (len(mark[1].expandtabs(4)) for mark in (fence, opened))
    return not fence[3] and fence[2].startswith(opened[2]) and deep - start <= DEEPER


@dataclass
class _Clock:
    """What all cases of a response may take together, and took (seconds)."""

    case: float
    total: float
    spent: float = 0.0
    counted: float = 0.0

    @property
    def left(self) -> float:
        return max(0.0, self.total - self.spent - 1e-6)  # sums of times are rounded

    def add(self, ended: Ended) -> None:
        self.spent += ended.seconds
        self.counted += ended.counted
        if ended.how == code_runner.TIME and ended.counted < self.case:
            self.check()

    def check(self) -> None:
        """Of time that is up. Raises `SandboxError` when it is for the machine's fault."""
        waited = self.spent - self.counted
        if waited > STARVED_SHARE * self.spent:
            raise SandboxError(
                f"the machine was too busy: the program waited {waited:.1f} of {self.spent:.1f} s "
                "for a CPU; lower reward.workers or raise total_seconds"
            )


def outcomes(
    maker: Maker,
    program: str,
    tests: UnitTests,
    limits: Limits,
    total_seconds: float,
    tolerance: float,
) -> Generator[str]:
    """Of each case in turn, `PASSED` or a word on why not.

    All run in one sandbox, which is left when the caller asks no further; a sandbox that was ended
    for what the program did is followed by another. Raises `SandboxError`.
    """
    # A character takes up to 6 bytes in JSON. Rounded, so that it tells nothing of the output.
    longest = max(len(str(case.wanted)) for case in tests.cases)
    most = MIB * (2 + 6 * longest // MIB)
    clock = _Clock(limits.case_seconds, total_seconds)
    text = program.encode("utf-8", "replace").decode()
    rest = list(tests.cases)
    while rest:
        with maker.start(text, tests.function, limits, most) as sandbox:
            while rest and sandbox.is_open:
                case = rest.pop(0)
                yield _outcome(sandbox, case, tests.function, clock, tolerance)


def _outcome(sandbox: Sandbox, case: Case, function: str, clock: _Clock, tolerance: float) -> str:
    if not clock.left:
        clock.check()
        return KILLED_FOR[code_runner.TIME]
    key = secrets.token_hex(8).encode()
    sent = {
        "input": case.text.encode("utf-8", "replace"),
        "args": case.args,
        "kwargs": case.kwargs or {},
        "key": key,
        "seconds": clock.left,
    }
    ended = sandbox.run(sent)
    clock.add(ended)
    if ended.how in KILLED_FOR:
        return KILLED_FOR[ended.how]
    if ended.how == code_runner.SIGNALLED and ended.code == XCPU:
        return "time_limit"
    if ended.how == code_runner.SIGNALLED:
        return f"signal {ended.code}"
    told, rest = _told(ended, key)
    if told == code_runner.RAISED:
        return _raised(rest)
    if function:
        return _judge_result(told, rest, case, tolerance)
    if ended.code:
        return f"exited {ended.code}"
    return (
        PASSED
        if same_text(ended.output.decode("utf-8", "replace"), case.wanted)
        else "wrong_output"
    )


def _told(ended: Ended, key: bytes) -> tuple[bytes, bytes]:
    """The letter and the rest of what the runner's fork wrote; a result without its key is none."""
    if not ended.result.startswith(key):
        return b"", b""
    rest = ended.result[len(key) :]
    return rest[:1], rest[1:]


def _raised(name: bytes) -> str:
    if name == b"MemoryError":
        return "memory_limit"
    if name == b"SystemExit":
        return "exited"
    return f"raised {name.decode()}" if re.fullmatch(rb"[A-Za-z_]\w{0,60}", name) else "raised"


def _judge_result(told: bytes, rest: bytes, case: Case, tolerance: float) -> str:
    if told == code_runner.NO_FUNCTION:
        return "no_function"
    if told == code_runner.NOT_JSON:
        return "no_json"
    if told != code_runner.RETURNED:
        return "exited"
    try:
        value = json.loads(rest)
    except (ValueError, RecursionError):
        return "no_json"
    return PASSED if same_value(value, case.wanted, tolerance) else "wrong_output"
