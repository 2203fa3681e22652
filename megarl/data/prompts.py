"""Prompts: rows of a JSONL file, checked once at start.

Every row becomes a `Prompt` with the very ids the engine executes, or a refusal with file, line and
reason. Nothing is truncated and the order of the file is kept.

Answers are text: an answer that is null, empty or not a string (a number, say) is refused, because
what a number reads like (`7`, `7.0`, `1e3`) would be a guess.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from megarl.contracts.errors import InputError
from megarl.contracts.hashes import bytes_hash, canonical_json
from megarl.contracts.records import Prompt
from megarl.contracts.tokens import Tokens, TokensError, check_messages
from megarl.recipe.data import SourceSection

SHOWN_REFUSALS = 5


class PromptError(InputError):
    """Prompts that cannot be used as asked; the message says why."""


class Refusal(NamedTuple):
    """One row that is left out."""

    where: str
    """`file:line`."""
    why: str


class _Refused(Exception):
    """Raised inside the checks of one row: `kind` is counted, `why` is shown."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind, self.why = kind, why


@dataclass(frozen=True)
class PromptSet:
    """The usable rows of one file, in its order."""

    rows: tuple[Prompt, ...]
    refusals: tuple[Refusal, ...]
    refused: dict[str, int]
    """Kind of refusal → rows, e.g. `{"too_long": 2, "empty_answer": 1}`."""
    fingerprint: str
    """Over ids, rendered token ids, answers, sources and metadata, in order."""

    def __len__(self) -> int:
        return len(self.rows)

    @staticmethod
    def load(sources: Sequence[SourceSection], tokens: Tokens, section: Any) -> PromptSet:
        """Read and check every row of `sources`, filled; `section` is the recipe's `data`.

        Raises `PromptError` when a file is missing or has no usable row, and when the refused
        share exceeds `section.max_refused_share`, naming the first rows and the count per kind.
        """
        rows: list[Prompt] = []
        refusals: list[Refusal] = []
        kinds: Counter[str] = Counter()
        seen: dict[str, str] = {}
        for source in sources:
            path = Path(source.path)
            if not path.is_file():
                raise PromptError(
                    f"{path} does not exist; set data.train or data.eval to a JSONL file"
                )
            reader = _Reader(source, tokens, section, seen)
            for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
                if not line.strip():
                    continue
                try:
                    rows.append(reader.prompt(number, line))
                except _Refused as refused:
                    refusals.append(Refusal(f"{path}:{number}", refused.why))
                    kinds[refused.kind] += 1
            _check_share(path, len(rows), refusals, kinds, section.max_refused_share)
        return PromptSet(tuple(rows), tuple(refusals), dict(kinds), _fingerprint(rows))


class _Reader:
    """Turns one line at a time into a `Prompt`; remembers the ids it has seen."""

    def __init__(
        self, source: SourceSection, tokens: Tokens, section: Any, seen: dict[str, str]
    ) -> None:
        self._source, self._tokens, self._section, self._seen = source, tokens, section, seen

    def prompt(self, number: int, line: bytes) -> Prompt:
        section = self._source
        row = _parse(line)
        prompt_id = self._claim_id(row, number)
        prompt = _required(row, section.prompt_key, "prompt")
        answer = _required(row, section.answer_key, "answer")
        _check_text(row)
        if not isinstance(answer, str):
            kind = type(answer).__name__
            raise _Refused(
                "answer_not_text", f'"{section.answer_key}" must be a string, not {kind} {answer!r}'
            )
        if not answer.strip():
            raise _Refused("empty_answer", f'"{section.answer_key}" is empty')
        token_ids = self._render(prompt)
        own = {section.prompt_key, section.answer_key, section.source_key, section.reward_key, "id"}
        name = self._source_name(row)
        return Prompt(
            prompt_id=prompt_id,
            source=name,
            text=prompt if isinstance(prompt, str) else prompt[-1]["content"],
            token_ids=token_ids,
            answer=answer,
            metadata={key: value for key, value in row.items() if key not in own},
            reward=section.reward or name,
        )

    def _claim_id(self, row: dict[str, Any], number: int) -> str:
        given = row.get("id")
        if given is not None and (isinstance(given, bool) or not isinstance(given, str | int)):
            raise _Refused("bad_id", f'"id" must be a string or an integer, not {given!r}')
        prompt_id = f"{self._source.name}:{number}" if given in (None, "") else str(given)
        here = f"{self._source.path}:{number}"
        first = self._seen.setdefault(prompt_id, here)
        if first != here:
            raise _Refused("duplicate_id", f"id {prompt_id!r} is taken by {first}")
        return prompt_id

    def _source_name(self, row: dict[str, Any]) -> str:
        key = self._source.source_key
        if key is None:
            return self._source.name
        source = _required(row, key, "source")
        if not isinstance(source, str):
            raise _Refused("bad_source", f'"{key}" must be a string, not {source!r}')
        return source

    def _render(self, prompt: Any) -> tuple[int, ...]:
        section, source = self._section, self._source
        if not isinstance(prompt, str):
            try:
                check_messages(prompt)
            except TokensError as error:
                raise _Refused("bad_messages", f'"{source.prompt_key}": {error}') from error
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        if not text.strip():
            raise _Refused("empty_prompt", f'"{source.prompt_key}" is empty')
        # Without a template no row could be rendered: that is the folder's fault, not the row's.
        if section.template == "model" and self._tokens.chat_template is None:
            return self._tokens.render(prompt, section.template, source.system_prompt)
        try:
            ids = self._tokens.render(prompt, section.template, source.system_prompt)
        except TokensError as error:
            raise _Refused("template", str(error)) from error
        if len(ids) > section.max_prompt_tokens:
            raise _Refused(
                "too_long",
                f"prompt of {len(ids)} tokens, data.max_prompt_tokens is "
                f"{section.max_prompt_tokens}",
            )
        largest = max(ids, default=-1)
        if largest >= self._tokens.vocab_size:
            raise _Refused(
                "outside_vocabulary",
                f"token id {largest} is outside the model's vocabulary of "
                f"{self._tokens.vocab_size}",
            )
        return ids


def _parse(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise _Refused("not_utf8", f"byte {error.start} is not UTF-8") from error
    except ValueError as error:
        raise _Refused("malformed_json", f"not JSON: {error}") from error
    except RecursionError as error:
        raise _Refused("malformed_json", "JSON nested too deeply") from error
    if not isinstance(row, dict):
        raise _Refused("malformed_json", f"a row must be a JSON object, not {type(row).__name__}")
    return row


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _required(row: dict[str, Any], key: str, kind: str) -> Any:
    if key not in row:
        raise _Refused(f"missing_{kind}", f'no "{key}"; keys are {sorted(row)}')
    if row[key] is None:
        raise _Refused(f"null_{kind}", f'"{key}" is null')
    return row[key]


def _check_text(row: dict[str, Any]) -> None:
    """JSON may escape half a surrogate pair: no text, no tokenizer reads it."""
    for key, value in row.items():
        try:
            json.dumps([key, value], ensure_ascii=False, allow_nan=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise _Refused("lone_surrogate", f"{key!r} holds half a surrogate pair") from error
        except ValueError as error:  # 1e999 reads as infinity
            raise _Refused("malformed_json", f"{key!r} holds a number beyond floats") from error


def _check_share(
    path: Path, kept: int, refusals: list[Refusal], kinds: Counter[str], limit: float
) -> None:
    total = kept + len(refusals)
    if kept and len(refusals) <= limit * total:
        return
    if not total:
        raise PromptError(f"{path} holds no rows")
    shown = "; ".join(f"{where}: {why}" for where, why in refusals[:SHOWN_REFUSALS])
    more = f"; and {len(refusals) - SHOWN_REFUSALS} more" * (len(refusals) > SHOWN_REFUSALS)
    counts = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
    raise PromptError(
        f"{path}: {len(refusals)} of {total} rows refused ({counts}), "
        f"data.max_refused_share is {limit:g}: {shown}{more}"
    )


def _fingerprint(rows: list[Prompt]) -> str:
    return bytes_hash(
        canonical_json([r.prompt_id, r.token_ids, r.answer, r.source, r.metadata]).encode() + b"\n"
        for r in rows
    )
