"""A plugin that does not load is an error that says what to install."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from onnxpar.errors import RankError
from onnxpar.runtime import groups


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Makes another file the plugin."""

    def other(file: Path) -> None:
        monkeypatch.setattr(groups, "library_path", lambda: file)
        groups.library.cache_clear()

    yield other
    monkeypatch.undo()
    groups.library.cache_clear()


def test_a_library_that_it_needs_is_missing(use: Callable[[Path], None], tmp_path: Path) -> None:
    file = tmp_path / "plugin.so"
    whole = groups.library_path().read_bytes()
    assert b"libgloo.so" in whole
    file.write_bytes(whole.replace(b"libgloo.so", b"libglox.so"))
    use(file)
    with pytest.raises(RankError, match=r"needs libglox\.so.*does not have; .*libgloo-dev"):
        groups.thread_worlds(1)


@pytest.mark.parametrize("content", [b"", b"no library", b"\x7fELF\x02\x01\x01"])
def test_a_damaged_plugin(use: Callable[[Path], None], tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "plugin.so"
    file.write_bytes(content)
    use(file)
    with pytest.raises(RankError, match=r"plugin\.so does not load: .*; install onnxpar again"):
        groups.thread_worlds(1)


def test_the_plugin_of_another_version(use: Callable[[Path], None], tmp_path: Path) -> None:
    file = tmp_path / "plugin.so"
    whole = groups.library_path().read_bytes()
    file.write_bytes(whole.replace(b"onnxpar_world_renew", b"onnxpar_world_renow"))
    use(file)
    with pytest.raises(
        RankError, match=r"is from another version of onnxpar: .*onnxpar_world_renew"
    ):
        groups.thread_worlds(1)
