"""Which model a critic is: the numbers of its folder, and whether its head begins at zero; and
whether a model reads the actor's token ids. Pure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megarl.contracts.mesh import Mesh
from megarl.contracts.pieces import read_pieces
from megarl.contracts.tokens import TokensError
from megarl.reshard.families import FolderError, ModelSpec, read_spec
from megarl.reshard.layout import megatron_placement
from megarl.reshard.placement import LayoutError


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


def refuse_other_tokens(key: str, folder: Path, actor_folder: Path) -> bool:
    """Whether `folder`, which the recipe's `key` names, has a tokenizer; where it has none its ids
    are taken for the actor's.

    Only ids are compared, not chat templates, and only those that both tokenizers know. Raises
    `InputError` naming the first id that is another piece of text here than in the actor's folder:
    the model would read another text than the actor wrote; and a tokenizer that cannot be read.
    """
    try:
        mine, theirs = read_pieces(folder), read_pieces(actor_folder)
    except TokensError as error:
        raise TokensError(f"{key}: {error}") from error
    if mine is None:
        return False
    if theirs is None:  # which `Tokens.load` refuses
        return True
    for number in sorted(mine.by_id.keys() & theirs.by_id.keys()):
        if mine.by_id[number] != theirs.by_id[number]:
            raise FolderError(
                f"{key}: in {mine.file} id {number} is {mine.by_id[number]!r}, in the actor's "
                f"{theirs.file} it is {theirs.by_id[number]!r}; take a model of the actor's "
                "tokenizer (if only the name of a token differs, copy the actor's tokenizer files "
                "into the folder)"
            )
    return True
