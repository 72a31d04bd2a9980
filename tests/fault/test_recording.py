"""The recorder's model equals a real directory, and its checks catch what they are for."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from support.recording import History, Recording, Value, read_tree


@pytest.mark.parametrize("profile", ["plain", "sync", "map"])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_model_equals_a_real_directory(tmp_path: Path, profile: str, seed: int) -> None:
    recording = Recording(tmp_path, seed, profile, steps=150)
    recording.wait_end()
    assert recording.failed is None
    history = recording.history()
    found = read_tree(tmp_path)
    assert history.acked >= 200 and len(found) > 10
    history.check_exact(found)
    history.check_synced(found)
    history.check_up_to(found, history.acked)


def test_a_killed_recorder_leaves_its_last_state_or_the_next(tmp_path: Path) -> None:
    recording = Recording(tmp_path, 5, "sync")
    recording.wait_acked(250)
    recording.stop()
    recording.history().check_exact(read_tree(tmp_path))


def test_the_checks_catch_loss_tears_and_additions(tmp_path: Path) -> None:
    recording = Recording(tmp_path, 7, "sync", steps=120)
    recording.wait_end()
    history = recording.history()
    good = read_tree(tmp_path)
    numbers = history._nodes[-1]
    synced = [p for p in good if good[p].kind == "f" and numbers[p] in history.synced]
    assert synced
    older = 0
    for path in synced:
        start = history.synced[numbers[path]]
        before = [content for at, content, _ in history._contents[numbers[path]] if at < start]
        may = history._held(path, history.synced_names, history.synced)
        torn = hashlib.sha256(b"torn").hexdigest()
        bad = [
            {**good, path: Value("f", good[path].mode, torn)},
            {p: v for p, v in good.items() if p != path},
        ]
        bad += [{**good, path: Value("f", good[path].mode, c)} for c in before if c not in may]
        older += len(bad) - 2
        for tree in bad:
            with pytest.raises(AssertionError):
                history.check_synced(tree)
    assert older
    with pytest.raises(AssertionError):
        history.check_exact({**good, "more": Value("d", 0o755, "")})
    with pytest.raises(AssertionError):
        history.check_synced({**good, "more": Value("d", 0o755, "")})


def test_an_emptied_file_must_not_be_seen_before_its_rewrite_is_closed(tmp_path: Path) -> None:
    recording = Recording(tmp_path, 11, "sync", steps=300)
    recording.wait_end()
    history = recording.history()
    last, checked = history.states[-1], 0
    for path, number in history._nodes[-1].items():
        # Made durable when it held something, emptied and rewritten later.
        made = history.synced.get(number, 0)
        rows = history._contents[number]
        ends = [row[0] for row in rows[1:]] + [len(history.states)]
        shown = {content for (_, content, hidden), end in zip(rows, ends) if not hidden and end > made}
        for time, content, hidden in history._contents[number]:
            if hidden and made and time > made and content not in shown:
                history.check_since(last, 0, history.synced)
                emptied = {**last, path: last[path]._replace(content=content)}
                with pytest.raises(AssertionError):
                    history.check_since(emptied, 0, history.synced)
                checked += 1
    assert checked


def test_pages_of_a_killed_write_are_no_tear(tmp_path: Path) -> None:
    """The last call of this recording is a write that never returned; some pages of it are there."""
    recording = Recording(tmp_path, 3, "plain", steps=120)
    recording.wait_end()
    calls = recording.calls
    checked = 0
    for at, call in enumerate(calls):
        if call["op"] != "write" or call["size"] < 30_000:
            continue
        history = History(3, calls[: at + 1], at)
        before, after = history.states[at], history.states[at + 1]
        (path,) = (p for p in after if after[p] != before[p]) if before != after else ("",)
        for content in history._partly[history._nodes[at][path]]:
            history.check_exact({**before, path: before[path]._replace(content=content)})
            checked += 1
    assert checked


def test_a_commit_may_come_between_the_two_requests_of_one_write(tmp_path: Path) -> None:
    """A write that begins inside a page was under way when a flush took what was there: its first half is no
    tear, its first half and a byte are one. Nor is it one where a file that was emptied is to stay unseen."""
    recording = Recording(tmp_path, 11, "plain", steps=400)
    recording.wait_end()
    history = recording.history()
    checked = 0
    for path, number in history._nodes[-1].items():
        for time, content, hidden in history._split.get(number, ()):
            named = history._nodes[time - 1].get(path) == number
            if hidden or not named or history._nodes[-1][path] == history.mapped:
                continue
            state = history.states[time - 1]
            history.check_up_to({**state, path: state[path]._replace(content=content)}, time - 1)
            with pytest.raises(AssertionError):
                history.check_up_to({**state, path: state[path]._replace(content="torn")}, time - 1)
            checked += 1
    assert checked
