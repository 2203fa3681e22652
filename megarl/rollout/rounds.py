"""Rounds of one iteration's rollout: draw prompts, generate, grade; again until enough would train.

One round, unless `algorithm.dynamic_sampling.max_rounds` allows more (DAPO, arXiv:2503.14476): then
the rewards of a round say how many of its groups are *informative* (complete by the recipe's rule,
and not of equal rewards where such groups are dropped), and prompts are drawn on until
`rollout.prompts_per_iteration` informative groups are there. All rounds are of one policy version,
with the generator awake in between; draw indices go on from round to round. What is decided between
rounds follows from the gathered table, so it is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from megarl.contracts.hashes import contract_hash
from megarl.contracts.records import Prompt, RewardRecord
from megarl.contracts.samples import Samples
from megarl.data.curriculum import KEY, CurriculumError
from megarl.data.cursor import PromptCursor
from megarl.data.exchange import gather_table
from megarl.data.prompts import PromptError
from megarl.recipe.schema import Recipe
from megarl.rewards.score import Failures
from megarl.rollout.account import Drawn
from megarl.rollout.collect import Grading, check_failures, count_losses
from megarl.rollout.groups import IterationPlan, select
from megarl.rollout.requests import Loss
from megarl.world import World


@dataclass(frozen=True)
class Sampled:
    """What one iteration sampled: this replica's part, and global facts about all of it."""

    prompts: tuple[Prompt, ...]
    """By draw index."""
    samples: Samples
    """This replica's, in canonical order."""
    records: list[RewardRecord]
    """Their rewards, on the rank that leads the replica."""
    drawn: Drawn


@dataclass
class Rounds:
    """One iteration's rounds; every method is called on every rank, in step."""

    world: World
    recipe: Recipe
    cursor: PromptCursor
    excluded: Collection[str]
    """Prompt ids that are not drawn."""
    iteration: int
    prompts: list[Prompt] = field(default_factory=list, init=False)
    """All that were drawn, by draw index."""
    informative: int = field(default=0, init=False)
    """Groups known to be: those of every round but the last possible one."""
    done: int = field(default=0, init=False)
    _draws: list[int] = field(default_factory=list, init=False)
    _samples: list[Samples] = field(default_factory=list, init=False)
    _losses: list[Loss] = field(default_factory=list, init=False)
    _gradings: list[Grading] = field(default_factory=list, init=False)
    _records: list[list[RewardRecord]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.cursor.begin(self.iteration)

    @property
    def may_go_on(self) -> bool:
        """Whether another round is allowed, needed or not."""
        return self.done < self.recipe.algorithm.dynamic_sampling.max_rounds

    def draw(self) -> tuple[Prompt, ...]:
        """The next round's prompts; none when there are enough groups, rounds or rows. Collective.

        Raises `PromptError` when the first round finds no prompt at all, `CurriculumError` for a
        curriculum that fails on some rank or answers otherwise there; each on every rank.
        """
        target = self.recipe.rollout.prompts_per_iteration
        missing = target - self.informative
        if missing <= 0 or not self.may_go_on:
            return ()
        count = prompts_wanted(missing, self.informative, len(self.prompts), target)
        drawn = self._drawn(count)
        if drawn or self.done:
            return drawn
        if self.cursor.curriculum is not None:
            raise PromptError(
                f"{KEY}: {self.cursor.curriculum.name} refuses every training prompt that is not "
                f"in quarantine in iteration {self.iteration}: let it keep some"
            )
        raise PromptError(
            "every training prompt is in quarantine: none could be scored; "
            "see quarantine.jsonl, mend the scorer or the rows, or raise "
            "reward.quarantine_after"
        )

    def _drawn(self, count: int) -> tuple[Prompt, ...]:
        """The cursor's next prompts. Where foreign code had a say, ranks agree on what they are."""
        if self.cursor.curriculum is None:
            return self.cursor.draw(count, self.excluded)
        problem, drawn = None, ()
        try:
            drawn = self.cursor.draw(count, self.excluded)
        except CurriculumError as error:  # raised below, on every rank
            problem = str(error)
        mine = contract_hash([[prompt.prompt_id for prompt in drawn], self.cursor.state])
        told = self.world.gather((problem, mine))
        for problem, _ in told:
            if problem is not None:
                raise CurriculumError(problem)
        other = [rank for rank, (_, theirs) in enumerate(told) if theirs != told[0][1]]
        if other:
            raise CurriculumError(
                f"{KEY}: {self.cursor.curriculum.name} keeps other prompts on rank {other[0]} than "
                f"on rank 0 in iteration {self.iteration}; it must follow from its arguments "
                "alone: keep no state, use no time, rank or random numbers"
            )
        return drawn

    @property
    def first_draw(self) -> int:
        """The draw index of the next round's first prompt."""
        return len(self.prompts)

    @property
    def asked(self) -> int:
        """Responses asked for, over all rounds and replicas."""
        return len(self.prompts) * self.recipe.rollout.group_size

    def add(
        self,
        prompts: Sequence[Prompt],
        samples: Samples,
        losses: Sequence[Loss],
        grading: Grading,
    ) -> None:
        """A round is generated; it is being graded."""
        self.prompts += prompts
        self._draws.append(len(prompts))
        self._samples.append(samples)
        self._losses += losses
        self._gradings.append(grading)
        self.done += 1

    def grade(self) -> None:
        """Wait for the round's rewards and count its informative groups. Collective.

        Raises `ExchangeError` on every rank when samples and rewards do not join.
        """
        self._records.append(self._gradings[-1].collect())
        table = gather_table(self.world, self._samples[-1], self._records[-1])
        selection, _ = select(table, self.recipe, prompts=self._draws[-1], invalid=table.invalid)
        self.informative += selection.counts["groups_informative"]

    def finish(self) -> Sampled:
        """The rewards that are still out, and all rounds as one. Collective.

        Raises `LostGeneration` and `RewardError` on every rank when more responses than the recipe
        allows are lost or could not be scored.
        """
        recipe = self.recipe
        lost = count_losses(self.world, self._losses, self.asked, recipe.rollout.max_lost_share)
        if len(self._records) < self.done:
            self._records.append(self._gradings[-1].collect())
        failures = sum((grading.failures for grading in self._gradings), Failures())
        check_failures(self.world, failures, recipe.reward.max_error_share)
        return Sampled(
            prompts=tuple(self.prompts),
            samples=Samples.concat(self._samples),
            records=[record for records in self._records for record in records],
            drawn=Drawn(
                sources=tuple(prompt.source for prompt in self.prompts),
                rounds=self.done,
                lost={str(reason): count for reason, count in lost.items()},
            ),
        )


def prompts_wanted(missing: int, informative: int, drawn: int, most: int) -> int:
    """How many prompts the next round draws, at least 1 and at most `most`.

    As many as give the `missing` groups when they are as often informative as the `drawn` ones
    were; `most` when none was, or nothing is drawn yet.
    """
    if not informative:
        return most
    return min(most, -(-missing * drawn // informative))


def shortfall(iteration: int, recipe: Recipe, plan: IterationPlan) -> str | None:
    """A line for people where an iteration has fewer groups, or prompts, than the recipe wants."""
    target, most = (
        recipe.rollout.prompts_per_iteration,
        recipe.algorithm.dynamic_sampling.max_rounds,
    )
    counts, rounds = plan.selection.counts, plan.account["rounds"]
    if most > 1 and counts["groups_informative"] < target:
        why = "no other row is left to it"
        if rounds == most:
            why = "raise algorithm.dynamic_sampling.max_rounds, or use data that is less one-sided"
        return (
            f"iteration {iteration}: dynamic sampling found {counts['groups_informative']} of "
            f"{target} informative groups in {counts['groups']} prompts of {rounds} rounds; {why}"
        )
    if counts["groups"] < target:
        why = "are in quarantine"
        if recipe.data.curriculum is not None:
            why += f", or refused by {KEY}"
        return (
            f"iteration {iteration}: only {counts['groups']} of {target} prompts are left, the "
            f"others {why}"
        )
    return None
