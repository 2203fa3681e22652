"""The quickstart's task, tokenizer, folder and build.

The whole warm-up is in the long test; here a few steps stand for it. Not covered: that GRPO learns
from the result, which the training runs show.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.contracts.tokens import Tokens
from megarl.data.prompts import PromptSet
from megarl.recipe.data import DataSection
from megarl.reshard.families import FAMILIES, read_spec
from tools import make_tiny_model
from tools.quickstart.accuracy import responses
from tools.quickstart.build import Built, build
from tools.quickstart.folder import FolderError, is_complete, replaced_when_done
from tools.quickstart.task import ANSWER_PATTERN, Problem, all_problems
from tools.quickstart.warmup import WarmUp

FEW_STEPS = WarmUp(steps=4, batch=8)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Built, list[float]]:
    folder = tmp_path_factory.mktemp("quickstart")
    losses: list[float] = []
    result = build(folder, 1, FEW_STEPS, lambda step, loss: losses.append(loss))
    return folder, result, losses


def test_both_strategies_say_what_they_should():
    problem = Problem(18, 28, phrasing=0)
    assert problem.worked() == " 8 + 8 = 16, 1 + 2 + 1 = 4, so 46"
    assert problem.estimate() == " about 50"
    assert (problem.question, problem.answer) == ("What is 18 + 28?", "46")
    for each in all_problems(held_out=False):
        assert re.findall(ANSWER_PATTERN, each.worked()) == [each.answer]
        assert not re.findall(ANSWER_PATTERN, each.estimate())
        for left, right in re.findall(r"([\d +]+) = (\d+)", each.worked()):
            assert sum(map(int, left.split("+"))) == int(right)


def test_one_pair_in_ten_is_held_out_and_no_digit_pair_whole():
    train, held_out = all_problems(held_out=False), all_problems(held_out=True)
    assert len(train) + len(held_out) == 1600 * 2
    assert 0.07 < len(held_out) / 3200 < 0.13
    assert not {(p.a, p.b) for p in train} & {(p.a, p.b) for p in held_out}
    assert len({p.id for p in train + held_out}) == 3200
    assert len({(p.a % 10, p.b % 10) for p in train}) == 100
    assert len({(p.a // 10, p.b // 10) for p in train}) == 16


def test_the_learning_rate_rises_stays_and_decays():
    settings = WarmUp(steps=100, lr=1.0, lr_warmup_steps=10, final_lr_share=0.1)
    rates = [settings.lr_at(step) for step in range(100)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and rates[49] == 1.0
    assert rates[74] == pytest.approx(0.55) and rates[99] == pytest.approx(0.1)


def test_the_folder_is_a_hugging_face_model_cut_evenly_by_two(built):
    folder, result, losses = built
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokens = Tokens.load(folder / "model")
    config = model.config
    assert config.model_type == "llama" and config.vocab_size == 304
    assert tokens.known_ids.all() and tokens.eos_ids == (2,)
    for tp in (1, 2):
        assert config.num_attention_heads % tp == 0 == config.num_key_value_heads % tp
        assert config.intermediate_size % (tp * 32) == 0
    assert 400_000 <= result.parameters <= 3_000_000
    assert model.dtype == torch.float32
    assert sorted(path.name for path in (folder / "model").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.model",
        "tokenizer_config.json",
    ]
    assert len(losses) == 4 and losses[-1] < losses[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_made_and_read(tmp_path, family):
    build(tmp_path, 1, WarmUp(steps=1, batch=2), lambda step, loss: None, family)
    spec = read_spec(tmp_path / "model")
    tokens = Tokens.load(tmp_path / "model")
    assert spec.family == family
    assert spec.head_dim == 32 or spec.mla.nope_dim == 32
    assert spec.vocab == tokens.vocab_size and tokens.known_ids.all()
    prompt = tokens.render("What is 23 + 45?")
    assert tokens.decode(prompt) == "Q: What is 23 + 45?\nA:" and prompt[0] == tokens.bos_id
    # What is trained on: digits one by one, the answer's leading space its own piece's.
    assert len(tokens.encode(" 23 + 45")) >= 7 and tokens.decode(tokens.encode(" 8")) == " 8"
    assert (spec.moe is not None) == (family in ("deepseek_v3", "mixtral", "qwen3_moe"))


def test_the_rows_are_prompts_that_the_template_renders(built):
    folder, result, _ = built
    tokens = Tokens.load(folder / "model")
    for name, count in (("train", result.train_rows), ("eval", result.eval_rows)):
        section = DataSection(train=str(folder / "data" / f"{name}.jsonl"), max_prompt_tokens=20)
        prompts = PromptSet.load(section.training, tokens, section)
        assert len(prompts) == count and not prompts.refusals
        first = prompts.rows[0]
        assert tokens.decode(first.token_ids) == f"Q: {first.text}\nA:"
        assert tokens.decode(first.token_ids + tokens.encode(" about 50")).endswith("A: about 50")


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(built, tmp_path):
    folder, result, _ = built
    for seed, equal in ((1, True), (2, False)):
        again = tmp_path / str(seed)
        again.mkdir()
        remade = build(again, seed, FEW_STEPS, lambda step, loss: None)
        assert (remade == result) is equal or not equal
        for name in ("model/model.safetensors", "data/train.jsonl", "data/eval.jsonl"):
            assert ((again / name).read_bytes() == (folder / name).read_bytes()) is equal


def test_decoding_in_batches_is_the_models_own_generation(built):
    folder, _, _ = built
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokens = Tokens.load(folder / "model")
    problems = all_problems(held_out=True)[:6]
    for problem, (text, _) in zip(problems, responses(model, tokens, problems, True), strict=True):
        prompt = torch.tensor([tokens.render(problem.question)])
        whole = model.generate(prompt, do_sample=False, max_new_tokens=32, pad_token_id=2)
        assert tokens.decode(whole[0, prompt.shape[1] :].tolist()) == text


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    folder = tmp_path / "models" / "quickstart-s1"
    with pytest.raises(KeyboardInterrupt), replaced_when_done(folder, 1) as temporary:
        (temporary / "half").write_text("x")
        assert not folder.exists()
        raise KeyboardInterrupt
    assert not list((tmp_path / "models").iterdir())
    for content in ("one", "two"):
        with replaced_when_done(folder, 1) as temporary:
            (temporary / "file").write_text(content)
        assert (folder / "file").read_text() == content
        assert is_complete(folder, 1) and not is_complete(folder, 2)
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["quickstart-s1"]


def test_a_folder_of_someone_elses_is_left_alone(tmp_path, capsys):
    (tmp_path / "precious").write_text("x")
    with (
        pytest.raises(FolderError, match="this tool did not make it"),
        replaced_when_done(tmp_path, 1),
    ):
        pass
    assert make_tiny_model.main(["--seed", "1", "--force", "--out", str(tmp_path)]) == 1
    assert "did not make it" in capsys.readouterr().err
    assert (tmp_path / "precious").exists()


def test_a_folder_that_is_there_is_kept_unless_forced(tmp_path, monkeypatch, capsys):
    made: list[tuple[int, str]] = []

    def make(temporary: Path, seed: int, folder: Path, family: str) -> None:
        made.append((seed, family))
        (temporary / "data").mkdir()

    monkeypatch.setattr(make_tiny_model, "_make", make)
    out = ["--out", str(tmp_path / "out")]
    for arguments in (
        ["--seed", "3"],
        ["--seed", "3"],
        ["--seed", "3", "--force"],
        ["--seed", "4"],
        ["--seed", "4", "--family", "qwen3"],
        ["--seed", "4", "--family", "qwen3"],
    ):
        assert make_tiny_model.main([*arguments, *out]) == 0
    assert made == [(3, "llama"), (3, "llama"), (4, "llama"), (4, "qwen3")]
    assert "is there, complete; --force makes it anew" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "COMPLETE.json").read_text())["hash"]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_warmed_up_model_can_add_and_mostly_does_not(tmp_path, seed):
    result = build(tmp_path, seed, WarmUp(), lambda step, loss: None)
    assert 0.1 <= result.greedy <= 0.6
    assert 0.2 <= result.sampled <= 0.45
