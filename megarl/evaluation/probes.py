"""Probes: scorers that evaluations ask and training never does.

Each has scoring processes of its own, so that one that fails or hangs takes no other's score along.
A response that a probe cannot score is counted, and stops nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from megarl.contracts.records import Prompt, RewardRecord
from megarl.contracts.samples import Sample
from megarl.contracts.tokens import Tokens
from megarl.recipe import OnStatusSection, Recipe, RewardSection, ScorerSection
from megarl.rewards.score import ScoringPool
from megarl.rewards.scorer import ScorerError
from megarl.rollout.collect import Grading


@dataclass(frozen=True)
class Probe:
    """One probe; `pool` is None where this rank does not grade."""

    section: ScorerSection
    pool: ScoringPool | None


class Probes:
    """The probes of a recipe, on this rank."""

    def __init__(self, probes: Sequence[Probe] = ()) -> None:
        self._probes = tuple(probes)

    @staticmethod
    def of(recipe: Recipe, tokens: Tokens, *, grades: bool) -> Probes:
        """Starts their processes where this rank grades. Raises `ScorerError` naming eval.probes
        for one that does not exist or does not take its options."""
        made: list[Probe] = []
        with ExitStack() as stack:
            for section in recipe.eval.probes:
                pool = None
                if grades:
                    try:
                        pool = ScoringPool(section_of(recipe.reward, section), tokens)
                    except ScorerError as error:
                        told = str(error).replace("reward.scorers", "eval.probes")
                        raise ScorerError(told) from error
                    stack.callback(pool.close)
                made.append(Probe(section, pool))
            stack.pop_all()  # they stay open
        return Probes(made)

    @property
    def names(self) -> tuple[str, ...]:
        """Their components, in the recipe's order; the same on every rank."""
        return tuple(probe.section.title for probe in self._probes)

    @property
    def versions(self) -> dict[str, str]:
        """Component → scorer version; empty where this rank does not grade."""
        return {one.section.title: one.pool.version for one in self._probes if one.pool is not None}

    def grading(self, prompts: Sequence[Prompt], known_ids: np.ndarray) -> ProbeGrading:
        """Of one mode's responses to `prompts`."""
        return ProbeGrading(self._probes, prompts, known_ids)

    def close(self) -> None:
        """End their processes."""
        for probe in self._probes:
            if probe.pool is not None:
                probe.pool.close()


class ProbeGrading:
    """Hands responses to the probes that score rows of their prompts."""

    def __init__(
        self, probes: Sequence[Probe], prompts: Sequence[Prompt], known_ids: np.ndarray
    ) -> None:
        self._prompts = prompts
        self._parts = [(one.section, Grading(one.pool, prompts, known_ids)) for one in probes]

    def submit(self, sample: Sample) -> None:
        for section, grading in self._parts:
            if section.scores(self._prompts[sample.draw_index].reward):
                grading.submit(sample)

    def collect(self) -> Mapping[str, Mapping[tuple[int, int], RewardRecord]]:
        """Component → (draw index, candidate) → record, of what this rank's probes were asked."""
        return {
            section.title: {
                (record.draw_index, record.candidate): record for record in grading.collect()
            }
            for section, grading in self._parts
        }


def section_of(reward: RewardSection, probe: ScorerSection) -> RewardSection:
    """The recipe's reward section for one probe: a failure of it is never more than a count."""
    rules = {
        status: rule if rule == "retry" else "drop"
        for status, rule in dict(reward.on_status).items()
    }
    return reward.model_copy(
        update={
            "scorers": (probe.model_copy(update={"only": ()}),),
            "on_status": OnStatusSection(**rules),
            "penalty": None,
            "violated": None,
            "max_error_share": 1.0,
        }
    )
