r"""`multiple_choice`: 1 when the option a response states last is the prompt's, else 0."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.rewards.answer_text import SENTENCE_END, after_thinking, last_box
from megarl.rewards.exact import NOT_FINISHED
from megarl.rewards.math_text import normal, plain_words
from megarl.rewards.options import check_flag, check_text, check_word
from megarl.rewards.scorer import NO_ANSWER, Response, RewardParts, Scorer

LETTERS = "ABCDEFGHIJ"
UNREADABLE = "unreadable"
"""Detail of a statement that names no option, or several."""
MOST = 600
"""Characters after the words of a statement that belong to it, its sentence ending before."""
MOST_STATED = 4_000
"""Characters of a statement, in a box too, that is read."""
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
LABELLED = re.compile(r"[\s*_`\"'$]{0,6}\(?([A-J])\)[\s*_]{0,6}(?=\S)")
"""Begins a line that gives an option's letter, in brackets or before one, and its text."""
SAME_BECAUSE = re.compile(r"\W{0,3}(?:because|since|as)\b")
"""What may follow an option's text on a last line."""
BLANK = re.compile(
    r"(?:(?:the|this|that|following|as|follows|below|here|correct|right|best|one|option|choice"
    r"|answer)(?!\w)|[^\w{}])*"
)
"""What states nothing: `the following:`, and `right` of `which option is right`."""
ANOTHER = re.compile(r"(?<!\w)[A-J]\)")
LETTER = re.compile(
    r"(?:\\text\s*\{)?\s*(?:the\s+)?(?:correct\s+)?(?:option|choice|answer|letter)?\s*[\"'(\[*$]*"
    r"([A-Ja-j])(?![A-Za-z'’])[\"')\]*$}]*",
    re.IGNORECASE,
)
MORE = re.compile(
    r"(?:\b(?:or|and|both|either|maybe)\b|[/&,;|])[\s*_\"'(\[$]*(?:option\s+)?[A-J](?![A-Za-z'’])"
)
GOES_ON = re.compile(
    r"(?:because|since|as|(?:is|was)(?!\s+(?:not|wrong|incorrect|false)\b)|which|that|for|due|given"
    r"|with)\b"
)
GOES_ON_A = re.compile(r"(?:because|since|is\s+(?:the\s+)?(?:correct|right|best))\b")
"""What may follow a bare letter; "A" and "I" are words too, which more can follow."""
RULED_OUT = re.compile(
    r"not\s+\(?[A-J]\)?(?:,?\s+but|\s*[,;]\s*(?:but\s+)?it(?:\s+is|['’]s))\s+(?:rather\s+)?",
    re.IGNORECASE,
)
OTHERS_WRONG = re.compile(
    r"(?:is\s+(?:the\s+)?(?:correct|right|best)(?:\s+(?:answer|option|choice|one))?)?\s*,?\s*"
    r"(?:because|since|as)\s+(?:both\s+)?(?:(?:option|choice|answer)s?\s+)?"
    r"(?P<others>\(?[A-J]\)?(?:\s*(?:,|,?\s+and\s)\s*\(?[A-J]\)?)*)\s+"
    r"(?:is|are)\s+(?:both\s+|all\s+|clearly\s+)?(?:wrong|incorrect|false)\b"
)
"""Behind a letter: the reason is that others are wrong. It names them, and states none."""
MARKED = re.compile(r"(?<![\w(])\(([A-J])\)(?!\w)")


ANSWERS = ("any", "letter", "index", "text")


def make(*, choices: str = "choices", answer_is: str = "any", finished: bool = True) -> Scorer:
    r"""Options:

    - `choices`: key of a row under which the options' texts stand: a list, or a mapping from letter
      to text. A row without it has letters alone.
    - `answer_is`: what the prompt's answer is: a `letter` from A to J, the `index` of a choice (the
      first is 0, as in MMLU), or the `text` of one. `any`: whichever of them it can be; where it
      can be two that name different choices, it cannot be scored (choices 2, 3, 4 and answer 2).
    - `finished`: a response that was cut off scores 0.

    A prompt's answer that names no choice is a ValueError. The response's answer is what it
    states last: `\boxed{B}`, `The answer is B`, `Answer: (B)`, `#### B`, `option B` chosen, a
    last line that is `B`; without any, a last line that is `B) London`, or with choices `London`;
    without that, the one letter in brackets, `(B)`, that the response has. A last line `C) Rome`
    states nothing where lines with other letters stand above (options copied, or gone through),
    unless it repeats one of a copy; nor does `Rome` below `London`. With choices, the text behind
    the letter must be that option's.
    With choices, the option's text may stand for its letter; a capital is read as a letter, if
    there is such an option. A statement that names several options, or none, is wrong
    (`unreadable`). What stands before the last `</think>` is not looked at.
    """
    check_text("choices", choices)
    check_word("answer_is", answer_is, ANSWERS)
    check_flag("finished", finished)

    def score(response: Response) -> RewardParts:
        options = _options(response.metadata, choices)
        wanted = _gold(response.answer, options, answer_is)
        if finished and not response.finished:
            return RewardParts(0.0, NOT_FINISHED)
        text = after_thinking(response.text)
        stated = _statement(text)
        if stated is None or BLANK.fullmatch(stated):
            stated = _last_line(text, options) or stated
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


def _gold(answer: str, options: Mapping[str, str], answer_is: str) -> str:
    """The prompt's letter; raises `ValueError`."""
    text = answer.strip()
    boxed = last_box(text)
    plain = normal(text if boxed is None else boxed).strip("()[]. ")
    if not plain:
        raise ValueError("the prompt has no answer to compare with")
    shown = text[:60]
    by_sign = by_text = None
    if answer_is != "text":
        by_sign = _by_letter_or_index(plain, options, answer_is)
    if answer_is in ("text", "any"):
        same = [letter for letter, option in options.items() if option == _text(text)]
        if len(same) > 1 and by_sign not in same:
            raise ValueError(f"the prompt's answer {shown!r} is the text of several of its choices")
        by_text = by_sign if by_sign in same else same[0] if same else None
    if by_sign and by_text and by_sign != by_text:
        kind = "index" if plain.isdecimal() else "letter"
        raise ValueError(
            f"the prompt's answer {shown!r} is the {kind} of choice {by_sign} and the text of "
            f"choice {by_text}: set the scorer's answer_is to {kind} or text"
        )
    if found := by_sign or by_text:
        return found
    wanted = {
        "any": "no letter from A to J, and no choice's text",
        "letter": "no letter from A to J",
        "index": "no index of a choice",
        "text": "no choice's text",
    }
    raise ValueError(f"the prompt's answer {shown!r} is {wanted[answer_is]}")


def _by_letter_or_index(plain: str, options: Mapping[str, str], answer_is: str) -> str | None:
    """The letter that the answer is, or whose index it is; raises `ValueError`."""
    if answer_is != "index" and len(plain) == 1 and plain.upper() in LETTERS:
        letter = plain.upper()
        if options and letter not in options:
            raise ValueError(
                f"the prompt's answer {letter} is none of its choices {', '.join(options)}"
            )
        return letter
    if answer_is != "letter" and plain.isdecimal() and int(plain) < len(options):
        return list(options)[int(plain)]
    return None


def _last_line(text: str, options: Mapping[str, str]) -> str | None:
    """The last line where it is an option's letter and text, or one of the texts; else None."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines or len(lines[-1]) > MOST:
        return None
    line, others = lines[-1], lines[:-1]
    if label := LABELLED.match(line):
        if STATEMENT.search(line, label.end()) or ANOTHER.search(line, label.end()):
            return None
        return line if _is_stated(label, options) and _is_alone(label, others) else None
    texts = set(options.values()) - {""}
    if not texts or _text(line) not in texts or others and _text(others[-1]) in texts:
        return None
    return line


def _is_stated(label: re.Match[str], options: Mapping[str, str]) -> bool:
    """Whether the text behind a line's letter is none, or an option's. (Another one's than the
    letter's is a contradiction for `_letter` to find.)"""
    told = _behind(label)
    if not options or not told or told in options.values():
        return True
    own = options.get(label[1], "")
    return bool(own and told.startswith(own) and SAME_BECAUSE.match(told, len(own)))


def _is_alone(label: re.Match[str], above: Sequence[str]) -> bool:
    """Whether no line above has a letter, but for a copy of the options of which this line, below
    something else, repeats one."""
    labels = [one for line in above if (one := LABELLED.match(line))]
    if not labels:
        return True
    if LABELLED.match(above[-1]) or len({one[1] for one in labels}) < len(labels):
        return False
    same = [one for one in labels if one[1] == label[1] and len(one.string) <= MOST]
    return bool(same) and _behind(same[0]) == _behind(label)


def _behind(label: re.Match[str]) -> str:
    """The text of the line behind its letter, in normal spelling."""
    return _text(label.string[label.end() :].strip(" \t*_`$.\"'"))


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
    if len(stated) > MOST_STATED:
        return None
    text = stated.strip(" \t*_`$.\"'")
    by_text = [letter for letter, option in options.items() if option and option == _text(text)]
    if len(by_text) == 1 and text not in options:
        return by_text[0]
    text = RULED_OUT.sub("", normal(text))
    match = LETTER.match(text)
    if match is None:
        return None
    letter, rest = match[1], text[match.end() :].lstrip("}) ")
    if letter.islower() and (rest or len(text) > 3):
        return None  # "a" is an article
    letter = letter.upper()
    if why := OTHERS_WRONG.match(rest):
        if letter in why["others"]:
            return None
        rest = "because " + rest[why.end() :]
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
