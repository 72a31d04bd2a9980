"""Many digests at once are those of each alone, whatever their lengths and addresses and however many."""

from __future__ import annotations

import hashlib
import random
import sys
import threading
from types import SimpleNamespace

import pytest

from fsd.model.errors import IntegrityError
from fsd.wire import sha
from fsd.wire.frame import Blob, make_blob, open_all, verify

BODY = random.Random(256).randbytes(300_000)


def each(messages: sha.Messages) -> list[bytes]:
    return [hashlib.sha256(one).digest() for one in messages]


@pytest.fixture
def many() -> object:
    from fsd.wire import _sha256  # not built here is a failure: scripts/setup builds it

    assert _sha256.FAST, "not taken for a processor that can"
    return _sha256.many


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 16, 19, 64])
@pytest.mark.sha_ni
def test_every_length_around_blocks(many: object, count: int) -> None:
    assert callable(many)
    for length in [*range(0, 260, 1 if count < 10 else 13), 4096, 70_001]:
        messages = [memoryview(BODY)[at * 7 : at * 7 + length] for at in range(count)]
        assert many(messages) == each(messages), length


@pytest.mark.sha_ni
def test_known_values(many: object) -> None:
    assert callable(many)
    abc, empty = (hashlib.sha256(one).digest() for one in (b"abc", b""))
    assert abc.hex() == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert many([b"abc"] * 9) == [abc] * 9 and many([b"", bytearray()]) == [empty, empty]


@pytest.mark.sha_ni
def test_each_bit_of_each_message_counts(many: object) -> None:
    assert callable(many)
    for lane in range(8):
        messages = [bytearray(BODY[:4096]) for _ in range(8)]
        for bit in range(0, 4096 * 8, 1021):
            messages[lane][bit // 8] ^= 1 << bit % 8
            assert many(messages) == each(messages), (lane, bit)


@pytest.mark.sha_ni
def test_what_it_does_not_take(many: object) -> None:
    assert callable(many)
    for wrong in ([], [b"x"] * 65, [b"x", b"yz"]):
        with pytest.raises(ValueError, match="messages"):
            many(wrong)
    with pytest.raises(TypeError):
        many([b"x", "y"])
    with pytest.raises(TypeError):
        many(5)


def test_messages_of_all_lengths_keep_their_order() -> None:
    rng = random.Random(3)
    for _ in range(50):
        lengths = [rng.choice([0, 1, 100, 5000, 5000, 5000, 65_536]) for _ in range(rng.randrange(40))]
        messages = [BODY[at : at + length] for at, length in enumerate(lengths)]
        assert sha.sha256_all(messages) == each(messages), lengths


def test_several_threads() -> None:
    messages = [BODY[at : at + 200_000] for at in range(8)]
    found: list[list[bytes]] = []
    threads = [threading.Thread(target=lambda: found.append(sha.sha256_all(messages))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [each(messages)] * 6


@pytest.mark.parametrize("wrong", [0, 3, 8, 11])
def test_one_blob_of_many_that_is_not_what_it_is_named_by(wrong: int) -> None:
    """Those before it in its group are not given, those of earlier groups are."""
    raw = [BODY[at : at + 10_000] for at in range(11)] + [b"\0" * 9000]
    blobs = [make_blob(one) for one in raw]
    assert list(open_all(blobs)) == raw
    verify(blobs)
    blobs[wrong] = Blob(bytes(32), *blobs[wrong][1:])
    with pytest.raises(IntegrityError, match="do not match"):
        verify(blobs)
    got: list[bytes] = []
    with pytest.raises(IntegrityError, match="do not match"):
        got.extend(open_all(blobs))
    assert got == raw[: wrong // sha.AT_ONCE * sha.AT_ONCE]


def test_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sha, "_many", None)
    messages = [BODY[at : at + 9000] for at in range(20)]
    assert sha.sha256_all(messages) == each(messages) and sha.sha256_all([]) == []


@pytest.mark.parametrize("wrong", [(8, 0), (2, 119), (1, 316)])
def test_a_processor_on_which_it_is_wrong_does_without(
    wrong: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight, two and the last alone: whichever fails, at whichever length."""

    def many(messages: sha.Messages) -> list[bytes]:
        digests = each(messages)
        assert len(messages) == 11
        if len(messages[0]) == wrong[1]:
            digests[-wrong[0]] = bytes(32)
        return digests

    built = SimpleNamespace(FAST=True, many=many)
    monkeypatch.setitem(sys.modules, "fsd.wire._sha256", built)
    monkeypatch.setattr("fsd.wire._sha256", built, raising=False)
    assert sha._best() is None
    built.many = each
    assert sha._best() is each
