"""What is taken for a change's privileges where the request itself was not seen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fsd.kernel import requests


@pytest.mark.parametrize(
    ("last", "kills", "from_pages"),
    [
        ((16, requests.KILLS, 5, 6), True, False),
        ((16, requests.FROM_PAGES, 5, 6), False, True),
        ((16, 0, 5, 6), False, False),
        ((0, 0, 0, 0), True, False),
    ],
)
def test_bits_are_rather_taken_away_than_left(
    monkeypatch: pytest.MonkeyPatch, last: tuple[int, int, int, int], kills: bool, from_pages: bool
) -> None:
    monkeypatch.setattr(requests, "_extension", SimpleNamespace(last=lambda: last))
    assert requests.newest() == (kills, from_pages, *last[2:], None)


@pytest.mark.parametrize(
    ("bits", "appends"), [(requests.APPENDS, True), (requests.PLACED, False), (requests.KILLS, None)]
)
def test_an_older_extension_does_not_tell_whether_a_handle_appends(
    monkeypatch: pytest.MonkeyPatch, bits: int, appends: bool | None
) -> None:
    monkeypatch.setattr(requests, "_extension", SimpleNamespace(last=lambda: (16, bits, 5, 6)))
    assert requests.newest().appends is appends
