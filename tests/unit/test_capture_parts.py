"""What a capture takes and what it makes of it: patterns, secrets, manifests. No disk."""

from __future__ import annotations

import random
import re
import time
from typing import Any

import pytest

from fsd.client import manifest
from fsd.client.manifest import DIR, FILE, LINK
from fsd.client.policy import DEFAULT_EXCLUDE, Policy, from_json
from fsd.client.redact import WINDOW, Secrets
from fsd.model.errors import CheckpointError, InvalidPath, UsageError
from fsd.service.contract_check import check_files

KEY = "sandbox-files/sha256/" + "a" * 64


@pytest.mark.parametrize(
    ("path", "covered"),
    [
        ("src/main.py", True),
        (".git/config", False),
        ("deep/.git/config", False),
        ("node_modules", False),
        ("a/node_modules/b/c.js", False),
        (".env", False),
        ("a/.env.local", False),
        (".environment/x", False),
        ("CLAUDE.md", False),
        ("docs/CLAUDE.md", True),
        ("GEMINI.md", False),
        (".claude/skills/pdf/SKILL.md", False),
        (".claude/skills", True),
        (".claude/settings.json", True),
        ("a/.codex/skills/x", True),
        (".grok/skills/x", False),
        ("agit", True),
        (".gitignore", True),
    ],
)
def test_default_excludes(path: str, covered: bool) -> None:
    assert Policy().covers(path, is_dir=False) is covered


def test_exclude_wins_and_include_reaches_down() -> None:
    policy = Policy(include=("*.py", "/docs/**"), exclude=("build/", "secret*.py"))
    assert policy.covers("a/b/c.py", is_dir=False)
    assert policy.covers("docs/x/y.txt", is_dir=False)
    assert not policy.covers("other/docs/y.txt", is_dir=False)
    assert not policy.covers("a/secret1.py", is_dir=False)
    assert not policy.covers("build/x.py", is_dir=False)
    assert policy.covers("a/build.py", is_dir=False)
    assert not policy.excluded("build", is_dir=False), "a pattern with a slash at its end means directories"
    assert policy.covers(".git/x.py", is_dir=False), "exclude replaces the default excludes"
    assert not Policy(include=("*",)).covers(".git/x", is_dir=False), "include keeps them"


def test_the_marker_is_protected_from_any_policy() -> None:
    policy = Policy(exclude=(), workspace_hash="abc")
    assert not policy.covers(".tanstack-projected-abc", is_dir=False)
    assert not policy.covers(".tanstack-projected-abc/x", is_dir=False)
    assert policy.covers(".tanstack-projected-abd", is_dir=False)


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("*.log", ("a.log", "x/y.log"), ("a.logs", "log")),
        ("/a/*", ("a/b",), ("a/b/c", "x/a/b")),
        ("a/**/z", ("a/z", "a/b/z", "a/b/c/z"), ("a/zz", "z")),
        ("**/t", ("t", "a/t", "a/b/t"), ("at",)),
        ("a/**", ("a/b", "a/b/c"), ("a", "ab")),
        ("?.c", ("a.c",), ("ab.c", ".c")),
        ("a+(b", ("a+(b",), ("aab",)),
        ("x**/b", ("x/b", "xy/z/b"), ("xb",)),
        ("**/a*b/**/c", ("ab/c", "d/axb/e/f/c"), ("ab/cc", "a/b/c")),
        ("**a*b", ("xa/ab",), ("a/b",)),
    ],
)
def test_patterns(pattern: str, yes: tuple[str, ...], no: tuple[str, ...]) -> None:
    policy = Policy(exclude=(pattern,))
    assert [path for path in yes if not policy.excluded(path, is_dir=False)] == []
    assert [path for path in no if policy.excluded(path, is_dir=False)] == []


def slowly(pattern: str, path: str) -> bool:
    """Whether the anchored `pattern` matches the whole `path`: by trying everything."""
    if not pattern:
        return path in ("", "/")
    if pattern.startswith("**/"):
        head, slash, rest = path.partition("/")
        return slowly(pattern[3:], path) or bool(head and slash and slowly(pattern, rest))
    if pattern.startswith("**"):
        return any(slowly(pattern[2:], path[at:]) for at in range(len(path) + 1))
    if pattern.startswith("*"):
        return any(slowly(pattern[1:], path[at:]) for at in range(len(path.partition("/")[0]) + 1))
    same = bool(path) and (path[0] == pattern[0] or (pattern[0] == "?" and path[0] != "/"))
    return same and slowly(pattern[1:], path[1:])


def test_patterns_match_what_trying_everything_matches(seed: int) -> None:
    chance = random.Random(seed)
    found = 0
    for _ in range(1500):
        words = ["".join(chance.choice("ab*?") for _ in range(chance.randint(1, 3))) for _ in range(3)]
        # `**` is a segment of its own here; what it means inside of a name is told above.
        words = [chance.choice((word.replace("**", "*"), "**")) for word in words] + ["a"]
        policy = Policy(exclude=("/" + "/".join(words),))
        for _ in range(10):
            names = ("".join(chance.choice("ab") for _ in range(chance.randint(1, 2))) for _ in range(5))
            path = "/".join(list(names)[: chance.randint(1, 5)])
            matches = slowly("/".join(words), path)
            found += matches
            assert policy.excluded(path, is_dir=False) == matches, (words, path)
    assert found > 100


@pytest.mark.parametrize("pattern", ["*a" * 500 + "b", "**a" * 500 + "b", "/" + "**/a/" * 500 + "b"])
def test_no_pattern_of_somebody_elses_record_takes_for_ever(pattern: str) -> None:
    policy = from_json({"include": [], "exclude": [pattern]})
    for path in ("a" * 255, "/".join(["a" * 255] * 10), "/".join("a" * 1000)):
        assert not policy.excluded(path + "c", is_dir=False)


def test_a_policy_comes_back_from_a_record() -> None:
    policy = Policy(("*.py",), ("x",), "h")
    assert from_json(policy.to_json()) == policy
    assert from_json(None).exclude == DEFAULT_EXCLUDE
    wrong: list[Any] = [[], {"include": "x"}, {"exclude": [1]}, {"exclude": [""]}, {"include": ["/"]}]
    for bad in wrong:
        with pytest.raises(UsageError):
            from_json(bad)


# secrets


def zeroed(data: bytes, secrets: list[bytes]) -> bytes:
    """The same by trying every place."""
    out = bytearray(data)
    for secret in secrets:
        for match in re.finditer(b"(?=" + re.escape(secret) + b")", data, re.DOTALL):
            out[match.start() : match.start() + len(secret)] = bytes(len(secret))
    return bytes(out)


def test_secrets_in_random_bytes(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        letters = rng.choice((b"ab", b"abc\n.[", bytes(range(256))))
        secrets = [bytes(rng.choices(letters, k=rng.randrange(4, 9))) for _ in range(rng.randrange(1, 6))]
        data = bytes(rng.choices(letters, k=rng.randrange(300)))
        for secret in rng.choices(secrets, k=3):
            at = rng.randrange(len(data) + 1)
            data = data[:at] + secret + data[at:]
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(3))
        pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)])]
        assert b"".join(Secrets(secrets).redacted(pieces)) == zeroed(data, secrets)


def test_a_secret_across_windows() -> None:
    secret = b"s" * 5 + b"ecret" * 40
    data = bytearray(b"." * (3 * WINDOW))
    for at in range(WINDOW - 150, 3 * WINDOW - len(secret), WINDOW):
        data[at : at + len(secret)] = secret
    pieces = [bytes(data[at : at + 100_000]) for at in range(0, len(data), 100_000)]
    got = b"".join(Secrets([secret]).redacted(pieces))
    assert len(got) == len(data)
    assert b"ecret" not in got
    assert got.count(0) == 2 * len(secret)


def test_redaction_stays_linear() -> None:
    """The worst a search by hand meets: one letter only, in secrets and in data."""
    secrets = Secrets([b"a" * size for size in range(100, 140)])

    def took(size: int) -> float:
        start = time.thread_time()
        assert not any(b"".join(secrets.redacted([b"a" * size])))
        return time.thread_time() - start

    took(1000)
    assert min(took(200_000) for _ in range(3)) < 40 * max(took(20_000), 0.001)


def test_secrets_that_cannot_be_used() -> None:
    for bad in ([b"abc"], [b""], [b"x" * 100_000], [b"%05d" % n for n in range(1001)]):
        with pytest.raises(UsageError):
            Secrets(bad)
    assert list(Secrets([]).redacted([b"a", b"b"])) == [b"a", b"b"]


# manifests


def file(path: Any, **more: Any) -> dict[str, Any]:
    return {"path": path, "kind": FILE, "blobKey": KEY, "size": 3, **more}


GOOD: list[list[dict[str, Any]]] = [
    [],
    [file("a"), file("b/c"), {"path": "d", "kind": DIR}],
    [file("a b/ü/😀"), {"path": "l", "kind": LINK, "target": "a/../b"}],
    [{"path": "x/y/l", "kind": LINK, "target": "../../a"}],
    [file("a", mode=0o755, mtimeNs=12, extra=[1])],
    [file("a..b"), file("...")],
]
BAD: list[list[Any]] = [
    [file("")],
    [file("/a")],
    [file("../a")],
    [file("a/../b")],
    [file("a//b")],
    [file("./a")],
    [file("a/")],
    [file("a\\b")],
    [file("a\0")],
    [file("C:/x")],
    [file("C:")],
    [file("\ud800")],
    [file(7)],
    [file("a"), file("a")],
    [file("a"), file("a/b")],
    [file("a/b"), file("a")],
    [{"path": "l", "kind": LINK, "target": "x"}, file("l/a")],
    [{"path": "l", "kind": LINK, "target": "/etc"}],
    [{"path": "l", "kind": LINK, "target": "../x"}],
    [{"path": "a/l", "kind": LINK, "target": "../../x"}],
    [{"path": "l", "kind": LINK, "target": ""}],
    [{"path": "l", "kind": LINK, "target": "a\0"}],
    [{"path": "l", "kind": LINK, "target": "\udfff"}],
    [{"path": "l", "kind": LINK}],
    [file("a", size=-1)],
    [file("a", size=True)],
    [file("a", size=2**53)],
    [file("a", blobKey=KEY + "\n")],
    [file("a", blobKey=KEY.upper())],
    [{"path": "a", "kind": "fifo"}],
    [None],
]


@pytest.mark.parametrize("files", GOOD)
def test_both_sides_take_a_good_manifest(files: list[dict[str, Any]]) -> None:
    check_files(files)
    read = manifest.read(files)
    assert [entry.path for entry in read] == sorted(e["path"] for e in files)
    check_files([entry.to_json() for entry in read])


@pytest.mark.parametrize("files", BAD)
def test_both_sides_refuse_a_bad_manifest(files: list[Any]) -> None:
    with pytest.raises(CheckpointError):
        check_files(files)
    with pytest.raises(InvalidPath):
        manifest.read(files)


def test_what_the_client_alone_refuses() -> None:
    with pytest.raises(InvalidPath):
        manifest.read({"a": 1})
    with pytest.raises(InvalidPath):
        manifest.read([file("x" * 256)])


def test_a_large_manifest_is_checked_quickly() -> None:
    files = [file(f"d{n % 100}/e{n % 7}/f{n}") for n in range(50_000)]
    start = time.thread_time()
    assert len(manifest.read(files)) == 50_000
    assert time.thread_time() - start < 20
