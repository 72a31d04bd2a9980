"""The random client test with more going wrong (`support.rough`): a full disk, a small buffer, ends of the
process at crash points, swept blobs, tiny limits. What it found is told in
`tests/fault/test_client_cases.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.rough import Rough, small_limits


def run(directory: Path, seed: int, steps: int = 170) -> Rough:
    """`steps` random steps; the tree as programs see it is compared now and then, the server's at the end."""
    world = Rough(directory, seed)
    with small_limits(world.small):
        try:
            for at in range(steps):
                world.step()
                if at % 25 == 24:
                    world.undisturbed(world.check_local)
            world.settle()
            world.until(world.volume.barrier())
            world.check_server()
            world.check_local()
            world.check_nothing_is_left()
        except BaseException:
            print(f"seed {seed} ({world.kind()}), after {len(world.done)} steps; the last:")
            print("\n".join(world.done[-40:]))
            raise
    world.close()
    return world


def test_nothing_is_lost_when_more_goes_wrong(tmp_path: Path) -> None:
    died = failed = 0
    for seed in range(30):
        world = run(tmp_path / str(seed), seed, 120)
        died, failed = died + world.crashed, failed + world.failed
    assert died > 10, "no process ended at a crash point"
    assert failed > 10, "no append failed"


def test_a_copy_that_is_not_committed_keeps_its_blob_through_a_sweep(tmp_path: Path) -> None:
    """Its source was overwritten and committed; the sweep takes nothing the mount asks to keep."""
    run(tmp_path, 20_035, 200)


def test_zeros_over_the_end_of_a_file_are_all_or_nothing(tmp_path: Path) -> None:
    """The disk is full between the two records of it."""
    run(tmp_path, 10_001, 250)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_nothing_is_lost_when_more_goes_wrong_for_long(tmp_path: Path) -> None:
    for seed in range(10_000, 10_600):
        run(tmp_path / str(seed), seed, 250)
