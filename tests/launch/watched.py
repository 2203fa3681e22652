"""An entry of ranks that watches what evaluations leave behind in the process that trains."""

from __future__ import annotations

import random
from typing import Any


def main() -> int:
    """`megarl.process.main`; an evaluation that leaves something behind ends the run."""
    from megarl import process, run_outputs

    evaluate = run_outputs.evaluate

    def watched(world: Any, generator: Any, *rest: Any) -> Any:
        tree, flush, held = generator._scheduler.tree_cache, generator.flush, []

        def flushing() -> None:
            held.append(tree.evictable_size())
            flush()

        before, generator.flush = random_states(), flushing
        done = evaluate(world, generator, *rest)
        del generator.flush
        if held[-1:] == [0] or not held:
            raise AssertionError(f"no prefix was kept, so nothing is shown: {held}")
        if tree.evictable_size():
            raise AssertionError("the prefix cache holds what the evaluation read")
        if random_states() != before:
            raise AssertionError("a random generator of the process moved")
        return done

    run_outputs.evaluate = watched
    return process.main()


def random_states() -> tuple:
    """Of Python, numpy and torch."""
    import numpy as np
    import torch

    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, keys.tobytes(), *rest, torch.get_rng_state().tolist()
