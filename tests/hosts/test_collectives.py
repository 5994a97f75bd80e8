"""Collectives between hosts: shared memory inside each, TCP connections between them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from hosts.collective_rank import results
from hosts.hosts import Hosts, why_not
from hosts.link import Network, Quality
from hosts.ranks import finish, start
from native.ranks import on_ranks

from onnxpar.runtime.ranks.groups import thread_worlds


@pytest.fixture(scope="module", autouse=True)
def allowed() -> None:
    if why_not():
        pytest.skip(why_not())


def said(
    counts: Sequence[int], killed: str = "none", connections: int = 1, slow: bool = False
) -> list[list[Any]]:
    """What each rank prints, with so many ranks on each host."""
    settings = {"ONNXPAR_CONNECTIONS": str(connections)}
    with ExitStack() as exits:
        hosts = exits.enter_context(Hosts(len(counts)))
        addresses = [host.address for host in hosts]
        if slow:
            network = Network(hosts, Quality(rate=125e6, latency=1e-4))
            addresses = exits.enter_context(network).addresses
        ranks = start("hosts.collective_rank", hosts, counts, addresses, [killed], settings)
        left = [rank for number, rank in enumerate(ranks) if str(number) != killed]
        return [[json.loads(line) for line in text.splitlines()] for text in finish(left)]


def on_one_host(size: int) -> list[dict[str, list[str]]]:
    worlds = thread_worlds(size, timeout=60)
    found = on_ranks(worlds, results)
    for world in worlds:
        world.close()
    return found


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("counts", "connections", "slow"),
    [
        pytest.param([2, 2], 1, False, id="2x2"),
        pytest.param([3, 1], 4, False, id="3+1, four connections"),
        pytest.param([1, 2, 2], 1, False, id="1+2+2"),
        pytest.param([2, 2], 2, True, id="2x2 over a slow link, two connections"),
    ],
)
def test_all_hosts_get_what_one_host_gets(counts: list[int], connections: int, slow: bool) -> None:
    """The operands are small integers, so that every order of additions has the same bits."""
    places = [host for host, count in enumerate(counts) for _ in range(count)]
    lines = said(counts, connections=connections, slow=slow)
    assert [line[0]["results"] for line in lines] == on_one_host(len(places))
    for rank, line in enumerate(lines):
        here = [place == places[rank] and other != rank for other, place in enumerate(places)]
        assert line[0]["shared"] == here


def test_a_sum_crosses_the_link_once() -> None:
    """Each host sends one tensor in an all-reduce, and not one for each of its ranks."""
    elements, turns = 1_000_000, 4
    with Hosts(2) as hosts, Network(hosts) as network:
        arguments = [str(elements), str(turns - 1)]
        finish(start("bench.bench_hosts", hosts, [2, 2], network.addresses, arguments))
        for moved in network.moved():
            assert 4 * elements * turns < moved < 1.1 * 4 * elements * turns


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 3])
def test_a_rank_that_dies_is_named_on_every_host(killed: int) -> None:
    for line in said([2, 2], killed=str(killed)):
        assert f"rank {killed} (pid " in line[1], line[1]


def test_a_number_of_connections_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXPAR_TRANSPORT", "gloo")
    for number in ("0", "17", "two"):
        monkeypatch.setenv("ONNXPAR_CONNECTIONS", number)
        with pytest.raises(Exception, match=f"ONNXPAR_CONNECTIONS='{number}' must be a number"):
            thread_worlds(2)
