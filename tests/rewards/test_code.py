"""The scorer `code`: verdicts in both styles, forged success, its statuses in a pool.

Not covered: what a sandbox keeps in (test_sandbox.py) and limits (test_sandbox_limits.py), how
tests are read and outcomes compared (test_code_tests.py), the interpreter's own faults.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from megarl.contracts.records import RewardStatus
from megarl.rewards import code
from megarl.rewards.scorer import Response, RewardParts, Scorer
from tests.rewards.make_pool import child_processes, left_of, prompt, sample, scoring
from tests.rewards.make_sandbox import USUAL, maker

DOUBLE = {
    "style": "stdin",
    "cases": [{"input": f"{n}\n", "output": f"{2 * n}\n"} for n in (1, 2, 3)],
}
CALL = {
    "style": "call",
    "function": "f",
    "cases": [{"args": [n], "output": 2 * n} for n in (1, 2, 3)],
}


def response(program: str, tests: Any, *, answer: str = "", finished: bool = True) -> Response:
    text = f"It is:\n```python\n{program}\n```\n"
    metadata = {} if tests is None else {"tests": tests}
    return Response(text, answer, "?", finished, "eos", metadata=metadata)


@pytest.fixture(scope="module", autouse=True)
def _works() -> None:
    """Skips where no sandbox can be made as the scorer makes it."""
    maker(USUAL)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = child_processes()
    yield
    assert left_of(before, seconds=0.0) == []


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    return code.make(case_seconds=3.0, memory_mb=128)


@pytest.fixture(scope="module")
def sharing() -> Scorer:
    return code.make(score="share", case_seconds=1.0, memory_mb=128, processes=4)


def called(output: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    case = {"args": list(args), "kwargs": kwargs, "output": output}
    return {"style": "call", "function": "f", "cases": [case]}


@pytest.mark.parametrize(
    ("program", "total", "detail"),
    [
        ("print(2 * int(input()))", 1.0, ""),
        ("import sys\nprint(int(sys.stdin.read()) * 2, end='  \\n\\n')", 1.0, ""),
        ("if __name__ == '__main__': print(2 * int(input()))", 1.0, ""),
        ("import sys\nprint(2 * int(input())); sys.exit()", 1.0, ""),
        ("import os\nprint(2 * int(input()), flush=True); os._exit(0)", 1.0, ""),
        ("import threading as t\nt.Thread(target=lambda: print(2*int(input()))).start()", 1.0, ""),
        ("print(2 * int(input())); exit()", 1.0, ""),
        ("import atexit\natexit.register(lambda: print(2 * int(input())))", 1.0, ""),
        ("out = open(1, 'w')\nout.write(str(2 * int(input())))", 1.0, ""),
        ("class A:\n    def __del__(self): print(2 * int(input()))\na = A(); a.a = a", 1.0, ""),
        ("import sys\nprint(2 * int(input())); sys.stdout.close()", 1.0, ""),
        ("print(2 * int(input())); raise SystemExit(False)", 1.0, ""),
        ("print(2 * int(input())); raise SystemExit('no')", 0.0, "exited 1"),
        ("import os, sys\nos.close(1); print(2 * int(input()))", 0.0, "raised OSError"),
        ("print(int(input()) ** 2)", 0.0, "wrong_output"),
        ("print(1 + int(input()))", 0.0, "wrong_output"),
        ("pass", 0.0, "wrong_output"),
        ("print(2 * int(input())); 1 / 0", 0.0, "raised ZeroDivisionError"),
        ("print(2 * int(input())); raise SystemExit(3)", 0.0, "exited 3"),
        ("print(2 * int(input(", 0.0, "raised SyntaxError"),
        ("class Bad(Exception): pass\nraise Bad", 0.0, "raised Bad"),
        ("raise type('a b' * 99, (Exception,), {})", 0.0, "raised"),
        ("import numpy", 0.0, "raised ModuleNotFoundError"),
        ("x = [0]\nwhile True: x += x", 0.0, "memory_limit"),
        ("import os\nos.abort()", 0.0, "signal 6"),
        ("import os\nos.kill(os.getpid(), 9)", 0.0, "signal 9"),
        ("while True: print('x' * 999)", 0.0, "output_limit"),
        ("def f(): f()\nf()", 0.0, "raised RecursionError"),
        ("x = '\udc80'; print(2 * int(input()))", 1.0, ""),
    ],
)  # fmt: skip
def test_scripts(scorer: Scorer, program: str, total: float, detail: str) -> None:
    assert scorer(response(program, DOUBLE)) == RewardParts(total, detail)


@pytest.mark.parametrize(
    "program", ["(" * 5000, "print(1)\0", "-" * 10**6 + "1", "lambda: " * 9999]
)
def test_programs_that_compilers_cannot_take(scorer: Scorer, program: str) -> None:
    """What a compiler makes of each differs by version; it is the program's failure."""
    parts = scorer(response(program, DOUBLE))
    assert parts.total == 0.0 and parts.detail.startswith(("raised", "signal", "memory_limit"))


@pytest.mark.parametrize(
    ("program", "total", "detail"),
    [
        ("def f(x): return 2 * x", 1.0, ""),
        ("def f(x): print('noise'); return 2.0 * x", 1.0, ""),
        ("f = lambda x: x + x\nif __name__ == '__main__': raise ValueError", 1.0, ""),
        ("class f(int):\n    def __new__(cls, x): return int.__new__(cls, 2 * x)", 1.0, ""),
        ("def f(x): return x", 0.0, "wrong_output"),
        ("def f(x): return str(2 * x)", 0.0, "wrong_output"),
        ("def f(x): return [2 * x]", 0.0, "wrong_output"),
        ("def f(x): return {2 * x}", 0.0, "no_json"),
        ("def f(x): return f", 0.0, "no_json"),
        ("def f(x):\n    a = []\n    a.append(a)\n    return a", 0.0, "no_json"),
        ("def f(x):\n    a = 0\n    for _ in range(10**5): a = [a]\n    return a", 0.0, "no_json"),
        ("def f(x): return 1 << 50000", 0.0, "no_json"),
        ("def f(): return 2", 0.0, "raised TypeError"),
        ("def g(x): return 2 * x", 0.0, "no_function"),
        ("f = 3", 0.0, "raised TypeError"),
        ("raise KeyError", 0.0, "raised KeyError"),
        ("def f(x): return 'x' * (1 << 23)", 0.0, "output_limit"),
    ],
)
def test_calls(scorer: Scorer, program: str, total: float, detail: str) -> None:
    assert scorer(response(program, CALL)) == RewardParts(total, detail)


WRITE = "import os\ndef tell(text):\n    for fd in range(3, 64):\n        try: os.write(fd, text)\n        except OSError: pass\n"  # noqa: E501
"""Begins programs that write to every file they may have."""

FORGED = {
    "leave": ("import os\nos._exit(0)", "exited"),
    "exit": ("import sys\nsys.exit(0)", "exited"),
    "leave in the call": ("import os\ndef f(x): os._exit(0)", "exited"),
    "exit in the call": ("import sys\ndef f(x): sys.exit(0)", "exited"),
    "equal to all": (
        "class Same(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def f(x): return Same(7)",
        "wrong_output",
    ),
    "text of all": (
        "class Same(int):\n    def __repr__(self): return '2'\n    __str__ = __repr__\n"
        "def f(x): return Same(7)",
        "wrong_output",
    ),
    "json": ("import json\njson.dumps = lambda *a, **k: '2'\ndef f(x): return 7", "wrong_output"),
    "builtins": (
        "import builtins, os\nbuiltins.print = builtins.len = builtins.type = lambda *a: 2\n"
        "os.write = lambda fd, data: len(data)\ndef f(x): return 7",
        "exited",
    ),
    "channel": (WRITE + "tell(b'=2')\ndef f(x): return 7", "exited"),
    "channel at once": (WRITE + "tell(b'=2'); os._exit(0)", "exited"),
    "channel with frames": (
        WRITE + "from struct import pack\n"
        "tell(pack('<BidII', 0, 0, 0, 0, 3) + b'+=2' + b'ready\\n'); os._exit(0)",
        "exited",
    ),
    "at exit": (WRITE + "import atexit\natexit.register(tell, b'=2')\ndef f(x): exit()", "exited"),
    "two processes": ("import os\ndef f(x):\n    return 7 if os.fork() else 2", "wrong_output"),
    "thread": (
        WRITE + "import threading, time\nthreading.Thread(target=tell, args=(b'=2',)).start()\n"
        "def f(x): time.sleep(0.1); return 7",
        "exited",
    ),
    "kill": ("import os\nos.kill(-1, 9)\nos.kill(1, 9)\ndef f(x): return 7", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_success_cannot_be_forged(scorer: Scorer, name: str) -> None:
    program, detail = FORGED[name]
    parts = scorer(response(program, called(2, 1)))
    assert parts.total == 0.0
    assert parts.detail == detail or (not detail and parts.detail.startswith(("raised", "signal")))


def test_a_program_that_finds_the_key_tells_no_more_than_a_value(scorer: Scorer) -> None:
    """It may answer by any way it likes. What it does not know is which answer is right."""
    program = (
        "import os, sys\n"
        "frame = sys._getframe()\n"
        "while 'key' not in frame.f_locals: frame = frame.f_back\n"
        "os.write(3, frame.f_locals['key'] + b'=' + ANSWER); os._exit(0)\n"
    )
    for said, total in ((b"2", 1.0), (b"3", 0.0), (b"true", 0.0), (b"*", 0.0), (b"2 2", 0.0)):
        parts = scorer(response(program.replace("ANSWER", repr(said)), called(2, 1)))
        assert parts.total == total, said


@pytest.mark.parametrize("tests", [called("wanted-9317", "given-5241"), {
    "style": "stdin", "cases": [{"input": "given-5241", "output": "wanted-9317"}]}])  # fmt: skip
def test_the_expected_output_is_not_in_the_sandbox(sharing: Scorer, tests: dict) -> None:
    """The program looks through every object of its process, which is the runner's fork."""
    program = (
        "import gc, sys\n"
        "def look(word):\n"
        "    seen, todo = set(), [*gc.get_objects(), sys._getframe()]\n"
        "    while todo:\n"
        "        one = todo.pop()\n"
        "        if id(one) in seen: continue\n"
        "        seen.add(id(one))\n"
        "        if isinstance(one, (str, bytes)) and word in str(one)[::-1]: return True\n"
        "        todo += gc.get_referents(one)\n"
        "        if hasattr(one, 'f_locals'): todo += [one.f_locals, one.f_back]\n"
        "if not look('1425-nevig'): raise LookupError\n"
        "if look('7139-detnaw'): raise OverflowError\n"
        "def f(x): return 'other'\n"
        "print('other')\n"
    )
    assert sharing(response(program, tests)).detail == "passed 0/1: wrong_output"


@pytest.mark.parametrize(
    ("program", "passed", "detail"),
    [
        ("def f(x): return 2 * x", 3, ""),
        ("def f(x): return x * x", 1, "wrong_output"),
        ("def f(x): return 2 * x if x > 1 else 1 / 0", 2, "raised ZeroDivisionError"),
        ("import time\ndef f(x): time.sleep(9 * (x == 2)); return 2 * x", 2, "time_limit"),
        ("seen = 0\ndef f(x):\n    global seen\n    seen += 1\n    return 2 * x * seen", 3, ""),
        ("import os\ndef f(x): open('y', 'x'); return 2 * x", 3, ""),
        (
            "import os, time\ndef f(x):\n    for _ in range(3 * (x == 1)):\n"
            "        if os.fork() == 0: break\n"
            "    y = b'x' * (x == 1) * (60 << 20); time.sleep(0.5 * (x == 1))\n    return 2 * x",
            2,
            "memory_limit",
        ),
    ],
)
def test_shares_and_what_one_case_leaves_to_the_next(
    sharing: Scorer, program: str, passed: int, detail: str
) -> None:
    parts = sharing(response(program, CALL))
    assert parts.total == passed / 3
    assert parts.detail == (f"passed {passed}/3: {detail}" if detail else "")


def test_all_cases_together_have_a_time() -> None:
    one = code.make(score="share", case_seconds=60.0, total_seconds=1.0)
    program = "import time\ndef f(x): time.sleep(60 * (x > 1)); return 2 * x"
    assert one(response(program, CALL)).detail == "passed 1/3: time_limit"


def test_values_travel_as_they_are(scorer: Scorer) -> None:
    for value in (
        None,
        True,
        1.5,
        -0.0,
        "é\n\ud800\0",
        [1, [2]],
        {"a": {"b": []}},
        10**30,
        [math.nan],
    ):
        program = "def f(x, *, y=None): assert repr(x) == repr(y); return (x, y)"
        assert scorer(response(program, called([value, value], value, y=value))).total == 1.0, value


def test_a_large_input_and_output(scorer: Scorer) -> None:
    text = "wörter\n" * 400_000
    tests = {"style": "stdin", "cases": [{"input": text, "output": text.upper()}]}
    assert scorer(response("import sys\nprint(sys.stdin.read().upper())", tests)).total == 1.0


def test_tests_may_be_the_answer_or_text_or_under_another_key(scorer: Scorer) -> None:
    program = "def f(x): return 2 * x"
    assert scorer(response(program, None, answer=json.dumps(CALL))).total == 1.0
    assert scorer(response(program, json.dumps(CALL), answer="prose")).total == 1.0
    other = code.make(tests_key="cases")
    given = Response(program, "", "?", True, "eos", metadata={"cases": CALL, "tests": 3})
    assert other(given) == RewardParts(0.0, "no_answer")
    assert code.make(tests_key="cases", take="whole")(given).total == 1.0


def test_responses_without_a_program_or_cut_off(scorer: Scorer) -> None:
    cut = response("def f(x): return 2 * x", CALL, finished=False)
    assert scorer(cut) == RewardParts(0.0, "not_finished")
    assert code.make(finished=False)(cut).total == 1.0
    for text in ("", "def f(x): return 2 * x", "```python\ndef f(x): return 2 * x", "```\n \n```"):
        given = Response(text, "", "?", True, "eos", metadata={"tests": CALL})
        assert scorer(given) == RewardParts(0.0, "no_answer")


def test_in_a_pool_wrong_bad_and_late_are_three_things() -> None:
    """Wrong scores 0; bad tests are an error; beyond the deadline of the pool is a time-out, which
    leaves nothing of the program behind."""
    before = child_processes()
    late = "import os, time\nos.fork()\ntime.sleep(60)\ndef f(x): return 2 * x"
    texts = [f"```\n{p}\n```" for p in ("def f(x): return 2 * x", "def f(x): return x", late)]
    options = {"case_seconds": 60.0, "total_seconds": 60.0}
    with scoring({"name": "code"} | options, deadline_seconds=2.0) as pool:
        for draw, (text, answer) in enumerate(
            [(texts[0], json.dumps(CALL)), (texts[1], json.dumps(CALL)), (texts[0], "46"),
             (texts[2], json.dumps(CALL)), (texts[0], json.dumps(CALL))]
        ):  # fmt: skip
            pool.submit(sample(text, draw), prompt(answer, f"p{draw}"))
        records = pool.collect([(draw, 0) for draw in range(5)])
    assert left_of(before) == []
    ok, error, timeout = RewardStatus.OK, RewardStatus.ERROR, RewardStatus.TIMEOUT
    assert [record.status for record in records] == [ok, ok, error, timeout, ok]
    assert [record.total for record in records] == [1.0, 0.0, None, None, 1.0]
    assert records[1].detail == "wrong_output"
    assert "the row's answer is a int, not an object" in records[2].detail


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"take": "first"}, "take must be block or whole, not 'first'"),
        ({"score": "some"}, "score must be all or share, not 'some'"),
        ({"case_seconds": 0}, "case_seconds must be a number of at least 0.01, not 0"),
        ({"total_seconds": math.nan}, "total_seconds must be a number"),
        ({"cpu_seconds": 1.5}, "cpu_seconds must be a whole number from 1, not 1.5"),
        ({"memory_mb": 8}, "memory_mb must be a whole number from 64, not 8"),
        ({"processes": True}, "processes must be a whole number"),
        ({"file_mb": "1"}, "file_mb must be a whole number from 1, not '1'"),
        ({"tolerance": -1.0}, "tolerance must be a number of at least 0"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        code.make(**options)
