"""A sandbox whose clock is set by hours, back and forth: leases last as the server's clock says, files have
the times they were given, and nothing is lost or taken for older than it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.client import Client
from test_exclusive import Place, drain, renew

from fsd.model.errors import FsdError, LeaseHeld
from fsd.model.limits import LEASE_TTL

HOUR = 3600 * 10**9


class Stepped:
    """A client with a wall clock of its own, `off` nanoseconds beside the server's."""

    def __init__(self, place: Place, name: str, *, exclusive: bool = False) -> None:
        self.place = place
        self.off = 0
        self.client: Client = place.client(name, exclusive=exclusive)
        self.client.host = replace(self.client.host, wall_ns=lambda: place.clock.wall_ns() + self.off)

    def put(self, name: bytes, data: bytes, *, sync: bool = False) -> int:
        ino = self.client.put(self.client.volume.root_ino, name, data, sync=sync)
        return self.client.volume.core.nodes.get(ino).mtime


@pytest.mark.parametrize(
    "steps",
    [
        (HOUR, -HOUR),
        *(pytest.param(steps, marks=pytest.mark.long) for steps in ((-HOUR, HOUR), (24 * HOUR, -48 * HOUR))),
    ],
)
def test_a_holder_s_clock_has_no_say_in_its_lease(tmp_path: Path, steps: tuple[int, int]) -> None:
    place = Place(tmp_path, 5)
    holder, other = Stepped(place, "holder", exclusive=True), Stepped(place, "other", exclusive=True)
    holder.client.open()
    fence = holder.client.volume.core.fence
    times = {b"f0": holder.put(b"f0", b"<f0>", sync=True)}
    for number, step in enumerate(steps, 1):
        holder.off += step
        other.off -= step
        # Renewed in time: it stays the writer, whatever either clock says.
        for _ in range(4):
            place.pass_(LEASE_TTL / 3)
            renew(holder.client)
            with pytest.raises(LeaseHeld):
                other.client.open()
        name = b"f%d" % number
        times[name] = holder.put(name, b"<" + name + b">", sync=True)
    assert holder.client.volume.core.fence == fence
    assert len({time // HOUR for time in times.values()}) > 1
    # Not renewed in time, it is another's, whatever either clock says.
    holder.off = -100 * HOUR
    holder.put(b"late", b"<late>")
    place.pass_(LEASE_TTL + 1)
    other.client.open()
    renew(holder.client)
    assert holder.client.volume.core.fenced is not None
    with pytest.raises(FsdError):
        holder.put(b"never", b"<never>")
    root = other.client.volume.root_ino
    for name, time in times.items():
        found = other.client.call(lambda v, name=name: v.lookup(root, name))
        assert found is not None
        assert found.mtime == time
    assert b"<late>" not in place.everything()
    place.bench.close()


@pytest.mark.parametrize("kill", [False, True])
def test_what_was_written_with_the_clock_set_back_is_newer_all_the_same(tmp_path: Path, kill: bool) -> None:
    """Order is by numbers, never by time: of a file written before and after the clock was set back, and read
    from the log by a daemon that was killed, the later bytes are there; so is the later of two mounts'."""
    place = Place(tmp_path, 6)
    one, two = Stepped(place, "one"), Stepped(place, "two")
    one.client.open()
    two.client.open()
    root = one.client.volume.root_ino
    for number, step in enumerate((0, HOUR, -3 * HOUR, 2 * HOUR, -HOUR)):
        one.off = step
        one.client.put(root, b"f", b"<version %d>" % number, offset=0, truncate=True)
        one.client.put(root, b"log", b"%d." % number)
        if kill:
            one.client.kill()
            one.client.open()
        found = one.client.call(lambda v: v.lookup(root, b"f"))
        assert found is not None
        assert one.client.read_all(found.ino) == b"<version %d>" % number
        drain(one.client)
        two.client.feed()
        two.off = -step
        seen = two.client.call(lambda v: v.lookup(v.root_ino, b"f"))
        assert seen is not None
        assert two.client.read_all(seen.ino) == b"<version %d>" % number
        two.client.put(two.client.volume.root_ino, b"g", b"[%d]" % number, sync=True)
        one.client.feed()
    listed = one.client.call(lambda v: v.lookup(root, b"log"))
    assert listed is not None
    assert one.client.read_all(listed.ino) == b"0.1.2.3.4."
    assert b"[0][1][2][3][4]" in place.everything()
    place.bench.close()
