"""An own objective tried on made-up tokens before anything is loaded, so that a fault is one line.

An own objective is a function of a pack's tokens and the recipe's `algorithm` section::

    def mine(tokens: PolicyTokens, settings) -> Tensor | tuple[Tensor, dict[str, Tensor]]: ...
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.own import is_own, load_own
from megarl.algorithms.surrogates import KEY, LossSettings, PolicyTokens, objective_of
from megarl.contracts.errors import InputError
from megarl.rewards.scorer import said

LENGTHS = (5, 1, 4)
"""Response tokens of the made-up sequences."""


def check_objective(settings: LossSettings) -> None:
    """Call the own objective of `settings`, the recipe's `algorithm` section; a built-in passes.

    It must return one finite loss per token, float32 [A], whose sum has a finite gradient that is
    not 0 everywhere; the same tokens must give the same bits again, or nobody could recompute a
    run; tokens that are not active must change nothing, and a token's loss may depend on its own
    sequence only, or else the loss would depend on how samples are packed.

    Raises `InputError`, one line, for the first of these that does not hold, and for an unknown
    name.
    """
    name = settings.objective
    objective_of(name)
    if not is_own(name):
        return
    load_own(KEY, name)
    active_A, sequence_A, columns = _made_up()
    everywhere = torch.ones_like(active_A)
    whole_A, gradient_A = _call(settings, columns, everywhere, sequence_A)
    again_A, gradient_again_A = _call(settings, columns, everywhere, sequence_A)
    if not (torch.equal(whole_A, again_A) and torch.equal(gradient_A, gradient_again_A)):
        _refuse(
            name,
            "gives other numbers when called again with the same tokens: a run could not be "
            "recomputed; keep no state, and seed random numbers in the call",
        )
    if not gradient_A.any():
        _refuse(
            name,
            "has no gradient: the sum of its losses over tokens does not depend on log_probs_A; "
            "do not detach them, and do not subtract the losses' mean over tokens",
        )
    holed_A, _ = _call(settings, columns, active_A, sequence_A)
    dense = [column[active_A] for column in columns]
    dense_A, _ = _call(settings, dense, everywhere[active_A], sequence_A[active_A])
    if not torch.allclose(holed_A[active_A], dense_A, rtol=1e-5, atol=1e-6):
        _refuse(
            name,
            "lets tokens that are not active change others' loss; sum or average over "
            "tokens.active_A only, and within one sequence of tokens.sequence_A only",
        )
    for sequence in range(len(LENGTHS)):
        own_A = sequence_A == sequence
        alone = [column[own_A] for column in columns]
        alone_A, _ = _call(settings, alone, everywhere[own_A], sequence_A[own_A] * 0)
        if not torch.allclose(whole_A[own_A], alone_A, rtol=1e-5, atol=1e-6):
            _refuse(
                name,
                "gives a token another loss when other samples are in its pack; "
                "it may look at the token's own sequence only (tokens.sequence_A)",
            )
    # A pack of which nothing trains.
    _call(settings, columns, torch.zeros_like(active_A), sequence_A)


def _made_up() -> tuple[Tensor, Tensor, list[Tensor]]:
    """Active tokens (each sequence has some), sequences, and log-probs, old ones and advantages."""
    sequence_A = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    tokens = len(sequence_A)
    generator = torch.Generator().manual_seed(0)
    old_A = -3 * torch.rand(tokens, generator=generator) - 0.05
    log_probs_A = old_A + 0.05 * torch.randn(tokens, generator=generator)
    advantages_A = torch.tensor([1.0, -0.5, 0.25, -2.0]).repeat(tokens)[:tokens]
    active_A = torch.arange(tokens) % 3 != 1
    active_A[LENGTHS[0]] = True  # the sequence of one token
    return active_A, sequence_A, [log_probs_A, old_A, advantages_A]


def _call(
    settings: LossSettings, columns: list[Tensor], active_A: Tensor, sequence_A: Tensor
) -> tuple[Tensor, Tensor]:
    """Loss [A] and the gradient [A] of its sum over active tokens, both found finite."""
    name = settings.objective
    log_probs_A = columns[0].clone().requires_grad_()
    tokens = PolicyTokens.of(log_probs_A, *columns[1:], active_A, sequence_A)
    try:
        loss_A, sums = objective_of(name)(tokens, settings)
        kept_A = torch.where(active_A, loss_A, 0.0)
        if kept_A.requires_grad:
            kept_A.sum().backward()
    except ValueError as error:
        if str(error).startswith(KEY):
            raise InputError(str(error)) from error
        _refuse(name, f"raised {said(error)}", error)
    except Exception as error:  # foreign code may raise anything
        _refuse(name, f"raised {said(error)}", error)
    gradient_A = torch.zeros_like(log_probs_A) if log_probs_A.grad is None else log_probs_A.grad
    if not torch.isfinite(kept_A).all():
        _refuse(name, f"returned a loss that is not finite: {kept_A.tolist()}")
    if not torch.isfinite(gradient_A).all():
        _refuse(name, "has a gradient that is not finite")
    for key, value in sums.items():
        if value.numel() != 1:
            _refuse(name, f"reports {key} of shape {list(value.shape)}; sums are scalars")
    return kept_A.detach(), gradient_A


def _refuse(name: str, what: str, cause: BaseException | None = None) -> None:
    raise InputError(f"{KEY}: {name} {what}") from cause
