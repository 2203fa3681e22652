"""One row of a source: from a line or a table's row to a `Prompt`, or a refusal with its reason.

Answers are text: an answer that is null, empty or not a string (a number, say) is refused, because
what a number reads like (`7`, `7.0`, `1e3`) would be a guess.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from megarl.contracts.records import Prompt
from megarl.contracts.template import Template
from megarl.contracts.tokens import Tokens, TokensError, check_messages
from megarl.data.readers import too_large
from megarl.data.refusals import PromptError, Refused
from megarl.data.renderings import special_tokens
from megarl.recipe.data import SourceSection

_SHOWN_KEYS = 20
_MOST_LEVELS = 100
"""Of lists and objects in a row; what writes, hashes and sends rows goes into them by recursion."""
ID_KEY = "id"
MOST_NAMES = 1000
"""Source names of a set; an iteration has several metrics for each."""
MANY_NAMES = 100
"""From more on a person is told."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A row that is in order but for the number of its tokens, which are not made yet."""

    prompt_id: str
    source: str
    text: str
    user_text: str
    """What the user wrote in all messages, a line break between two."""
    rendered: str
    answer: str
    metadata: dict[str, Any]
    reward: str
    place: str
    """`file:line`."""
    own_system: bool
    """It begins with a system message, which stands in place of the source's system prompt."""
    special: str
    """The first special token that is written in its text; empty: none is."""


class RowChecks:
    """Checks the rows of one source; `seen` and `names` have the ids, with their places, and the
    source names of all usable rows of the set."""

    def __init__(
        self,
        source: SourceSection,
        tokens: Tokens,
        template: Template,
        section: Any,
        seen: dict[str, str],
        names: set[str],
    ) -> None:
        """`source` is filled; `section` is the recipe's `data`."""
        self._source, self._tokens, self._template = source, tokens, template
        self._section, self._seen, self._names = section, seen, names
        keys = (source.prompt_key, source.answer_key, source.source_key, source.reward_key)
        self._own = [ID_KEY, *(key for key in keys if key is not None)]
        self._special = special_tokens(tokens)

    def check(self, number: int, row: dict[str, Any]) -> Checked:
        """Raises `Refused`. `row` has passed `check_json`."""
        source = self._source
        prompt_id = self._id(row, number)
        prompt = required(row, source.prompt_key, "prompt")
        answer = required(row, source.answer_key, "answer")
        if not isinstance(answer, str):
            kind = type(answer).__name__
            raise Refused(
                "answer_not_text", f'"{source.answer_key}" must be a string, not {kind} {answer!r}'
            )
        if not answer.strip():
            raise Refused("empty_answer", f'"{source.answer_key}" is empty')
        name = self._name(row, source.source_key, "source") or source.name
        reward = self._name(row, source.reward_key, "reward") or source.reward or name
        rendered = self._rendered(prompt)
        text, user_text = said_by_user(prompt)
        return Checked(
            prompt_id=prompt_id,
            source=name,
            text=text,
            user_text=user_text,
            rendered=rendered,
            answer=answer,
            metadata=without(row, self._own),
            reward=reward,
            place=f"{source.path}:{number}",
            own_system=source.system_prompt is not None and begins_with_system(prompt),
            special=self._special(prompt),
        )

    def prompt(self, checked: Checked, token_ids: tuple[int, ...]) -> Prompt:
        """The row with the very ids that the engine executes; its `id` is taken from then on.

        Raises `Refused`, and `PromptError` where rows have more than 1,000 source names.
        """
        limit = self._section.max_prompt_tokens
        if len(token_ids) > limit:
            raise Refused(
                "too_long",
                f"prompt of {len(token_ids)} tokens, data.max_prompt_tokens is {limit}",
            )
        largest = max(token_ids, default=-1)
        if largest >= self._tokens.vocab_size:
            raise Refused(
                "outside_vocabulary",
                f"token id {largest} is outside the model's vocabulary of "
                f"{self._tokens.vocab_size}",
            )
        # Last: a row that is refused takes no id from a later one.
        first = self._seen.setdefault(checked.prompt_id, checked.place)
        if first is not checked.place:
            raise Refused("duplicate_id", f"id {checked.prompt_id!r} is taken by {first}")
        self._count(checked)
        return Prompt(
            prompt_id=checked.prompt_id,
            source=checked.source,
            text=checked.text,
            token_ids=token_ids,
            answer=checked.answer,
            metadata=checked.metadata,
            reward=checked.reward,
        )

    def _count(self, checked: Checked) -> None:
        self._names.add(checked.source)
        if len(self._names) > MOST_NAMES:
            raise PromptError(
                f"{checked.place}: source {checked.source!r:.80} is number {len(self._names)}, and "
                f"each has metrics of its own: {MOST_NAMES} at most; is data.source_key "
                f"({self._source.source_key}) a column that differs in every row? name another "
                "one, or none"
            )

    def _id(self, row: dict[str, Any], number: int) -> str:
        given = row.get(ID_KEY)
        if given is not None and (isinstance(given, bool) or not isinstance(given, str | int)):
            raise Refused("bad_id", f'"{ID_KEY}" must be a string or an integer, not {given!r}')
        return f"{self._source.name}:{number}" if given in (None, "") else str(given)

    def _name(self, row: dict[str, Any], key: str | None, kind: str) -> str:
        """The row's source or reward name; empty where no key says it."""
        if key is None:
            return ""
        name = required(row, key, kind)
        if not isinstance(name, str) or not name.strip():
            raise Refused(f"bad_{kind}", f'"{key}" must be a text that is not empty, not {name!r}')
        if not name.isprintable():
            raise Refused(
                f"bad_{kind}",
                f'"{key}" is {name!r:.80}: metrics are named after it, so it may have no line '
                "break or other character that does not print; write it otherwise",
            )
        return name

    def _rendered(self, prompt: Any) -> str:
        source = self._source
        if not isinstance(prompt, str):
            try:
                check_messages(prompt)
            except TokensError as error:
                raise Refused("bad_messages", f'"{source.prompt_key}": {error}') from error
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        if not text.strip():
            raise Refused("empty_prompt", f'"{source.prompt_key}" is empty')
        try:
            return self._tokens.rendered(prompt, self._template, source.system_prompt)
        except TokensError as error:
            raise Refused("template", str(error)) from error


def checked_row(raw: bytes | dict[str, Any] | Refused, max_bytes: int) -> dict[str, Any]:
    """What `read_rows` gave, as a row of plain JSON. Raises `Refused`."""
    if isinstance(raw, Refused):
        raise raw
    row = parse_line(raw) if isinstance(raw, bytes) else raw
    size = check_json(row)
    if row is raw and size > max_bytes:  # a line was measured when it was read
        raise too_large(size, max_bytes)
    return row


def parse_line(line: bytes) -> dict[str, Any]:
    """The JSON object of a line. Raises `Refused`."""
    try:
        row = _DECODER.decode(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise Refused("not_utf8", f"byte {error.start} is not UTF-8") from error
    except ValueError as error:
        raise Refused("malformed_json", f"not JSON: {error}") from error
    except RecursionError as error:
        raise Refused("malformed_json", "JSON nested too deeply") from error
    if not isinstance(row, dict):
        raise Refused("malformed_json", f"a row must be a JSON object, not {type(row).__name__}")
    return row


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Python alone would take the last of two values of one key."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Refused("malformed_json", f"an object has the key {twice!r:.80} twice; keep one")
    return found


_DECODER = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_each_once)


def check_json(row: dict[str, Any]) -> int:
    """How many bytes of JSON `row` is. Raises `Refused` for what no JSON file can hold.

    JSON may escape half a surrogate pair: no text, no tokenizer reads it.
    """
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
        size = len(text.encode("utf-8"))
    except RecursionError as error:
        raise Refused("malformed_json", "JSON nested too deeply") from error
    except UnicodeEncodeError as error:
        raise Refused("lone_surrogate", f"{_culprit(row)} holds half a surrogate pair") from error
    except ValueError as error:  # 1e999 reads as infinity, and tables have NaN
        raise Refused("malformed_json", f"{_culprit(row)} holds a number beyond floats") from error
    if text.count("{") + text.count("[") > _MOST_LEVELS and _deeper(row, _MOST_LEVELS):
        raise Refused("malformed_json", "JSON nested too deeply")
    return size


def _deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects go more than `levels` into one another."""
    if not isinstance(value, dict | list):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return not levels or any(_deeper(item, levels - 1) for item in inside)


def _culprit(row: dict[str, Any]) -> str:
    """The first key whose value, or which itself, is no JSON."""
    for key, value in row.items():
        try:
            json.dumps([key, value], ensure_ascii=False, allow_nan=False).encode("utf-8")
        except ValueError:
            return repr(key)
    return "the row"


_ABSENT = object()


def look_up(row: dict[str, Any], key: str, default: Any = None) -> Any:
    """`row[key]`, or what `a.b` leads to: key b within key a. A key with dots in it comes first."""
    if key in row:
        return row[key]
    head, dot, rest = key.partition(".")
    inside = row.get(head)
    return look_up(inside, rest, default) if dot and isinstance(inside, dict) else default


def required(row: dict[str, Any], key: str, kind: str) -> Any:
    """The value at `key`. Raises `Refused` where it is missing or null."""
    value = look_up(row, key, _ABSENT)
    if value is _ABSENT:
        holder, inside = deepest(row, key)
        names = sorted(holder)
        shown = ", ".join(names[:_SHOWN_KEYS]) + " …" * (len(names) > _SHOWN_KEYS)
        whose = f"keys of {inside}" if inside else "keys"
        raise Refused(f"missing_{kind}", f'no "{key}"; {whose} are {shown or "none"}')
    if value is None:
        raise Refused(f"null_{kind}", f'"{key}" is null')
    return value


def deepest(row: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """The object in which `look_up` looks for the last part of `key`, and the key that led there;
    of the parts that are missing the first is meant."""
    path: list[str] = []
    head, dot, rest = key.partition(".")
    while dot and isinstance(row.get(head), dict):
        row = row[head]
        path.append(head)
        head, dot, rest = rest.partition(".")
    return row, ".".join(path)


def without(row: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """`row` but for what `look_up` finds under `keys`; an object left empty goes too."""
    rest = dict(row)
    for key in keys:
        if key in rest:
            del rest[key]
            continue
        head, dot, inner = key.partition(".")
        if dot and isinstance(rest.get(head), dict):
            left = without(rest[head], [inner])
            if left or not rest[head]:
                rest[head] = left
            else:
                del rest[head]
    return rest


def begins_with_system(prompt: Any) -> bool:
    """Whether a prompt is messages of which the first is the system's."""
    return not isinstance(prompt, str) and prompt[0]["role"] == "system"


def said_by_user(prompt: Any) -> tuple[str, str]:
    """The last message's text, and the user's in all messages, a line break between two."""
    if isinstance(prompt, str):
        return prompt, prompt
    last = prompt[-1]["content"]
    earlier = [message["content"] for message in prompt[:-1] if message["role"] == "user"]
    return last, "\n".join([*earlier, last]) if earlier else last
