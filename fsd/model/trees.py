"""Rules of a manifest's paths that capture, restore and the server's check must share."""

from __future__ import annotations

from collections.abc import Iterable


def parents(paths: Iterable[str]) -> set[str]:
    """Every directory that `paths` lie in; each is looked at once."""
    found: set[str] = set()
    for path in paths:
        above = path.rpartition("/")[0]
        while above and above not in found:
            found.add(above)
            above = above.rpartition("/")[0]
    return found


def stays_inside(path: str, target: str) -> bool:
    """Whether a symlink at `path` with `target` points into the tree, going by the text alone."""
    if not target or target.startswith("/") or "\0" in target:
        return False
    depth = path.count("/")
    for segment in target.split("/"):
        depth += -1 if segment == ".." else segment not in ("", ".")
        if depth < 0:
            return False
    return True
