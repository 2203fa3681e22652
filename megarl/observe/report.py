"""`report.html`: the curves of a run on one page that needs nothing else.

`python -m megarl.observe.report RUN_FOLDER` writes it again from metrics.jsonl.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from megarl.observe import metrics
from megarl.observe.positions import resumed_told
from megarl.observe.runfolder import NotARun, RunFiles, accuracy_before_after, is_stage, read_run

REPORT_FILE = "report.html"
MOST_SOURCES = 8
"""As many as there are colours."""
WIDTH, HEIGHT, MARGIN = 640, 200, 48
COLORS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#4b5563")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 720px; margin: 2em auto; color: #1f2937 }
h1 { font-size: 1.4em } h2 { font-size: 1.05em; margin: 1.6em 0 .2em }
svg { width: 100%; height: auto } text { font: 11px system-ui, sans-serif; fill: #6b7280 }
td { padding: .1em 1.2em .1em 0 } .bad { color: #dc2626 } .key { margin-right: 1.2em }
"""

Points = Sequence[tuple[float, float]]


def report_html(run: RunFiles) -> str:
    """The page. Everything that comes from the run's files is escaped; no other host is named."""
    stages = sorted({key for row in run.rows for key in row if is_stage(key)})
    seconds = {key.removeprefix(metrics.STAGE_PREFIX): run.points(key) for key in stages}
    accuracy = {
        "greedy": run.evaluations(metrics.ACCURACY),
        "sampled": run.evaluations(metrics.ACCURACY_SAMPLED),
    }
    clipped = {
        "below": run.points(metrics.CLIP_LOW),
        "above": run.points(metrics.CLIP_HIGH),
    }
    moved = {
        "steps taken": run.points(metrics.APPROX_KL),
        "step that target_kl stopped": run.points(metrics.APPROX_KL_STOPPED),
    }
    plots = (
        ("Reward, mean of an iteration", {"reward": run.points(metrics.REWARD)}),
        ("Reward by source", _by_source(run, metrics.REWARD_OF)),
        ("Share of groups with equal rewards, by source", _by_source(run, metrics.EQUAL_OF)),
        ("Tokens of a response, by source", _by_source(run, metrics.LENGTH_OF)),
        ("Held-out accuracy", accuracy),
        ("Largest log-prob gap, trainer to generator", {"gap": run.points(metrics.PARITY)}),
        ("Entropy of the policy, nats", {"entropy": run.points(metrics.ENTROPY)}),
        ("Approximate KL from before the updates, nats", moved),
        ("Share of tokens whose gradient the clip cut off", clipped),
        ("KL to the reference, nats per token", {"kl": run.points(metrics.REFERENCE_KL)}),
        ("Critic: value loss", {"loss": run.points(metrics.VALUE_LOSS)}),
        ("Critic: explained variance of the returns", {"share": run.points(metrics.EXPLAINED)}),
        ("Seconds of an iteration", {"all": run.points(metrics.SECONDS)} | seconds),
    )
    body = "".join(
        f"<h2>{escape(title)}</h2>\n{_plot(series)}"
        for title, series in plots
        if any(series.values())
    )
    reason = run.unfinished()
    incomplete = f'<p class="bad">Incomplete: {escape(reason)}</p>' if reason else ""
    incomplete += f"<p>{escape(run.replayed() or '')}</p>" if run.replay else ""
    resumed = resumed_told(run.folder)
    incomplete += f"<p>{escape(resumed)}</p>" if resumed else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(run.name)}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{escape(run.name)}</h1>{incomplete}\n{_facts(run)}\n{body}</body></html>\n"
    )


def _by_source(run: RunFiles, prefix: str) -> dict[str, Points]:
    return {name: run.points(prefix + name) for name in run.sources()[:MOST_SOURCES]}


def write_report(run_folder: Path) -> Path:
    """Write `report.html` into the run's folder and return its path."""
    path = run_folder / REPORT_FILE
    whole = path.with_name(path.name + ".tmp")
    whole.write_text(report_html(read_run(run_folder)), encoding="utf-8")
    whole.replace(path)
    return path


def _facts(run: RunFiles) -> str:
    facts = {"iterations": f"{len(run.rows)} of {run.iterations or '?'}"}
    for label, key in (
        ("accuracy, greedy", metrics.ACCURACY),
        ("accuracy, sampled", metrics.ACCURACY_SAMPLED),
    ):
        told = [
            _short(value) for value in accuracy_before_after(run.rows, key) if value is not None
        ]
        if told:
            facts[label] = " → ".join(told)
    for label in ("started", "cpu", "git"):
        value = run.environment.get(label)
        if isinstance(value, dict):
            value = f"{value.get('revision')}{' and changes' if value.get('dirty') else ''}"
        if value:
            facts[label] = str(value)
    rows = "".join(
        f"<tr><td>{escape(label)}</td><td>{escape(value)}</td></tr>"
        for label, value in facts.items()
    )
    return f"<table>{rows}</table>"


def _plot(series: Mapping[str, Points]) -> str:
    """One SVG with a line, and dots when they are few, for each series, and its legend."""
    points = [point for values in series.values() for point in values]
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(0.0, *(y for _, y in points)), max(y for _, y in points)
    high = high if high > low else low + 1.0
    across = (WIDTH - 2 * MARGIN) / ((right - left) or 1.0)
    up = (HEIGHT - 2 * 20) / (high - low)

    def place(x: float, y: float) -> tuple[str, str]:
        return f"{MARGIN + (x - left) * across:.1f}", f"{HEIGHT - 20 - (y - low) * up:.1f}"

    drawn = [_axes(left, right, low, high)]
    for color, values in zip(_cycle(len(series)), series.values(), strict=True):
        places = [place(x, y) for x, y in values]
        line = " ".join(f"{x},{y}" for x, y in places)
        drawn.append(f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{line}"/>')
        if len(places) <= 20:
            drawn += [f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>' for x, y in places]
    legend = "".join(
        f'<span class="key" style="color:{color}">{escape(name)}</span>'
        for color, name in zip(_cycle(len(series)), series, strict=True)
    )
    shape = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
    return f"<svg {shape}>{''.join(drawn)}</svg>\n<p>{legend if len(series) > 1 else ''}</p>\n"


def _axes(left: float, right: float, low: float, high: float) -> str:
    drawn = []
    for share in (0.0, 0.5, 1.0):
        y = HEIGHT - 20 - share * (HEIGHT - 40)
        value = _short(low + share * (high - low))
        drawn.append(
            f'<path d="M{MARGIN} {y:.0f}H{WIDTH - MARGIN}" stroke="#e5e7eb"/>'
            f'<text x="{MARGIN - 6}" y="{y + 4:.0f}" text-anchor="end">{value}</text>'
        )
    for x, value, anchor in ((MARGIN, left, "start"), (WIDTH - MARGIN, right, "end")):
        drawn.append(f'<text x="{x}" y="{HEIGHT - 4}" text-anchor="{anchor}">{value:g}</text>')
    return "".join(drawn)


def _cycle(count: int) -> list[str]:
    return [COLORS[index % len(COLORS)] for index in range(count)]


def _short(value: float) -> str:
    return f"{value:.3g}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and print its path; 2 and one line for a folder that is no run."""
    parser = argparse.ArgumentParser(prog="python -m megarl.observe.report", description=__doc__)
    parser.add_argument("run_folder", type=Path, help="a run's folder, like runs/quickstart-s1")
    options = parser.parse_args(arguments)
    try:
        print(write_report(options.run_folder))
    except NotARun as error:
        print(f"megarl: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
