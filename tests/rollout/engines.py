"""What real SGLang engines did, run once in the shared ranks and asserted on by several tests.

Each function below `# in the ranks` runs on a rank and returns plain results; the cached ones
under `# in the test process` start them.
"""

from __future__ import annotations

import functools
import os
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.contracts.mesh import Mesh
from megarl.contracts.samples import Sample
from megarl.rollout.requests import Request, assign_replicas, request_seed
from tests.rollout import tiny
from tests.rollout.oracle import gap, hf_log_probs, own

CPU = torch.device("cpu")


def grid(prompts: int = 6, candidates: int = 4, iteration: int = 0) -> list[Request]:
    """`candidates` requests of each of `prompts` prompts of 5 to 45 tokens, two with a shared
    beginning longer than a cache page."""
    ids = np.random.default_rng(3).integers(6, tiny.VOCABULARY, size=(prompts, 45))
    ids[1, :20] = ids[0, :20]
    return [
        Request(
            prompt,
            candidate,
            tuple(int(i) for i in ids[prompt, : 5 + 40 * (prompt % 6) // 5]),
            request_seed(7, iteration, f"p{prompt}", candidate),
        )
        for prompt in range(prompts)
        for candidate in range(candidates)
    ]


# in the ranks


def build(folder: str, tp: int = 1, active: int | None = 0, **section: Any) -> Any:
    from megarl.rollout.generator import Generator

    mesh = Mesh(dist.get_world_size(), tp=1, rollout_tp=tp)
    section = tiny.section(tp=tp, **section)
    generator = Generator(Path(folder), mesh, dist.get_rank(), section, 1, CPU)
    if active is not None:
        generator.activate(tiny.version(active))
    return generator


def failure(function: Any, *arguments: Any, **keywords: Any) -> str:
    try:
        function(*arguments, **keywords)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def _rng() -> list[Any]:
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]


def _lost(generator: Any) -> dict[str, Any]:
    """SGLang aborts request 1 while it runs: with a retry left, and with none."""
    requests = [Request(0, c, (9, 8, 7), request_seed(7, 0, "lost", c)) for c in range(2)]
    sampling = tiny.sampling(max_response_tokens=20)
    whole = generator.generate(requests, sampling, tiny.version())
    early = next(int(i) for i in whole[0].response_ids[1:5] if i not in whole[1].response_ids)
    sampling = replace(sampling, stop_token_ids=(early,))
    completed: list[Sample] = []

    def abort_the_other(sample: Sample) -> None:
        completed.append(sample)
        if sample.candidate == 0:
            generator._scheduler.abort("1")

    again = generator.generate(requests, sampling, tiny.version(), abort_the_other)
    generator._section.retries = 0
    told = failure(generator.generate, requests, sampling, tiny.version(), abort_the_other)
    losses: list[Any] = []
    rest = generator.generate(
        requests, sampling, tiny.version(), abort_the_other, on_loss=losses.append
    )
    generator._section.retries = 1
    kept = generator.generate(
        requests, sampling, tiny.version(), on_loss=losses.append, aborted=[0]
    )
    return {
        "whole": whole,
        "again": again,
        "told": told,
        "completed": completed,
        "losses": losses,
        "rest": [rest, kept],
    }


def _counted(
    generator: Any, requests: list[Request], sampling: Any, count: str
) -> tuple[int, list[Sample]]:
    """The sum of SGLang's own per-request counter `count`, and the samples."""
    counts: list[int] = []
    drive = generator._scheduler.drive

    def counting(batch: Any, on_finished: Any, aborted: Any) -> None:
        def accept(finished: Any) -> None:
            counts.append(getattr(finished, count))
            on_finished(finished)

        drive(batch, accept, aborted)

    generator._scheduler.drive = counting
    try:
        samples = generator.generate(requests, sampling, tiny.version())
    finally:
        del generator._scheduler.drive
    return sum(counts), samples


def _refusals(generator: Any, requests: list[Request]) -> dict[str, str]:
    sampling, version = tiny.sampling(), tiny.version()
    ask = functools.partial(failure, generator.generate)
    long = [replace(requests[0], prompt_ids=(7,) * 501)]
    told = {
        "wrong version": ask(requests, sampling, tiny.version(1)),
        "too long": ask(long, sampling, version),
        "foreign id": ask([replace(requests[0], prompt_ids=(tiny.VOCABULARY,))], sampling, version),
        "top_p": ask(requests, replace(sampling, top_p=0.9), version),
    }
    fits = [replace(requests[0], prompt_ids=(7,) * 498)]
    told["just fits"] = str(len(generator.generate(fits, sampling, version)[0].response_ids))
    generator.deactivate()
    told["deactivated"] = ask(requests, sampling, version)
    generator.activate(version)
    return told


def _frequencies(generator: Any, folder: str, temperature: float, draws: int) -> np.ndarray:
    """[2, V] counts of one-token draws, and what softmax expects of them."""
    requests = [Request(i, 0, (9, 8, 7), request_seed(7, 1, f"f{i}", 0)) for i in range(draws)]
    sampling = tiny.sampling(temperature=temperature, max_response_tokens=1)
    samples = generator.generate(requests, sampling, tiny.version())
    counts = np.bincount([s.response_ids[0] for s in samples], minlength=tiny.VOCABULARY)
    expected = draws * np.exp(hf_log_probs(folder, samples[:1], temperature)[0][0])
    return np.stack([counts, expected])


def _live_weights(generator: Any, other: str, requests: list[Request]) -> dict[str, Any]:
    """Overwrite the live parameters by those of checkpoint `other`: stale, then flushed."""
    from safetensors.torch import load_file

    sampling = tiny.sampling()
    before = generator.generate(requests, sampling, tiny.version())
    padding, parameters = generator.padding(), generator.named_parameters()
    generator.deactivate()
    tensors = load_file(Path(other) / "model.safetensors")

    def write(name: str, parts: list[str]) -> None:
        source = torch.cat([tensors.pop(part) for part in parts])
        rows = padding.get(name, (len(source), 0))[0]
        with torch.no_grad():
            parameters.pop(name)[:rows].copy_(source)

    for name in list(parameters):
        if "qkv_proj" in name:
            write(name, [name.replace("qkv_proj", part) for part in ("q_proj", "k_proj", "v_proj")])
        elif "gate_up_proj" in name:
            write(name, [name.replace("gate_up", part) for part in ("gate", "up")])
        else:
            write(name, [name])
    generator.active = tiny.version(1)  # the fault: admitted without a flush
    stale = generator.generate(requests, sampling, tiny.version(1))
    generator.deactivate()
    generator.activate(tiny.version(1))
    fresh = generator.generate(requests, sampling, tiny.version(1))
    kept = {name: p.clone() for name, p in generator.named_parameters().items()}
    generator.sleep()
    slept = generator.active
    generator.wake()
    same = all(torch.equal(kept[n], p) for n, p in generator.named_parameters().items())
    return {
        "before": before,
        "stale": stale,
        "fresh": fresh,
        "unwritten": sorted(parameters) + sorted(tensors),
        "active after sleep": slept,
        "weights kept over sleep": same,
    }


def _padding_rows(generator: Any, requests: list[Request]) -> dict[str, Any]:
    """The vocabulary's padding rows are made to win every draw, if anything looked at them."""
    sampling = tiny.sampling()
    before = generator.generate(requests, sampling, tiny.version())
    parameters = generator.named_parameters()
    with torch.no_grad():
        for name, (first, last) in generator.padding().items():
            parameters[name][first:last] = 1e3
    generator.activate(tiny.version())
    after = generator.generate(requests, sampling, tiny.version())
    return {"padding": generator.padding(), "before": before, "after": after}


def one_rank(folder: str, other: str) -> dict[str, Any]:
    """Everything a single rank shows, with three engines one after the other."""
    import megarl.rollout.generator  # noqa: F401  (importing SGLang draws from python's random)

    found: dict[str, Any] = {}
    requests, version = grid(), tiny.version()
    random.seed(11), np.random.seed(11), torch.manual_seed(11)
    rng = _rng()
    generator = build(folder, active=None)
    found["before activation"] = failure(generator.generate, requests, tiny.sampling(), version)
    generator.activate(version)
    found["rng kept"] = _rng() == rng

    for temperature in (1.0, 0.7):
        sampling = tiny.sampling(temperature=temperature)
        batch = generator.generate(requests, sampling, version)
        single = [generator.generate([r], sampling, version)[0] for r in requests[::5]]
        generator.flush()
        backwards = generator.generate(requests[::-1], sampling, version)[::-1]
        found[temperature] = {
            "batch": batch,
            "single": single,
            "backwards": backwards,
            "gap": gap(folder, [*batch, *single, *backwards], temperature),
        }
    order: list[Sample] = []
    stops = tiny.sampling(stop_token_ids=(tiny.EOS, tiny.STOP), max_response_tokens=60)
    found["stops"] = generator.generate(requests, stops, version, order.append)
    found["completed"] = order
    found["prefix hits"], hit = _counted(generator, requests, tiny.sampling(), "cached_tokens")
    found["prefix gap"] = gap(folder, hit, 1.0)
    found["greedy"] = generator.generate(requests[::4], tiny.sampling(temperature=0.0), version)
    found["greedy hf"] = [r.argmax(-1) for r in hf_log_probs(folder, found["greedy"], 1.0)]
    found["greedy gap"] = gap(folder, found["greedy"], 1.0)
    found["rng kept"] &= _rng() == rng
    found["frequencies"] = {t: _frequencies(generator, folder, t, 2048) for t in (1.0, 0.7)}
    found["lost"] = _lost(generator)
    found["refusals"] = _refusals(generator, requests)
    generator._scheduler.waiting_queue.append(None)  # a request that lingers
    found["not flushed"] = [failure(generator.activate, version), generator.active]
    generator._scheduler.waiting_queue.clear()
    generator.activate(version)
    found["padding"] = _padding_rows(generator, requests)
    found["live"] = _live_weights(generator, other, requests)
    found["rng kept"] &= _rng() == rng
    generator.close()
    generator.close()
    descriptors = len(os.listdir("/proc/self/fd"))

    found["pool too small"] = failure(build, folder, max_total_tokens=32)
    # A pool too small for the batch: SGLang retracts running requests and computes them again.
    small = build(other, max_total_tokens=512, max_running_requests=24, chunked_prefill_tokens=64)
    found["cold"] = small.generate(requests, tiny.sampling(), version)
    found["retractions"], found["pressed"] = _counted(
        small, grid(candidates=8), tiny.sampling(max_response_tokens=40), "retraction_count"
    )
    found["pressed gap"] = gap(other, found["pressed"], 1.0)
    small.close()
    found["descriptors leaked"] = len(os.listdir("/proc/self/fd")) - descriptors
    return found


def two_ranks(folder: str, tp: int, unaligned: str) -> dict[str, Any]:
    """This rank's replica of two ranks: its rows of the grid, and its samples."""
    rank = dist.get_rank()
    torch.manual_seed(100 + rank)  # ranks' own generators must not matter
    requests = grid()
    generator = build(folder, tp=tp)
    rows = assign_replicas(requests, dist.get_world_size() // tp, 12)[generator.replica]
    mine = [requests[row] for row in rows]
    found: dict[str, Any] = {"rows": rows, "padding": generator.padding()}
    for temperature in (1.0, 0.7):
        samples = generator.generate(mine, tiny.sampling(temperature=temperature), tiny.version())
        found[temperature] = samples
        found[f"gap {temperature}"] = gap(folder, samples, temperature)
    total = torch.ones(1)
    generator.close()
    found["groups left"] = len(dist.distributed_c10d._world.pg_map) - 1
    if tp > 1:
        found["unaligned"] = failure(build, unaligned, tp=tp)
    dist.all_reduce(total)  # the default group outlives the engine
    found["ranks after close"] = int(total)
    return found


def bf16_rank(folder: str) -> dict[str, Any]:
    generator = build(folder, dtype="bfloat16")
    samples = generator.generate(grid(), tiny.sampling(dtype="bfloat16"), tiny.version())
    generator.close()
    exact = own(hf_log_probs(folder, samples, 1.0), samples)
    rounded = own(hf_log_probs(folder, samples, 1.0, torch.bfloat16), samples)
    told = np.concatenate([sample.rollout_log_probs for sample in samples])
    return {
        "samples": samples,
        "gap": np.abs(told - exact),
        "hf gap": np.abs(rounded - exact),
    }


# in the test process


@functools.cache
def folder(layout: str, seed: int = 0, dtype: str = "float32", ffn: int = 192) -> str:
    path = Path(tempfile.mkdtemp(prefix="megarl-tiny-"))
    return str(tiny.save_model(path, layout, seed, dtype, ffn))


@functools.cache
def on_one_rank(ranks: Any, layout: str) -> dict[str, Any]:
    return ranks.run(1, one_rank, folder(layout), folder(layout, seed=1))[0]


@functools.cache
def on_two_ranks(ranks: Any, layout: str, tp: int) -> list[dict[str, Any]]:
    return ranks.run(2, two_ranks, folder(layout), tp, folder(layout, ffn=81))
