"""Large blobs are received where they stay: whatever the answer is like, and however it arrives."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable

import pytest
from support.badserver import Peer, reply, serving

from fsd.host.seam import Host
from fsd.model.errors import IntegrityError, Unavailable
from fsd.model.limits import BLOCK, KIB
from fsd.model.token import make
from fsd.remote.hot import HttpRemote, RemoteOptions
from fsd.wire.frame import PIECE_LEAST, Blob, make_blob, open_blob, pack, pack_pieces

LARGE = [make_blob(os.urandom(size)) for size in (BLOCK, BLOCK - 1, PIECE_LEAST)]
MIXED = [*LARGE, make_blob(b"small")]
SMALL = [make_blob(os.urandom(8 * KIB)) for _ in range(40)]
LITTLE = [make_blob(b"one"), make_blob(b"two")]
ENOUGH = 20.0


def remote_to(url: str) -> HttpRemote:
    return HttpRemote(
        RemoteOptions(url, make(Host(), "fs_aaaaaaaaaaaaaaaaaaaa", "tok", {"local": url})), Host()
    )


def asked(url: str, blobs: list[Blob], timeout: float = 30) -> list[Blob]:
    found, absent = remote_to(url).blobs([blob.hash for blob in blobs], timeout)
    assert not absent and len(found) == len(blobs)
    return found


def answering(act: Callable[[Peer, bytes], None], blobs: list[Blob]) -> Callable[[Peer], None]:
    def behave(peer: Peer) -> None:
        while peer.request() is not None:
            act(peer, reply(pack({"absent": []}, blobs)))

    return behave


def in_pieces(seed: int) -> Callable[[Peer, bytes], None]:
    def act(peer: Peer, answer: bytes) -> None:
        rng = random.Random(seed)
        at = 0
        while at < len(answer):
            size = rng.choice((1, 7, 300, 5000, 70_000, 900_000))
            peer.sock.sendall(answer[at : at + size])
            at += size
            if rng.random() < 0.2:
                peer.stop.wait(0.002)

    return act


@pytest.mark.parametrize("blobs", [LARGE, MIXED, SMALL, LITTLE], ids=["large", "mixed", "small", "little"])
@pytest.mark.parametrize("seed", range(4))
def test_however_it_arrives_it_is_what_was_sent(blobs: list[Blob], seed: int) -> None:
    with serving(answering(in_pieces(seed), blobs)) as url:
        remote = remote_to(url)
        for _ in range(2):  # the connection is kept
            found, absent = remote.blobs([blob.hash for blob in blobs], 30)
            assert [open_blob(one) for one in found] == [open_blob(one) for one in blobs] and not absent


def test_a_large_blob_is_handed_on_as_it_was_received() -> None:
    with serving(answering(lambda peer, answer: peer.sock.sendall(answer), LARGE)) as url:
        for one in asked(url, LARGE):
            assert type(one.stored) is bytes and open_blob(one) is one.stored


def test_an_answer_with_wrong_bytes_is_found_out() -> None:
    def act(peer: Peer, answer: bytes) -> None:
        peer.sock.sendall(answer[:-1] + bytes([answer[-1] ^ 1]))

    with serving(answering(act, LARGE)) as url:
        *whole, last = asked(url, LARGE)
        assert [open_blob(one) for one in whole] == [one.stored for one in LARGE[:-1]]
        with pytest.raises(IntegrityError):
            open_blob(last)


@pytest.mark.parametrize("kept", [0, 6, 8, 60, 400, BLOCK, 2 * BLOCK])
def test_an_answer_that_is_cut_is_unavailable(kept: int) -> None:
    def act(peer: Peer, answer: bytes) -> None:
        head = answer.index(b"\r\n\r\n") + 4
        peer.sock.sendall(answer[: head + kept])
        peer.reset() if kept % 4 else peer.sock.close()

    with serving(answering(act, LARGE)) as url, pytest.raises(Unavailable):
        asked(url, LARGE)


def table(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Peer, bytes], None]:
    """The frame's pieces changed, under the length they have then."""

    def act(peer: Peer, _: bytes) -> None:
        peer.sock.sendall(reply(b"".join(change([bytes(one) for one in pack_pieces({"absent": []}, LARGE)]))))

    return act


@pytest.mark.parametrize(
    "change",
    [
        lambda pieces: [*pieces, b"more"],
        lambda pieces: pieces[:-1],
        lambda pieces: [b"FSD2" + pieces[0][4:], *pieces[1:]],
        lambda pieces: [pieces[0][:4] + b"\xff" * 4 + pieces[0][8:], *pieces[1:]],
        lambda pieces: [pieces[0][:8] + b"\xc1" + pieces[0][9:], *pieces[1:]],
        lambda pieces: [bytes(BLOCK)],
    ],
    ids=["more", "less", "no frame", "a long header", "a damaged header", "zeros"],
)
def test_a_table_that_says_something_else_is_no_answer(
    change: Callable[[list[bytes]], list[bytes]],
) -> None:
    with serving(answering(table(change), LARGE)) as url:
        remote = remote_to(url)
        for _ in range(2):  # on a new connection each time
            with pytest.raises(Unavailable, match="no answer"):
                remote.blobs([blob.hash for blob in LARGE], 30)


def test_who_drips_or_stops_is_given_up_in_time() -> None:
    def act(peer: Peer, answer: bytes) -> None:
        peer.sock.sendall(answer[: 2 * BLOCK])
        for at in range(2 * BLOCK, len(answer)):
            if peer.stop.wait(0.05):
                return
            peer.sock.sendall(answer[at : at + 1])

    with serving(answering(act, LARGE)) as url:
        before = time.monotonic()
        with pytest.raises(Unavailable, match="within 1"):
            asked(url, LARGE, timeout=1)
        assert time.monotonic() - before < ENOUGH


def test_close_ends_it() -> None:
    there = threading.Event()

    def act(peer: Peer, answer: bytes) -> None:
        peer.sock.sendall(answer[:BLOCK])
        there.set()
        peer.hang()

    with serving(answering(act, LARGE)) as url:
        remote = remote_to(url)
        ended: list[BaseException] = []

        def ask() -> None:
            try:
                remote.blobs([blob.hash for blob in LARGE], 60)
            except Unavailable as exc:
                ended.append(exc)

        thread = threading.Thread(target=ask)
        thread.start()
        assert there.wait(ENOUGH)
        remote.close()
        thread.join(ENOUGH)
        assert len(ended) == 1
