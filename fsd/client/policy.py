"""Which files of a local directory a capture takes and a restore may touch.

Patterns are text. `*` and `?` stand for anything but a slash, `**` for any number of directories. Without a
slash a pattern is a name at any depth, with one it is a path from the top (`/a` is `a` at the top); one that
ends in a slash means directories only. Rules:

- exclude wins over include; what is excluded takes everything below it along
- `include` never keeps a walk from a directory: a match is found below ones that do not match
- giving `include` alone keeps the default excludes; giving `exclude` replaces them
- the marker of a workspace is protected whatever the policy says

The policy travels in the checkpoint, because a restore has to use the one of the capture.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Final

from fsd.model.errors import UsageError
from fsd.model.limits import PATTERN_BYTES_MAX, PATTERNS_MAX
from fsd.model.plain import dataclass, field

DEFAULT_EXCLUDE: Final = (
    ".git",
    "node_modules",
    ".env*",
    "/CLAUDE.md",
    "/GEMINI.md",
    "/.claude/skills/*",
    "/.codex/skills/*",
    "/.grok/skills/*",
)
MARKER: Final = ".tanstack-projected-"
FIELD: Final = "policy"  # of a checkpoint's record
_TOKENS: Final = re.compile(r"(?:^|(?<=/))\*\*/|\*\*|\*|\?|[^*?]+")
_ANY: Final = {"**/": "(?:[^/]+/)*", "**": ".*"}  # what may be passed over, slashes too


def _regex(pattern: str) -> str:
    """A regular expression for a whole path; directories are matched with a slash at their end."""
    if len(pattern.encode("utf-8", "surrogatepass")) > PATTERN_BYTES_MAX or "\0" in pattern:
        raise UsageError(f"a pattern has at most {PATTERN_BYTES_MAX} bytes and no NUL")
    body, only_dirs = pattern.rstrip("/"), pattern.endswith("/")
    anchored = "/" in body
    body = body.lstrip("/")
    if not body:
        raise UsageError(f"the pattern {pattern!r} is empty")
    below = body.endswith("/**")  # everything in a directory, not the directory
    end = "/.+" if below else ("/" if only_dirs else "/?")
    return ("" if anchored else "(?:.*/)?") + _wildcards(_TOKENS.findall(body.removesuffix("/**"))) + end


def _wildcards(tokens: list[str]) -> str:
    """The body of a pattern. Patterns come with checkpoints that somebody else made, so no text may make the
    search for a match explode: of two wildcards, the earlier takes as little as it can and never gives way
    again (an atomic group), since the later one can pass over all that this leaves. Only the last of each
    kind is tried at every place."""
    parts: list[list[str]] = [[""]]  # between wildcards for slashes: runs between single stars
    stars: list[str] = []
    for token in tokens:
        if token in _ANY:
            stars.append(_ANY[token])
            parts.append([""])
        elif token == "*":
            parts[-1].append("")
        else:
            parts[-1][-1] += "[^/]" if token == "?" else re.escape(token)
    found = _runs(parts[0])
    for at, star in enumerate(stars, 1):
        last = at == len(stars)
        found += f"{star}{_runs(parts[at])}" if last else f"(?>{star}?{_runs(parts[at])})"
    return found


def _runs(runs: list[str]) -> str:
    """Runs of plain text with a star between each two."""
    made = runs[0]
    for at, run in enumerate(runs[1:], 1):
        made += f"[^/]*?{run}" if at == len(runs) - 1 else f"(?>[^/]*?{run})"
    return made


def _compiled(patterns: Iterable[str]) -> re.Pattern[str] | None:
    found = [_regex(pattern) for pattern in patterns]
    if len(found) > PATTERNS_MAX:
        raise UsageError(f"{len(found)} patterns, at most {PATTERNS_MAX}")
    return re.compile("|".join(f"(?:{one})" for one in found), re.DOTALL) if found else None


@dataclass(frozen=True)
class Policy:
    """See the module. `include` empty: everything. `skip_links`: links that a manifest cannot hold are left
    out instead of failing the capture."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = DEFAULT_EXCLUDE
    workspace_hash: str = ""
    skip_links: bool = False
    _seen: dict[str, bool] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def _included(self) -> re.Pattern[str] | None:
        return _compiled(self.include)

    @cached_property
    def _excluded(self) -> re.Pattern[str] | None:
        return _compiled(self.exclude)

    def check(self) -> None:
        """Raises `UsageError` for patterns that are none."""
        _ = self._included, self._excluded
        if self.workspace_hash and not re.fullmatch("[A-Za-z0-9_-]{1,128}", self.workspace_hash):
            raise UsageError("a workspace hash has 1 to 128 letters, digits, - and _")

    def excluded(self, path: str, *, is_dir: bool) -> bool:
        """Whether the entry itself is left out. Its parents are the caller's business."""
        if self.workspace_hash and path == MARKER + self.workspace_hash:
            return True
        regex = self._excluded
        return regex is not None and regex.fullmatch(path + "/" if is_dir else path) is not None

    def included(self, path: str, *, is_dir: bool) -> bool:
        regex = self._included
        return regex is None or regex.fullmatch(path + "/" if is_dir else path) is not None

    def covers(self, path: str, *, is_dir: bool) -> bool:
        """Whether an entry of a manifest belongs to the policy: neither it nor anything above is excluded,
        and it is included."""
        above = path.rpartition("/")[0]
        if above and self._left_out(above):
            return False
        return not self.excluded(path, is_dir=is_dir) and self.included(path, is_dir=is_dir)

    def _left_out(self, directory: str) -> bool:
        """Whether a directory or one above it is excluded. Each is looked at once."""
        chain = []
        at = directory
        while at and at not in self._seen:
            chain.append(at)
            at = at.rpartition("/")[0]
        out = self._seen[at] if at else False
        for one in reversed(chain):
            out = self._seen[one] = out or self.excluded(one, is_dir=True)
        return out

    def to_json(self) -> dict[str, Any]:
        """For the record of a checkpoint."""
        found: dict[str, Any] = {"include": list(self.include), "exclude": list(self.exclude)}
        if self.workspace_hash:
            found["workspaceHash"] = self.workspace_hash
        return found


def of_record(record: Mapping[str, Any]) -> Policy:
    """What a restore of a checkpoint goes by: the policy it was captured with. A state of a filesystem holds
    everything, and was captured without one."""
    return Policy(exclude=()) if record.get("native") else from_json(record.get(FIELD))


def from_json(raw: object) -> Policy:
    """The policy in a record; the default one where there is none. Raises `UsageError` for what is none."""
    if raw is None:
        return Policy()
    if not isinstance(raw, Mapping):
        raise UsageError("the checkpoint's policy cannot be read", hint="give --include and --exclude")
    lists = [raw.get("include", []), raw.get("exclude", list(DEFAULT_EXCLUDE))]
    if not all(isinstance(one, list) and all(isinstance(p, str) for p in one) for one in lists):
        raise UsageError("the checkpoint's policy cannot be read", hint="give --include and --exclude")
    made = Policy(tuple(lists[0]), tuple(lists[1]), str(raw.get("workspaceHash", "")))
    made.check()
    return made
