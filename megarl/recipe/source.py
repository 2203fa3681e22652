"""Recipe text → one plain tree of settings that remembers where each was set.

A recipe may name another in `base:` (a path relative to its own file); the two are merged key by
key, the inheriting file wins, lists and single values are replaced whole. `key=value` overrides
come last. Nothing here knows which keys exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from megarl.contracts.errors import InputError

KeyPath = tuple[str, ...]

# No section is this deep; an alias inside its own anchor would be endless.
MAX_DEPTH = 20
# Characters of an override that a message repeats.
MOST_SHOWN = 200


class RecipeError(InputError):
    """What is wrong in a recipe, where, and what to change: one line."""


def dotted(path: Sequence[str | int]) -> str:
    """`("rollout", "tp")` → `rollout.tp`."""
    return ".".join(str(part) for part in path)


@dataclass
class Settings:
    """Nested plain data, and for each key path the place that set it (`file:line` or `override …`).

    `origin` is the place named for keys that nobody set: the recipe file.
    """

    origin: str
    data: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, str] = field(default_factory=dict)

    def place(self, path: Sequence[str | int]) -> str:
        """Where `path` was set, or a key under it, or its nearest section, or the recipe file."""
        parts = tuple(str(part) for part in path)
        if parts not in self.places:
            for inner, at in self.places.items():
                if inner[: len(parts)] == parts:
                    return at
        for length in range(len(parts), 0, -1):
            if parts[:length] in self.places:
                return self.places[parts[:length]]
        return self.origin

    def is_set(self, path: Sequence[str | int]) -> bool:
        """Whether a file or an override set exactly this key."""
        return tuple(str(part) for part in path) in self.places

    def lay_over(self, other: Settings) -> None:
        """Merge `other` into this one; where both set a key, `other` wins."""
        self._merge(self.data, other.data, other, ())
        self.origin = other.origin

    def _merge(
        self, mine: dict[str, Any], theirs: dict[str, Any], other: Settings, path: KeyPath
    ) -> None:
        for key, value in theirs.items():
            here = (*path, key)
            if isinstance(value, dict) and isinstance(mine.get(key), dict):
                if here in other.places:
                    self.places[here] = other.places[here]
                self._merge(mine[key], value, other, here)
                continue
            mine[key] = value
            size = len(here)
            for old in [old for old in self.places if old[:size] == here]:
                del self.places[old]
            self.places |= {new: at for new, at in other.places.items() if new[:size] == here}


def read_settings(path: Path, inheritors: tuple[Path, ...] = ()) -> Settings:
    """The settings of a recipe file and of those it inherits from.

    `inheritors`: the files, by absolute path, whose `base` chain led here. Raises `RecipeError`.
    """
    settings = _parse_file(path)
    base = settings.data.pop("base", None)
    if base is None:
        return settings
    place = settings.places.pop(("base",))
    if not isinstance(base, str):
        raise RecipeError(f"{place}: base: must be the path of one recipe file, got {base!r}")
    parent = path.parent / base
    chain = (*inheritors, path.resolve())
    if not parent.is_file():
        raise RecipeError(
            f"{place}: base: there is no file {parent}; give a path relative to {path}"
        )
    if parent.resolve() in chain:
        raise RecipeError(f"{place}: base: {parent} inherits from itself; remove one of the links")
    merged = read_settings(parent, chain)
    merged.lay_over(settings)
    return merged


def apply_overrides(settings: Settings, overrides: Sequence[str]) -> None:
    """Set each `key=value` (dotted key, YAML value) over what files say. Raises `RecipeError`."""
    for override in overrides:
        key, equals, text = override.partition("=")
        told = override.replace("\n", "\\n")
        place = "override " + (told if len(told) <= MOST_SHOWN else told[: MOST_SHOWN - 1] + "…")
        path = tuple(key.strip().split("."))
        if not equals or not all(path):
            raise RecipeError(f"{place}: write overrides as key=value, for example rollout.tp=2")
        _refuse_into_list(settings.data, path, place)
        value = _parse_text(text, place)
        if isinstance(value.data, str) and text != text.strip():
            raise RecipeError(
                f"{place}: there is white space around the value; leave it out, or put the value "
                "into quotes of its own"
            )
        layer = Settings(settings.origin, places={path: place})
        layer.places |= {(*path, *inner): place for inner in value.places}
        tree = value.data
        for part in reversed(path):
            tree = {part: tree}
        layer.data = tree
        settings.lay_over(layer)


def _refuse_into_list(data: Any, path: KeyPath, place: str) -> None:
    for depth, part in enumerate(path):
        if isinstance(data, list):
            raise RecipeError(
                f"{place}: {dotted(path[:depth])} is a list, which is replaced whole: "
                f"{dotted(path[:depth])}=[…]"
            )
        data = data.get(part) if isinstance(data, dict) else None


def _parse_file(path: Path) -> Settings:
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise RecipeError(f"{path}: there is no such recipe file") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not a UTF-8 text file ({error.reason})") from error
    layer = _parse_text(text, str(path), lines=True)
    if layer.data is None:
        layer.data = {}
    if not isinstance(layer.data, dict):
        raise RecipeError(f"{path}:1: a recipe is a mapping of sections such as `actor:`")
    return layer


def _parse_text(text: str, origin: str, *, lines: bool = False) -> Settings:
    """Plain data of one YAML document; `lines` adds the line to each place."""
    reader = YAML(typ="safe", pure=True)
    settings = Settings(origin)
    try:
        root = reader.compose(text)
        settings.data = None if root is None else _plain(root, (), settings, reader, lines)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{origin}:{mark.line + 1}" if lines and mark else origin
        problem = " ".join((error.problem or error.context or "cannot be read").split())
        raise RecipeError(f"{where}: not valid YAML: {problem}") from error
    except YAMLError as error:
        raise RecipeError(f"{origin}: not valid YAML: {' '.join(str(error).split())}") from error
    return settings


def _plain(node: Node, path: KeyPath, settings: Settings, reader: YAML, lines: bool) -> Any:
    """Plain data of a node; notes the place of every key below it."""

    def child(key: str, value: Node, at: Node) -> Any:
        line = f":{at.start_mark.line + 1}" if lines else ""
        settings.places[(*path, key)] = f"{settings.origin}{line}"
        return _plain(value, (*path, key), settings, reader, lines)

    if len(path) > MAX_DEPTH:
        raise RecipeError(f"{settings.place(path)}: nested too deeply, or an alias to itself")
    if isinstance(node, ScalarNode):
        try:
            return reader.constructor.construct_object(node, deep=True)
        except (ValueError, OverflowError) as error:  # such as the 13th month of a date
            raise RecipeError(f"{settings.place(path)}: {dotted(path)}: {error}") from error
    if isinstance(node, SequenceNode):
        return [child(str(index), item, item) for index, item in enumerate(node.value)]
    assert isinstance(node, MappingNode)
    tree: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = str(key_node.value) if isinstance(key_node, ScalarNode) else "?"
        if key in tree:
            line = f":{key_node.start_mark.line + 1}" if lines else ""
            raise RecipeError(
                f"{settings.origin}{line}: {dotted((*path, key))}: this key is set twice; keep one"
            )
        tree[key] = child(key, value_node, key_node)
    return tree
