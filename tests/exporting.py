"""A small model and a run that exports it, for the tests of exports."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megarl.contracts.mesh import Mesh
from megarl.exports import Exports
from megarl.recipe import Recipe, load_recipe
from megarl.reshard.families import ModelSpec, read_spec
from megarl.reshard.layout import hf_placement, megatron_placement
from megarl.world import World
from tests.reshard.models import make_shards, make_whole, same_bits

QUICKSTART = Path(__file__).resolve().parent.parent / "recipes" / "quickstart.yaml"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def write_model(folder: Path) -> Path:
    """Config and tokenizer of a model, all that an export copies."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text('{"a": 1}')
    return folder


class Run:
    """What `Exports` needs of a run on this rank, with weights that follow from a seed."""

    def __init__(self, model: str, *settings: str) -> None:
        path = Path(model)
        self.folder = path.parent / "run"
        self.recipe: Recipe = load_recipe(QUICKSTART, [f"model.path={path}", *settings])
        self.spec: ModelSpec = read_spec(path)
        size = dist.get_world_size()
        self.world = World(Mesh(size, tp=size), torch.device("cpu"), timeout=30)
        self.placement = megatron_placement(self.spec, self.world.mesh)
        self.exports = self.again()

    def again(self) -> Exports:
        return Exports(self.folder, self.recipe, self.spec, self.world)

    def weights(self, seed: int) -> dict[str, torch.Tensor]:
        whole = make_whole(hf_placement(self.spec, self.world.mesh), seed)
        return make_shards(self.placement, self.world.rank, whole)

    def write(self, finished: int, accuracy: float | None = None) -> bool:
        """What a run does at a position; the weights' seed is the position's."""
        due = self.exports.due(finished, accuracy)
        if due:
            self.exports.write(finished, self.weights(finished), accuracy)
        return due

    def seen(self) -> tuple[list[str], str | None]:
        """The names in `exports/`, and where `best` points to. Collective: no rank goes on before
        rank 0 has looked."""

        def look() -> tuple[list[str], str | None]:
            folder = self.folder / "exports"
            names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
            return names, os.readlink(folder / "best") if "best" in names else None

        return self.world.gather(look() if self.world.is_main else None)[0]

    def holds(self, folder: Path, seed: int) -> bool:
        """Whether an export is whole and of the weights of `seed`. Collective."""
        whole = make_whole(hf_placement(self.spec, self.world.mesh), seed)

        def look() -> bool:
            names = sorted(path.name for path in folder.iterdir())
            return names == ["config.json", "model.safetensors", "tokenizer.json"] and same_bits(
                load_file(folder / "model.safetensors"), whole
            )

        return self.world.gather(look() if self.world.is_main else None)[0]

    def on_main(self, *acts: Callable[[], Any]) -> None:
        """Rank 0 does it while the others wait."""
        self.world.barrier("before")
        if self.world.is_main:
            for act in acts:
                act()
        self.world.barrier("after")


BEST = "checkpoint.export_best=true"
