r"""Where a response's answer stands: boxes, and what it says the answer is.

All scans are linear in the response's length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import combinations

BOX = re.compile(r"\\(?:boxed|fbox)(?:\s*\{|\s+([A-Za-z0-9])(?![A-Za-z0-9]))")
SAID = re.compile(
    r"####"
    r"|\banswers?\b[\s*_]{0,4}"
    r"(?:(?:is|are)\b(?:\s+(?:equal\s+to|therefore|thus|simply|then)\b)?|[:=])",
    re.IGNORECASE,
)
r"""What comes before a stated answer: `####`, `Answer:`, `The answer is`, `The answers are:`."""
SENTENCE_END = re.compile(r"[.!?](?=\s+[^\s\d]|\s*$)|\n")
MATH_SPAN = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\$([^$]+)\$|\\\((.+?)\\\)", re.DOTALL)
JOINS = re.compile(
    r"[\s$*]{0,8}(?:\\[()\[\]])?\s{0,4}"
    r"(?:[,;]|[,;]?\s{0,4}(?:\\text\s?\{)?\s{0,4}(?:and|(?P<or>or))\s{0,4}\}?)"
    r"(?:\\[,; ]|\\q?quad|[\s$*]){0,8}(?:\\[()\[\]])?\s{0,4}"
)
r"""What stands between the boxes of a list: `,`, `, and`, `$ or $`, `\text{ and }`."""
MOST_SPELLINGS = 4
"""Contents of a list's boxes that are compared for being one answer."""
MOST_SAID = 2_000
"""Characters after the words that state an answer in which its end is looked for."""


def after_thinking(text: str) -> str:
    """What follows the last `</think>`; everything where there is none."""
    return text.rpartition("</think>")[2]


def closing_brace(text: str, start: int, most: int | None = None) -> int:
    r"""Index of the `}` that closes a group whose content starts at `start`; -1: it never closes.

    `\{` and `\}` are printed braces and do not count.
    """
    depth, index = 1, start
    end = len(text) if most is None else min(len(text), start + most)
    while index < end:
        char = text[index]
        if char == "\\":
            index += 1
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return index
        index += 1
    return -1


def last_box(text: str, same: Callable[[str, str], bool] | None = None) -> str | None:
    r"""Content of the last `\boxed{…}` (or `\fbox{…}`) whose braces balance, or of a `\boxed 7`,
    which boxes the character after it; None without one.

    Boxes with nothing but `,`, `;`, `and` or `or` between them are one answer, the list of their
    contents: `\boxed{1}, \boxed{2}` says `1, 2`. Where all hold the same, or each two what is the
    same by `same`, the last one's content stands alone.
    """
    found: list[str] = []
    words: list[str] = []
    start = 0
    for box_start, box_end, content in _boxes_backwards(text):
        if found:
            between = JOINS.fullmatch(text, box_end, start)
            if between is None:
                break
            words.append(" or " if between["or"] else ", ")
        found.append(content)
        start = box_start
    spellings = list(dict.fromkeys(found))
    if len(spellings) < 2:
        return found[0] if found else None
    pairs = combinations(spellings, 2)
    if same and len(spellings) <= MOST_SPELLINGS and all(same(one, two) for one, two in pairs):
        return found[0]
    return found[-1] + "".join(map(str.__add__, words[::-1], found[-2::-1]))


def _boxes_backwards(text: str) -> Iterator[tuple[int, int, str]]:
    """Start, end and content of each box, the last first."""
    # Backwards, so that many boxes cost no more than one; a stray opening one ends at the next's
    # start at the latest, which bounds the whole scan by the length of the text.
    limit = len(text)
    for match in reversed(list(BOX.finditer(text))):
        if match[1] is not None:
            yield match.start(), match.end(), match[1]
        else:
            close = closing_brace(text, match.end(), limit - match.end())
            if close >= 0:
                yield match.start(), close + 1, text[match.end() : close].strip()
        limit = min(limit, match.start())


def last_said(text: str) -> str | None:
    """The rest of the sentence, or line, after the last words that state an answer; None without.

    Where nothing follows on the line, the next line that is not empty counts.
    """
    last = None
    for match in SAID.finditer(text):
        last = match
    if last is None:
        return None
    rest = text[last.end() : last.end() + MOST_SAID].lstrip(" \t\r\n*_:`")
    return _sentence(rest)


def last_line(text: str) -> str | None:
    """The last line that is not empty; None without one."""
    lines = text.strip().rsplit("\n", 1)
    return lines[-1].strip() or None


def _sentence(text: str) -> str:
    """`text` up to the end of its first sentence or line; mathematics is never cut."""
    cover = MATH_SPAN.match(text)
    from_here = cover.end() if cover else 0
    end = SENTENCE_END.search(text, from_here)
    return text[: end.start() if end else len(text)].strip(" \t\r\n*_`")
