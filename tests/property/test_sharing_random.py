"""Several sessions on one tree at random, in rounds: what any of them wrote in a round is there at its end.

A round begins with everybody knowing the same state. Each session then queues random operations on what it
knows and on what it makes itself, and commits in pieces, in turns with the others. A session does not destroy
what it wrote itself in the round; so whatever it wrote must be reachable at the end, whatever the others did.
After every commit the audit finds nothing. With pins now and then, so that rows die as well.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.bench import Bench, Mount

from fsd.model.attrs import ROOT_INO, Attr
from fsd.model.ops import RENAME_EXCHANGE
from fsd.service import pins

NAMES = [b"a", b"b", b"c", b"d"]


@dataclass
class Known:
    """A session's idea of the tree: changed by its own operations, not by the others'."""

    attrs: dict[int, Attr]
    names: dict[int, dict[bytes, int]]
    contents: dict[int, bytes]
    written: dict[int, bytes] = field(default_factory=dict)  # ino → what this session wrote this round

    def dirs(self) -> list[int]:
        return sorted(self.names)

    def entries(self, *, dirs: bool) -> list[tuple[int, bytes, int]]:
        return [
            (parent, name, ino)
            for parent in self.dirs()
            for name, ino in sorted(self.names[parent].items())
            if (ino in self.names) == dirs
        ]


def look(bench: Bench) -> Known:
    _, (tree,) = bench.service.namespace.ask(bench.fs, [("tree", ROOT_INO, 100_000)])
    known = Known({}, {}, {})
    for ino, entries in tree:
        known.names[ino] = {entry.name: entry.attr.ino for entry in entries}
        for entry in entries:
            known.attrs[entry.attr.ino] = entry.attr
            if entry.attr.is_file:
                known.contents[entry.attr.ino] = bench.read(entry.attr)
    return known


class Session:
    def __init__(self, bench: Bench, rng: random.Random, name: str) -> None:
        self.bench, self.rng, self.name = bench, rng, name
        self.m: Mount = bench.mount(name)
        self.known = look(bench)
        self.tokens: list[bytes] = []
        self.told = 0

    def base(self, ino: int) -> int:
        found = self.known.attrs.get(ino)
        return found.cseq if found is not None else 0

    def token(self) -> bytes:
        self.tokens.append(f"<{self.name}.{self.m.session}.{self.m.next_op}>".encode())
        return self.tokens[-1]

    def pick(self, *, dirs: bool) -> tuple[int, bytes, int] | None:
        found = self.known.entries(dirs=dirs)
        return self.rng.choice(found) if found else None

    def mine(self, ino: int) -> bool:
        return ino in self.known.written

    # Operations on what is known.

    def op_create(self) -> None:
        parent, name = self.rng.choice(self.known.dirs()), self.rng.choice(NAMES)
        if name not in self.known.names[parent]:
            data = self.token()
            ino = self.m.file(parent, name, data)
            self.known.names[parent][name] = ino
            self.known.written[ino] = data

    def op_mkdir(self) -> None:
        parent, name = self.rng.choice(self.known.dirs()), self.rng.choice(NAMES)
        if name not in self.known.names[parent]:
            ino = self.m.mkdir(parent, name)
            self.known.names[parent][name] = ino
            self.known.names[ino] = {}

    def op_write(self) -> None:
        found = self.pick(dirs=False)
        if found is None or found[2] not in self.known.contents or self.mine(found[2]):
            return
        ino = found[2]
        old = self.known.contents[ino]
        if self.rng.random() < 0.5:
            data = old + self.token()
            self.m.write(ino, data, self.base(ino), full=False, appended_from=len(old))
        else:
            data = self.token()
            self.m.write(ino, data, self.base(ino), full=self.rng.random() < 0.5)
        self.known.written[ino] = data

    def op_setattr(self) -> None:
        found = self.pick(dirs=self.rng.random() < 0.3)
        if found:
            self.m.setattr(found[2], mode=self.rng.choice((0o600, 0o644)))

    def op_link(self) -> None:
        found, parent = self.pick(dirs=False), self.rng.choice(self.known.dirs())
        name = self.rng.choice(NAMES)
        if found and name not in self.known.names[parent]:
            self.m.link(found[2], parent, name)
            self.known.names[parent][name] = found[2]

    def op_unlink(self) -> None:
        found = self.pick(dirs=False)
        if found and not self.mine(found[2]):
            parent, name, ino = found
            self.m.unlink(parent, name, ino, self.base(ino))
            del self.known.names[parent][name]

    def op_rmdir(self) -> None:
        found = self.pick(dirs=True)
        if found and not self.known.names[found[2]]:
            self.m.rmdir(*found)
            del self.known.names[found[0]][found[1]]
            del self.known.names[found[2]]

    def below(self, ino: int) -> set[int]:
        found = {ino}
        for child in self.known.names.get(ino, {}).values():
            found |= self.below(child)
        return found

    def op_rename(self) -> None:
        found = self.pick(dirs=self.rng.random() < 0.4)
        if not found:
            return
        parent, name, ino = found
        new_parent, new_name = self.rng.choice(self.known.dirs()), self.rng.choice(NAMES)
        is_dir = ino in self.known.names
        over = self.known.names[new_parent].get(new_name, 0)
        if over == ino or self.mine(over) or (is_dir and new_parent in self.below(ino)):
            return
        if over and ((over in self.known.names) != is_dir or self.known.names.get(over)):
            return
        if over and over in self.below(parent):
            return
        self.m.rename(parent, name, ino, new_parent, new_name, over, self.base(over))
        del self.known.names[parent][name]
        self.known.names[new_parent][new_name] = ino
        if over and is_dir:
            del self.known.names[over]

    def op_exchange(self) -> None:
        one, two = self.pick(dirs=False), self.pick(dirs=False)
        if one and two and one[2] != two[2]:
            self.m.rename(*one, two[0], two[1], two[2], self.base(two[2]), RENAME_EXCHANGE)
            self.known.names[one[0]][one[1]] = two[2]
            self.known.names[two[0]][two[1]] = one[2]

    def act(self) -> None:
        getattr(self, self.rng.choice(OPS))()

    def commit(self) -> None:
        if self.m.queue:
            self.told += len(self.m.commit())


OPS = sorted(name for name in vars(Session) if name.startswith("op_"))


def one_round(bench: Bench, rng: random.Random) -> int:
    """One round; how many outcomes were told."""
    sessions = [Session(bench, rng, name) for name in ("A", "B", "C")]
    for session in sessions:
        for _ in range(rng.randrange(1, 9)):
            session.act()
    # Each session's operations go in up to three commits, in turns.
    for turn in range(3):
        rng.shuffle(sessions)
        for session in sessions:
            queue = session.m.queue
            cut = len(queue) if turn == 2 else rng.randrange(len(queue) + 1)
            session.m.queue = queue[:cut]
            session.commit()
            session.m.queue = queue[cut:]
            bench.audit()
    everything = [data for data in bench.tree().values() if isinstance(data, bytes)]
    for session in sessions:
        for data in session.tokens:
            assert any(data in one for one in everything), f"{data!r} is lost"
    return sum(session.told for session in sessions)


def run(bench: Bench, seed: int, rounds: int) -> None:
    rng = random.Random(seed)
    bench.new_fs()
    told, kept = 0, []
    for _ in range(rounds):
        told += one_round(bench, rng)
        if rng.random() < 0.3:
            kept.append(bench.service.db.write(lambda tx: pins.pin(tx, bench.fs, "checkpoint", "test"))[0])
        if kept and rng.random() < 0.3:
            number = kept.pop(rng.randrange(len(kept)))
            bench.service.db.write(lambda tx, n=number: pins.unpin(tx, bench.service.packs, bench.fs, n))
    assert told > rounds / 10, "the sessions hardly met"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Bench(tmp_path_factory.mktemp("random")) as made:
        yield made


@pytest.mark.parametrize("seed", range(10))
def test_random_sessions(bench: Bench, seed: int) -> None:
    run(bench, seed, 15)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_random_sessions_long(tmp_path: Path, seed: int) -> None:
    with Bench(tmp_path) as made:
        run(made, seed, 60)
