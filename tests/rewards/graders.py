"""Scorers of a user's own, good and bad. Imported by scoring workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np

from megarl.rewards.scorer import Response, RewardParts

NOT_A_FUNCTION = 3


def length(response: Response, *, per: float = 1.0) -> float:
    """Tokens over `per`; the text may ask for something else to happen."""
    return len(response.token_ids) / per


def words(response: Response, *, score: float = 1.0) -> RewardParts:
    """Every word is a step that ends at its last character, worth `score` times its number."""
    steps, at = [], -1
    for number, word in enumerate(response.text.split(" ")):
        at += len(word) + (number > 0)
        steps.append((at, score * number))
    return RewardParts(float(len(steps)), "", tuple(steps))


BAD_STEPS = {
    "single": (3,),
    "beyond": (6, 1.0),
    "before": (-1, 1.0),
    "float": (1.0, 1.0),
    "infinite": (1, float("inf")),
    "none": (1, None),
    "number": 3,
}


def stepping(response: Response) -> RewardParts:
    """Gives the step that the response's text names."""
    return RewardParts(1.0, "", (BAD_STEPS[response.text],))


def first(response: Response) -> RewardParts:
    return RewardParts(0.0, "", ((0, 5.0),))


def last(response: Response) -> RewardParts:
    return RewardParts(0.0, "", ((len(response.token_ids) - 1, 7.0),))


def obey(response: Response) -> object:
    """Does what the response's text says."""
    word, _, rest = response.text.partition(" ")
    match word:
        case "score":
            return float(rest)
        case "parts":
            return RewardParts(0.5, rest)
        case "numpy":
            return np.float32(rest)
        case "none":
            return None
        case "text":
            return rest
        case "raise":
            raise RuntimeError(f"{rest}\nsecond line")
        case "exit":
            os._exit(int(rest))
        case "leave":
            sys.exit(rest)
        case "sleep":
            time.sleep(float(rest))
            return 1.0
        case "tower":
            return 9**9**9**9
        case "print":
            print("not a frame", flush=True)
            os.write(1, b"raw bytes\n")
            return 1.0
        case "child":
            subprocess.Popen(["sleep", "3600"])
            time.sleep(3600)
        case "input":
            return float(len(input()))
    raise ValueError(f"cannot obey {response.text!r}")


def alarmed(response: Response) -> float:
    """Sets a timer in the thread that the scorer is called in."""
    signal.alarm(5)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(0)
    return 1.0


def alarmed_in_a_thread(response: Response) -> float:
    """Sets a timer off the main thread, where Python raises ValueError."""
    failures: list[BaseException] = []

    def verify() -> None:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        except ValueError as error:
            failures.append(error)

    thread = threading.Thread(target=verify)
    thread.start()
    thread.join()
    raise failures[0]


def flaky(response: Response, *, marks: str) -> float:
    """Fails the first time it sees a prompt, and remembers that in the folder `marks`."""
    mark = os.path.join(marks, response.prompt_id)
    if not os.path.exists(mark):
        with open(mark, "w"):
            pass
        raise RuntimeError("first time")
    return 1.0


def everything(response: Response) -> RewardParts:
    """Says what it was given."""
    return RewardParts(
        1.0,
        "|".join(
            map(
                str,
                (
                    response.text,
                    response.answer,
                    response.prompt,
                    response.prompt_id,
                    response.source,
                    response.metadata,
                    response.finished,
                    response.end_reason,
                    response.token_ids,
                ),
            )
        ),
    )


class Unruly(BaseException):
    """No Exception, and without a text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class NoText:
    def __str__(self) -> str:
        raise RuntimeError("no text")


def unruly(response: Response) -> object:
    """Ends as the response's text says, in ways that no scorer should."""
    match response.text.split():
        case ["interrupt"]:
            raise KeyboardInterrupt("stop")
        case ["base"]:
            raise Unruly
        case ["generator"]:
            raise GeneratorExit
        case ["detail"]:
            return RewardParts(1.0, NoText())
        case ["abort"]:
            os.abort()
        case ["slow", "exit", code]:
            os.closerange(3, 64)  # the pipes to the pool among them
            time.sleep(min(0.3 if int(code) < 10 else 60.0, float(code)))
            os._exit(int(code))
    return 1.0
