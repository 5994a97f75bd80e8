from collections.abc import Callable, Iterator

import pytest

from onnxpar.runtime.ranks.groups import World, thread_worlds


@pytest.fixture(scope="module", autouse=True)
def every_medium(medium: str) -> None:
    """All tests of the plugin run over each."""


@pytest.fixture
def frames(request: pytest.FixtureRequest) -> int:
    """How many damaged frames a test sends."""
    return int(request.config.getoption("--frames"))


@pytest.fixture(scope="module")
def worlds_of(medium: str) -> Iterator[Callable[[int], list[World]]]:
    """The ranks of a world of n threads, shared by the tests of a module that leave it intact."""
    made: dict[int, list[World]] = {}

    def worlds(n: int) -> list[World]:
        if n not in made:
            made[n] = thread_worlds(n, timeout=30)
        return made[n]

    yield worlds
    for ranks in made.values():
        for world in ranks:
            world.close()


@pytest.fixture
def fresh_worlds() -> Iterator[Callable[..., list[World]]]:
    """New worlds for a test that makes them fail."""
    made: list[World] = []

    def worlds(n: int, timeout: float = 30) -> list[World]:
        ranks = thread_worlds(n, timeout=timeout)
        made.extend(ranks)
        return ranks

    yield worlds
    for world in made:
        world.close()
