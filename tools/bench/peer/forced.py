"""`megarl.train` for one rank, with a given length for every response:

    MEGARL_BENCH_LENGTHS=lengths.json python -m tools.bench.peer.forced RECIPE [key=value …]

The file lists one length per (prompt, candidate) in canonical order; every iteration uses them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from megarl.contracts.samples import SamplingContract
from megarl.data import guards
from megarl.process import main
from megarl.rollout import scheduler
from megarl.rollout.requests import Request
from tools.bench.peer.lengths import LENGTHS_VARIABLE


def force(lengths: list[int]) -> None:
    """Replaces `scheduler.engine_request`: a response ends at its length and nowhere else.

    No policy ends so, and the guard of ends would refuse to train on it: it is left out.
    """
    stock = scheduler.engine_request

    def engine_request(name: str, request: Request, sampling: SamplingContract) -> Any:
        made = stock(name, request, sampling)
        row = request.draw_index * sampling.n + request.candidate
        made.sampling_params.max_new_tokens = lengths[row]
        made.sampling_params.stop_token_ids = set()
        return made

    scheduler.engine_request = engine_request
    guards.check_ends = lambda found, samples, sampling: None


if __name__ == "__main__":
    force(json.loads(Path(os.environ[LENGTHS_VARIABLE]).read_text(encoding="utf-8")))
    sys.exit(main())
