"""The values of open sizes at which ranks are proved."""

from __future__ import annotations

from onnxpar.equivalence.sizes import MOST_BINDINGS, bindings


def test_each_value_of_each_size_is_tried() -> None:
    found = bindings({"batch": 6, "seq": 8}, (), [4])
    assert found[:2] == [{"batch": 6, "seq": 8}, {"batch": 1, "seq": 1}]
    assert {each["batch"] for each in found} >= {1, 3, 4, 5, 7, 13}
    assert {each["seq"] for each in found} >= {1, 3, 4, 5, 9, 17}
    assert len({tuple(each.values()) for each in found}) == len(found)
    assert any(each["batch"] % 2 != each["seq"] % 2 for each in found)


def test_a_given_size_stays() -> None:
    found = bindings({"batch": 6, "seq": 8}, ["seq"], [4])
    assert {each["seq"] for each in found} == {8} and len(found) > 4
    assert bindings({"batch": 6}, ["batch"], [4]) == [{"batch": 6}]
    assert bindings({}, (), [4]) == [{}]


def test_their_number_is_limited() -> None:
    assert len(bindings({"batch": 6}, (), range(2, 100))) == MOST_BINDINGS
