"""Tokenizer and chat template of a model folder, hashed: text or messages → the ids that run.

Text becomes ids once, here. Nothing downstream encodes again: a decoded and re-encoded response
is another list of ids, and its log-probs and masks would belong to other tokens.

Beginning of sequence: ids start with exactly one BOS when the chat template renders one or the
tokenizer prepends one by itself, and with none otherwise. A base model without a template is
prompted with `template="none"`: the plain text under the same BOS rule, no end of sequence.
A Jinja file is a template like the model's own (`contracts.template`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.contracts.hashes import contract_hash, file_hash
from megarl.contracts.template import (
    MODEL,
    NONE,
    Messages,
    Template,
    TokensError,
    check_messages,
    read_template,
    render_messages,
)

__all__ = ["Messages", "Template", "Tokens", "TokensError", "check_messages"]

TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
"""Files of a model folder that decide ids; those present go into the hash."""

PROBES = (
    "What is 23 + 45?",
    "The answer is 1024.50, so it's (a - b) / 2 = 7!",
    "two  spaces and a word",
    "line one\nline two",
    "naïve café",
)
"""Texts on which two tokenizers of one folder must agree, ids and decoding."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """Tokenizer and chat template of one model folder. Made by `Tokens.load`."""

    folder: Path
    vocab_size: int
    """The HF config's `vocab_size`: the model's ids are 0 … vocab_size − 1."""
    known_ids: np.ndarray
    """bool [vocab_size]: the tokenizer knows this id. Others may be sampled as a policy drifts."""
    bos_id: int | None
    adds_bos: bool
    """The tokenizer prepends BOS by itself."""
    eos_ids: tuple[int, ...]
    """Ids that end a response: the union of config, generation config and tokenizer."""
    special_ids: frozenset[int]
    """Ids that `decode` skips: BOS, EOS, PAD, UNK and every added token declared special."""
    chat_template: str | None
    hash: str
    """Over the tokenizer's files, the template and the special ids."""
    _tokenizer: Any

    @staticmethod
    def load(folder: Path) -> Tokens:
        """Read a model folder's tokenizer; nothing is downloaded.

        Raises `TokensError` when config or tokenizer files are missing or damaged, when no
        end-of-sequence id is declared, or when transformers and sentencepiece read the folder
        differently.
        """
        folder = Path(folder)
        config = _read_json(folder / "config.json", required=True)
        vocab_size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
        if not isinstance(vocab_size, int):
            raise TokensError(
                f"{folder / 'config.json'} has no vocab_size; is it a model's config?"
            )
        tokenizer = _load_tokenizer(folder)
        _check_sentencepiece(folder, tokenizer)
        known_ids = np.zeros(vocab_size, dtype=bool)
        ids = np.array(sorted(tokenizer.get_vocab().values()), dtype=np.int64)
        known_ids[ids[ids < vocab_size]] = True
        known_ids.setflags(write=False)
        generation = _read_json(folder / "generation_config.json", required=False)
        eos_ids = _eos_ids(config, generation, tokenizer)
        if not eos_ids:
            raise TokensError(
                f"{folder} declares no eos_token_id in config.json, generation_config.json or its "
                "tokenizer: no response could end; add one"
            )
        template = tokenizer.chat_template
        if isinstance(template, Mapping):
            template = template.get("default")
        special_ids = _special_ids(tokenizer, eos_ids)
        files = {n: file_hash(folder / n) for n in TOKENIZER_FILES if (folder / n).is_file()}
        bos_id = tokenizer.bos_token_id
        plain = tokenizer("a", add_special_tokens=False)["input_ids"]
        marked = tokenizer("a", add_special_tokens=True)["input_ids"]
        adds_bos = bos_id is not None and marked[:1] == [bos_id] and plain[:1] != [bos_id]
        facts = {
            "files": files,
            "template": template,
            "vocab_size": vocab_size,
            "bos": [bos_id, adds_bos],
            "eos": list(eos_ids),
            "special": sorted(special_ids),
        }
        return Tokens(
            folder=folder,
            vocab_size=vocab_size,
            known_ids=known_ids,
            bos_id=bos_id,
            adds_bos=adds_bos,
            eos_ids=eos_ids,
            special_ids=special_ids,
            chat_template=template,
            hash=contract_hash(facts),
            _tokenizer=tokenizer,
        )

    def template(self, name: str = MODEL) -> Template:
        """The template `name`: `model`, `none`, or the path of a Jinja file.

        Raises `TokensError` for a folder without a template and for a file that is none.
        """
        if name == NONE:
            return Template(NONE, None)
        if name != MODEL:
            return read_template(Path(name), self._tokenizer)
        if self.chat_template is None:
            raise TokensError(
                f"{self.folder} has no chat template: add a chat_template to its "
                "tokenizer_config.json, set data.template to a Jinja file, or set data.template: "
                f'"{NONE}" to prompt with plain text'
            )
        return Template(MODEL, self.chat_template)

    def render(
        self,
        prompt: str | Messages,
        template: str | Template = MODEL,
        system_prompt: str | None = None,
    ) -> tuple[int, ...]:
        """The ids a prompt is executed with.

        With a template, text becomes one user message and the ids end with the template's header
        of the assistant. `system_prompt` becomes the first message, unless the messages bring a
        system message of their own.

        Raises `TokensError` as `template` does, for messages or a system prompt without a
        template, malformed messages, and what the template itself refuses.
        """
        if isinstance(template, str):
            template = self.template(template)
        return self.executed([self.rendered(prompt, template, system_prompt)])[0]

    def rendered(
        self, prompt: str | Messages, template: Template, system_prompt: str | None = None
    ) -> str:
        """The text of `render`, before it becomes ids."""
        if template.text is None:
            if not isinstance(prompt, str) or system_prompt is not None:
                what = "a system prompt" if isinstance(prompt, str) else "chat messages"
                raise TokensError(
                    f'{what} cannot be rendered with data.template "{NONE}"; use "{MODEL}"'
                )
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        check_messages(messages)
        if system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system_prompt}, *messages]
        return render_messages(self._tokenizer, template, messages)

    def executed(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Ids of rendered texts with their BOS, each as if it came alone; faster in hundreds."""
        if not texts:
            return []
        found = self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return [self._with_one_bos(tuple(ids)) for ids in found]

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of `text` alone; nothing is added at either end."""
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids` for scorers and people: special ids skipped, no space cleaned up.

        Raises `TokensError` on an id the tokenizer does not know.
        """
        all_ids = np.fromiter(ids, dtype=np.int64)
        known = (all_ids >= 0) & (all_ids < self.vocab_size)
        known[known] = self.known_ids[all_ids[known]]
        if not known.all():
            first = all_ids[~known][0]
            raise TokensError(f"token id {first} is unknown to the tokenizer of {self.folder}")
        kept = [id_ for id_ in all_ids.tolist() if id_ not in self.special_ids]
        return self._tokenizer.decode(
            kept, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """What each id adds to a text, for people: special ones by name, a part of a character as
        the vocabulary writes it, an id that the tokenizer does not know as `⟨id 417⟩`."""
        # Some tokenizers drop the space before the first piece: each is decoded after a letter.
        anchor = self.encode("a")
        start = self._tokenizer.decode(anchor, clean_up_tokenization_spaces=False)
        told: dict[int, str] = {}
        for id_ in (ids := list(ids)):
            if id_ in told:
                continue
            if not (0 <= id_ < self.vocab_size and self.known_ids[id_]):
                told[id_] = f"⟨id {id_}⟩"
                continue
            name = str(self._tokenizer.convert_ids_to_tokens(id_))
            text = self._tokenizer.decode([*anchor, id_], clean_up_tokenization_spaces=False)
            whole = text.startswith(start) and "\ufffd" not in text
            told[id_] = text[len(start) :] if whole and id_ not in self.special_ids else name
        return [told[id_] for id_ in ids]

    def ids_of(self, texts: Iterable[str]) -> tuple[int, ...]:
        """The one id of each text; raises `TokensError` for a text of several tokens."""
        found = []
        for text in texts:
            ids = self.encode(text)
            if len(ids) != 1:
                raise TokensError(
                    f"rollout.stop {text!r} is {len(ids)} tokens of {self.folder}; a stop text "
                    "must be exactly one token"
                )
            found.append(ids[0])
        return tuple(found)

    def _with_one_bos(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        bos = self.bos_id
        if bos is None:
            return ids
        start = 0
        while start < len(ids) and ids[start] == bos:
            start += 1
        return (bos, *ids[start:]) if start or self.adds_bos else ids


def _read_json(path: Path, required: bool) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise TokensError(f"{path} does not exist; model.path must be a Hugging Face folder")
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise TokensError(f"{path}:{line}: not UTF-8: {error.reason}") from error
    except json.JSONDecodeError as error:
        raise TokensError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    if not isinstance(value, dict):
        raise TokensError(f"{path} is a JSON {type(value).__name__}, not an object")
    return value


def _load_tokenizer(folder: Path) -> Any:
    # Imported here: it takes seconds, and contracts are read by processes that need no tokenizer.
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise TokensError(f"{folder} holds no tokenizer file (tokenizer.json or tokenizer.model)")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of a damaged file tokenizers raises a plain Exception
        first = str(error).strip().partition("\n")[0]
        if isinstance(error, (LookupError, TypeError, AttributeError)):
            first = f"{type(error).__name__}: {first}"
        raise TokensError(f"transformers cannot read the tokenizer in {folder}: {first}") from error


def _check_sentencepiece(folder: Path, tokenizer: Any) -> None:
    """Raise unless transformers gives sentencepiece's own ids and text, where both can read.

    On some layouts (`model_type: qwen2`) AutoTokenizer silently takes another class for a
    sentencepiece file: other ids, and spaces lost when decoding.
    """
    path = folder / "tokenizer.model"
    if not path.is_file():
        return
    from sentencepiece import SentencePieceProcessor

    try:
        pieces = SentencePieceProcessor(model_proto=path.read_bytes())
    except RuntimeError as error:
        raise TokensError(
            f"{path} is not a sentencepiece model; remove it if tokenizer.json is the tokenizer"
        ) from error
    for text in PROBES:
        ours = tokenizer(text, add_special_tokens=False)["input_ids"]
        theirs = pieces.encode(text)
        if ours == theirs and pieces.unk_id() not in theirs:
            ours = tokenizer.decode(theirs, clean_up_tokenization_spaces=False)
            theirs = pieces.decode(theirs)
        if ours != theirs:
            raise TokensError(
                f"{folder}: {type(tokenizer).__name__} (AutoTokenizer) disagrees with "
                f"tokenizer.model on {text!r}: {ours!r} against sentencepiece's {theirs!r}; use a "
                "model layout whose tokenizer is sentencepiece (model_type llama), or convert it "
                "to a tokenizer.json and remove tokenizer.model"
            )


def _eos_ids(config: dict, generation: dict, tokenizer: Any) -> tuple[int, ...]:
    found: set[int] = set()
    for value in (
        config.get("eos_token_id"),
        generation.get("eos_token_id"),
        tokenizer.eos_token_id,
    ):
        if value is not None:
            found.update(value if isinstance(value, list) else [value])
    return tuple(sorted(found))


def _special_ids(tokenizer: Any, eos_ids: tuple[int, ...]) -> frozenset[int]:
    # Not `all_special_ids`: it also lists user-defined pieces (a line break) that are plain text.
    named = (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    added = tokenizer.added_tokens_decoder.items()
    special = {id_ for id_, token in added if token.special}
    return frozenset({*eos_ids, *special, *(id_ for id_ in named if id_ is not None)})
