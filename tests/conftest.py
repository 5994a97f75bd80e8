"""Options and profiles that all tests share."""

from __future__ import annotations

import math
import os
import signal
import zlib
from collections import defaultdict
from collections.abc import Iterator

import hypothesis
import pytest

# In a shell's background, or under nohup, these are ignored: commands that tests start would, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

os.environ["ONNXPAR_MEASURE"] = "0"  # costs do not depend on the machine; commands inherit this

FRACTION = 20
"""Of as many cases of a matrix one runs by default."""

hypothesis.settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(scope="module", params=["shared-memory", "gloo"])
def medium(request: pytest.FixtureRequest) -> Iterator[str]:
    """What carries the messages of worlds that tests and their child processes make."""
    before = os.environ.get("ONNXPAR_TRANSPORT")
    os.environ["ONNXPAR_TRANSPORT"] = request.param
    yield request.param
    if before is None:
        del os.environ["ONNXPAR_TRANSPORT"]
    else:
        os.environ["ONNXPAR_TRANSPORT"] = before


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write tests/golden anew; review the difference by eye",
    )
    parser.addoption(
        "--write-gradients",
        action="store_true",
        help="write onnxpar/grad/proof.json: how many tests of tests/grad asked each op's gradient",
    )
    parser.addoption(
        "--random-graphs",
        type=int,
        default=240,
        metavar="N",
        help="random graphs to shard and compare",
    )
    parser.addoption(
        "--frames",
        type=int,
        default=200,
        metavar="N",
        help="damaged frames that each test of the control channel sends (1000: two minutes)",
    )
    parser.addoption(
        "--horovod",
        action="store_true",
        help="read Horovod's signatures from its source on the package index",
    )
    parser.addoption(
        "--zoo",
        action="store_true",
        help="all models at every preset, number of ranks, batch and open size, and all cases of "
        "tests that are marked as a matrix or slow (hours)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Unless all are wanted, leaves one case in FRACTION of each test that is marked as a matrix,
    and no test that is marked as slow."""
    if config.getoption("zoo"):
        return
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("matrix"):
            cases[item.nodeid.partition("[")[0]].append(item)
    left_out = {item for item in items if item.get_closest_marker("slow")}
    for of_test in cases.values():  # by checksum, because neighbours have parameters in common
        by_checksum = sorted(of_test, key=lambda item: zlib.crc32(item.nodeid.encode()))
        left_out.update(by_checksum[math.ceil(len(of_test) / FRACTION) :])
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))
