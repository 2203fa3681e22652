"""Golden token contracts: fixed files, no sampling; each role sees the text, ids and masks it must.

    prompts      `Tokens.render`, `PromptSet`: the ids that run
    generator    SGLang's own request and end of a request, one offered id at a time
    actor        the packed forward's ids, positions, targets and mask; the reference gets the same
    critic       there is none yet: the positions its values must be read at
    scorers      text and whether it is finished, in a real scoring process

The files are made by `make_cases.py` without megarl. Not covered: what models compute on these ids
(`tests/models`), and that SGLang samples from them (`tests/rollout`).
"""

from __future__ import annotations

import functools
import json
import shutil
from array import array
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.contracts.records import UNKNOWN_TOKEN, Prompt, RewardStatus, Scores
from megarl.contracts.samples import End, EndReason, Sample, Samples, SamplingContract
from megarl.contracts.tokens import Tokens
from megarl.data.packing import Pack, build_pack, pad_pack
from megarl.data.prepare import prepare
from megarl.data.prompts import PromptSet
from megarl.recipe.data import DataSection
from megarl.rewards.score import ScoringPool
from megarl.rollout.selection import select_groups
from tests.rewards.make_pool import GRADERS, section
from tests.rollout import tiny

HERE = Path(__file__).parent
CASES = sorted(path.stem for path in HERE.glob("*.json"))
LIMIT = 16


@functools.cache
def load(name: str) -> dict[str, Any]:
    return json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By case, the golden tokenizer's folder with what the case changes in it."""
    parent, made, found = tmp_path_factory.mktemp("golden"), {}, {}
    for name in CASES:
        changes = {key: load(name).get(key, {}) for key in ("config", "tokenizer")}
        path = made.setdefault(json.dumps(changes), parent / name)
        if not path.exists():
            shutil.copytree(HERE / "tokenizer", path)
            for key, file in (("config", "config.json"), ("tokenizer", "tokenizer_config.json")):
                whole = json.loads((path / file).read_text()) | changes[key]
                (path / file).write_text(json.dumps(whole))
        found[name] = path
    return found


@pytest.fixture(scope="session")
def tokens(folders):
    """`tokens(name)`: the case's tokenizer."""
    load_once = functools.cache(Tokens.load)
    return lambda name: load_once(folders[name])


def sampling_of(name: str, tokens: Tokens) -> SamplingContract:
    """As `assemble_data.sampling_of` makes it of a recipe."""
    stops = {*tokens.eos_ids, *tokens.ids_of(load(name).get("stop", []))}
    limit = load(name).get("max_response_tokens", LIMIT)
    return tiny.sampling(stop_token_ids=tuple(sorted(stops)), max_response_tokens=limit)


# prompts


@pytest.mark.parametrize("name", CASES)
def test_prompts_become_the_ids_that_run(tokens, name: str) -> None:
    for sample in load(name)["samples"]:
        system = sample.get("system_prompt")
        ids = tokens(name).render(sample["prompt"], system_prompt=system)
        assert list(ids) == sample["prompt_ids"]


@pytest.mark.parametrize("name", CASES)
def test_rows_pass_whole_or_are_refused(tokens, tmp_path, name: str) -> None:
    case = load(name)
    refused = case.get("refused", [])
    rows = [{"prompt": row["prompt"], "answer": "?"} for row in (*case["samples"], *refused)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    systems = [sample["system_prompt"] for sample in case["samples"] if "system_prompt" in sample]
    longest = max(len(sample["prompt_ids"]) for sample in case["samples"])
    data = DataSection(
        train=str(path),
        max_prompt_tokens=case.get("max_prompt_tokens", longest),
        max_refused_share=0.75,
        system_prompt=next(iter(systems), None),
    )
    loaded = PromptSet.load(data.training, tokens(name), data)
    wanted = [sample["prompt_ids"] for sample in case["samples"]]
    assert [list(row.token_ids) for row in loaded.rows] == wanted
    assert loaded.refused == {row["kind"]: 1 for row in refused}


# generator and scorers


def _ended(name: str, sampling: SamplingContract, tokens: Tokens, draw: int) -> list[Sample]:
    """In a rank: SGLang's own request takes the offered ids until it says that it is finished."""
    from megarl.platforms import prepare_sglang

    prepare_sglang()
    from sglang.srt.managers.schedule_batch import Req

    from megarl.rollout.collected import Collected
    from megarl.rollout.requests import Request
    from megarl.rollout.scheduler import engine_request

    samples = load(name)["samples"]
    requests = [
        Request(draw, at, tuple(sample["prompt_ids"]), seed=at) for at, sample in enumerate(samples)
    ]
    collected = Collected(requests, sampling, frozenset(tokens.eos_ids), None)
    for at, sample in enumerate(samples):
        asked = engine_request(str(at), requests[at], sampling)
        assert list(asked.input_ids) == sample["prompt_ids"]
        assert asked.sampling_params.stop_token_ids == set(sampling.stop_token_ids)
        assert asked.sampling_params.max_new_tokens == sampling.max_response_tokens
        running = Req(
            asked.rid,
            None,
            array("q", asked.input_ids),
            asked.sampling_params,
            return_logprob=asked.return_logprob,
            vocab_size=tokens.vocab_size,
        )
        for id_ in sample["engine_offered"]:
            running.output_ids.append(id_)
            running.logprob.output_token_logprobs_val.append(-float(id_) / 1000)
            running.update_finish_state(1)
            if running.finished():
                break
        collected.accept(running)
    return collected.samples()


def _generated_and_graded(folders: dict[str, Path]) -> dict[str, tuple[list[Sample], list]]:
    """In a rank: by case, the samples and the records of a real scoring process; cases of one
    folder share it, each with a draw of its own."""
    from megarl.rollout.collect import Grading

    found = {}
    for path in sorted(set(folders.values())):
        tokens = Tokens.load(path)
        names = [name for name in folders if folders[name] == path]
        prompts = [Prompt(name, "golden", "asked", (1,), "?") for name in names]
        pool = ScoringPool(section(f"{GRADERS}:everything"), tokens)
        try:
            grading = Grading(pool, prompts, tokens.known_ids)
            samples = {n: _ended(n, sampling_of(n, tokens), tokens, d) for d, n in enumerate(names)}
            for sample in (sample for name in names for sample in samples[name]):
                grading.submit(sample)
            records = grading.collect()
        finally:
            pool.close()
        for draw, name in enumerate(names):
            own = (record for record in records if record.draw_index == draw)
            found[name] = (samples[name], sorted(own, key=lambda record: record.candidate))
    return found


@pytest.fixture(scope="session")
def generated(ranks, folders) -> dict[str, tuple[list[Sample], list]]:
    return ranks.run(1, _generated_and_graded, folders)[0]


@pytest.mark.dist
@pytest.mark.parametrize("name", CASES)
def test_the_generator_ends_responses_where_they_end_and_changes_no_id(generated, name) -> None:
    for sample, golden in zip(generated[name][0], load(name)["samples"], strict=True):
        assert sample.prompt_ids.tolist() == golden["prompt_ids"]
        assert sample.response_ids.tolist() == golden["response_ids"]
        assert sample.action_mask.tolist() == [True] * len(golden["response_ids"])
        told = (-sample.rollout_log_probs * 1000).round().astype(int)
        assert told.tolist() == golden["response_ids"]
        assert sample.end is End[golden["end"].upper()]
        assert sample.end_reason is EndReason[golden["end_reason"].upper()]


# actor, reference, critic


def _golden_samples(name: str) -> Samples:
    rows = []
    for at, golden in enumerate(load(name)["samples"]):
        tokens = len(golden["response_ids"])
        rows.append(
            Sample(
                draw_index=0,
                candidate=at,
                prompt_ids=np.array(golden["prompt_ids"]),
                response_ids=np.array(golden["response_ids"]),
                action_mask=np.ones(tokens, dtype=bool),
                rollout_log_probs=-np.ones(tokens, dtype=np.float32),
                end=End[golden["end"].upper()],
                end_reason=EndReason[golden["end_reason"].upper()],
                seed=at,
                started=0.0,
                finished=1.0,
            )
        )
    return Samples.from_rows(rows, "v")


def _pack(name: str, samples: Samples) -> Pack:
    pack = build_pack(samples, range(len(samples)))
    pad_to = load(name).get("pad_to")
    return pack if pad_to is None else pad_pack(pack, pad_to)


@pytest.mark.parametrize("name", CASES)
def test_the_actor_sees_what_was_sampled(name: str) -> None:
    pack, golden = _pack(name, _golden_samples(name)), load(name)["pack"]
    assert pack.token_ids_T.tolist() == golden["token_ids"]
    assert pack.positions_T.tolist() == golden["positions"]
    assert pack.cu_seqlens.tolist() == golden["cu_seqlens"]
    assert pack.predictor_A.tolist() == golden["predictors"]
    assert pack.target_A.tolist() == golden["targets"]
    assert pack.action_mask_A.tolist() == golden["action_mask"]
    assert pack.sequence_A.tolist() == golden["sequence"]


class _Seen:
    """Stands where actor and reference stand, and keeps the packs it was asked to score."""

    def __init__(self) -> None:
        self.packs: list[Pack] = []

    def padded(self, packs):
        return packs

    def counting_experts(self, packs):
        return nullcontext([])

    def log_probs(self, packs):
        self.packs = list(packs)
        return [SimpleNamespace(log_probs_A=torch.zeros(len(pack.target_A))) for pack in packs]


@pytest.mark.parametrize("name", CASES)
def test_the_reference_scores_the_very_packs_of_the_actor(name: str) -> None:
    samples = _golden_samples(name)
    actor, reference = _Seen(), _Seen()
    rows = [[np.arange(len(samples))]]
    prepared = prepare(samples, rows, actor, reference, torch.device("cpu"))
    assert len(actor.packs) == 1 and actor.packs[0] is reference.packs[0] is prepared.packs[0][0]


@pytest.mark.parametrize("name", CASES)
def test_a_critic_reads_its_values_where_tokens_are_predicted(name: str) -> None:
    """V(s_t) at the position before token t; a cut response is continued at its last token."""
    samples, golden = _golden_samples(name), load(name)["critic"]
    pack = _pack(name, samples)
    assert pack.predictor_A.tolist() == golden["value_positions"]
    last = pack.predictor_A[torch.from_numpy(samples.response_offsets[1:] - 1)] + 1
    cut = samples.end == End.TRUNCATED
    told = [int(at) if is_cut else None for at, is_cut in zip(last, cut, strict=True)]
    assert told == golden["bootstrap_positions"]


# scorers


@pytest.mark.dist
@pytest.mark.parametrize("name", CASES)
def test_scorers_read_the_text_and_whether_it_is_finished(generated, name: str) -> None:
    for record, golden in zip(generated[name][1], load(name)["samples"], strict=True):
        expected = golden["scorer"]
        if expected is None:
            assert record.status is RewardStatus.ERROR and record.detail == UNKNOWN_TOKEN
            assert record.total is None
            continue
        ids = tuple(golden["response_ids"])
        read = (expected["text"], "?", "asked", name, "golden", {}, expected["finished"])
        assert record.detail == "|".join(map(str, (*read, golden["end_reason"], ids)))


@pytest.mark.dist
def test_a_sample_with_an_unknown_id_is_kept_as_a_fact_and_not_trained_on(generated) -> None:
    samples, records = generated["unknown_id"]
    scores = Scores.from_records(records)
    end = np.array([sample.end for sample in samples])
    invalid = scores.has_detail(UNKNOWN_TOKEN)
    assert invalid.tolist() == [True, False]
    selection = select_groups(scores, end, 2, "keep", "drop", invalid=invalid)
    told = [str(selection.reason(row)) for row in (0, 1)]
    assert told == ["invalid_tokens", "incomplete_group"]
