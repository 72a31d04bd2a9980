"""Questions of a mount are answered from the state asked for: a checkpoint's, a fork's before its copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.bench import Bench, Mount
from support.postgres import database_of

from fsd.model.attrs import ROOT_INO
from fsd.model.limits import BLOCK
from fsd.service import namespace
from fsd.service.native import Ask
from fsd.service.retained import At
from fsd.wire.messages import ATTRS, BLOCKS, LIST, LOOKUP, PATH, TREE

Question = tuple[Any, ...]


@pytest.fixture(params=["sqlite", "postgresql"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path, database=database_of(request)) as made:
        yield made


def all_kinds(mount: Mount) -> list[Question]:
    """A tree, and a question of each kind about what `change` changes of it."""
    top = mount.mkdir(ROOT_INO, b"d")
    kept, went = mount.file(top, b"kept", b"one"), mount.file(top, b"went", b"two")
    large = mount.file(top, b"large", b"x" * (BLOCK + 1))
    mount.setxattr(kept, b"user.tag.a", b"before")
    mount.commit()
    return [
        (LOOKUP, top, b"kept", 100),
        (LOOKUP, top, b"went", 0),
        (LOOKUP, top, b"came", 100),
        (LIST, top, b"", 100),
        (ATTRS, (ROOT_INO, top, kept, went, large)),
        (BLOCKS, large, 0, 10),
        (BLOCKS, went, 0, 10),
        (TREE, ROOT_INO, 100),
        (PATH, (b"d", b"went")),
        (PATH, (b"d", b"came")),
    ]


def change(mount: Mount, questions: Sequence[Question]) -> None:
    """Change all that `questions` ask for."""
    top, kept, went, large = questions[4][1][1:]
    mount.setattr(ROOT_INO, mode=0o700)
    mount.setattr(kept, mode=0o600)
    mount.setxattr(kept, b"user.tag.a", b"after")
    mount.unlink(top, b"went", went, mount.seq)
    mount.write(large, b"y" * (2 * BLOCK + 1), mount.seq)
    mount.file(top, b"came", b"new")
    mount.commit()


def test_a_checkpoint_answers_every_question_as_it_was(bench: Bench) -> None:
    mount = bench.mount()
    questions = all_kinds(mount)
    ask = bench.service.namespace.ask
    seq, before = ask(bench.fs, questions)
    made = bench.service.db.write(lambda tx: bench.service.checkpoints.make(tx, bench.fs, None, Ask()))
    change(mount, questions)
    _, now = ask(bench.fs, questions)
    assert [one for one, other in zip(before, now, strict=True) if one == other] == []
    assert ask(bench.fs, questions, At(checkpoint=made["checkpoint_id"])) == (seq, before)


def test_a_fork_that_is_not_copied_answers_every_question_as_its_origin_was(bench: Bench) -> None:
    mount = bench.mount()
    questions = all_kinds(mount)
    ask = bench.service.namespace.ask
    seq, before = ask(bench.fs, questions)
    made = bench.service.db.write(lambda tx: bench.service.forks.create(tx, bench.fs, "fork", []))
    fork = bench.service.filesystems.get(made["file_system_id"])
    change(mount, questions)
    assert ask(fork, questions) == (seq, before)
    bench.service.forks.finish(fork)
    assert ask(fork, questions) == (seq, before)


def test_a_lookup_behind_lists_that_took_all_there_was(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list has one entry at least, so what is left of a request's entries can be less than none: the
    lookups behind it are answered, without the directory."""
    monkeypatch.setattr(namespace, "NS_ENTRIES_MAX", 2)
    mount = bench.mount()
    for name in (b"a", b"b", b"c", b"d"):
        mount.file(ROOT_INO, name, b"")
    mount.commit()
    questions = [*[(LIST, ROOT_INO, b"", 1)] * 5, (LOOKUP, ROOT_INO, b"c", 100)]
    _, answers = bench.service.namespace.ask(bench.fs, questions)
    assert [[one.name for one in entries] for entries, _ in answers[:5]] == [[b"a"]] * 5
    found, listing = answers[5]
    assert found.name == b"c"
    assert listing is None
