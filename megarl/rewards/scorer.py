"""What a scorer sees and says, and how scorers are found. Imported by scoring workers: stays light.

A scorer is a function of one response. An own one is named by import path in the recipe and takes
its options as keyword arguments::

    def score(response: Response, *, unit: str = "cm") -> RewardParts | float: ...

It raises on what it cannot score; it never answers 0 for that. Where the recipe gives it a `batch`
it is given a list of responses and gives a list with one answer each::

    def score(responses: list[Response], **options) -> list[RewardParts | float]: ...

Either may be an `async def`, which is awaited: several are on their way at once.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megarl.contracts.errors import InputError

BUILT_IN = {
    "exact_match": "megarl.rewards.exact",
    "format": "megarl.rewards.format",
    "json_schema": "megarl.rewards.schema",
    "length": "megarl.rewards.length",
    "repetition": "megarl.rewards.repetition",
    "math": "megarl.rewards.math_answer",
    "gsm8k": "megarl.rewards.gsm8k",
    "multiple_choice": "megarl.rewards.choice",
    "code": "megarl.rewards.code",
}
"""Name in a recipe → module with `make(**options)`, which checks them and gives the scorer."""

MOST_SAID = 300
"""Characters that are kept of an error's text and of a detail."""

MOST_SHOWN = 4
"""Elements of a container that is shown whole in an error's text."""

PENALTY = "[penalty] "
"""Begins the detail of a record whose total is the declared penalty: it could not be scored. No
scorer's own detail begins so."""

NO_ANSWER = "no_answer"
"""Detail of a response in which no answer could be found: scored, and wrong."""


@dataclass(frozen=True, slots=True)
class Response:
    """One response as scorers see it."""

    text: str
    """Decoded response, special tokens left out."""
    answer: str
    prompt: str
    """What the user wrote (the last message), without the chat template."""
    finished: bool
    """The policy ended it; False when it was cut off or aborted."""
    end_reason: str
    """`eos`, `stop`, `max_tokens`, …: an `EndReason` in lower case."""
    token_ids: tuple[int, ...] = ()
    prompt_id: str = ""
    source: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The row's other keys."""
    reward: str = ""
    """The row's reward name."""


@dataclass(frozen=True, slots=True)
class RewardParts:
    """A scorer's answer: its score, and a word on why where that helps."""

    total: float
    detail: str = ""
    """Its first 300 characters are kept."""
    steps: tuple[tuple[int, float], ...] = ()
    """Process rewards: (response token index at which the step ends, its score), an index into
    `Response.token_ids`. They are trained on where `algorithm.rewards` is `process`."""


Answer = RewardParts | float
Scorer = Callable[[Response], Answer | Awaitable[Answer]]
BatchScorer = Callable[[list[Response]], Sequence[Answer] | Awaitable[Sequence[Answer]]]


class ScorerError(InputError):
    """A scorer that cannot be used as the recipe says; one line."""


def load_scorer(name: str, options: Mapping[str, Any]) -> tuple[Scorer, str]:
    """The scorer called `name` with its options, and the name of the module it lives in.

    Raises `ScorerError` when it does not exist or does not take these options.
    """
    if name in BUILT_IN:
        try:
            module = importlib.import_module(BUILT_IN[name])
        except ImportError as error:  # a library that it needs
            raise ScorerError(f"reward.scorers: cannot load {name}: {said(error)}") from error
        _check_options(name, module.make, (), options)
        try:
            return module.make(**options), module.__name__
        except ValueError as error:
            raise ScorerError(f"reward.scorers: {name}: {error}") from error
    path, colon, attribute = name.partition(":")
    if not colon or not path or not attribute:
        raise ScorerError(f"reward.scorers: {no_such_scorer(name)}")
    try:
        function = getattr(importlib.import_module(path), attribute)
    except BaseException as error:  # foreign code may end in any way while it is imported
        raise ScorerError(f"reward.scorers: cannot import {name}: {said(error)}") from error
    if not callable(function):
        raise ScorerError(f"reward.scorers: {name} is a {type(function).__name__}, not a function")
    _check_options(name, function, (None,), options)
    return partial(function, **options), path


def no_such_scorer(name: str) -> str:
    """What to say of a name that is neither a built-in nor an import path."""
    close = difflib.get_close_matches(name, BUILT_IN, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return (
        f"{name!r} is no scorer; {hint}give one of {', '.join(BUILT_IN)}, or your function as "
        "import.path:function"
    )


def is_async(scorer: Callable) -> bool:
    """Whether calling it gives something to await."""
    while isinstance(scorer, partial):
        scorer = scorer.func
    return inspect.iscoroutinefunction(scorer) or inspect.iscoroutinefunction(
        getattr(scorer, "__call__", None)  # noqa: B004  an object whose __call__ is async
    )


def answers_of(value: Any, count: int) -> list[Any]:
    """A batched scorer's answers on so many responses.

    Raises `TypeError` for what is no list (other sequence, array of one dimension), `ValueError`
    for another number of answers.
    """
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        answers = list(value)
    elif getattr(value, "ndim", None) == 1 and hasattr(value, "tolist"):
        answers = value.tolist()
    else:
        raise TypeError(f"returned {_shown(value)}, not a list with one score per response")
    if len(answers) != count:
        raise ValueError(f"returned {len(answers)} scores for {count} responses")
    return answers


def said(error: BaseException) -> str:
    """`ValueError: what`: the first line of foreign code's error, whatever its `__str__` does."""
    try:
        first_line = str(error).strip().partition("\n")[0][:MOST_SAID]
    except BaseException as worse:  # in a worker's process there is nobody else to stop
        first_line = f"its text cannot be had: {type(worse).__name__} in __str__"
    return f"{type(error).__name__}: {first_line}"


def parts_of(value: Any, tokens: int) -> RewardParts:
    """A scorer's answer on a response of so many tokens.

    Raises `TypeError` or `ValueError` for an answer, or a step's score, that is no finite number,
    for a step that ends outside the response, and for a detail that looks like a penalty's.
    """
    parts = value if isinstance(value, RewardParts) else RewardParts(value)
    total = _finite(parts.total, "")
    steps = []
    for step in parts.steps:
        if not isinstance(step, Sequence) or len(step) != 2:
            raise TypeError(f"returned the step {step!r}, not (token index, score)")
        index, score = step
        if not isinstance(index, numbers.Integral):
            raise TypeError(f"returned a step at token {index!r}, which is no index")
        if not 0 <= index < tokens:
            raise ValueError(f"returned a step at token {index} of a response of {tokens} tokens")
        steps.append((int(index), _finite(score, f" for the step at token {index}")))
    detail = str(parts.detail)[:MOST_SAID]
    if detail.startswith(PENALTY):
        raise ValueError(f"returned a detail that begins with {PENALTY!r}, which marks a penalty")
    return RewardParts(total, detail, tuple(steps))


def _finite(value: Any, where: str) -> float:
    if not isinstance(value, numbers.Real):
        raise TypeError(f"returned {_shown(value)}{where}, not a number")
    if not math.isfinite(value):
        raise ValueError(f"returned {float(value)}{where}, not a finite number")
    return float(value)


def _shown(value: Any) -> str:
    """What was returned in place of an answer; a way out where a keyword is wrong."""
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        return "a generator (it has a yield; a scorer returns)"
    if inspect.iscoroutine(value):
        value.close()  # or Python warns that nobody awaited it
        return "a coroutine (declare the function itself async def, and it is awaited)"
    if isinstance(value, list | tuple | Mapping) and len(value) > MOST_SHOWN:
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value)


def _check_options(
    name: str, function: Callable, positional: tuple, options: Mapping[str, Any]
) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(*positional, **options)
    except TypeError as error:
        known = list(signature.parameters)[len(positional) :]
        raise ScorerError(
            f"reward.scorers: {name}: {error}; its options are {', '.join(known) or 'none'}"
        ) from error
