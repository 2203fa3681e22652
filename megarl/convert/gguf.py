"""A GGUF file, decoded by transformers: weights, config and tokenizer.

Quantized weights have no float dtype of their own; they are decoded to float32. The whole model is
in memory then, in each process.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.convert.boxes import ConvertError
from megarl.convert.processes import one_line
from megarl.convert.source import MemorySource

SUFFIX = ".gguf"
NO_NUMBERS = ("_model_name_or_path", "unk_token_id")
"""What transformers takes over of a file's description, and is none of the config's: the file's
title, and an id that the tokenizer has."""


class GGUFSource(MemorySource):
    """Holds the folder that its config and tokenizer were written to."""

    folder: tempfile.TemporaryDirectory

    def close(self) -> None:
        self.folder.cleanup()


def open_gguf(path: Path) -> GGUFSource:
    """Raises `ConvertError`: a file that transformers cannot decode, `FolderError` for a model that
    is not handled."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = tempfile.TemporaryDirectory(prefix="megarl-gguf-")
    try:
        with warnings.catch_warnings(), _no_bar():
            warnings.simplefilter("ignore")
            config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
            # What `from_pretrained(gguf_file=…)` decodes with. That itself wants accelerate, to
            # place a model; here there is none, and the names are those of one without weights.
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
            decoded = load_gguf_checkpoint(
                str(path), return_tensors=True, model_to_load=model, torch_dtype=torch.float32
            )
        config.architectures = [type(model).__name__]
        config.dtype = torch.float32
        for key in NO_NUMBERS:
            if key in vars(config):
                delattr(config, key)
        config.save_pretrained(folder.name)
        GenerationConfig.from_model_config(config).save_pretrained(folder.name)
        tokenizer.save_pretrained(folder.name)
        source = GGUFSource(path, Path(folder.name), decoded["tensors"])
    except ConvertError:
        folder.cleanup()
        raise
    except Exception as error:  # decoding a damaged file may raise anything
        folder.cleanup()
        raise ConvertError(
            f"{path}: not decoded; it is damaged or truncated, or of a kind that transformers does "
            f"not know: {one_line(error)}"
        ) from error
    except BaseException:
        folder.cleanup()
        raise
    source.folder = folder
    return source


@contextmanager
def _no_bar() -> Iterator[None]:
    """transformers draws one of its own while it decodes."""
    from transformers import modeling_gguf_pytorch_utils as decoding

    made = decoding.tqdm
    decoding.tqdm = lambda items, **_: items
    try:
        yield
    finally:
        decoding.tqdm = made
