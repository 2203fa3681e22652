"""Rows of a Parquet file as plain JSON values, batch by batch.

Columns are checked before rows are read. What JSON has no form for becomes text where that is
exact and usual (dates and times as ISO 8601, decimals as written) and is refused by name where it
is not (bytes, durations). Parquet has no absent keys: they are nulls, in metadata too; only in
chat messages are nulls left out, since templates ask whether a key is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.data.refusals import PromptError, Refused
from megarl.recipe.data import SourceSection

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS = 256
"""Rows of a batch."""
_SHOWN_COLUMNS = 20


def read_parquet(source: SourceSection) -> Iterator[tuple[int, dict[str, Any] | Refused]]:
    """Rows from 1 on.

    Raises `PromptError` for a damaged file, and for a column that is missing or whose type cannot
    be what the recipe takes it for.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path, number = Path(source.path), 0
    try:
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            schema = file.schema_arrow
            _check_columns(path, schema, source)
            for batch in file.iter_batches(_ROWS):
                for row in _rows(_without_nanoseconds(batch)):
                    number += 1
                    yield number, _without_nulls(row, source.prompt_key)
    except (pa.ArrowException, OSError) as error:
        told = " ".join(str(error).split())[:200]
        where = f"after row {number}" if number else "its footer or first rows cannot be read"
        raise PromptError(f"{path}: broken Parquet, {where}: {told}; copy it again") from error


def _rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | Refused]:
    try:
        rows = batch.to_pylist(maps_as_pydicts="strict")
    except (UnicodeDecodeError, KeyError, OverflowError):
        if len(batch) > 1:
            for row in range(len(batch)):
                yield from _rows(batch.slice(row, 1))
            return
        yield _why_unreadable(batch)
        return
    for row in rows:
        yield {name: _plain(value) for name, value in row.items()}


def _why_unreadable(batch: pa.RecordBatch) -> Refused:
    """Of a batch of one row."""
    for name in batch.schema.names:
        try:
            batch.column(name).to_pylist(maps_as_pydicts="strict")
        except UnicodeDecodeError:
            return Refused("not_utf8", f'"{name}" holds bytes that are not UTF-8')
        except KeyError:
            return Refused("malformed_json", f'"{name}" is a map with one key twice')
        except OverflowError:
            return Refused(
                "malformed_json",
                f'"{name}" holds a date or time beyond the years 1 to 9999; correct it',
            )
    return Refused("malformed_json", "a row that cannot be read")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat()
    return str(value) if isinstance(value, Decimal) else value


def _without_nulls(row: dict[str, Any] | Refused, prompt_key: str | None) -> Any:
    """Chat messages of one column have all messages' keys; those of others are null here."""
    if isinstance(row, Refused):
        return row
    holder, key = row, str(prompt_key)
    while key not in holder:
        head, dot, rest = key.partition(".")
        if not dot or not isinstance(holder.get(head), dict):
            return row
        holder, key = holder[head], rest
    if isinstance(holder[key], list):
        holder[key] = [_compact(message) for message in holder[key]]
    return row


def _compact(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    return {key: value for key, value in message.items() if value is not None}


def _without_nanoseconds(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Times of a column of their own to the microsecond, which is what Python's have."""
    import pyarrow as pa

    for index, column in enumerate(batch.schema):
        if pa.types.is_timestamp(column.type) and column.type.unit == "ns":
            coarser = batch.column(index).cast(pa.timestamp("us", column.type.tz), safe=False)
            batch = batch.set_column(index, column.name, coarser)
    return batch


def _check_columns(path: Path, schema: pa.Schema, source: SourceSection) -> None:
    names = schema.names
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise PromptError(f'{path}: two columns are called "{twice[0]}"; rename one')
    for key, role in (
        ("prompt_key", "a prompt: text, or a list of messages {role, content}"),
        ("answer_key", "an answer: text"),
        ("source_key", "a source: text"),
        ("reward_key", "a reward name: text"),
    ):
        name = getattr(source, key)
        if name is None:
            continue
        kind = _type_at(schema, name)
        if kind is None:
            raise PromptError(f'{path}: no column "{name}" ({key}); {_there(schema, name)}')
        if not (_is_text(kind) or (key == "prompt_key" and _is_messages(kind))):
            raise PromptError(
                f'{path}: column "{name}" ({key}) is {kind}, which is not {role}{_advice(kind)}'
            )
    for column in schema:
        zone = _unknown_zone(column.type)
        if zone is not None:
            raise PromptError(
                f'{path}: column "{column.name}" is {column.type}, and this machine knows no time '
                f"zone {zone!r}; write the column in UTC, or install the zone (package tzdata)"
            )
        problem = _problem(column.type, top=True)
        if problem:
            raise PromptError(
                f'{path}: column "{column.name}" is {column.type}, and {problem} has no form in '
                "JSON, which a row's other keys are kept in; write the file without it"
            )


def _advice(kind: pa.DataType) -> str:
    import pyarrow as pa

    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "; write the numbers as text, as the scorer is to compare them (7, 7.0 or 1e3)"
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return "; write the column as UTF-8 text"
    return "; name another column, or write this one as text"


def _type_at(schema: pa.Schema, key: str) -> pa.DataType | None:
    """Of a column or, behind dots, of a field in one."""
    import pyarrow as pa

    fields, rest = {column.name: column.type for column in schema}, key
    while rest not in fields:
        head, dot, rest = rest.partition(".")
        if not dot or head not in fields or not pa.types.is_struct(fields[head]):
            return None
        fields = {field.name: field.type for field in fields[head].fields}
    return fields[rest]


def _there(schema: pa.Schema, key: str) -> str:
    """The columns that there are or, where `key` leads into one, its fields."""
    import pyarrow as pa

    names, path, rest = schema.names, "", key
    fields = {column.name: column.type for column in schema}
    head, dot, rest = rest.partition(".")
    while dot and head in fields:
        path = f"{path}.{head}" if path else head
        if not pa.types.is_struct(fields[head]):
            return f'"{path}" is {fields[head]}, which has no fields'
        fields = {field.name: field.type for field in fields[head].fields}
        names = list(fields)
        head, dot, rest = rest.partition(".")
    shown = ", ".join(names[:_SHOWN_COLUMNS])
    more = f" and {len(names) - _SHOWN_COLUMNS} more" * (len(names) > _SHOWN_COLUMNS)
    return f"{f'fields of {path}' if path else 'columns'} are {shown}{more}"


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return any(is_(kind) for is_ in (pa.types.is_string, pa.types.is_large_string, _is_view))


def _is_view(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return pa.types.is_string_view(kind)


def _is_list(kind: pa.DataType) -> bool:
    import pyarrow as pa

    types = pa.types
    views = types.is_list_view(kind) or types.is_large_list_view(kind)
    return (
        views or types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    )


def _is_messages(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if not _is_list(kind) or not pa.types.is_struct(kind.value_type):
        return False
    fields = {field.name: field.type for field in kind.value_type.fields}
    return all(name in fields and _is_text(fields[name]) for name in ("role", "content"))


def _unknown_zone(kind: pa.DataType) -> str | None:
    """The first time zone in a type that Python does not know."""
    import pyarrow as pa

    if pa.types.is_timestamp(kind) and kind.tz is not None:
        try:
            pa.scalar(0, kind).as_py()
        except pa.ArrowInvalid:
            return kind.tz
        return None
    inside = [kind.field(index).type for index in range(kind.num_fields)]
    if pa.types.is_dictionary(kind):
        inside = [kind.value_type]
    return next((zone for each in inside if (zone := _unknown_zone(each)) is not None), None)


def _problem(kind: pa.DataType, top: bool = False) -> str:
    """What of a type cannot become plain JSON; nothing where all can."""
    import pyarrow as pa

    types = pa.types
    if _is_list(kind) or types.is_dictionary(kind):
        return _problem(kind.value_type)
    if types.is_struct(kind):
        names = [field.name for field in kind.fields]
        if len(set(names)) < len(names):
            return "a struct with one field twice"
        return next(filter(None, (_problem(field.type) for field in kind.fields)), "")
    if types.is_map(kind):
        if not _is_text(kind.key_type):
            return f"a map whose keys are {kind.key_type}"
        return _problem(kind.item_type)
    if types.is_timestamp(kind) and kind.unit == "ns" and top:
        return ""
    if (types.is_timestamp(kind) or types.is_time(kind)) and kind.unit == "ns":
        return f"{kind} (nanoseconds)"
    good = (types.is_null, types.is_boolean, types.is_integer, types.is_floating, types.is_decimal)
    good += (types.is_date, types.is_timestamp, types.is_time, _is_text)
    return "" if any(is_(kind) for is_ in good) else str(kind)
