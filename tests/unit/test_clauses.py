"""`tests/CLAUSES.md` names tests that exist, for every section of the checkpoint contract."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SECTIONS = {*range(2, 15), 16, 17, 18, 20, 22}


def test_each_clause_has_tests_that_are_there() -> None:
    there = {
        name
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    rows = re.findall(
        r"^\| (\d+)[^|]*\| .+ \| (`test_.+`) \|$", (TESTS / "CLAUSES.md").read_text(), re.MULTILINE
    )
    named = {name for _, tests in rows for name in re.findall(r"`(\w+)`", tests)}
    assert len(named) > 50
    assert named <= there, f"no such tests: {sorted(named - there)}"
    assert {int(section) for section, _ in rows} == SECTIONS
