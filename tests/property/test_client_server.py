"""Random operations, cuts and crashes through client state machine and commit service, no kernel.

After each step that promises something the server's tree (or what programs see) equals a model of what was
acknowledged. The seed of a failing run is in its name; the last steps are printed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.world import World


def run(directory: Path, seed: int, steps: int, every: int) -> World:
    """`steps` random steps; the tree as programs see it is compared after each `every`-th, the server's at
    each fsync, barrier and crash, and at the end."""
    world = World(directory, seed)
    try:
        for at in range(steps):
            world.step()
            if at % every == every - 1:
                world.check_local()
        world.net.faulty, world.net.cut = False, 0
        world.until(world.volume.barrier())
        world.check_server()
        world.check_local()
        assert world.volume.pending().clean
    except BaseException:
        print(f"seed {seed}, after {len(world.done)} steps; the last:")
        print("\n".join(world.done[-25:]))
        raise
    assert world.volume.core.conflicts == 0, "one mount alone has no conflicts"
    world.close()
    return world


@pytest.mark.parametrize("seed", range(6))
def test_the_tree_equals_the_model(tmp_path: Path, seed: int) -> None:
    world = run(tmp_path, seed, 170, 10)
    assert world.remote.calls.count("commit") > 5, "nothing was committed"


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(1000, 1020))
def test_the_tree_equals_the_model_for_long(tmp_path: Path, seed: int) -> None:
    world = run(tmp_path, seed, 500, 1)
    assert world.recoveries > 0, "no recovery had anything to do"
