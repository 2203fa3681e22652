"""Scoring: responses stream in while others are generated, reward records come out at the end.

"Wrong", "scored 0" and "could not be scored" stay three things. A response without an answer is
scored (`ok`, detail `no_answer`); a scorer that raises, ends its process, or returns what is no
finite number makes the record an `error`; one that takes too long makes it a `timeout`. What these
lead to is the recipe's `reward.on_status`: `drop` keeps the status for group selection, `retry`
scores once more and then drops, `penalty` gives the declared total, `stop` raises.

A scorer with `only` scores the rows whose reward name it lists; for others it is not there. The
total is the weighted sum of the components, unless one is below its scorer's `at_least`: then it is
`reward.violated`. The components stay what the scorers said. Step scores are each scorer's, times
its weight, in the order of their tokens; a violated constraint does not change them.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from megarl.contracts.hashes import contract_hash
from megarl.contracts.records import Prompt, RewardRecord, RewardStatus, Scores
from megarl.contracts.samples import End, Sample
from megarl.contracts.tokens import Tokens
from megarl.rewards.frames import Died, Outcome, ScorerSetup, Setup, TimedOut, Verdict
from megarl.rewards.scorer import PENALTY, Response, ScorerError
from megarl.rewards.sources import named_files
from megarl.rewards.workers import Job, WorkerPool

StepScores = tuple[tuple[int, float], ...]
"""(response token index, score) of each step."""
Key = tuple[int, int]
"""(draw index, candidate)."""

GB = 10**9


class RewardError(RuntimeError):
    """Scoring went so wrong that the run must stop; the message says what to look at."""


def is_penalised(status: RewardStatus, detail: str) -> bool:
    """Whether a record got the declared penalty as its total, because it could not be scored."""
    return status is RewardStatus.OK and detail.startswith(PENALTY)


def penalised(scores: Scores) -> np.ndarray:
    """bool [N]: `is_penalised` of each row."""
    marked = np.array([detail.startswith(PENALTY) for detail in scores.details], dtype=bool)
    return scores.ok & marked[scores.detail_code] if len(marked) else np.zeros(len(scores), bool)


def first_component(section: Any, reward: str) -> str | None:
    """Component that is a row's accuracy: of the first of the scorers of `section` (the recipe's
    `reward`) that scores rows of this reward name. None where none does."""
    for scorer in section.scorers:
        if scorer.scores(reward):
            return scorer.title
    return None


class Times(NamedTuple):
    """How long a scorer took."""

    count: int
    """Responses."""
    total: float
    """Seconds; a response of a batch has its share of the call's."""
    longest: float


@dataclass
class Failures:
    """Records of one collection and how many could not be scored; adds up over ranks."""

    records: int = 0
    details: Counter[str] = field(default_factory=Counter)
    """`error: <detail>` or `timeout: <detail>` → records, before `on_status` is applied."""

    def __add__(self, other: Failures) -> Failures:
        return Failures(self.records + other.records, self.details + other.details)

    def check(self, max_share: float) -> None:
        """Raise `RewardError` when a larger share failed, naming the commonest reason."""
        failed = self.details.total()
        if failed <= max_share * self.records:
            return
        detail, count = self.details.most_common(1)[0]
        raise RewardError(
            f"{failed} of {self.records} responses could not be scored, reward.max_error_share is "
            f"{max_share:g}; most often ({count}×) {detail}"
        )


class ScoringPool:
    """Scores samples in processes of their own, each within `reward.deadline_seconds`."""

    def __init__(self, section: Any, tokens: Tokens) -> None:
        """Start the workers and load every scorer; `section` is the recipe's `reward`.

        Raises `ScorerError` when a scorer does not exist or does not take its options, and when a
        file that an option names cannot be read.
        """
        self._section, self._tokens = section, tokens
        self._weights = {item.title: item.weight for item in section.scorers}
        self._at_least = {
            item.title: item.at_least for item in section.scorers if item.at_least is not None
        }
        if len(self._weights) < len(section.scorers):
            titles = Counter(item.title for item in section.scorers)
            raise ScorerError(
                "reward.scorers: two scorers have the same component name; give one `component`: "
                + ", ".join(item.name for item in section.scorers if titles[item.title] > 1)
            )
        self._rules = {
            RewardStatus.TIMEOUT: section.on_status.timeout,
            RewardStatus.ERROR: section.on_status.error,
        }
        if "penalty" in self._rules.values() and section.penalty is None:
            raise ScorerError("reward.on_status says penalty: set reward.penalty to its value")
        if self._at_least and section.violated is None:
            raise ScorerError("a scorer says at_least: set reward.violated, the total below it")
        setup = Setup(
            sys_path=tuple(sys.path),
            scorers=tuple(
                ScorerSetup(item.title, item.name, item.options, frozenset(item.only), item.batch)
                for item in section.scorers
            ),
            deadline_seconds=section.deadline_seconds,
            memory_bytes=None if section.memory_gb is None else int(section.memory_gb * GB),
            concurrency=section.concurrency,
        )
        self._known: set[str] = set()  # reward names that some scorer with a weight scores
        self._jobs: dict[Key, Job] = {}
        self.failures = Failures()
        self.times: dict[str, Times] = {}
        """Of the last collection: component → how long its scorer took for responses it scored or
        failed on. One that missed the deadline or ended its process is in none."""
        named = _named_files(setup)
        self._pool = WorkerPool(setup, section.workers, section.max_pending, self._is_retried)
        try:
            self.version = self._hash_version(setup, named)
        except BaseException:
            self.close()
            raise

    def submit(self, sample: Sample, prompt: Prompt) -> None:
        """Start scoring. The same response again changes nothing.

        Returns at once, unless `reward.max_pending` responses are without an outcome: then it waits
        for one, and whoever generates waits with it, so that what is generated faster than it is
        scored does not fill the memory.

        Raises `ValueError` when another response comes under an id that is being scored or no
        scorer with a weight scores the row, `TokensError` when the response holds an id the
        tokenizer does not know, and `ScorerError` when the pool has failed.
        """
        key = (sample.draw_index, sample.candidate)
        token_ids = tuple(sample.response_ids.tolist())
        before = self._jobs.get(key)
        if before is not None:
            if before.response.token_ids != token_ids:
                raise ValueError(f"two different responses for draw and candidate {key}")
            return
        if prompt.reward not in self._known:
            self._check_scored(prompt)
        response = Response(
            text=self._tokens.decode(token_ids),
            answer=prompt.answer,
            prompt=prompt.text,
            finished=sample.end is End.TERMINATED,
            end_reason=sample.end_reason.name.lower(),
            token_ids=token_ids,
            prompt_id=prompt.prompt_id,
            source=prompt.source,
            metadata=prompt.metadata,
            reward=prompt.reward,
        )
        self._jobs[key] = self._pool.submit(response)

    def collect(self, expected: Sequence[Key], check_share: bool = True) -> list[RewardRecord]:
        """Records of all submitted samples, in the order of `expected`; waits for the last.

        Their ids are free again afterwards. `failures` counts what could not be scored; with
        `check_share` it is checked against `reward.max_error_share` here, otherwise the caller adds
        it up over ranks first (a share of few samples says little).

        Raises `ValueError` when `expected` is not what was submitted, `RewardError` for a failure
        whose rule is `stop` and for too large a share of failures.
        """
        if len(set(expected)) != len(expected) or set(expected) != self._jobs.keys():
            odd = sorted(set(expected) ^ self._jobs.keys())
            raise ValueError(f"expected rewards differ from submitted samples, at {odd[:4]} …")
        self._pool.wait()
        jobs, self._jobs = self._jobs, {}
        self.failures = Failures(len(jobs))
        self.times = _times(self._weights, jobs.values())
        records = [self._record(key, jobs[key]) for key in expected]
        if check_share:
            self.failures.check(self._section.max_error_share)
        return records

    def close(self) -> None:
        """End every worker and what it started."""
        self._pool.close()

    def _check_scored(self, prompt: Prompt) -> None:
        if not any(item.weight and item.scores(prompt.reward) for item in self._section.scorers):
            raise ValueError(
                f"prompt {prompt.prompt_id}: no scorer with a weight scores rows of the reward "
                f"{prompt.reward!r} (reward.scorers … only)"
            )
        self._known.add(prompt.reward)

    def _is_retried(self, outcome: Outcome, tries: int) -> bool:
        status, _ = _status_of(outcome)
        return status is not RewardStatus.OK and tries == 1 and self._rules[status] == "retry"

    def _record(self, key: Key, job: Job) -> RewardRecord:
        status, detail = _status_of(job.outcome)
        components: dict[str, float] = {}
        steps: StepScores = ()
        total = None
        if status is RewardStatus.OK:
            components = job.outcome.components
            steps = self._steps(job.outcome.steps)
            total, violation = self._total(components)
            detail = "; ".join(told for told in (detail, violation) if told)
            if not all(map(math.isfinite, (total, *(score for _, score in steps)))):
                status, detail = RewardStatus.ERROR, "the weighted scores are beyond floats"
                components, steps, total = {}, (), None
        if status is not RewardStatus.OK:
            self.failures.details[f"{status}: {detail}"] += 1
            if self._rules[status] == "stop":
                raise RewardError(
                    f"response {key} to prompt {job.response.prompt_id} could not be scored and "
                    f"reward.on_status.{status} is stop: {detail}"
                )
            if self._rules[status] == "penalty":
                total, detail = self._section.penalty, f"{PENALTY}{status}: {detail}"
                status = RewardStatus.OK
        return RewardRecord(
            draw_index=key[0],
            candidate=key[1],
            total=None if total is None else float(total),
            components=components,
            scorer_version=self.version,
            status=status,
            detail=detail,
            seconds=job.outcome.seconds,
            step_rewards=steps,
        )

    def _steps(self, said: dict[str, StepScores]) -> StepScores:
        """All scorers' step scores, weighted; of one token's the earlier scorer's comes first."""
        weighted = [
            (index, score * weight)
            for name, weight in self._weights.items()
            if weight  # as in the total, a scorer of weight 0 is not counted
            for index, score in said.get(name, ())
        ]
        return tuple(sorted(weighted, key=lambda step: step[0]))

    def _total(self, components: dict[str, float]) -> tuple[float, str]:
        """The reward, and which constraints are violated (empty: none)."""
        low = [
            name
            for name, bound in self._at_least.items()
            if name in components and components[name] < bound
        ]
        if low:
            return self._section.violated, f"below at_least: {', '.join(low)}"
        # Weight 0: reported, not counted (so that 0 × a huge score cannot show either).
        weighed = {name: weight for name, weight in self._weights.items() if weight}
        return sum(components[name] * w for name, w in weighed.items() if name in components), ""

    def _hash_version(self, setup: Setup, named: dict[str, str]) -> str:
        """Over code, options and the files they name, weights, constraints, rules and library
        versions."""
        sources = self._pool.sources
        return contract_hash(
            {
                "scorers": [[item.name, item.options] for item in setup.scorers],
                "named_files": named,
                "only": {item.title: sorted(item.only) for item in setup.scorers},
                "batch": {item.title: item.batch for item in setup.scorers},
                "weights": self._weights,
                "at_least": self._at_least,
                "violated": self._section.violated,
                "files": sources.files,
                "libraries": sources.libraries,
                "rules": {str(status): rule for status, rule in self._rules.items()},
                "penalty": self._section.penalty,
                "deadline_seconds": self._section.deadline_seconds,
                "memory_gb": self._section.memory_gb,
            }
        )


def _named_files(setup: Setup) -> dict[str, str]:
    try:
        return named_files([item.options for item in setup.scorers])
    except OSError as error:
        raise ScorerError(
            f"reward.scorers: cannot read {error.filename or 'a file'} that an option names: "
            f"{error.strerror or error}"
        ) from error


def _times(titles: Iterable[str], jobs: Iterable[Job]) -> dict[str, Times]:
    times = dict.fromkeys(titles, Times(0, 0.0, 0.0))
    for job in jobs:
        if isinstance(job.outcome, Verdict):
            for title, seconds in job.outcome.times.items():
                count, total, longest = times[title]
                times[title] = Times(count + 1, total + seconds, max(longest, seconds))
    return times


def _status_of(outcome: Outcome) -> tuple[RewardStatus, str]:
    match outcome:
        case TimedOut(deadline=deadline):
            return RewardStatus.TIMEOUT, f"no score within {deadline:g} s"
        case Died(exit_code=code):
            return RewardStatus.ERROR, f"the scorer ended its process with exit code {code}"
        case Verdict(error=str(error)):
            return RewardStatus.ERROR, error
        case Verdict(detail=detail):
            return RewardStatus.OK, detail
