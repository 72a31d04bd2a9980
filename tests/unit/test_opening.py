"""How long opening a volume may take: as long as something goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.clock import MadeUp

from fsd.kernel import tasks
from fsd.kernel.opening import Limit
from fsd.model.errors import Unavailable


def run(within: float | None, *pauses: float) -> bool:
    """Whether work that tells of itself after each of `pauses` seconds was given up."""

    async def main() -> bool:
        limit = Limit(within)

        async def work() -> None:
            for pause in pauses:
                await tasks.sleep(pause)
                limit.went_on(f"after {pause:g}", 10.0)

        return not await limit.covers(work)

    return tasks.run(main, clock=MadeUp())


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

    assert tasks.run(main) == [
        "/mnt could not be mounted within 10 s",
        "/mnt could not be mounted: nothing went on for 10 s (3 operations of an earlier run to send)",
    ]


def test_the_time_in_which_the_process_did_not_run_is_left_out() -> None:
    clock = MadeUp()

    async def work() -> None:
        await tasks.sleep(4)
        clock.jump(3600)  # stopped meanwhile
        await tasks.sleep(4)

    async def main() -> tuple[bool, bool, bool]:
        begun = tasks.current_time()
        enough = await Limit(11).covers(work)
        assert tasks.current_time() - begun == 3608
        waiting = Limit(11)
        clock.jump(3600)
        return enough, await Limit(5).covers(work), await waiting.pause(8)

    assert tasks.run(main, clock=clock) == (True, False, True)


def test_no_pause_goes_beyond_the_limit() -> None:
    async def main() -> tuple[list[bool], float]:
        begun, limit = tasks.current_time(), Limit(2.5)
        return [await limit.pause(1) for _ in range(4)], tasks.current_time() - begun

    assert tasks.run(main, clock=MadeUp()) == (
        [True, True, False, False],
        2,
    )


def test_what_the_work_raises_is_raised_as_it_is() -> None:
    async def work() -> None:
        await tasks.sleep(1)
        raise Unavailable("no server")

    async def main() -> None:
        with pytest.raises(Unavailable, match="no server"):
            await Limit(10).covers(work)

    tasks.run(main, clock=MadeUp())
