"""Packing with a packer that is kept: as msgpack's own, also after a failure, and in every thread."""

from __future__ import annotations

import threading

import msgpack
import pytest

from fsd.model import packing
from fsd.model.limits import KIB, MIB

VALUES = [(), (1, b"name", None, True, "text", -(1 << 40)), [b"x" * KIB, {b"k": (1, 2)}], bytes(MIB)]


def test_what_is_packed_is_what_msgpack_packs() -> None:
    for value in VALUES * 2:
        assert packing.packb(value) == msgpack.packb(value, use_bin_type=True)


def test_nothing_of_a_failure_stays_behind() -> None:
    with pytest.raises(TypeError):
        packing.packb((1, b"begun", object()))
    with pytest.raises(OverflowError):
        packing.packb((1, 1 << 70))
    assert packing.packb((1, b"x")) == msgpack.packb((1, b"x"), use_bin_type=True)


def test_a_large_value_does_not_leave_its_buffer_behind() -> None:
    before = packing._packer.pack
    packing.packb(bytes(KIB))
    assert packing._packer.pack == before
    packing.packb(bytes(MIB))
    assert packing._packer.pack != before


def test_each_thread_has_its_own() -> None:
    wrong: list[bytes] = []

    def work(seed: int) -> None:
        for at in range(300):
            value = [seed, at, b"%d" % seed * (at + 1)] * 20
            raw = packing.packb(value)
            if raw != msgpack.packb(value, use_bin_type=True):
                wrong.append(raw)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
