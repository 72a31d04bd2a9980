"""How long opening a volume may take: as long as something goes on."""

from __future__ import annotations

from pathlib import Path

import trio
import trio.testing

from fsd.kernel.opening import Limit


def run(within: float | None, *pauses: float) -> bool:
    """Whether work that tells of itself after each of `pauses` seconds was given up."""

    async def main() -> bool:
        limit = Limit(within)
        with limit.scope() as scope:
            for pause in pauses:
                await trio.sleep(pause)
                limit.went_on(f"after {pause:g}", 10.0)
        return scope.cancelled_caught

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_what_goes_on_may_take_as_long_as_it_takes() -> None:
    assert not run(10.0, 9, 9, 9, 9)
    assert run(10.0, 9, 9, 11, 9)
    assert run(10.0, 11, 9)


def test_a_longer_limit_is_not_made_shorter_by_what_goes_on() -> None:
    assert not run(60.0, 1, 50, 9)
    assert not run(None, 1, 1000, 9)


def test_what_is_told_says_what_went_on_last() -> None:
    async def main() -> list[str]:
        limit = Limit(10.0)
        first = limit.over(Path("/mnt"), 10.0)
        limit.went_on("3 operations of an earlier run to send", 10.0)
        return [first.message, limit.over(Path("/mnt"), 10.0).message]

    assert trio.run(main) == [
        "/mnt could not be mounted within 10 s",
        "/mnt could not be mounted: nothing went on for 10 s (3 operations of an earlier run to send)",
    ]
