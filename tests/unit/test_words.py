"""Counted things in messages."""

from __future__ import annotations

import pytest

from fsd.model.words import counted


@pytest.mark.parametrize(
    ("count", "noun", "verbs", "told"),
    [
        (0, "file", (), "0 files"),
        (1, "file", (), "1 file"),
        (2, "byte", (), "2 bytes"),
        (1, "entry", ("lies", "lie"), "1 entry lies"),
        (3, "entry", ("lies", "lie"), "3 entries lie"),
        (2, "directory", (), "2 directories"),
    ],
)
def test_one_and_more(count: int, noun: str, verbs: tuple[str, ...], told: str) -> None:
    assert counted(count, noun, *verbs) == told
