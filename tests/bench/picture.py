"""The results as one SVG: for each figure a bar a peer, as multiples of fsd's value on a log scale."""

from __future__ import annotations

import math
from html import escape

from bench.results import Results
from bench.targets import FSD

COLOURS = {
    "ext4": "#9aa5b1",
    "passthrough_ll": "#52606d",
    "juicefs, SQLite": "#f0b429",
    "juicefs, Redis": "#de911d",
}
LEFT, WIDTH, BAR, GAP = 260, 560, 9, 12
DECADES = 2.0  # bars reach from 1/100 to 100 times fsd's value


def draw(results: Results) -> str:
    """Rates are turned round, so that to the right always means: slower or more than fsd."""
    peers = [name for name in results.peers() if name != FSD]
    figures = [
        f for f in results.figures() if results.median(FSD, f) and any(results.median(p, f) for p in peers)
    ]
    lines: list[str] = []
    y = 70
    for figure in figures:
        lines.append(_text(LEFT - 8, y + BAR * len(peers) / 2 + 4, figure, anchor="end"))
        for peer in peers:
            value, own = results.median(peer, figure), results.median(FSD, figure)
            if value and own:
                lines += _bar(y, peer, own / value if figure.endswith("/s") else value / own)
            y += BAR
        y += GAP
    middle = LEFT + WIDTH / 2
    grid = [
        f'<line x1="{middle + WIDTH / 2 * at / DECADES:.0f}" x2="{middle + WIDTH / 2 * at / DECADES:.0f}" '
        f'y1="60" y2="{y}" stroke="{"#102a43" if at == 0 else "#d9e2ec"}"/>'
        + _text(
            middle + WIDTH / 2 * at / DECADES, 55, "fsd" if at == 0 else f"{10.0**at:g}x", anchor="middle"
        )
        for at in (-2, -1, 0, 1, 2)
    ]
    title = (
        f"fsd {results.commit}: others as multiples of fsd; right of the line they are slower or take more"
    )
    key = [
        f'<rect x="{LEFT + 150 * at}" y="28" width="10" height="10" fill="{COLOURS.get(peer, "#829ab1")}"/>'
        + _text(LEFT + 150 * at + 15, 37, peer)
        for at, peer in enumerate(peers)
    ]
    body = "\n".join([_text(10, 18, title), *key, *grid, *lines])
    size = f'width="{LEFT + WIDTH + 60}" height="{y + 10}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _bar(y: float, peer: str, multiple: float) -> list[str]:
    at = max(-DECADES, min(DECADES, math.log10(multiple))) / DECADES * WIDTH / 2
    middle = LEFT + WIDTH / 2
    colour = COLOURS.get(peer, "#829ab1")
    return [
        f'<rect x="{middle + min(0.0, at):.1f}" y="{y:.0f}" width="{max(1.0, abs(at)):.1f}" '
        f'height="{BAR - 1}" fill="{colour}"/>',
        _text(
            middle + at + (4 if at >= 0 else -4),
            y + BAR - 1,
            f"{multiple:.2g}",
            "start" if at >= 0 else "end",
            8,
        ),
    ]


def _text(x: float, y: float, what: str, anchor: str = "start", size: int = 11) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(what)}</text>'
