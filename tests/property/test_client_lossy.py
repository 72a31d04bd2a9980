"""The rough client test with a server that loses what uncommitted copies name (`support.lossy`): whatever
else happens, it ends, the next mount works, and everything that was not put aside is there."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from support.lossy import Lossy
from support.rough import small_limits

from fsd.vfs import recover
from fsd.vfs.drive import Driver


def run(directory: Path, seed: int, steps: int) -> int:
    """How much was put aside in a random day."""
    world = Lossy(directory, seed)

    def sleep(seconds: float) -> None:
        world.clock.seconds += seconds

    with pytest.MonkeyPatch.context() as patch, small_limits(world.small):
        patch.setattr(recover, "Driver", partial(Driver, sleep=sleep))
        try:
            for _ in range(steps):
                world.step()
            world.settle()
            world.look_again()
            world.kill()
            world.open()
            world.look_again()
        except BaseException:
            print(f"seed {seed} ({world.kind()}), after {len(world.done)} steps; the last:")
            print("\n".join(world.done[-40:]))
            raise
    world.close()
    return world.aside


def test_what_cannot_be_made_is_put_aside_and_all_else_goes_on(tmp_path: Path) -> None:
    assert sum(run(tmp_path / str(seed), seed, 60) for seed in range(30_024, 30_030)) > 0


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_what_cannot_be_made_is_put_aside_for_long(tmp_path: Path) -> None:
    assert sum(run(tmp_path / str(seed), seed, 150) for seed in range(30_000, 30_150)) > 50
