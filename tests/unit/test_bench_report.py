"""The report of scripts/bench: medians, ratios, verdicts and the picture of results that are known."""

from __future__ import annotations

import xml.etree.ElementTree as Xml
from pathlib import Path

import pytest
from bench import measure, peers, picture, report, special, wanted
from bench.results import Results
from bench.targets import FLOOR, FSD, JUICE, Target, Verdict, verdicts


@pytest.fixture
def results() -> Results:
    made = Results("0123456789ab", 3, {"when": "then", "cores": 2, "kernel": "k", "python": "p"})
    made.machine["caches_dropped"] = True
    for peer, values in {FLOOR: (1.0, 2.0, 3.0), JUICE: (10.0, 8.0, 9.0), FSD: (1.5, 2.5, 2.0)}.items():
        for value in values:
            made.put(peer, "untar until durable, s", value)
    made.put(FSD, "SQLite FULL, tx/s", 100.0)
    made.put(JUICE, "SQLite FULL, tx/s", 60.0)
    made.failed("juicefs, Redis", "start", RuntimeError("no such\nprogram"))
    return made


def words(results: Results) -> dict[tuple[str, str, float], str]:
    return {(v.target.figure, v.target.other, v.target.factor): v.word for v in verdicts(results)}


def test_medians_spread_and_what_was_promised(results: Results) -> None:
    assert results.median(FSD, "untar until durable, s") == 2.0
    assert results.spread(FLOOR, "untar until durable, s") == 0.5
    found = words(results)
    assert found["untar until durable, s", FLOOR, 2] == "met"
    assert found["untar until durable, s", JUICE, 1 / 5] == "MISSED"
    assert found["SQLite FULL, tx/s", JUICE, 2] == "MISSED"
    assert found["git clone, s", JUICE, 1 / 3] == "not measured"


def test_a_rate_is_met_from_above() -> None:
    target = Target("rate", JUICE, 1, rate=True)
    assert Verdict(target, 5.0, 4.0).word == "met"
    assert Verdict(target, 3.0, 4.0).word == "MISSED"


def test_the_text_names_every_failure_and_ratio(results: Results) -> None:
    text = report.text(results)
    assert "FAILED       juicefs, Redis: start: RuntimeError: no such program" in text
    line = next(line for line in text.splitlines() if line.startswith("untar until durable"))
    assert "1.00x" in line
    assert "0.22x" in line


def test_what_is_saved_is_read_again_the_same(results: Results, tmp_path: Path) -> None:
    saved = report.save(results, tmp_path)
    assert {path.suffix for path in saved} == {".json", ".txt", ".svg"}
    again = Results.load(tmp_path / "0123456789ab.json")
    assert report.text(again) == report.text(results)
    (tmp_path / "new.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="format 99"):
        Results.load(tmp_path / "new.json")


def test_the_picture_is_a_picture(results: Results) -> None:
    root = Xml.fromstring(picture.draw(results))
    assert root.tag.endswith("svg")
    shown = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert "untar until durable, s" in shown
    assert "SQLite FULL, tx/s" in shown


def test_the_options_name_what_there_is() -> None:
    assert tuple(measure.GROUPS) == wanted.GROUPS
    assert tuple(special.SPECIAL) == wanted.SPECIAL
    made = (peers.Local, peers.Passthrough, peers.JuiceFs, peers.JuiceFsRedis, peers.Fsd)
    assert {peer.name.split(",")[0] for peer in made} == set(wanted.PEERS)
    assert wanted.arguments(["--only", "fsd,ext4", "--groups", "git,many"]).only == ["fsd", "ext4"]
