r"""`multiple_choice`: 1 when the option a response states last is the prompt's, else 0."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.rewards.answer_text import SENTENCE_END, after_thinking, last_box
from megarl.rewards.exact import NOT_FINISHED
from megarl.rewards.math_text import normal, plain_words
from megarl.rewards.scorer import NO_ANSWER, Response, RewardParts, Scorer

LETTERS = "ABCDEFGHIJ"
UNREADABLE = "unreadable"
"""Detail of a statement that names no option, or several."""
MOST = 600
"""Characters after the words of a statement that belong to it, its sentence ending before."""
STATEMENT = re.compile(
    r"\\(?:boxed|fbox)\s*\{"
    r"|\b(?:answer|choice|option)s?\b[\s*_]{0,4}(?:is|are|would\s+be|must\s+be)\b[\s*_:]{0,6}"
    r"|\b(?:answer|choice|option)s?[\s*_]{0,4}[:=][\s*_]{0,6}"
    r"|\b(?:choose|select|pick)\s+(?:option\s+|choice\s+|answer\s+)?(?=[\"'(*$\\]*[A-Ja-j]\b)"
    r"|\b(?=\(?(?-i:[A-J])\)?\s+is\s+(?:the\s+)?(?:correct|right|best)\b)"
    r"|####\s*"
    r"|(?m:^)[\s*_]{0,6}(?=\(?[A-J][).:]?[\s*_.]{0,6}\s*\Z)",
    re.IGNORECASE,
)
"""What introduces a statement. The last kind is a last line that is a letter and nothing else."""
LETTER = re.compile(
    r"(?:\\text\s*\{)?\s*(?:the\s+)?(?:correct\s+)?(?:option|choice|answer|letter)?\s*[\"'(\[*$]*"
    r"([A-Ja-j])(?![A-Za-z'’])[\"')\]*$}]*",
    re.IGNORECASE,
)
MORE = re.compile(
    r"(?:\b(?:or|and|both|either|maybe)\b|[/&,;|])[\s*_\"'(\[$]*(?:option\s+)?[A-J](?![A-Za-z'’])"
)
GOES_ON = re.compile(r"(?:because|since|as|is|was|which|that|for|due|given|with)\b")
GOES_ON_A = re.compile(r"(?:because|since|is\s+(?:the\s+)?(?:correct|right|best))\b")
"""What may follow a bare letter; "A" and "I" are words too, which more can follow."""
RULED_OUT = re.compile(r"not\s+\(?[A-J]\)?,?\s+but\s+(?:rather\s+)?", re.IGNORECASE)
MARKED = re.compile(r"(?<![\w(])\(([A-J])\)(?!\w)")


def make(*, choices: str = "choices", finished: bool = True) -> Scorer:
    r"""Options:

    - `choices`: key of a row under which the options' texts stand: a list, or a mapping from letter
      to text. A row without it has letters alone.
    - `finished`: a response that was cut off scores 0.

    The prompt's answer is a letter from A to J; with choices, it may be the number of one (from 0)
    or its text. The response's answer is what it states last: `\boxed{B}`, `The answer is B`,
    `Answer: (B)`, `#### B`, `option B` chosen, a last line that is `B`; without any, the one letter
    in brackets, `(B)`, that the response has. With choices, the option's text may stand for its
    letter. A statement that names several options, or none, is wrong (`unreadable`). What stands
    before the last `</think>` is not looked at.
    """
    if not isinstance(choices, str) or not choices:
        raise ValueError(f"choices must be a row's key, not {choices!r}")

    def score(response: Response) -> RewardParts:
        options = _options(response.metadata, choices)
        wanted = _gold(response.answer, options)
        if finished and not response.finished:
            return RewardParts(0.0, NOT_FINISHED)
        text = after_thinking(response.text)
        stated = _statement(text)
        if stated is None:
            marked = set(MARKED.findall(text))
            if len(marked) != 1:
                return RewardParts(0.0, UNREADABLE if marked else NO_ANSWER)
            return RewardParts(float(marked.pop() == wanted))
        if not stated:
            return RewardParts(0.0, NO_ANSWER)
        said = _letter(stated, options)
        return RewardParts(0.0, UNREADABLE) if said is None else RewardParts(float(said == wanted))

    return score


def _options(metadata: Mapping[str, Any], key: str) -> dict[str, str]:
    """Letter → its option's text in normal spelling; empty for a row without choices."""
    given = metadata.get(key)
    if given is None:
        return {}
    if isinstance(given, Mapping):
        # As `datasets` writes ARC: {"label": ["A", …], "text": ["…", …]}.
        if set(given) >= {"label", "text"} and not isinstance(given["label"], str):
            given = dict(zip(given["label"], given["text"], strict=True))
        pairs = [(str(letter).strip().upper(), text) for letter, text in given.items()]
    elif isinstance(given, Sequence) and not isinstance(given, str):
        if len(given) > len(LETTERS):
            raise ValueError(
                f"the row's {key} are {len(given)}; at most {len(LETTERS)} have letters"
            )
        pairs = list(zip(LETTERS, given, strict=False))
    else:
        raise ValueError(f"the row's {key} are neither a list nor a mapping from letter to text")
    options = {}
    for letter, text in pairs:
        if letter not in LETTERS or len(letter) != 1:
            raise ValueError(f"the row's {key} have {letter!r}, which is no letter from A to J")
        options[letter] = _text(str(text))
    return options


def _gold(answer: str, options: Mapping[str, str]) -> str:
    """The prompt's letter; raises `ValueError`."""
    text = answer.strip()
    boxed = last_box(text)
    plain = normal(text if boxed is None else boxed).strip("()[]. ")
    if not plain:
        raise ValueError("the prompt has no answer to compare with")
    by_text = [letter for letter, option in options.items() if option == _text(text)]
    if len(plain) == 1 and plain.upper() in LETTERS:
        letter = plain.upper()
        if options and letter not in options:
            raise ValueError(
                f"the prompt's answer {letter} is none of its choices {', '.join(options)}"
            )
        return letter
    if len(by_text) == 1:
        return by_text[0]
    if len(by_text) > 1:
        raise ValueError(f"the prompt's answer {text[:60]!r} is the text of several of its choices")
    if options and plain.isdecimal() and int(plain) < len(options):
        return list(options)[int(plain)]
    raise ValueError(
        f"the prompt's answer {text[:60]!r} is no letter from A to J, and no choice's text"
    )


def _statement(text: str) -> str | None:
    """What the last statement says; None without one."""
    last = None
    for match in STATEMENT.finditer(text):
        last = match
    if last is None:
        return None
    if last[0].endswith("{"):
        boxed = last_box(text)
        return boxed if boxed is not None else ""
    rest = text[last.end() : last.end() + MOST].lstrip()
    boxed = last_box(rest)
    if boxed is not None:
        return boxed
    # The letter's own full stop, `B. Paris`, ends no sentence.
    own = re.match(r"[\s*_(\[\"'$]*[A-Ja-j][.)\]:]+\s*", rest)
    end = SENTENCE_END.search(rest, own.end() if own else 0)
    return rest[: end.start() if end else len(rest)].strip()


def _letter(stated: str, options: Mapping[str, str]) -> str | None:
    """The one option that a statement names, by its letter or its text; None: none, or several."""
    text = stated.strip(" \t*_`$.\"'")
    by_text = [letter for letter, option in options.items() if option and option == _text(text)]
    if len(by_text) == 1:
        return by_text[0]
    text = RULED_OUT.sub("", normal(text))
    match = LETTER.match(text)
    if match is None:
        return None
    letter, rest = match[1], text[match.end() :].lstrip("}) ")
    if letter.islower() and (rest or len(text) > 3):
        return None  # "a" is an article
    letter = letter.upper()
    if options and letter not in options or MORE.search(rest):
        return None
    if re.match(r"[.:)\-,;\s]*[A-J](?![\w'’])", rest):
        return None  # a second letter
    told = _text(rest.lstrip(".:)-,; "))
    if told in options.values() and told != options.get(letter):
        return None  # another option's text
    marked = "(" in match[0] or ")" in match[0] or rest[:1] in (".", ":", ")", "-", ",", ";")
    if not rest or marked or rest.startswith(r"\text") or (told and told == options.get(letter)):
        return letter
    return letter if (GOES_ON_A if letter in "AI" else GOES_ON).match(rest) else None


def _text(text: str) -> str:
    return plain_words(normal(text))
