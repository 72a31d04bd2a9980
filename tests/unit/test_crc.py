"""The log's CRC-32 is zlib's, whatever the length, the address and what came before."""

from __future__ import annotations

import random
import threading
import zlib

import pytest

from fsd.host import crc

BODY = random.Random(32).randbytes(200_000)


def test_known_values() -> None:
    assert crc.crc32(b"") == 0
    assert crc.crc32(b"123456789") == 0xCBF43926  # the polynomial's check value


@pytest.mark.parametrize("at", [0, 1, 7, 8, 15, 16, 33])
def test_every_length_up_to_some_registers(at: int) -> None:
    for length in range(300):
        data = memoryview(BODY)[at : at + length]
        assert crc.crc32(data) == zlib.crc32(data), length


def test_any_length_behind_anything() -> None:
    rng = random.Random(7)
    for _ in range(300):
        low, high = sorted((rng.randrange(len(BODY)), rng.randrange(len(BODY))))
        before = rng.choice([0, 1, 0xFFFFFFFF, rng.getrandbits(32)])
        data = memoryview(BODY)[low:high]
        assert crc.crc32(data, before) == zlib.crc32(data, before), (low, high, before)


def test_piece_by_piece() -> None:
    rng = random.Random(8)
    at = value = 0
    while at < len(BODY):
        length = rng.randrange(1, 5000)
        value = crc.crc32(BODY[at : at + length], value)
        at += length
    assert value == zlib.crc32(BODY)


def test_each_bit_of_a_record_counts() -> None:
    data = bytearray(BODY[:4096])
    right = crc.crc32(bytes(data))
    for bit in range(0, len(data) * 8, 37):
        data[bit // 8] ^= 1 << bit % 8
        assert crc.crc32(bytes(data)) != right, bit
        data[bit // 8] ^= 1 << bit % 8
    assert crc.crc32(bytes(data)) == right


def test_several_threads() -> None:
    wanted = zlib.crc32(BODY)
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(crc.crc32(BODY))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [wanted] * 8


def test_what_is_no_bytes_is_refused() -> None:
    with pytest.raises(TypeError):
        crc.crc32("text")  # type: ignore[arg-type]


@pytest.mark.x86_64
def test_the_extension_was_built() -> None:
    """It is optional elsewhere; here `scripts/setup` builds it, and without it writing would be slower."""
    from fsd.host import _crc32

    assert not _crc32.FAST or crc.crc32 is _crc32.crc32
