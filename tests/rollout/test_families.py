"""Every family, and every way its weights are cut, in the real SGLang, against the HF model.

Not covered: CUDA, where other kernels compute the same layers; bfloat16; DeepSeek-V2 with limited
groups, which transformers 5.12 cannot run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megarl.rollout.requests import Request, request_seed
from tests.rollout import engines, tiny
from tests.rollout.families import DENSE, FAMILIES, VOCABULARY, WITH_EXPERTS, save_family
from tests.rollout.families import hf_log_probs as oracle

pytestmark = pytest.mark.dist
BOUND = 3e-5
"""Largest |engine − HF| log-prob in fp32."""


def _requests() -> list[Request]:
    """Prompts of 7, 32, 57 and 82 tokens."""
    ids = np.random.default_rng(3).integers(6, VOCABULARY, size=(4, 90))
    return [
        Request(row, 0, tuple(ids[row, : 7 + 25 * row].tolist()), request_seed(7, 0, f"p{row}", 0))
        for row in range(4)
    ]


def _served(folders: list[str], tp: int, ep: int) -> list[dict[str, Any]]:
    """Of each folder's engine on this rank: samples and prompt log-probs."""
    found = []
    for folder in folders:
        # A chunk is shorter than the longest prompt.
        generator = engines.build(folder, tp=tp, ep=ep, chunked_prefill_tokens=64)
        requests, version = _requests(), tiny.version()
        samples = generator.generate(requests, tiny.sampling(), version)
        prompts = generator.prompt_log_probs([one.prompt_ids for one in requests], version)
        found.append({"samples": samples, "prompts": prompts})
        generator.close()
    return found


def _live(generator: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in generator.named_parameters().items()}


def _loaded(folder: str, tp: int, ep: int) -> dict[str, torch.Tensor]:
    """The parameters that SGLang's own loader made of `folder` on this rank."""
    generator = engines.build(folder, tp=tp, ep=ep)
    live = _live(generator)
    generator.close()
    return live


def _gaps(folder: str, found: dict[str, Any]) -> tuple[float, float]:
    """Largest |engine − HF| over the responses' tokens, and over the prompts'."""
    samples, prompts = found["samples"], found["prompts"]
    whole = oracle(folder, [[*s.prompt_ids.tolist(), *s.response_ids.tolist()] for s in samples])
    answers, asked = [], []
    for sample, told, exact in zip(samples, prompts, whole, strict=True):
        length = len(sample.prompt_ids)
        assert told.shape == (length - 1,) and told.dtype == np.float32
        answers.append(np.abs(exact[length - 1 :] - sample.rollout_log_probs).max())
        asked.append(np.abs(exact[: length - 1] - told).max())
    return max(answers), max(asked)


@pytest.mark.parametrize(
    "names, tp, ep",
    [
        (list(FAMILIES), 1, 1),
        (["llama", "qwen2", "qwen3"], 4, 1),  # two key/value heads on four ranks
        (WITH_EXPERTS, 2, 2),
        (["qwen3_moe", "mixtral", "deepseek_v3"], 4, 2),  # an expert's width over two ranks
        pytest.param(WITH_EXPERTS, 4, 1, marks=pytest.mark.long),
        pytest.param(WITH_EXPERTS, 4, 4, marks=pytest.mark.long),
        pytest.param(DENSE, 4, 1, marks=pytest.mark.long),
        pytest.param(list(FAMILIES), 2, 1, marks=pytest.mark.long),
    ],
    ids=lambda value: value if isinstance(value, int) else f"{len(value)} families",
)
def test_log_probs_are_the_models(ranks, tmp_path, names, tp, ep) -> None:
    folders = [save_family(tmp_path / name, name) for name in names]
    shown = ranks.run(tp, _served, folders, tp, ep)
    for index, (name, folder) in enumerate(zip(names, folders, strict=True)):
        answers, prompts = _gaps(folder, shown[0][index])
        assert max(answers, prompts) <= BOUND, (name, answers, prompts)
        for rank in shown[1:]:  # every rank of a replica has the same
            for ours, theirs in zip(
                shown[0][index]["samples"], rank[index]["samples"], strict=True
            ):
                assert ours.response_ids.tolist() == theirs.response_ids.tolist()


def _cut(tensor: torch.Tensor, dim: int, parts: int, index: int) -> torch.Tensor:
    return tensor.chunk(parts, dim)[index]


def _expected(files: dict[str, torch.Tensor], tp: int, ep: int, rank: int) -> dict[str, Any]:
    """Rank's parameters of layer 1 of the qwen3_moe model, by hand from the file's tensors."""
    start = "model.layers.1."
    attention = start + "self_attn."
    q, k, v = (files[f"{attention}{part}_proj.weight"] for part in "qkv")
    copies = tp // 2  # of each of the two key/value heads
    moe_tp = tp // ep
    experts = range(8 // ep * (rank // moe_tp), 8 // ep * (rank // moe_tp + 1))

    def expert(number: int, part: str, dim: int) -> torch.Tensor:
        tensor = files[f"{start}mlp.experts.{number}.{part}_proj.weight"]
        return _cut(tensor, dim, moe_tp, rank % moe_tp)

    return {
        f"{attention}qkv_proj.weight": torch.cat(
            [_cut(q, 0, tp, rank), _cut(k, 0, 2, rank // copies), _cut(v, 0, 2, rank // copies)]
        ),
        f"{attention}q_norm.weight": files[f"{attention}q_norm.weight"],
        f"{attention}o_proj.weight": _cut(files[f"{attention}o_proj.weight"], 1, tp, rank),
        f"{start}mlp.gate.weight": files[f"{start}mlp.gate.weight"],
        f"{start}mlp.experts.w13_weight": torch.stack(
            [torch.cat([expert(e, "gate", 0), expert(e, "up", 0)]) for e in experts]
        ),
        f"{start}mlp.experts.w2_weight": torch.stack([expert(e, "down", 1) for e in experts]),
    }


@pytest.mark.parametrize("tp, ep", [(4, 2), (2, 2)])
def test_heads_and_experts_lie_where_the_layout_says(ranks, tmp_path, tp: int, ep: int) -> None:
    folder = save_family(tmp_path / "model", "qwen3_moe")
    files = load_file(Path(folder) / "model.safetensors")
    for rank, live in enumerate(ranks.run(tp, _loaded, folder, tp, ep)):
        for name, tensor in _expected(files, tp, ep, rank).items():
            assert torch.equal(live[name], tensor), (rank, name)


def _rewritten(folder: str, other: str, tp: int, ep: int) -> list[Any]:
    """Prompt log-probs of an engine that loaded `other`, and of one whose weights became its."""
    prompts, version = [one.prompt_ids for one in _requests()], tiny.version()
    loaded = engines.build(other, tp=tp, ep=ep)
    theirs = loaded.prompt_log_probs(prompts, version)
    weights = _live(loaded)
    loaded.close()
    generator = engines.build(folder, tp=tp, ep=ep, release=True)
    before = generator.prompt_log_probs(prompts, version)
    generator.sleep()
    generator.wake()
    for name, parameter in generator.named_parameters().items():
        parameter.data.copy_(weights.pop(name))
    generator.activate(version)
    after = generator.prompt_log_probs(prompts, version)
    generator.close()
    dist.barrier()
    return [theirs, before, after, sorted(weights)]


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v2", "deepseek_v3"])
def test_nothing_is_left_of_weights_that_were_overwritten(ranks, tmp_path, name: str) -> None:
    """Latent attention keeps transposed copies of a weight; they must follow it."""
    folders = [save_family(tmp_path / f"{seed}", name, seed) for seed in (3, 4)]
    for theirs, before, after, unwritten in ranks.run(2, _rewritten, *folders, 2, 2):
        assert not unwritten
        for expected, old, told in zip(theirs, before, after, strict=True):
            assert np.abs(old - expected).max() > 0.1
            assert np.array_equal(told, expected)


def _prompts_read(folder: str) -> dict[str, Any]:
    generator = engines.build(folder)
    prompts, version = [one.prompt_ids for one in _requests()], tiny.version()
    plain = generator.prompt_log_probs(prompts, version)
    # Of prompts whose keys and values are cached, beside others, and between hot draws.
    generator.generate(_requests(), tiny.sampling(temperature=0.5), version)
    again = generator.prompt_log_probs(prompts[::-1], version)[::-1]
    found = {
        "plain": plain,
        "again": again,
        "one": generator.prompt_log_probs([(5,)], version),
        "empty": engines.failure(generator.prompt_log_probs, [()], version),
        "foreign": engines.failure(generator.prompt_log_probs, [(VOCABULARY,)], version),
        "version": engines.failure(generator.prompt_log_probs, prompts, tiny.version(1)),
    }
    with torch.no_grad():
        generator.named_parameters()["model.norm.weight"][3] = torch.nan
    try:
        generator.prompt_log_probs(prompts, version)
    except FloatingPointError as error:
        found["nan"] = str(error)
    generator.close()
    return found


def test_prompt_log_probs_are_of_the_weights_alone(ranks, tmp_path) -> None:
    folder = save_family(tmp_path / "model", "llama")
    found = ranks.run(1, _prompts_read, folder)[0]
    exact = oracle(folder, [list(one.prompt_ids) for one in _requests()])
    for plain, again, expected in zip(found["plain"], found["again"], exact, strict=True):
        assert np.abs(plain - expected).max() <= BOUND
        assert np.abs(again - expected).max() <= BOUND
    assert [len(told) for told in found["one"]] == [0]
    assert "empty prompt" in found["empty"]
    assert f"vocabulary of {VOCABULARY}" in found["foreign"]
    assert found["version"].startswith("WrongVersion")
    assert "have no value" in found["nan"]
