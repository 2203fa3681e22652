"""A small recipe file, and ways to change it and to look at a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from megarl.recipe import RecipeError, load_recipe

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"

MINIMAL = """\
seed: 7
run:
  iterations: 4
model:
  path: models/tiny-s{seed}
data:
  train: train.jsonl
  max_prompt_tokens: 16
world:
  ranks: 2
actor:
  tp: 2
  lr: 2e-4
  tokens_per_micro_batch: 64
rollout:
  prompts_per_iteration: 4
  group_size: 4
  max_response_tokens: 16
  max_total_tokens: 256
  max_running_requests: 8
  chunked_prefill_tokens: 64
reward:
  scorers:
    - {name: exact_match, strip: true}
algorithm:
  minibatches: 2
"""


def line_of(path: Path, start: str) -> str:
    """`file:line` of the first line of `path` that starts so, spaces aside."""
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.strip().startswith(start):
            return f"{path}:{number}"
    raise AssertionError(f"no line of {path} starts with {start}")


def refusal(path: Path, overrides: list[str] | None = None) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides or [])
    message = str(caught.value)
    assert "\n" not in message
    return message


def with_setting(path: Path, key: str, value: str) -> str:
    """Sets a dotted key in the file; returns the `file:line` where it stands."""
    yaml = YAML()
    tree = yaml.load(path.read_text())
    node: Any = tree
    *sections, leaf = key.split(".")
    for section in sections:
        node = node.setdefault(section, {})
    node[leaf] = YAML(typ="safe").load(value)
    with open(path, "w") as out:
        yaml.dump(tree, out)
    node = YAML().load(path.read_text())
    for section in sections:
        node = node[section]
    return f"{path}:{node.lc.key(leaf)[0] + 1}"
