"""A plugin that does not load is an error that says what to install."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from committed import MODELS

import onnxpar
from onnxpar.base.errors import RankError
from onnxpar.runtime.ranks import groups, library


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Makes another file the plugin."""

    def other(file: Path) -> None:
        monkeypatch.setattr(library, "library_path", lambda: file)
        library.library.cache_clear()

    yield other
    monkeypatch.undo()
    library.library.cache_clear()


def test_a_library_that_it_needs_is_missing(use: Callable[[Path], None], tmp_path: Path) -> None:
    """A wheel has the C++ library in it, and needs that of C."""
    file = tmp_path / "plugin.so"
    whole = library.library_path().read_bytes()
    needed, other, package = (
        ("libstdc++.so.6", "libstdc++.so.0", "libstdc++6")
        if b"libstdc++.so.6" in whole
        else ("libm.so.6", "libm.so.0", "libc6")
    )
    file.write_bytes(whole.replace(needed.encode(), other.encode()))
    use(file)
    message = f"needs {other}, which this machine does not have; .*apt install {package})"
    with pytest.raises(RankError, match=re.escape(message).replace(r"\.\*", ".*")):
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
    whole = library.library_path().read_bytes()
    file.write_bytes(whole.replace(b"onnxpar_world_renew", b"onnxpar_world_renow"))
    use(file)
    with pytest.raises(
        RankError, match=r"is from another version of onnxpar: .*onnxpar_world_renew"
    ):
        groups.thread_worlds(1)


@pytest.mark.slow
def test_a_source_folder_uses_the_library_of_the_installed_package(tmp_path: Path) -> None:
    """A program that runs in a checkout imports the checkout, and so do its ranks."""
    source = Path(onnxpar.__file__).parent
    if "site-packages" not in source.parts:
        pytest.skip("Python finds a package that is installed in place before any folder")
    built = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(source, tmp_path / "onnxpar", ignore=built)
    program = (
        "import onnxpar, sys\n"
        "assert onnxpar.__file__.startswith(sys.argv[2]), onnxpar.__file__\n"
        "onnxpar.shard(sys.argv[1], 'm.par', devices=2, preset='data-parallel')\n"
        "with onnxpar.InferenceSession('m.par') as session:\n"
        "    print(len(session.get_outputs()))\n"
    )
    arguments = ["-c", program, str(MODELS / "gpt2.dynamo.static.onnx"), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "1\n", done.stderr


def test_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "OWN", tmp_path / "onnxpar")
    monkeypatch.setattr(sys, "path", [])
    message = f"{tmp_path / 'onnxpar'} has no libonnxpar_ops.so; install onnxpar (pip install "
    with pytest.raises(RankError, match=re.escape(message)):
        library.library_path()
