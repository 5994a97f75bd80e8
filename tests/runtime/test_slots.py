"""Hosts and their numbers of ranks, on the command line and in files."""

from pathlib import Path

import pytest

from onnxpar.base.errors import InputError
from onnxpar.runtime.launch.slots import Slots, parse_hosts, ranks_of, read_hostfile


def test_hosts() -> None:
    found = parse_hosts("a:2, user@b.example:3,c,[fd00::1]:2")
    assert found == [Slots("a", 2), Slots("user@b.example", 3), Slots("c", 1), Slots("fd00::1", 2)]
    assert ranks_of(found) == [[0, 1], [2, 3, 4], [5], [6, 7]]


@pytest.mark.parametrize(
    "text, reason",
    [
        ("", "must be HOST or HOST:RANKS"),
        ("a:", "'a:' must be"),
        ("a:x", "must be HOST"),
        ("a:0", "host a has no ranks"),
        ("a:1,,b", "'' must be"),
        ("a,b,a:2", "names host a twice"),
        ("-oProxyCommand=x", "is no name of a host"),
    ],
)
def test_hosts_that_are_wrong(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        parse_hosts(text)


def test_a_host_file(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# two machines\na slots=2\n\nb slots = 4 max_slots=8  # the big one\nc\n")
    assert read_hostfile(file) == [Slots("a", 2), Slots("b", 4), Slots("c", 1)]


@pytest.mark.parametrize(
    "text, reason",
    [("", "names no host"), ("a slots=x", r"line 1: 'a slots=x' must be"), ("a\na", "a twice")],
)
def test_a_host_file_that_is_wrong(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(InputError, match=reason):
        read_hostfile(file)
    with pytest.raises(InputError, match="cannot be read"):
        read_hostfile(tmp_path / "none")
