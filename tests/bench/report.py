"""A run's results as text for people, and saved as text, JSON and a picture."""

from __future__ import annotations

from pathlib import Path

from bench import picture
from bench.results import Results
from bench.targets import FSD, verdicts

LABEL = 42


def text(results: Results) -> str:
    """Tables: side by side, fsd alone, targets, failures."""
    return (
        "\n".join([*_head(results), "", *_beside(results), "", *_alone(results), "", *_targets(results)])
        + "\n"
    )


def save(results: Results, directory: Path) -> list[Path]:
    """Named after the commit; returns the paths."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = directory / results.commit.rstrip("+")
    made = {".json": results.json(), ".txt": text(results), ".svg": picture.draw(results)}
    paths = []
    for suffix, content in made.items():
        path = stem.with_suffix(suffix)
        path.write_text(content)
        paths.append(path)
    return paths


def _head(results: Results) -> list[str]:
    machine = results.machine
    cold = "dropped" if machine["caches_dropped"] else "NOT dropped (needs root)"
    noise = ", ".join(
        f"{figure} {results.median('host', figure):.4g} ±{results.spread('host', figure):.0%}"
        for figure in results.values.get("host", {})
    )
    return [
        f"fsd {results.commit}, {machine['when']}, rounds: {results.rounds}; medians, ± is half the range.",
        f"{machine['cores']} cores, Linux {machine['kernel']}, Python {machine['python']}; "
        f"caches {cold} before cold figures.",
        f"The machine meanwhile: {noise or 'not looked at'}. Read ratios, not times.",
    ]


def _beside(results: Results) -> list[str]:
    names = list(results.peers())
    others = [name for name in names if name != FSD]
    shared = [
        figure
        for figure in results.figures()
        if any(figure in results.values[name] for name in others) or figure.endswith("CPU")
    ]
    lines = ["".join([f"{'':{LABEL}}", *(f"{name:>23}" for name in names)])]
    for figure in shared:
        own = results.median(FSD, figure)
        cells = []
        for name in names:
            value = results.median(name, figure)
            if value is None:
                cells.append(f"{'-':>23}")
                continue
            ratio = f" {own / value:5.2f}x" if own is not None and name != FSD and value else " " * 7
            cells.append(f"{value:9.4g} ±{results.spread(name, figure):4.0%}{ratio}".rjust(23))
        lines.append((f"{figure:{LABEL}}" + "".join(cells)).rstrip())
    lines.append("x: fsd's value as a multiple of that peer's.")
    return lines


def _alone(results: Results) -> list[str]:
    others = {figure for name, figures in results.peers().items() if name != FSD for figure in figures}
    own = [
        figure
        for figure in results.values.get(FSD, {})
        if figure not in others and not figure.endswith("CPU")
    ]
    return [
        f"{figure:{LABEL + 12}}{results.median(FSD, figure):10.4g}  ±{results.spread(FSD, figure):.0%}"
        for figure in own
    ]


def _targets(results: Results) -> list[str]:
    lines = ["targets"]
    for one in verdicts(results):
        value = "-" if one.value is None else f"{one.value:.4g}"
        bound = "-" if one.bound is None else f"{one.bound:.4g}"
        lines.append(f"  {one.word:13}{one.target.figure:52}{value:>9}  {one.target.told()} ({bound})")
    for peer, what, why in results.failures:
        lines.append(f"  FAILED       {peer}: {what}: {why}")
    return lines
