"""`checkpoint`: saving and loading a training position, against plain writes and reads."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from tools.bench.harness import CACHE, ROOT, Bench, BenchError, Spread, environment
from tools.bench.runs import run_command

PAIRS = {
    "save_over_raw": ("raw_write", "save"),
    "load_over_raw": ("raw_read", "load"),
    "load_proven_over_raw": ("raw_read", "load_proven"),
    "load_over_raw_warm": ("raw_read_warm", "load_warm"),
}
"""Ratio → (seconds of the plain side, of megarl's)."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=5, help="of everything (default: 5)")
    parser.add_argument("--ranks", type=int, default=2, help="that save and load (default: 2)")
    parser.add_argument("--tp", type=int, default=2, help="tensor parallel size (default: 2)")
    parser.add_argument("--layers", type=int, default=12, help="of the model (default: 12)")
    parser.add_argument("--hidden", type=int, default=768, help="its hidden size (default: 768)")
    parser.add_argument("--vocab", type=int, default=32000, help="its vocabulary (default: 32000)")


def random_model(folder: Path, options: argparse.Namespace) -> None:
    """A Hugging Face folder with random weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).float().save_pretrained(folder)


def run(options: argparse.Namespace) -> dict[str, Any]:
    if options.ranks % options.tp or 4 % options.tp:
        raise BenchError(f"--tp {options.tp} must divide --ranks {options.ranks} and 4 (heads)")
    facts = environment()
    folder = CACHE / "runs" / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "run").mkdir(parents=True)
    random_model(folder / "model", options)
    job = {
        "folder": str(folder / "run"),
        "model": str(folder / "model"),
        "result": str(folder / "result.json"),
        "tp": options.tp,
        "repeats": options.repeats,
    }
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={options.ranks}", "-m", "tools.bench.checkpoint_ranks"]
    started = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run_command([*command, str(folder / "job.json")], started, CACHE / "runs" / "checkpoint.log")
    told = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    shutil.rmtree(folder)
    return summary(told) | {
        "repeats": options.repeats,
        "ranks": options.ranks,
        "tp": options.tp,
        "environment": facts,
    }


def summary(told: dict[str, Any]) -> dict[str, Any]:
    """From the ranks' seconds to ratios within each turn, MB/s and the share that holds up."""
    size, seconds = told["bytes"], told["seconds"]
    result: dict[str, Any] = {}
    for ratio, (plain, mine) in PAIRS.items():
        pairs = zip(seconds[plain], seconds[mine], strict=True)
        result |= Spread.of([raw / own for raw, own in pairs]).keys(ratio)
    shares = [waited / whole for whole, waited in told["behind"]]
    result |= Spread.of(shares).keys("blocking_share")
    result |= Spread.of([waited for _, waited in told["behind"]]).keys("blocking_seconds")
    for side, taken in seconds.items():
        result |= Spread.of([size / one / 1e6 for one in taken]).keys(f"{side}_mb_per_s", 1)
    return result | {
        "first_save_mb_per_s": round(size / told["first_save"] / 1e6, 1),
        "bytes": size,
        "bytes_per_rank": told["bytes_per_rank"],
    }


BENCH = Bench(
    name="checkpoint",
    line="saving and loading a training position: against plain writes and reads of its bytes",
    text="""Several ranks save and load weights and optimizer state of a random model; in turn
each rank writes, or reads, the bytes of its own files plainly (blocks of 16 MiB), in the same
folder. Seconds are until the last rank is through; a ratio is taken within a turn. Before each
measurement old files are gone for a second, and as much memory as it takes was touched and freed:
a virtual machine may give free memory back to its host, and the page cache then grows at a third
of the disk's speed, for whichever side comes after a pause.

save_over_raw        seconds of write + fsync over those of a save that the loop waits for: digests
                     of the optimizer's state (the weights' are known since the update), files,
                     fsync, index, COMMIT.json. The save asks the disk to begin early, the plain
                     side does not; the older checkpoint is removed after it
load_over_raw        seconds of reading over those of loading a checkpoint, until each tensor lies
                     where it belongs. Before either side its files are dropped from the page
                     cache (fsync, POSIX_FADV_DONTNEED)
load_proven_over_raw the same until all tensors are digested and found to be those saved, as a
                     resume does
load_over_raw_warm   the load with the files in the page cache
blocking_share       of a background save, from the call to the commit: the share for which the
                     loop waited (copy, digests, votes); optimizer steps go on beside it
first_save_mb_per_s  the first save of the process, which takes its memory""",
    add_options=add_options,
    run=run,
)
