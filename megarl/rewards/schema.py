"""`json_schema`: 1 when the response is JSON and valid under a schema, else 0."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from jsonschema_specifications import REGISTRY
from referencing import Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from megarl.rewards.scorer import MOST_SAID, NO_ANSWER, Response, RewardParts, Scorer

FENCE = "```"
TOO_DEEP = "nested too deeply"
SHALLOW = 20
"""Levels of a document that any usable schema can be followed through."""
TRIVIAL = (None, True, 0, "", [], {}, [0], [""], [[]], [{}], {"a": 0}, {"a": []}, {"a": {}})
"""Documents that a schema is tried on when it is loaded."""
ENDLESS = "a $ref of the schema leads back to itself for the same value, without an end"


def make(*, schema: Mapping[str, Any] | str) -> Scorer:
    """Option `schema`: a JSON schema, as a mapping in the recipe or as the path of a JSON file.

    Its `$schema` says the draft; without one it is read as draft 2020-12. `format` words are not
    asserted. A `$ref` must lead to a place in the schema itself, or to a published draft: nothing
    is fetched. One that leads back to itself for the same value (`{"$ref": "#"}`) never comes to an
    end: it is refused, or an error of the response that gets there.

    The last block that a line ```json opens counts, to its closing line or to the response's end;
    without such a block the whole response does.
    What is not JSON (`NaN` and a name given twice are not) scores 0 with the detail `no_answer`.
    The detail of an invalid answer is its most telling problem: where, and what.
    """
    validator = _validator(schema)

    def score(response: Response) -> RewardParts:
        text = _last_block(response.text)
        try:
            value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_object)
        except (ValueError, RecursionError):
            return RewardParts(0.0, NO_ANSWER)
        try:
            problem = best_match(validator.iter_errors(value))
        except RecursionError as error:
            if _is_shallow(value):
                raise ValueError(ENDLESS) from error
            # The answer's doing, under a schema that refers to itself.
            return RewardParts(0.0, TOO_DEEP)
        if problem is None:
            return RewardParts(1.0)
        return RewardParts(0.0, f"{problem.json_path}: {problem.message}"[:MOST_SAID])

    return score


def _validator(schema: Mapping[str, Any] | str) -> Validator:
    where = "schema"
    if isinstance(schema, str):
        where = f"schema {schema}"
        try:
            schema = json.loads(Path(schema).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{where} cannot be read as JSON: {error}") from error
    if not isinstance(schema, Mapping) or not schema:
        # An empty schema is one too, but all JSON is valid under it.
        raise ValueError(f"{where} must be a mapping with something in it")
    draft = validator_for(schema, default=Draft202012Validator)
    try:
        draft.check_schema(schema)
    except SchemaError as error:
        raise ValueError(
            f"{where} is no JSON schema: {error.json_path}: {error.message}"
        ) from error
    resource = Resource.from_contents(schema, default_specification=DRAFT202012)
    registry = REGISTRY.with_resource("", resource)
    try:
        _follow(resource, registry.resolver_with_root(resource))
    except Unresolvable as error:
        raise ValueError(f"{where} refers to {error.ref}, which it does not hold") from error
    validator = draft(schema, registry=REGISTRY)
    try:
        for document in TRIVIAL:
            validator.is_valid(document)
    except RecursionError as error:
        raise ValueError(f"{where}: {ENDLESS}") from error
    return validator


def _is_shallow(value: Any) -> bool:
    """Whether no part of it lies under more than `SHALLOW` lists and objects."""
    level = [value]
    for _ in range(SHALLOW):
        level = [
            part
            for whole in level
            if isinstance(whole, dict | list)
            for part in (whole.values() if isinstance(whole, dict) else whole)
        ]
    return not any(isinstance(part, dict | list) for part in level)


def _follow(resource: Resource[Any], resolver: Any) -> None:
    """Looks every `$ref` up, so that none is found missing while a response is scored."""
    if isinstance(resource.contents, Mapping) and isinstance(resource.contents.get("$ref"), str):
        resolver.lookup(resource.contents["$ref"])
    for inner in resource.subresources():
        _follow(inner, resolver.in_subresource(inner))


def _last_block(text: str) -> str:
    # By lines and not by a pattern: linear, however many blocks are left open.
    block: list[str] | None = None
    is_open = False
    for line in text.splitlines(keepends=True):
        mark = line.strip()
        if is_open and mark == FENCE:
            is_open = False
        elif not is_open and mark.lower() == FENCE + "json":
            block, is_open = [], True
        elif is_open and block is not None:
            block.append(line)
    return text if block is None else "".join(block)


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in an object")
    return found
