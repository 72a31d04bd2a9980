"""Small parts of the direct commands' client: identity, addresses, copy targets, workers."""

from __future__ import annotations

import signal
import sys
import threading

import pytest
from support.wait import wait_for

from fsd.client.files import check_revision, join, json_name, raw_path, raw_target
from fsd.client.http import encode_json, encode_path, encode_query
from fsd.client.identity import Claim, Identity, admin_identity, check_endpoint, data_identity
from fsd.client.pool import Workers
from fsd.client.transfer import base_name, means_into, normal
from fsd.host.seam import Host
from fsd.model.errors import (
    FsdError,
    NotAuthenticated,
    PosixError,
    Unavailable,
    UnknownRegion,
    UsageError,
)
from fsd.model.token import make

TOKEN = make(
    Host(), "fs_aaaaaaaaaaaaaaaaaaaa", "tok", {"eu": "https://eu.example", "us": "https://us.example/base"}
).text()


def test_two_values_are_enough_and_an_endpoint_overrides() -> None:
    found = data_identity(Claim(token=f" {TOKEN}\n", region="us"))
    assert (found.endpoint, found.server.base, found.secret) == ("https://us.example/base", "/base", TOKEN)
    assert found.server[1:3] == ("us.example", 443) and found.file_system_id == "fs_aaaaaaaaaaaaaaaaaaaa"
    other = data_identity(Claim(token=TOKEN, region="nowhere", endpoint="http://127.0.0.1:81/"))
    assert other.endpoint == "http://127.0.0.1:81" and other.server[1:3] == ("127.0.0.1", 81)
    assert TOKEN not in repr(found) and TOKEN not in repr(Claim(token=TOKEN, admin_key="k"))


@pytest.mark.parametrize(
    ("claim", "error", "says"),
    [
        (Claim(), NotAuthenticated, "no filesystem token"),
        (Claim(token="x"), NotAuthenticated, "no fsd token"),
        (Claim(token=TOKEN[:-5]), NotAuthenticated, "truncated"),
        (Claim(token=TOKEN), UnknownRegion, "eu, us"),
        (Claim(token=TOKEN, region="mars"), UnknownRegion, "knows: eu, us"),
        (Claim(token=TOKEN, region="eu", file_system_id="fs_b"), NotAuthenticated, "not for fs_b"),
        (Claim(token=TOKEN, endpoint="http://fsd.example"), UsageError, "plain HTTP"),
    ],
)
def test_identities_that_are_none(claim: Claim, error: type[FsdError], says: str) -> None:
    with pytest.raises(error, match=says):
        data_identity(claim)


@pytest.mark.parametrize(
    ("claim", "error"),
    [
        (Claim(admin_key="k"), UsageError),
        (Claim(token=TOKEN), NotAuthenticated),
        (Claim(endpoint="https://x"), NotAuthenticated),
        (Claim(endpoint="https://x", admin_key=" \n"), NotAuthenticated),
        (Claim(endpoint="https://x", admin_key="a\nb"), NotAuthenticated),
    ],
)
def test_admin_needs_an_endpoint_and_a_key(claim: Claim, error: type[FsdError]) -> None:
    with pytest.raises(error):
        admin_identity(claim)
    assert admin_identity(Claim(endpoint="https://x", admin_key="key\n")).secret == "key"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "x",
        "ftp://x",
        "http://",
        "https://x:0",
        "https://x:99999",
        "https://u@x",
        "https://x?y",
        "https://x y",
    ],
)
def test_endpoints_that_are_none(url: str) -> None:
    with pytest.raises(UsageError):
        check_endpoint(url, insecure=True)


@pytest.mark.parametrize("url", ["http://localhost:1", "http://127.8.9.1", "http://[::1]:5", "https://x"])
def test_endpoints_a_secret_may_go_to(url: str) -> None:
    assert check_endpoint(url + "/", insecure=False) == url
    assert check_endpoint("http://10.0.0.1", insecure=True) == "http://10.0.0.1"


def test_addresses_hold_any_bytes() -> None:
    assert encode_path(b"//a b/\xff?#%") == "a%20b/%FF%3F%23%25"
    assert encode_query({"a": b"\xff&", "b": None, "c": 7, "d": "ü="}) == "?a=%FF%26&c=7&d=%C3%BC%3D"
    assert encode_query(()) == ""
    assert Identity("http://[::1]:8", "s").server[1:3] == ("::1", 8)


def test_json_bodies_are_strict() -> None:
    assert encode_json({"a": "ü"}) == '{"a":"ü"}'.encode()
    for bad in (float("nan"), "\ud800"):
        with pytest.raises(UsageError):
            encode_json({"a": bad})


def test_names_come_back_as_they_were() -> None:
    assert raw_path({"path": "/ü"}) == "/ü".encode()
    assert raw_path({"path": "/\ufffd", "path_b64": "L/8="}) == b"/\xff"
    assert json_name(b"\xff") == {"b64": "/w=="} and json_name(b"a") == "a"
    for broken in ({}, {"target": "x", "target_b64": "!"}):
        with pytest.raises(Unavailable):
            raw_target(broken)


@pytest.mark.parametrize("text", ["", "5", "5:", ":5", "a:b", "5:6:7"])
def test_revisions_that_are_none(text: str) -> None:
    with pytest.raises(UsageError):
        check_revision(text)
    assert check_revision(' "12:34" ') == "12:34"


def test_where_paths_lead() -> None:
    assert [means_into(p) for p in (b"/a/", b"/", b".", b"x/..", b"/a", b"a.")] == [True] * 4 + [False] * 2
    assert normal(b"//a/./b/") == b"/a/b" and normal(b"/") == b"/"
    assert join(b"/", b"a") == b"/a" and join(b"/a/", b"b") == b"/a/b"
    assert base_name(b"/a/b//", "it") == b"b"
    for call in (lambda: normal(b"a"), lambda: normal(b"/a/../b"), lambda: base_name(b"/", "it")):
        with pytest.raises(UsageError):
            call()
    with pytest.raises(PosixError):
        normal(b"/" + b"x" * 256)


def test_workers_do_everything_and_wait_for_it() -> None:
    done: list[int] = []
    with Workers(3) as workers:
        for at in range(50):
            workers.submit(lambda at=at: done.append(at))  # type: ignore[misc]
    assert sorted(done) == list(range(50))


def test_a_failed_job_ends_the_rest_and_is_raised() -> None:
    gate = threading.Event()

    def fail() -> None:
        gate.wait(60)
        raise Unavailable("gone")

    submitted: list[int] = []

    def use() -> None:
        with Workers(2) as workers:
            workers.submit(fail)
            gate.set()
            for at in range(100_000):
                workers.submit(lambda: None)
                submitted.append(at)

    with pytest.raises(Unavailable):
        use()
    assert len(submitted) < 100_000


def test_leaving_by_an_exception_drops_what_has_not_begun() -> None:
    running, done = threading.Event(), []

    def leave() -> None:
        with Workers(1) as workers:

            def job() -> None:
                running.set()
                assert workers.stopping.wait(60)
                done.append(1)

            workers.submit(job)
            workers.submit(lambda: done.append(2))
            assert running.wait(60)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        leave()
    assert done == [1], "what ran was waited for, what waited was dropped"


def test_an_interruption_while_it_waits_ends_what_runs() -> None:
    """^C mostly comes when all is submitted: what goes on in the background would not be in the record of a
    push, and would meet itself as somebody else's in the next one."""
    main, done = threading.main_thread().ident, []
    assert main == threading.get_ident()

    def waits() -> bool:
        frame = sys._current_frames()[main]
        while frame.f_back is not None and frame.f_code is not Workers.__exit__.__code__:
            frame = frame.f_back
        return frame.f_code is Workers.__exit__.__code__

    def leave() -> None:
        with Workers(1) as workers:

            def job() -> None:
                wait_for(waits, 60, "the end of the block")
                signal.raise_signal(signal.SIGINT)
                assert workers.stopping.wait(60)
                done.append(1)

            workers.submit(job)
            workers.submit(lambda: done.append(2))

    with pytest.raises(KeyboardInterrupt):
        leave()
    assert done == [1], "what ran was waited for, what waited was dropped"


def test_a_job_that_does_not_end_keeps_nobody_after_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsd.client.pool.POLL", 0.001)
    monkeypatch.setattr("fsd.client.pool.LAST", 0.01)
    running, gate = threading.Event(), threading.Event()

    def leave() -> None:
        with Workers(1) as workers:
            workers.submit(lambda: (running.set(), gate.wait(60))[0])
            assert running.wait(60)
            raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            leave()
        assert any(one.name == "copy-0" for one in threading.enumerate()), "it was not waited for"
    finally:
        gate.set()
