"""Inode numbers on the wire, where they are not those programs saw.

They differ after the server made a copy of this session's losing content (programs go on with that copy
under the number they know), after two equal directories became one, and after this process turned out to be
the copy of another (numbers made under the old session that were never committed get new ones).
"""

from __future__ import annotations

from fsd.model.attrs import Attr
from fsd.model.ops import Content, Create, Link, Op, Rename, Rmdir, Setattr, Setxattr, Unlink


class WireMap:
    """A one-to-one map between local numbers and those on the wire; identity where nothing is said."""

    def __init__(self, pairs: tuple[tuple[int, int], ...] = ()) -> None:
        self._out: dict[int, int] = dict(pairs)
        self._in: dict[int, int] = {wire: local for local, wire in pairs}

    def pairs(self) -> tuple[tuple[int, int], ...]:
        return tuple(self._out.items())

    def out(self, local: int) -> int:
        return self._out.get(local, local)

    def known(self, wire: int) -> int | None:
        """The local number of `wire`; None when it has none because another inode uses that number here."""
        found = self._in.get(wire)
        if found is not None:
            return found
        return None if wire in self._out else wire

    def put(self, local: int, wire: int) -> None:
        """From now on `local` is `wire`. The wire number `local` had is free for an alias."""
        old = self._out.pop(local, None)
        if old is not None:
            self._in.pop(old, None)
        self._out[local] = wire
        self._in[wire] = local

    def op(self, op: Op, shift: int) -> Op:
        """`op` as it goes on the wire."""
        opno = op.opno - shift
        if not self._out:
            return op if not shift else op._replace(opno=opno)
        out = self.out
        if isinstance(op, Create | Unlink | Rmdir | Link):
            return op._replace(opno=opno, parent=out(op.parent), ino=out(op.ino))
        if isinstance(op, Rename):
            return op._replace(
                opno=opno,
                parent=out(op.parent),
                ino=out(op.ino),
                new_parent=out(op.new_parent),
                over=out(op.over) if op.over else 0,
            )
        assert isinstance(op, Setattr | Setxattr | Content)
        return op._replace(opno=opno, ino=out(op.ino))

    def attr(self, attr: Attr, local: int) -> Attr:
        """`attr` as this side numbers it."""
        if not self._out:
            return attr
        parent = self.known(attr.parent) if attr.parent else 0
        return attr._replace(ino=local, parent=attr.parent if parent is None else parent)

    @property
    def empty(self) -> bool:
        return not self._out
