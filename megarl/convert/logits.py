"""What transformers and megarl's own model compute of every token of some texts: log-probabilities,
or values where the model has a value head."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.convert.boxes import ConvertError
from megarl.convert.companions import has_tokenizer
from megarl.convert.megatron_to_hf import write_hf
from megarl.convert.source import HFSource, Source, blocks

TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 3))  # 5",
    "1 2 3 4 5 6 7 8 9 10 11 12. Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich.",
    "Water boils at 100 degrees Celsius at sea level; higher up it boils earlier because",
)
MOST_TOKENS = 256
"""Of a text; what is beyond is left out."""
RANDOM_LENGTH = 32
TIMEOUT = 600.0


def lines_of(prompts: Path) -> list[str]:
    """The file's lines that are not blank. Raises `ConvertError`: not readable, or no such line."""
    try:
        lines = prompts.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConvertError(f"--prompts {prompts}: {getattr(error, 'strerror', error)}") from error
    if not any(line.strip() for line in lines):
        raise ConvertError(f"--prompts {prompts}: holds no text")
    return [line for line in lines if line.strip()]


def refuse_not_finite(source: Source) -> None:
    """Raises `ConvertError` naming the first tensor that is not finite: what neither
    library computes with them would be numbers."""
    for name, stored in source.tensors.items():
        for rows in blocks(stored.rows, stored.cols * stored.dtype.itemsize):
            block = torch.empty(rows.stop - rows.start, stored.cols, dtype=stored.dtype)
            source.read(name, rows.start, 0, block)
            if not block.isfinite().all():
                raise ConvertError(
                    f"{source.path}: {name} holds values that are not finite; there is "
                    "nothing to compare that the model computes"
                )


def texts_of(lines: Sequence[str] | None, source: Source) -> list[Tensor]:
    """Token ids int64 [n] of each text, n at least 2: of `lines`, or of `TEXTS`. A model folder
    without a tokenizer gets fixed random ids instead of the latter.

    Raises `ConvertError`: no line of two tokens, no tokenizer for `lines`.
    """
    folder = source.companions
    if not has_tokenizer(folder):
        if lines is not None:
            raise ConvertError(f"{folder}: no tokenizer for the lines of --prompts")
        draw = torch.Generator().manual_seed(0)
        shape = (len(TEXTS), RANDOM_LENGTH)
        return list(torch.randint(source.spec.vocab, shape, generator=draw))
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        told = str(error).splitlines()[:1]
        kind = type(error).__name__
        raise ConvertError(
            f"{folder}: its tokenizer does not load: {kind}: {''.join(told)}"
        ) from error
    most = min(MOST_TOKENS, source.spec.max_positions)
    texts = TEXTS if lines is None else lines
    found = [torch.tensor(tokenizer(text)["input_ids"][:most]) for text in texts]
    found = [ids for ids in found if len(ids) > 1]
    if not found:
        raise ConvertError(f"{folder}: its tokenizer makes no text of two tokens")
    return found


def largest_difference(
    theirs: Source, ours: Source, texts: Sequence[Tensor]
) -> tuple[float, int, str]:
    """(the largest difference of a token, tokens compared, where it was), with both models in
    float32: `theirs` by transformers, `ours` by megarl.

    Of a language model it is that of a token's log-probability; of one with a value head that of
    the value read at a token, of a value beyond ±1 as a share of it. Raises `ConvertError` as
    `refuse_not_finite`.
    """
    for source in (theirs, ours):
        refuse_not_finite(source)
    has_values = theirs.spec.head == "value"
    first = 1 if has_values else 2
    expected = (_values_by_transformers if has_values else _by_transformers)(theirs, texts)
    found = _by_megarl(ours, texts)
    largest, place, count = 0.0, "nowhere", 0
    for number, (a, b) in enumerate(zip(expected, found, strict=True)):
        apart = (a - b).abs()
        if has_values:
            apart = apart / a.abs().clamp(min=1)
        count += len(apart)
        if not torch.isfinite(apart).all():
            return float("inf"), count, f"text {number + 1}: not finite"
        if float(apart.max()) > largest:
            largest = float(apart.max())
            place = f"text {number + 1}, token {int(apart.argmax()) + first}"
    return largest, count, place


def _by_transformers(source: Source, texts: Sequence[Tensor]) -> list[Tensor]:
    """[n - 1] of each text: log-probabilities of all its tokens but the first."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with _as_hf_folder(source) as folder, torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        found = []
        for ids in texts:
            logits = model(input_ids=ids[None]).logits[0, :-1].float()
            found.append(logits.log_softmax(-1).gather(1, ids[1:, None]).squeeze(1))
    return found


def _values_by_transformers(source: Source, texts: Sequence[Tensor]) -> list[Tensor]:
    """[n] of each text: the head on the last hidden state of every token."""
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    task = "TokenClassification" if source.spec.value_bias else "SequenceClassification"
    kind = getattr(transformers, f"AutoModelFor{task}")
    with _as_hf_folder(source) as folder, torch.no_grad():
        model = kind.from_pretrained(folder, dtype=torch.float32).eval()
        # A sequence classification's own forward tells the value of one token alone.
        hidden = [model.base_model(input_ids=ids[None]).last_hidden_state[0] for ids in texts]
        return [model.score(each).float().squeeze(1) for each in hidden]


def _by_megarl(source: Source, texts: Sequence[Tensor]) -> list[Tensor]:
    """As `_by_transformers`, of a model with a value head as `_values_by_transformers`."""
    from megarl.contracts.mesh import Mesh
    from megarl.convert.stored import TorchDistSource
    from megarl.models.build import destroy_mesh
    from megarl.models.roles import Reference
    from megarl.world import World, process_group

    with process_group("gloo", TIMEOUT), _as_hf_folder(source) as folder:
        world = World(Mesh(1, tp=1), torch.device("cpu"), TIMEOUT)
        numbers = SimpleNamespace(dtype="float32")
        settings = SimpleNamespace(
            logprob_chunk_tokens=MOST_TOKENS,
            recompute="none",
            sequence_parallel=False,
            router="trained",
        )
        role = Reference(source.spec, folder, world, numbers, settings, 1.0)
        try:
            if isinstance(source, TorchDistSource) and _is_float32(source):
                _load_again(role, source.path)
            (packs,) = role.padded([[_pack(ids) for ids in texts]])
            if role.has_values:
                return [torch.cat([told.values_A, told.last_S]) for told in role.values(packs)]
            return [scores.log_probs_A for scores in role.log_probs(packs)]
        finally:
            destroy_mesh()


def _is_float32(source: Source) -> bool:
    return all(stored.dtype == torch.float32 for stored in source.tensors.values())


def _load_again(role: Any, folder: Path) -> None:
    """By megatron itself, over weights that are none: then it is known to read the folder."""
    from megarl.checkpoint.torch_dist import load_tensors, model_tensors

    with torch.no_grad():
        for param in role.named_parameters().values():
            param.fill_(math.nan)
    load_tensors(model_tensors(role.model), folder)


def _pack(ids: Tensor) -> Any:
    """A text as one sample: its first token is the prompt."""
    from megarl.contracts.samples import EndReason, Sample, Samples
    from megarl.data.packing import build_pack

    count = len(ids) - 1
    sample = Sample(
        draw_index=0,
        candidate=0,
        prompt_ids=ids[:1].numpy(),
        response_ids=ids[1:].numpy(),
        action_mask=np.ones(count, bool),
        rollout_log_probs=np.zeros(count, np.float32),
        end=0,
        end_reason=EndReason.EOS,
        seed=0,
        started=0.0,
        finished=1.0,
    )
    return build_pack(Samples.from_rows([sample], "verify"), [0])


@contextmanager
def _as_hf_folder(source: Source) -> Iterator[Path]:
    """A folder that both libraries load; a temporary one, in float32, of what is none."""
    if isinstance(source, HFSource):
        yield source.path
        return
    with tempfile.TemporaryDirectory(prefix="megarl-verify-") as place:
        folder = Path(place) / "model"
        write_hf(source, folder, dict.fromkeys(source.tensors, torch.float32))
        yield folder
