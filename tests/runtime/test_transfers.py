"""Which rank sends what to whom: all that is needed, once, and by equal shares."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxpar.runtime.ranks import transfers
from onnxpar.runtime.ranks.transfers import Transfer, planned, waves

SIZES = {f"{number}.weights": size for number, size in enumerate((0, 1, 10, 25, 40))}


@st.composite
def worlds(
    draw: st.DrawFn,
) -> tuple[dict[str, set[int]], dict[str, list[list[int]]]]:
    """Who has each file, and the places that need it: lists of ranks that see one folder."""
    size = draw(st.integers(2, 8))
    place_of = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    places = [[r for r, own in enumerate(place_of) if own == p] for p in set(place_of)]
    holders, needs = {}, {}
    for name in SIZES:
        lacking = [place for place in places if draw(st.booleans())]
        having = {rank for place in places if place not in lacking for rank in place}
        if lacking and having:
            holders[name], needs[name] = having, lacking
    return holders, needs


@given(worlds())
def test_every_place_gets_what_it_needs_once(
    case: tuple[dict[str, set[int]], dict[str, list[list[int]]]],
) -> None:
    holders, needs = case
    found = planned(SIZES, holders, needs)
    assert [one.name for one in found] == [*needs]
    for one in found:
        assert one.source in holders[one.name] and one.bytes == SIZES[one.name]
        assert len(one.receivers) == len(needs[one.name])
        for rank, place in zip(one.receivers, needs[one.name], strict=True):
            assert rank in place


@given(worlds())
def test_waves_carry_every_byte_once_and_in_order(
    case: tuple[dict[str, set[int]], dict[str, list[list[int]]]],
) -> None:
    found = planned(SIZES, *case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers, "PIECE", 10)
        done: Counter[Transfer] = Counter()
        for wave in waves(found):
            assert wave
            receivers = [rank for one, _, _ in wave for rank in one.receivers]
            assert len(receivers) == len({*receivers})
            for one, at, length in wave:
                assert at == done[one] and 0 < length <= 10
                done[one] += length
    assert all(done[one] == one.bytes for one in found)


def test_ranks_share_the_work() -> None:
    """Of sending, and in each place of writing."""
    sizes = {str(number): 10 for number in range(12)}
    holders = {name: [0, 1, 2] for name in sizes}
    found = planned(sizes, holders, {name: [[3, 4], [5, 6, 7]] for name in sizes})
    sent, written = Counter(), Counter[int]()
    for one in found:
        sent[one.source] += one.bytes
        written.update(dict.fromkeys(one.receivers, one.bytes))
    assert sent == {0: 40, 1: 40, 2: 40}
    assert written == {3: 60, 4: 60, 5: 40, 6: 40, 7: 40}
