"""Chat templates: the model folder's own, none (plain text), or a Jinja file of the recipe's.

A file is rendered by the same machinery as a model's own template (transformers'
`apply_chat_template`), with the same names in it: `messages`, `bos_token`, `eos_token`,
`add_generation_prompt`, `strftime_now`.

The date in a prompt is `TODAY`, whatever the day: by the clock, a run that goes on tomorrow would
have other data, and ranks that start around midnight would differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from megarl.contracts.errors import InputError
from megarl.contracts.hashes import bytes_hash

Messages = Sequence[Mapping[str, Any]]

MODEL, NONE = "model", "none"

TODAY = datetime(2024, 7, 26)
"""What a template's `strftime_now` tells: the date of Llama 3.1's template where none is given."""

FOREIGN_ERRORS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
"""What an expression in a template raises besides Jinja's own errors."""


class TokensError(InputError):
    """A tokenizer, template or text that cannot be used as asked; one line."""


@dataclass(frozen=True)
class Template:
    """How messages become text. Made by `Tokens.template`, once for all prompts."""

    name: str
    """`model`, `none` or the file's path."""
    text: str | None
    """None: plain text under no template."""

    @property
    def hash(self) -> str:
        """Of its text; plain text has a hash of its own."""
        told = b"none" if self.text is None else b"jinja\n" + self.text.encode()
        return bytes_hash([told])


def read_template(path: Path, tokenizer: Any) -> Template:
    """The Jinja file at `path`, which must compile.

    Raises `TokensError` where it does not exist, is not UTF-8, is empty or has a syntax error.
    """
    from jinja2.exceptions import TemplateError, TemplateSyntaxError

    where = f"data.template: {path}"
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise TokensError(
            f'{where} does not exist; give the path of a Jinja file, "{MODEL}" or "{NONE}"'
        ) from None
    except OSError as error:
        raise TokensError(f"{where} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TokensError(f"{where} is not UTF-8 (byte {error.start}); save it as UTF-8") from error
    if not text.strip():
        raise TokensError(f'{where} is empty; for plain text set data.template to "{NONE}"')
    template = Template(str(path), text)
    try:
        apply_template(tokenizer, text, [{"role": "user", "content": "a"}])
    except TemplateSyntaxError as error:
        raise TokensError(f"{where}:{error.lineno}: {_one_line(error)}; correct it") from error
    except (TemplateError, *FOREIGN_ERRORS):
        # It compiles. What it says to one message is no row's error: it may want several.
        pass
    return template


def render_messages(tokenizer: Any, template: Template, messages: Messages) -> str:
    """Text of `messages`, ending with the template's header of the assistant.

    Raises `TokensError` for what the template refuses or cannot render.
    """
    from jinja2.exceptions import TemplateError

    try:
        return apply_template(tokenizer, template.text, messages)
    except (TemplateError, *FOREIGN_ERRORS) as error:
        told = _one_line(error)
        raise TokensError(f"the chat template refuses these messages: {told}") from error


def apply_template(tokenizer: Any, text: str | None, messages: Messages) -> str:
    """Raises what the template raises."""
    return tokenizer.apply_chat_template(
        list(messages),
        chat_template=text,
        tokenize=False,
        add_generation_prompt=True,
        strftime_now=TODAY.strftime,
    )


def check_messages(messages: Any) -> None:
    """Raise `TokensError` unless `messages` is a conversation that waits for the assistant."""
    if not isinstance(messages, list | tuple) or not messages:
        raise TokensError("a prompt must be text or a non-empty list of messages")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TokensError(f"message {index} is not an object with a role")
        if not isinstance(message.get("content"), str):
            raise TokensError(f"message {index} ({message['role']}) has no text content")
    if messages[-1]["role"] == "assistant":
        raise TokensError("the last message is the assistant's: there is nothing to answer")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
