"""Which model a critic is: the numbers of its folder, and whether its head begins at zero. Pure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from megarl.contracts.mesh import Mesh
from megarl.reshard.families import FolderError, ModelSpec, read_spec
from megarl.reshard.layout import megatron_placement
from megarl.reshard.placement import LayoutError

TOKENIZER = "tokenizer.json"


def critic_spec(
    folder: Path, actor: ModelSpec, longest: int | None = None, mesh: Mesh | None = None
) -> tuple[ModelSpec, bool]:
    """(the critic's numbers, whether its head is fresh) for the model in `folder`.

    A causal LM gives its body under a value head without a bias, not tied, which is fresh: no
    tensor of the folder. A sequence or token classification of one label (a reward model) is
    taken as it is. Its size is its own, but it reads the actor's token ids, so its vocabulary is
    at least as large. `longest`: tokens of a prompt and its response, for each of which it must
    have a position; `mesh`: what it must be cut by (None: not asked).

    Raises `FolderError` or `LayoutError`, in one line that names critic.path.
    """
    try:
        spec = read_spec(folder)
    except FolderError as error:
        told = str(error).replace("model.path", "critic.path")
        raise FolderError(f"critic.path: {told}") from error
    if spec.vocab < actor.vocab:
        raise FolderError(
            f"critic.path: {folder} has a vocabulary of {spec.vocab}, the actor one of "
            f"{actor.vocab}; take a critic of the actor's tokenizer"
        )
    if longest is not None and spec.max_positions < longest:
        raise FolderError(
            f"critic.path: {folder} has {spec.max_positions} positions, but "
            f"data.max_prompt_tokens + rollout.max_response_tokens are {longest}; lower one of "
            "them or use a critic with more positions"
        )
    fresh = spec.head != "value"
    if fresh:
        spec = replace(spec, head="value", tied=False)
    if mesh is not None:
        try:
            megatron_placement(spec, mesh)
        except LayoutError as error:
            raise LayoutError(f"critic.path: {folder}: {error}") from error
    return spec, fresh


def refuse_other_tokens(folder: Path, actor_folder: Path) -> None:
    """Raises `FolderError` where the two folders' tokenizers give a token two ids: the critic would
    read another text than the actor wrote. Where either has no `tokenizer.json` nothing is known.
    """
    mine, theirs = _ids(Path(folder)), _ids(Path(actor_folder))
    for token, number in theirs.items():
        if mine.get(token, number) != number:
            raise FolderError(
                f"critic.path: {Path(folder) / TOKENIZER} gives {token!r} the id {mine[token]}, "
                f"{Path(actor_folder) / TOKENIZER} {number}; take a critic of the actor's tokenizer"
            )


def _ids(folder: Path) -> dict[str, int]:
    """Token → id; empty without a tokenizer.json."""
    path = folder / TOKENIZER
    if not path.is_file():
        return {}
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        vocab = told["model"]["vocab"]
        if isinstance(vocab, list):  # of a unigram model: (token, score), by id
            vocab = {token: number for number, (token, _) in enumerate(vocab)}
        added = {each["content"]: each["id"] for each in told.get("added_tokens") or ()}
        return {**vocab, **added}
    except (ValueError, KeyError, TypeError) as error:
        raise FolderError(
            f"{path}: not a tokenizer of the tokenizers library: {error!r}"
        ) from error
