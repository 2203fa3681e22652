"""Recipes of published models: they load, the models' published numbers fit their layouts, and what
their comments reckon is so.

The numbers of config.json are written here or in `tests/reshard/published.py`; totals of parameters
are the hub's. Rows have the columns of the published data sets. Not covered: that the recipes run,
since no GPU was at hand; that they learn; the data sets themselves.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.contracts.tokens import Tokens
from megarl.data.prompts import PromptSet
from megarl.data.reward_names import check_rewards
from megarl.process import _check_model
from megarl.recipe import Recipe, load_recipe
from megarl.recipe.layout import mesh_of
from megarl.reshard.families import family_rules, read_spec
from megarl.reshard.layout import LayoutError
from megarl.rewards import gsm8k, math_answer
from megarl.rewards.scorer import Response
from tests.contracts.tokenizer_folders import character_folder
from tests.recipe.files import ROOT
from tests.reshard.published import QWEN3_8B, QWEN3_30B_A3B, QWEN25_7B, SMOLLM2_135M

QWEN25_05B = QWEN25_7B | {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
QWEN3_4B = QWEN3_8B | {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "tie_word_embeddings": True,
}
QWEN3_30B_A3B_BASE = QWEN3_30B_A3B | {"max_position_embeddings": 32768}
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "smollm2-135m-gsm8k-style": (SMOLLM2_135M, 134_515_008),
    "qwen2.5-0.5b-gsm8k": (QWEN25_05B, 494_032_768),
    "qwen3-4b-math": (QWEN3_4B, 4_022_468_096),
    "qwen3-30b-a3b-math": (QWEN3_30B_A3B_BASE, 30_532_122_624),
}
"""Recipe → config.json as published, and the model's number of parameters."""
ON_GPUS = [name for name in MODELS if name.startswith("qwen")]


def recipe_of(name: str, folder: Path, *settings: str) -> Recipe:
    """The recipe on a folder that holds nothing but its model's config.json."""
    (folder / "config.json").write_text(json.dumps(MODELS[name][0]))
    return load_recipe(ROOT / "recipes" / f"{name}.yaml", [f"model.path={folder}", *settings])


def test_every_recipe_loads_and_every_real_one_has_its_model_here() -> None:
    names = {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    for name in names:
        assert load_recipe(ROOT / "recipes" / f"{name}.yaml").run.name.startswith(name)
    assert {name for name in names if not name.startswith("quickstart")} == MODELS.keys()


@pytest.mark.parametrize("name", MODELS)
def test_the_published_model_is_cut_as_the_recipe_says(name: str, tmp_path: Path) -> None:
    _check_model(recipe_of(name, tmp_path))
    rules = family_rules(read_spec(tmp_path))
    assert sum(math.prod(rule.shape) for rule in rules) == MODELS[name][1]


def test_a_layout_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """The check can fail: 4 kv heads are not cut over 8 ranks, 128 experts not over 3."""
    name = "qwen3-30b-a3b-math"
    with pytest.raises(LayoutError, match="kv heads"):
        _check_model(recipe_of(name, tmp_path, "actor.tp=8", "actor.expert_tp=1"))
    with pytest.raises(LayoutError, match="experts"):
        _check_model(recipe_of(name, tmp_path, "world.ranks=12", "actor.ep=3"))


@pytest.mark.parametrize("name", ON_GPUS)
def test_the_comments_reckon_with_the_models_own_numbers(name: str, tmp_path: Path) -> None:
    """Bytes of a token in the KV cache of a GPU, of the whole cache, and weights of a GPU."""
    text = (ROOT / "recipes" / f"{name}.yaml").read_text(encoding="utf-8").replace("\n#", " ")
    recipe = recipe_of(name, tmp_path)
    spec, mesh = read_spec(tmp_path), mesh_of(recipe)
    heads = max(1, spec.kv_heads // mesh.rollout_tp)
    token = spec.layers * 2 * heads * spec.head_dim * 2
    assert token % 1024 == 0
    cache = token * recipe.rollout.max_total_tokens
    told = re.search(
        r"(\d+) KiB\s+a\s+token:\s+(\d+)\s+tokens\s+([\d.]+) GB", re.sub(r"\s+", " ", text)
    )
    assert told is not None
    assert int(told[1]) == token // 1024 and int(told[2]) == recipe.rollout.max_total_tokens
    assert float(told[3]) == round(cache / 1e9, 1)

    rules = family_rules(spec)
    experts = sum(math.prod(rule.shape) for rule in rules if ".experts." in rule.hf)
    rest = sum(math.prod(rule.shape) for rule in rules) - experts
    copies = mesh.world // mesh.tp
    mine = rest / mesh.tp + experts / mesh.ep
    state = 12 * (rest / mesh.tp / copies + experts / mesh.ep / (mesh.world // mesh.ep))
    for what, size in (("weights bfloat16", 2 * mine), ("gradients float32", 4 * mine)):
        assert f"{what} {size / 1e9:.1f} GB" in text
    assert f"= {state / 1e9:.1f} GB" in text


GSM8K_ROW = {
    "question": "Natalia sold 48 clips in April and half as many in May. How many in all?",
    "answer": "In May she sold 48/2 = <<48/2=24>>24.\nThat is 48+24 = <<48+24=72>>72.\n#### 72",
}
ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": GSM8K_ROW,
    "dapo": {
        "prompt": "In triangle $ABC$ find $p+q$.",
        "solution": "34",
        "data_source": "math_dapo",
        "source_prompt": [{"content": "Solve …", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
    },
    "aime24": {
        "id": 60,
        "problem": "Every morning Aya goes for a walk. Find the number of minutes.",
        "solution": "… \\boxed{204}.",
        "answer": "204",
        "url": "https://…",
        "year": "2024",
    },
    "math500": {
        "problem": "Convert the point $(0,3)$ to polar coordinates.",
        "solution": "… $\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}$.",
        "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
        "subject": "Precalculus",
        "level": 2,
        "unique_id": "test/precalculus/807.json",
    },
}
"""Source → a row as the published data set has it."""
SAID = {"gsm8k": "#### 72", "dapo": r"\boxed{34}", "aime24": r"\boxed{204}"}
SAID["math500"] = r"\boxed{(3, \pi/2)}"
SCORED_BY = {"gsm8k": gsm8k.make(), "math": math_answer.make()}


@pytest.mark.parametrize("name", ON_GPUS)
def test_the_published_columns_are_read_and_scored(name: str, tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    tokens = Tokens.load(character_folder(tmp_path / "model", template))
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml")
    for sources, held_out in ((recipe.data.training, False), (recipe.data.held_out, True)):
        placed = []
        for source in sources:
            path = tmp_path / Path(source.path).name
            if path.suffix == ".jsonl":
                path.write_text(json.dumps(ROWS[source.name]) + "\n")
            else:
                pq.write_table(pa.Table.from_pylist([ROWS[source.name]]), path)
            placed.append(source.model_copy(update={"path": str(path)}))
        prompts = PromptSet.load(placed, tokens, recipe.data)
        check_rewards(prompts, recipe.reward, held_out=held_out)
        assert len(prompts) == len(sources) and not prompts.refusals
        for prompt in prompts.rows:
            said = Response(SAID[prompt.source], prompt.answer, prompt.text, True, "eos")
            scorers = [one for one in recipe.reward.scorers if one.scores(prompt.reward)]
            assert scorers[0].name == ("gsm8k" if prompt.source == "gsm8k" else "math")
            assert SCORED_BY[scorers[0].name](said).total == 1.0
