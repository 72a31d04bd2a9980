"""The bound of the design: at most 60 us of CPU an operation in a batch of 1,000 (measured: about 20)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.bench import Bench
from support.commit_cost import KINDS, cost

BOUND_US = 60.0


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Bench(tmp_path_factory.mktemp("cost")) as made:
        yield made


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_cost_of_an_operation(bench: Bench, kind: str) -> None:
    found = cost(bench, kind, 4)
    assert found <= BOUND_US, f"{kind}: {found:.1f} us an operation"
