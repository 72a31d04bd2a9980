"""Every pair of operations of two sessions on one start, one committed after the other (design section 3).

After each pair: no written content is lost, what the first gave a name keeps it, the audit finds nothing, and
the second was told whenever its operation did not simply take effect.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from support.bench import Bench, Mount

from fsd.model.attrs import ROOT_INO, Attr
from fsd.model.ops import CONFLICT, RENAME_EXCHANGE, RENAME_NOREPLACE, Outcome

BASE_F = b"base of f, "
BASE_G = b"base of g, "


@dataclass
class Start:
    """The state both sessions know: d/ (with d/x), e/ (empty), k/ (with k/y), f, g."""

    d: Attr
    e: Attr
    k: Attr
    f: Attr
    g: Attr
    x: Attr


@dataclass
class Did:
    """What an operation claims: contents that must be somewhere, names that must mean an inode (0: nothing),
    and how to see that it took effect as it stands."""

    contents: list[bytes] = field(default_factory=list)
    names: dict[tuple[int, bytes], int] = field(default_factory=dict)
    holds: Callable[[Bench], bool] = lambda bench: True


Action = Callable[[Mount, Start], Did]
ACTIONS: dict[str, Action] = {}


def action(fn: Action) -> Action:
    ACTIONS[fn.__name__] = fn
    return fn


def ino_at(bench: Bench, parent: int, name: bytes) -> int:
    _, (answer,) = bench.service.namespace.ask(bench.fs, [("lookup", parent, name, 0)])
    return 0 if answer is None or answer[0] is None else int(answer[0].attr.ino)


def attr_of(bench: Bench, ino: int) -> Attr | None:
    _, (answer,) = bench.service.namespace.ask(bench.fs, [("attrs", (ino,))])
    found: Attr | None = answer[0]
    return found


def named(names: dict[tuple[int, bytes], int]) -> Callable[[Bench], bool]:
    return lambda bench: all(ino_at(bench, *key) == ino for key, ino in names.items())


def content_is(ino: int, data: bytes) -> Callable[[Bench], bool]:
    def holds(bench: Bench) -> bool:
        found = attr_of(bench, ino)
        return found is not None and bench.read(found) == data

    return holds


def made(names: dict[tuple[int, bytes], int], contents: list[bytes] | None = None) -> Did:
    return Did(contents or [], {key: ino for key, ino in names.items() if ino}, named(names))


def text(m: Mount, what: str) -> bytes:
    return f"{what} by {m.name} ".encode()


@action
def create(m: Mount, s: Start) -> Did:
    data = text(m, "create")
    return made({(s.d.ino, b"n"): m.file(s.d.ino, b"n", data)}, [data])


@action
def create_in_empty(m: Mount, s: Start) -> Did:
    data = text(m, "create in e")
    return made({(s.e.ino, b"n"): m.file(s.e.ino, b"n", data)}, [data])


@action
def mkdir(m: Mount, s: Start) -> Did:
    return made({(s.d.ino, b"n"): m.mkdir(s.d.ino, b"n")})


@action
def mkdir_and_fill(m: Mount, s: Start) -> Did:
    directory = m.mkdir(s.d.ino, b"n")
    data = text(m, "below mkdir")
    m.file(directory, b"inner", data)
    return made({(s.d.ino, b"n"): directory}, [data])


@action
def mkdir_in_empty(m: Mount, s: Start) -> Did:
    directory = m.mkdir(s.e.ino, b"n")
    data = text(m, "below mkdir in e")
    m.file(directory, b"inner", data)
    return made({(s.e.ino, b"n"): directory}, [data])


@action
def symlink(m: Mount, s: Start) -> Did:
    return made({(s.d.ino, b"n"): m.symlink(s.d.ino, b"n", text(m, "target"))})


@action
def symlink_same(m: Mount, s: Start) -> Did:
    return made({(s.d.ino, b"n"): m.symlink(s.d.ino, b"n", b"one target")})


@action
def write(m: Mount, s: Start) -> Did:
    data = text(m, "write")
    m.write(s.f.ino, data, s.f.cseq)
    return Did([data], holds=content_is(s.f.ino, data))


@action
def write_partly(m: Mount, s: Start) -> Did:
    data = text(m, "written in part")
    m.write(s.f.ino, data, s.f.cseq, full=False)
    return Did([data], holds=content_is(s.f.ino, data))


@action
def write_same(m: Mount, s: Start) -> Did:
    m.write(s.f.ino, b"the same bytes", s.f.cseq)
    return Did([b"the same bytes"], holds=content_is(s.f.ino, b"the same bytes"))


@action
def append(m: Mount, s: Start) -> Did:
    data = text(m, "append")
    m.write(s.f.ino, BASE_F + data, s.f.cseq, full=False, appended_from=len(BASE_F))
    return Did([data], holds=content_is(s.f.ino, BASE_F + data))


@action
def truncate(m: Mount, s: Start) -> Did:
    m.write(s.f.ino, BASE_F[:4], s.f.cseq, full=False)
    return Did([BASE_F[:4]], holds=content_is(s.f.ino, BASE_F[:4]))


@action
def setattr_f(m: Mount, s: Start) -> Did:
    m.setattr(s.f.ino, mode=0o600 + m.session % 8, mtime=m.session)
    mode, mtime = stat.S_IFREG | 0o600 + m.session % 8, m.session
    return Did(
        holds=lambda bench: (a := attr_of(bench, s.f.ino)) is not None and (a.mode, a.mtime) == (mode, mtime)
    )


@action
def setxattr_f(m: Mount, s: Start) -> Did:
    name = f"user.{m.name}".encode()
    m.setxattr(s.f.ino, name, b"1")
    return Did(holds=lambda bench: (a := attr_of(bench, s.f.ino)) is not None and name in (a.xattrs or {}))


@action
def link(m: Mount, s: Start) -> Did:
    m.link(s.f.ino, s.d.ino, b"n")
    return made({(s.d.ino, b"n"): s.f.ino})


@action
def link_in_empty(m: Mount, s: Start) -> Did:
    m.link(s.f.ino, s.e.ino, b"l")
    return made({(s.e.ino, b"l"): s.f.ino})


@action
def unlink(m: Mount, s: Start) -> Did:
    m.unlink(ROOT_INO, b"f", s.f.ino, s.f.cseq)
    return made({(ROOT_INO, b"f"): 0})


@action
def rmdir(m: Mount, s: Start) -> Did:
    m.rmdir(ROOT_INO, b"e", s.e.ino)
    return made({(ROOT_INO, b"e"): 0})


@action
def rename(m: Mount, s: Start) -> Did:
    m.rename(ROOT_INO, b"f", s.f.ino, s.d.ino, b"n")
    return made({(ROOT_INO, b"f"): 0, (s.d.ino, b"n"): s.f.ino})


@action
def rename_into_empty(m: Mount, s: Start) -> Did:
    m.rename(ROOT_INO, b"f", s.f.ino, s.e.ino, b"n", flags=RENAME_NOREPLACE)
    return made({(ROOT_INO, b"f"): 0, (s.e.ino, b"n"): s.f.ino})


@action
def rename_over(m: Mount, s: Start) -> Did:
    m.rename(ROOT_INO, b"g", s.g.ino, ROOT_INO, b"f", s.f.ino, s.f.cseq)
    return made({(ROOT_INO, b"g"): 0, (ROOT_INO, b"f"): s.g.ino})


@action
def save_by_rename(m: Mount, s: Start) -> Did:
    data = text(m, "saved")
    temporary = m.file(ROOT_INO, f".f.{m.name}".encode(), data)
    m.rename(ROOT_INO, f".f.{m.name}".encode(), temporary, ROOT_INO, b"f", s.f.ino, s.f.cseq)
    return made({(ROOT_INO, b"f"): temporary}, [data])


@action
def exchange(m: Mount, s: Start) -> Did:
    m.rename(ROOT_INO, b"f", s.f.ino, ROOT_INO, b"g", s.g.ino, s.g.cseq, RENAME_EXCHANGE)
    return made({(ROOT_INO, b"f"): s.g.ino, (ROOT_INO, b"g"): s.f.ino})


@action
def exchange_kinds(m: Mount, s: Start) -> Did:
    m.rename(s.d.ino, b"x", s.x.ino, ROOT_INO, b"e", s.e.ino, 0, RENAME_EXCHANGE)
    return made({(s.d.ino, b"x"): s.e.ino, (ROOT_INO, b"e"): s.x.ino})


@action
def rename_directory_over(m: Mount, s: Start) -> Did:
    m.rename(ROOT_INO, b"d", s.d.ino, ROOT_INO, b"e", s.e.ino, 0)
    return made({(ROOT_INO, b"d"): 0, (ROOT_INO, b"e"): s.d.ino})


@action
def rename_d_below_k(m: Mount, s: Start) -> Did:
    m.rename(ROOT_INO, b"d", s.d.ino, s.k.ino, b"d")
    return made({(ROOT_INO, b"d"): 0, (s.k.ino, b"d"): s.d.ino})


@action
def rename_k_below_d(m: Mount, s: Start) -> Did:
    m.rename(ROOT_INO, b"k", s.k.ino, s.d.ino, b"k")
    return made({(ROOT_INO, b"k"): 0, (s.d.ino, b"k"): s.k.ino})


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Bench(tmp_path_factory.mktemp("matrix")) as made_bench:
        yield made_bench


def begin(bench: Bench) -> Start:
    bench.new_fs()
    zero = bench.mount("start")
    d, e, k = (zero.mkdir(ROOT_INO, name) for name in (b"d", b"e", b"k"))
    zero.file(d, b"x", b"x in d")
    zero.file(k, b"y", b"y in k")
    zero.file(ROOT_INO, b"f", BASE_F)
    zero.file(ROOT_INO, b"g", BASE_G)
    assert zero.commit() == []
    assert e
    return Start(*(bench.find(path) for path in ("d", "e", "k", "f", "g", "d/x")))


def contents(bench: Bench) -> list[bytes]:
    return [what for what in bench.tree().values() if isinstance(what, bytes)]


def check_told(bench: Bench, told: list[Outcome]) -> None:
    """Where an outcome says that something is, it is."""
    for outcome in told:
        assert outcome.reason
        assert outcome.errno
        if outcome.status == CONFLICT and outcome.ino and outcome.name:
            assert ino_at(bench, outcome.parent, outcome.name) == outcome.ino, outcome


@pytest.mark.parametrize("first", sorted(ACTIONS))
def test_every_second_after(bench: Bench, first: str) -> None:
    for second in sorted(ACTIONS):
        start = begin(bench)
        a, b = bench.mount("hostA"), bench.mount("hostB")
        did_a, did_b = ACTIONS[first](a, start), ACTIONS[second](b, start)
        assert a.commit() == [], f"{first} alone"
        assert did_a.holds(bench), f"{first} alone"
        told = b.commit()
        pair = f"{first} then {second}: {told}"
        bench.audit()
        everything = contents(bench)
        for data in did_a.contents + did_b.contents:
            assert any(data in one for one in everything), f"{pair}: {data!r} is lost"
        for key, ino in did_a.names.items():
            before, now = ino, ino_at(bench, *key)
            # The second may move or remove what the first named, where it says so and loses no content.
            if now != before:
                assert names_again(did_b, before) or not attr_of(bench, key[0]), (
                    f"{pair}: {key} lost its name"
                )
        assert told or did_b.holds(bench), f"{pair}: not applied, and not told"
        check_told(bench, told)


def names_again(did: Did, ino: int) -> bool:
    """Whether the second gave the inode another name on purpose (it moved the same file)."""
    return ino in did.names.values()
