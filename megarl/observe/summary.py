"""A short summary of a run for a person: `python -m megarl.observe.summary RUN_FOLDER`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from megarl.observe import metrics
from megarl.observe.metrics import TENSORBOARD_FOLDER
from megarl.observe.output import close_output, prepare_output
from megarl.observe.plots import text_plot
from megarl.observe.positions import checkpoints_told, resumed_told
from megarl.observe.runfolder import (
    REPLAY_FILE,
    NotARun,
    RunFiles,
    accuracy_before_after,
    read_run,
)

MOST_SOURCES = 12
FILES = (
    ("metrics.jsonl", "one JSON object per iteration"),
    ("report.html", "plots, for a browser"),
    ("timeline.json", "where the time went: open it at https://ui.perfetto.dev"),
    ("eval", "what the model answered to the held-out prompts"),
    ("experience", "every sample it learnt from, sealed: tools/audit.py"),
    ("checkpoints", "positions that the run can go on from"),
    ("resumes", "what resumes set aside: the run as it was before each of them"),
    ("exports", "Hugging Face folders of iterations on the way"),
    ("hf", "the trained model: a Hugging Face folder that transformers loads"),
    (REPLAY_FILE, "what the replay compared: losses, gradient norms, weights"),
    ("recipe.yaml", "every setting of this run"),
    ("logs", "what the libraries said, by rank"),
)


def summary(run: RunFiles) -> str:
    """The summary's text. An incomplete run is called so in its first lines, a replay too."""
    if run.replay:
        return "\n\n".join("\n".join(part) for part in (_head(run), _files(run)))
    parts = [_head(run), _results(run), _by_source(run), _times(run), _plot(run)]
    parts += [_files(run), _next(run)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _head(run: RunFiles) -> list[str]:
    layout = [f"{run.setting('world', 'ranks')} ranks" if run.setting("world", "ranks") else ""]
    for role in ("actor", "rollout"):
        tp = run.setting(role, "tp")
        layout.append(f"{role} tp={tp}" if tp else "")
    told = ", ".join(part for part in layout if part)
    lines = [f"{run.name}" + (f": {told}" if told else "")]
    replayed, reason = run.replayed(), run.unfinished()
    if replayed:
        lines.append(f"{replayed}; step by step in {run.folder / REPLAY_FILE}")
        what_if = run.replay.get("what_if")
        if isinstance(what_if, list) and what_if:
            lines.append(f"asked for another update: {', '.join(map(str, what_if))}")
    lines += [line for line in (resumed_told(run.folder),) if line]
    return [*lines, f"INCOMPLETE: {reason}"] if reason else lines


def _results(run: RunFiles) -> list[str]:
    lines = [f"  {'':<30}{'before':>9}{'after':>9}"]
    for label, key in (
        ("held-out accuracy, greedy", metrics.ACCURACY),
        ("held-out accuracy, sampled", metrics.ACCURACY_SAMPLED),
    ):
        before, after = accuracy_before_after(run.rows, key)
        lines.append(f"  {label:<30}{_number(before)}{_number(after)}{_interval(run, key)}")
    rewards = [value for _, value in run.points(metrics.REWARD)]
    first, last = (rewards[0], rewards[-1]) if rewards else (None, None)
    lines.append(f"  {'reward, first and last':<30}{_number(first)}{_number(last)}")
    penalised = sum(value for _, value in run.points(metrics.PENALISED))
    if penalised:
        lines.append(f"  {penalised:.0f} responses could not be scored and got the penalty")
    gaps = [value for _, value in run.points(metrics.PARITY)]
    if gaps:
        limit = run.setting("parity", "max")
        allowed = f" (allowed {limit:.0e})" if isinstance(limit, int | float) else ""
        lines.append(
            f"  trainer and generator differ by at most {max(gaps):.1e} in any token's log-prob"
            + allowed
        )
    return lines


def _interval(run: RunFiles, key: str) -> str:
    """Of the last evaluation, where it has one."""
    bounds = [accuracy_before_after(run.rows, f"{key}/{side}")[1] for side in ("low", "high")]
    if None in bounds:
        return ""
    level = run.setting("eval", "confidence")
    percent = f"{100 * level:g} %: " if isinstance(level, int | float) else ""
    return "  ({}{:.3f} to {:.3f})".format(percent, *bounds)


def _by_source(run: RunFiles) -> list[str]:
    """Of iterations that drew from several: each source's first reward, and where it came to."""
    sources = run.sources()
    if not sources:
        return []
    heads = ("first", "last", "equal", "tokens")
    lines = [f"  {'by source':<30}" + "".join(f"{head:>9}" for head in heads)]
    for name in sources[:MOST_SOURCES]:
        rewards, equal, tokens = (
            [value for _, value in run.points(prefix + name)]
            for prefix in (metrics.REWARD_OF, metrics.EQUAL_OF, metrics.LENGTH_OF)
        )
        told = (rewards[:1], rewards[-1:], equal[-1:], tokens[-1:])
        shown = "".join(letter if letter.isprintable() else "?" for letter in name)
        shown = shown if len(shown) <= 28 else shown[:27] + "…"
        lines.append(f"  {shown:<30}" + "".join(_number(*(each or [None])) for each in told))
    if len(sources) > MOST_SOURCES:
        lines.append(f"  and {len(sources) - MOST_SOURCES} more, see metrics.jsonl")
    return [*lines, "  (first, last: reward; equal: groups of equal rewards; tokens: a response's)"]


def _number(value: float | None) -> str:
    return f"{'-':>9}" if value is None else f"{value:>9.3f}"


def _times(run: RunFiles) -> list[str]:
    seconds = [value for _, value in run.points(metrics.SECONDS)]
    whole = sum(seconds)
    if not whole:
        return [f"  {len(run.rows)} iterations"]
    shares = [
        f"{name} {part / whole:.0%}"
        for name, part in run.stage_seconds().items()
        if part / whole >= 0.01
    ]
    lines = [f"  {len(seconds)} iterations in {whole:.1f} s, {whole / len(seconds):.2f} s each:"]
    for start in range(0, len(shares), 5):
        lines.append("    " + ", ".join(shares[start : start + 5]))
    return lines


def _plot(run: RunFiles) -> list[str]:
    rewards, accuracy = run.points(metrics.REWARD), run.evaluations(metrics.ACCURACY)
    if len(rewards) < 2:
        return []
    lines = text_plot({"·": rewards, "●": accuracy})
    return [f"  · reward{'   ● held-out accuracy, greedy' if accuracy else ''}", *lines]


def _files(run: RunFiles) -> list[str]:
    lines = [f"  Files in {run.folder}:"]
    lines += [f"    {name:<15}{what}" for name, what in FILES if (run.folder / name).exists()]
    told = checkpoints_told(run.folder)
    lines += [f"  {told[0].upper()}{told[1:]}"] if told else []
    if (run.folder / TENSORBOARD_FOLDER).exists():
        tool = _shown(Path(sys.executable).with_name("tensorboard"))
        lines.append(f"  Curves: {tool} --logdir {shlex.quote(str(run.folder.parent))}")
    return lines


def _next(run: RunFiles) -> list[str]:
    recipe = _recipe_path(run)
    if recipe is None or run.unfinished():
        return []
    stem = Path(recipe).stem
    script = "ppo.sh" if run.setting("algorithm", "name") == "ppo" else "grpo.sh"
    command = f"bash launch/{script} {shlex.quote(recipe)}"
    lines = ["  What to try next:"]
    ranks, tp = run.setting("world", "ranks"), run.setting("rollout", "tp")
    if ranks == 2 and tp == 1:
        lines.append(f"    {command} rollout.tp=2 run.name={stem}-tp2")
        lines.append("      one generator over both ranks: the same answers, token by token")
    if (run.folder / "experience").exists():
        folder = shlex.quote(str(run.folder))
        lines.append(f"    {_shown(Path(sys.executable))} tools/show_rollouts.py {folder}")
        lines.append("      what the model answered; tools/audit.py traces and verifies it")
    seed = run.setting("seed")
    if stem == "quickstart" and isinstance(seed, int):
        lines.append(f"    make demo SEED={seed + 1}")
        lines.append("      another model, other prompts and draws, the same lesson")
    lines.append(f"    edit {recipe}: every key is explained in docs/recipe.md")
    return lines


def _recipe_path(run: RunFiles) -> str | None:
    """The recipe that the run was started with: the first argument that is no `key=value`."""
    arguments = run.environment.get("argv")
    if not isinstance(arguments, list):
        return None
    paths = [text for text in arguments[1:] if str(text).endswith((".yaml", ".yml"))]
    return str(paths[0]) if paths else None


def _shown(path: Path) -> str:
    """`path` as a person would type it here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the summary of a run; 2 and one line on standard error for a folder that is none."""
    parser = argparse.ArgumentParser(prog="python -m megarl.observe.summary", description=__doc__)
    parser.add_argument("run_folder", type=Path, help="a run's folder, like runs/quickstart-s1")
    options = parser.parse_args(arguments)
    prepare_output()
    try:
        print(summary(read_run(options.run_folder)))
        sys.stdout.flush()
    except NotARun as error:
        print(f"megarl: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        close_output()
    return 0


if __name__ == "__main__":
    sys.exit(main())
