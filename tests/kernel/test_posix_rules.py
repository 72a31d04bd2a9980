"""The rules of POSIX and ext4, one by one, on the mount and on a local directory in the same run.

The tables are `support.posixrules` and `support.handlerules`: each call that takes a path in each situation
that makes one fail, kinds against kinds, owners against modes, flags and times; by root and by other users. A
short run plays some of them (others when the seed is another); `--all` plays all, and looks at which times
moved.
"""

from __future__ import annotations

import random
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path

import pytest
from support import handlerules, posixrules
from support.differential import differences, identities, tree
from support.loopdisk import LoopDisk
from support.posixrules import Rule, path_calls, situations
from support.ruleplayer import Ground
from support.sandbox import Sandbox
from support.server import Server, TestFs
from support.usermount import in_a_users_mount

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(300)]
SAMPLE = 8  # rules of each group in a short run


@lru_cache(maxsize=1)
def groups() -> dict[str, list[Rule]]:
    alone = len(identities()) == 1
    return {
        name: [rule for rule in rules if not (alone and rule.of_others)]
        for name, rules in handlerules.groups().items()
    }


class Stage:
    """A filesystem, a first mount and a local directory; other mounts of it when asked for."""

    def __init__(self, fs: TestFs, base: Path, *options: str) -> None:
        self.fs, self.base = fs, base
        base.chmod(0o755)
        self.boxes: list[Sandbox] = []
        self.box = self.mount(*options)
        self.local = base / "local"
        self.ground: Ground | None = None

    def mount(self, *options: str) -> Sandbox:
        box = Sandbox(self.base / f"box{len(self.boxes)}", self.fs, *options)
        self.boxes.append(box)
        box.mount()
        for above in (box.base,) if "--read-only" in options else (box.base, box.mountpoint):
            above.chmod(0o755)
        return box

    def play(self, rules: Sequence[Rule], timed: bool = False) -> None:
        assert rules
        self.ground = Ground(self.local, self.box.mountpoint / "t", identities())
        try:
            self.ground.play_all(rules, timed)
        finally:
            self.ground.close()

    def same_elsewhere(self, *options: str) -> None:
        """The tree is the local one's, and the same again on another mount once this one is gone."""
        here = self.box.mountpoint / "t"
        assert not differences(tree(self.local), tree(here))
        whole = tree(here, exact=True)
        self.box.unmount()
        self.box.lose()
        other = self.mount(*options)
        assert not differences(whole, tree(other.mountpoint / "t", exact=True))

    def close(self) -> None:
        for box in self.boxes:
            box.close()


@pytest.fixture
def stage(trusted: Server, tmp_path: Path) -> Iterator[Stage]:
    made = Stage(trusted.create(), tmp_path)
    yield made
    made.close()


def test_some_of_all_rules(stage: Stage, seed: int) -> None:
    chosen = random.Random(seed)
    rules = [rule for group in groups().values() for rule in chosen.sample(group, min(SAMPLE, len(group)))]
    stage.play(rules)
    stage.same_elsewhere()


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("group", handlerules.GROUPS)
def test_all_rules(stage: Stage, group: str) -> None:
    stage.play(groups()[group], timed=True)
    stage.same_elsewhere()


@pytest.mark.root
@pytest.mark.timeout(600)
@pytest.mark.parametrize("share", [20, pytest.param(1, marks=pytest.mark.long)])
def test_what_acls_allow(trusted: Server, tmp_path: Path, seed: int, share: int) -> None:
    rules = list(handlerules.granular())
    made = Stage(trusted.create(), tmp_path, "--acl")
    try:
        made.play(random.Random(seed).sample(rules, len(rules) // share), timed=share == 1)
        made.same_elsewhere("--acl")
    finally:
        made.close()


@pytest.mark.long
@pytest.mark.loop
@pytest.mark.timeout(900)
def test_a_mount_to_look_at_says_what_a_read_only_disk_says(stage: Stage, tmp_path: Path) -> None:
    """Each call in each situation by each user where nothing can be changed: EROFS, or what is told first."""
    with LoopDisk(tmp_path / "loop", 64) as disk:
        disk.path.chmod(0o755)
        _look_only(stage, disk.path)


def _look_only(stage: Stage, disk: Path) -> None:
    people, places = identities(), list(situations().items())
    ground = Ground(disk / "t", stage.box.mountpoint / "t", people)
    for where, (before, _) in places:
        plain = [*posixrules.make("file", b"plain", 0o666), *posixrules.make("dir", b"plain-dir", 0o777)]
        assert ground.play(Rule(where, (*before, *plain)), timed=False) is None
    ground.close()
    stage.box.unmount()
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True, timeout=60)
    other = stage.mount("--read-only")
    found, asked, refused = [], 0, 0
    ground = Ground(disk / "t", other.mountpoint / "t", people, ready=True)
    try:
        for at, (where, (_, path)) in enumerate(places):
            for (call, op), pair in product(path_calls(path).items(), zip(*ground.sides, strict=True)):
                for actor in pair:
                    assert actor.do(("enter", b"%05d/in" % (at + 1)))[0] is None
                wanted, got = (actor.do(op)[0] for actor in pair)
                asked += 1
                refused += wanted == "EROFS"
                if wanted != got:
                    found.append(f"{call}: {where}: there {wanted}, here {got}")
    finally:
        ground.close()
    assert not found, f"{len(found)} of {asked}\n" + "\n".join(found[:40])
    assert refused > asked // 10


@pytest.mark.root
@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "group", ["paths", "rename", "open", "running", "handle", "times", "new", "xattr", "link", "pointers"]
)
def test_rules_on_a_mount_that_a_user_made(trusted: Server, open_dir: Path, group: str) -> None:
    """Made and used by one who is not root, through fusermount3."""
    tests = Path(__file__).parents[1]
    script = f"""
        export PYTHONPATH={tests.parent}:{tests}
        {shlex.quote(sys.executable)} -m support.ruleplayer local m/t {group} 2>&1
    """
    told = in_a_users_mount(open_dir, trusted.create(), 65534, script, timeout=1200)
    assert " rules\n" in told, told[-5000:]
