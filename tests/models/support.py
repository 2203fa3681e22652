"""Random HF models, samples and recipe sections for the tests of `megarl/models`."""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.contracts.mesh import Mesh
from megarl.contracts.samples import EndReason, Sample, Samples
from megarl.data.pack import MicroBatch, Pack, ValueBatch
from megarl.data.packing import build_pack, pad_pack, plan_packs
from megarl.reshard.families.spec import ModelSpec
from megarl.world import World
from tests.models.shapes import EXPERTS, NAMES

VOCAB = 307  # no multiple of 128, so that padding rows matter


def write_hf_model(
    folder: Path,
    family: str = "qwen2",
    *,
    tied: bool = False,
    task: str = "CausalLM",
    **numbers: Any,
):
    """A random HF model with nothing at its default, saved to `folder`; every weight is random,
    biases and norms too, and large enough for log-probs far from uniform.
    """
    import transformers

    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,  # not hidden / heads
        "rms_norm_eps": 3e-4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 77_000.0},
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
    }
    shape |= EXPERTS.get(family, {}) | numbers
    if task != "CausalLM":
        shape |= {"num_labels": 1, "pad_token_id": 0}
    config_class = getattr(transformers, f"{NAMES[family]}Config")
    model_class = getattr(transformers, f"{NAMES[family]}For{task}")
    torch.manual_seed(11)
    model = model_class(config_class(**shape)).float()
    with torch.no_grad():
        for name, param in model.state_dict().items():
            if "norm" in name:
                param.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                param.normal_(std=0.3)
            else:
                param.normal_(std=0.15)
    model.save_pretrained(folder)
    return model.eval()


def as_stored(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors named and shaped as in `model`'s state, under the names of its checkpoint's files
    (experts one by one), as float64 matrices. By transformers' own conversion.
    """
    from safetensors.torch import load_file

    holder = copy.deepcopy(model)
    with torch.no_grad():
        for name, tensor in holder.state_dict().items():
            tensor.copy_(tensors[name])
    with tempfile.TemporaryDirectory() as folder:
        holder.save_pretrained(folder)
        stored = load_file(Path(folder) / "model.safetensors")
    return {name: tensor.double().view(len(tensor), -1) for name, tensor in stored.items()}


def make_samples(
    seed: int,
    rows: int,
    prompt: tuple[int, int] = (2, 9),
    response: tuple[int, int] = (1, 12),
    below: int = VOCAB,
) -> Samples:
    """Random samples with lengths in the given half-open ranges, of ids `below` one."""
    draw = np.random.default_rng(seed)
    made = []
    for row in range(rows):
        length = int(draw.integers(*response))
        made.append(
            Sample(
                draw_index=row,
                candidate=0,
                prompt_ids=draw.integers(0, below, draw.integers(*prompt)),
                response_ids=draw.integers(0, below, length),
                action_mask=np.ones(length, bool),
                rollout_log_probs=-draw.random(length).astype(np.float32),
                end=0,
                end_reason=EndReason.EOS,
                seed=row,
                started=0.0,
                finished=1.0,
            )
        )
    return Samples.from_rows(made, "test")


def local_packs(
    samples: Samples, mesh: Mesh, rank: int, budget: int, padding: int | None = None
) -> list[Pack]:
    """`padding`: all packs are made so many tokens longer than the longest; a pipeline needs it."""
    lengths = samples.prompt_lengths + samples.response_lengths
    plan = plan_packs(lengths, mesh.dp, budget)
    packs = [build_pack(samples, rows) for rows in plan[mesh.dp_index(rank)]]
    if padding is None:
        return packs
    longest = max(len(pack.token_ids_T) for pack in packs)
    return [pad_pack(pack, longest + padding) for pack in packs]


def micro_batch(pack: Pack, samples: Samples, scale: float = 1.0) -> MicroBatch:
    """Advantages vary with the token; Σ weights over all samples is `scale`."""
    place = torch.from_numpy(np.asarray(pack.response_A)).float()
    return MicroBatch(
        pack=pack,
        old_log_probs_A=torch.zeros(len(place)),
        ref_log_probs_A=None,
        rollout_log_probs_A=torch.zeros(len(place)),
        advantages_A=torch.sin(place),
        weights_A=torch.full((len(place),), scale / len(samples.response_ids)),
    )


def value_batch(pack: Pack, samples: Samples) -> ValueBatch:
    """Returns vary with the token; Σ weights over all samples is 1."""
    place = torch.from_numpy(np.asarray(pack.response_A)).float()
    return ValueBatch(
        pack=pack,
        values_A=torch.zeros(len(place)),
        returns_A=torch.sin(place),
        weights_A=torch.full((len(place),), 1.0 / len(samples.response_ids)),
    )


def squares(values_A: torch.Tensor, batch: ValueBatch) -> tuple[torch.Tensor, dict]:
    """½ Σ w (V − R)²."""
    error = values_A - batch.returns_A
    loss = 0.5 * (batch.weights_A * error.square()).sum()
    return loss, {"value_loss": loss, "tokens": torch.tensor(float(len(values_A)))}


def policy_gradient(scores: Any, batch: MicroBatch) -> tuple[torch.Tensor, dict]:
    """−Σ w A log π − 0.01 Σ w H: uses both outputs, linear in them."""
    pg = -(batch.weights_A * batch.advantages_A * scores.log_probs_A).sum()
    bonus = (batch.weights_A * scores.entropy_A).sum()
    least = torch.full((1,), -torch.inf)
    largest = torch.cat([scores.log_probs_A, least]).max()
    return pg - 0.01 * bonus, {"pg": pg, "entropy": bonus, "log_prob_max": largest}


def make_world(tp: int, pp: int = 1, timeout: float = 60.0, **mesh: Any) -> World:
    return World(Mesh(dist.get_world_size(), tp=tp, pp=pp, **mesh), torch.device("cpu"), timeout)


def actor_section(**changes: Any) -> SimpleNamespace:
    values = {
        "lr": 1e-3,
        "lr_schedule": "constant",
        "lr_warmup_steps": 0,
        "min_lr": 0.0,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "clip_grad": 1.0,
        "distributed_optimizer": True,
        "logprob_chunk_tokens": 16,
        "recompute": "none",
        "sequence_parallel": False,
        "max_skipped_steps": 3,
        "router": "trained",
        "router_aux_loss": 0.0,
        "replay_routing": False,
    }
    return SimpleNamespace(**values | changes)


def make_actor(
    folder: Path,
    world: World,
    *,
    dtype: str = "float32",
    temperature: float = 0.8,
    spec: ModelSpec | None = None,
    **section: Any,
):
    """`spec`: the folder's own if not given."""
    from megarl.models.roles import Actor
    from megarl.reshard.families import read_spec

    return Actor(
        spec or read_spec(folder),
        folder,
        world,
        SimpleNamespace(dtype=dtype),
        actor_section(**section),
        temperature,
        total_steps=10,
    )


def make_critic(
    folder: Path, world: World, *, actor: ModelSpec | None = None, dtype: str = "float32", **section
):
    """Of `folder` as it is, or a causal LM with a fresh head; `actor`: the spec it has to suit."""
    from megarl.models.critic_spec import critic_spec
    from megarl.models.roles import Critic
    from megarl.reshard.families import read_spec

    spec, fresh = critic_spec(folder, actor or read_spec(folder))
    numbers = SimpleNamespace(dtype=dtype)
    return Critic(spec, folder, world, numbers, actor_section(**section), 0.8, 10, fresh_head=fresh)


def full_gradients(actor: Any) -> dict[str, torch.Tensor]:
    """HF-named gradients before clipping, whole, float64, gathered from all ranks; of what is not
    trained, zeros.

    Read from DDP's buffers inside a step; needs `distributed_optimizer` off (every data-parallel
    rank then holds the reduced gradients).
    """
    grads = {
        name: tensor.main_grad if tensor.requires_grad else torch.zeros_like(tensor)
        for name, tensor in actor.named_parameters().items()
    }
    return gather_logical(actor, grads)


def gather_logical(actor: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole HF-named tensors from tensors shaped like this rank's parameters, of which all copies
    must be the same: data-parallel ones, norms on TP ranks, experts, both ends of a tied pipeline.
    Collective.
    """
    from megarl.reshard.layout import megatron_placement

    world = actor.world
    placement = megatron_placement(actor.spec, world.mesh)
    everyone = world.gather({name: t.detach().clone() for name, t in tensors.items()})
    whole = {
        name: torch.full((tensor.rows, tensor.cols), float("nan"), dtype=torch.float64)
        for name, tensor in placement.tensors.items()
    }
    for rank, parts in enumerate(everyone):
        for piece in placement.pieces[rank]:
            part = parts[piece.param]
            matrix = part[:, None] if part.dim() == 1 else part
            rows = slice(piece.param_row, piece.param_row + piece.rows)
            block = matrix[rows, piece.param_col : piece.param_col + piece.cols]
            target = whole[piece.tensor][piece.row : piece.row + piece.rows]
            target = target[:, piece.col : piece.col + piece.cols]
            held = ~target.isnan()
            assert torch.equal(target[held], block.double()[held]), (piece, "copies differ")
            target.copy_(block)
    return whole


def hf_scores(
    model: Any, samples: Samples, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs, entropies) [R] of the response tokens, one HF forward per sample."""
    log_probs, entropies = [], []
    for sample in samples:
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids])).long()
        logits = model(ids[None]).logits[0].float() / temperature
        log_p = logits[len(sample.prompt_ids) - 1 : -1].log_softmax(-1)
        target = torch.from_numpy(np.array(sample.response_ids)).long()
        log_probs.append(log_p.gather(1, target[:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies)


def relative(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Relative L2 distance over all tensors together; the distance itself to nothing but zeros."""
    names = sorted(wanted)
    difference = torch.cat([(found[n] - wanted[n]).flatten() for n in names]).norm()
    size = torch.cat([wanted[n].flatten() for n in names]).norm()
    return float(difference / size if size > 0 else difference)


def torch_step(
    model: Any, section: SimpleNamespace, more: Callable[[Any, Samples], torch.Tensor] | None = None
) -> dict[str, Any]:
    """`policy_gradient` on `make_samples(5, 12)` by HF's model and torch's AdamW, one step: loss,
    norm, gradients and weights (HF names, matrices), loss and log-probs [R] before and after.
    The model is left as it is after the step. `more` is added to the loss that is stepped on.
    """
    samples = make_samples(5, 12)
    place = torch.arange(len(samples.response_ids)).float()

    def loss() -> tuple[torch.Tensor, torch.Tensor]:
        log_probs, entropy = hf_scores(model, samples, 0.8)
        return -(torch.sin(place) * log_probs).mean() - 0.01 * entropy.mean(), log_probs

    first, log_probs = loss()
    if more is not None:
        first = first + more(model, samples)
    first.backward()
    params = dict(model.named_parameters())
    state = model.state_dict(keep_vars=True)
    gradients = {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in state.items()}
    gradients = as_stored(model, gradients)
    norm = torch.nn.utils.clip_grad_norm_(params.values(), section.clip_grad)
    groups = [
        {
            "params": [p for p in params.values() if p.dim() > 1],
            "weight_decay": section.weight_decay,
        },
        {"params": [p for p in params.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps).step()
    weights = as_stored(model, state)
    with torch.no_grad():
        after = float(loss()[0])
    return {
        "loss": float(first),
        "log_probs": log_probs.detach(),
        "gradients": gradients,
        "norm": float(norm),
        "weights": weights,
        "loss_after": after,
    }


def replaced(batch: MicroBatch, **changes: Any) -> MicroBatch:
    return dataclasses.replace(batch, **changes)
