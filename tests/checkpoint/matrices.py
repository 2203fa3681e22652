"""One save, loaded in many layouts: what must be equal, and by how much rounding may differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.checkpoint.layouts import Layout, load_and_go_on, same_bits, train_and_save
from tests.models.support import relative

MOST_LOG_PROB, MOST_GRADIENT = 3e-5, 1e-5


def compare(saved: dict, loaded: dict, *, exact_steps: bool, bf16: bool = False) -> str:
    """One line of numbers; fails where something did not come back."""
    assert same_bits(saved["weights"], loaded["weights"])
    assert saved["state"].keys() == loaded["state"].keys()
    assert ("fp32_param" in saved["state"]) == bf16
    for key, tensors in saved["state"].items():
        assert any(bool(tensor.any()) for tensor in tensors.values()), key
        assert same_bits(tensors, loaded["state"][key]), key
    for told in (saved, loaded):
        for key, tensors in told.get("plain", {}).items():
            assert same_bits(tensors, saved["state"][key]), key
    assert saved["digests"] == loaded["digests"]
    assert len(saved["digests"]) == sum(len(tensors) for tensors in saved["state"].values())
    assert saved["adam_step"] == loaded["adam_step"] == saved["steps"] == loaded["steps"]
    assert saved["lr"] == loaded["lr"]
    apart = float((saved["log_probs"] - loaded["log_probs"]).abs().max())
    gradient = relative(loaded["gradient"], saved["gradient"])
    if not bf16:  # whose forward rounds otherwise in another layout
        assert apart <= MOST_LOG_PROB
        assert gradient <= MOST_GRADIENT
    if exact_steps:
        assert apart == 0.0 and gradient == 0.0 and saved["norm"] == loaded["norm"]
        for step in ("after 1", "after 2"):
            assert same_bits(saved[step], loaded[step]), step
    moved = relative(saved["after 2"], saved["weights"])
    assert moved > 1e-4, "the steps moved nothing, so that equal weights would prove nothing"
    step = relative(loaded["after 1"], saved["after 1"])
    return f"log-probs {apart:.1e}  gradient {gradient:.1e}  weights a step on {step:.1e}"


def matrix(
    ranks: Any, tmp_path: Path, source: Path, saver: Layout, loaders: list[Layout]
) -> list[set[str]]:
    """Save once, load in every layout; prints a table. Returns, for each of `loaders`, the
    parameters whose state lies on several ranks."""
    cut: dict[str, set[str]] = {}
    folder = tmp_path / "saved"
    saved = ranks.run(saver.world, train_and_save, source, folder, saver)[0]
    bf16 = saver.dtype == "bfloat16"
    for world in sorted({loader.world for loader in loaders}):
        group = [loader for loader in loaders if loader.world == world]
        found = ranks.run(world, load_and_go_on, source, folder, group, timeout=300)[0]
        for loader, loaded in zip(group, found, strict=True):
            line = compare(saved, loaded, exact_steps=loader == saver, bf16=bf16)
            # The distributed optimizer cuts in the middle, for experts often between two.
            assert bool(loaded["cut"]) or not loader.sharded or loader.mesh.dp == 1, str(loader)
            assert not loaded["cut"] or loader.sharded
            cut[str(loader)] = loaded["cut"]
            print(f"{saver!s:22} → {loader!s:22} {saver.dtype:9} {line}")
    return [cut[str(loader)] for loader in loaders]
