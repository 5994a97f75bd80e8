"""A sharded model that is not what was written does not run."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from agreement import TIMEOUT, feeds_for
from committed import MODELS
from onnx import numpy_helper
from runtime.bundles import started

from onnxpar.base import digests
from onnxpar.base.errors import ModelError, OnnxparError, RankError
from onnxpar.cli.command_line import main
from onnxpar.layout.mesh import Mesh
from onnxpar.planner import sharder
from onnxpar.planner.options import Options
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.threads import ThreadSession

MODEL = MODELS / "llama.dynamo.static.onnx"
TP = Options(mesh=Mesh.parse("tp=2"), preset="tensor-parallel")
FLIPS = 300


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    par = tmp_path_factory.mktemp("made") / "model.par"
    sharder.shard(MODEL, par, TP)
    return par


@pytest.fixture
def par(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "model.par")
    return tmp_path / "model.par"


def opened(par: Path) -> None:
    """What a start checks of all ranks."""
    bundle = Bundle.load(par)
    bundle.files.check_complete()
    for rank in range(bundle.mesh.size):
        bundle.files.check_samples(rank)


def flip(file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def swap(one: Path, two: Path) -> None:
    kept = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(kept)


@pytest.mark.slow
def test_no_flipped_bit_is_silent(par: Path) -> None:
    """Anywhere in the folder, in plan.json as in weights."""
    random = np.random.default_rng(0)
    files = sorted(par.iterdir())
    opened(par)
    for _ in range(FLIPS):
        file = files[random.integers(len(files))]
        bit = int(random.integers(8 * file.stat().st_size))
        flip(file, bit)
        with pytest.raises(OnnxparError) as failed:
            opened(par)
        assert file.name in str(failed.value) or "format" in str(failed.value)
        flip(file, bit)
    opened(par)


@pytest.mark.parametrize("suffix", ["onnx", "weights"])
def test_swapped_files(suffix: str, par: Path) -> None:
    swap(par / f"rank_0000.{suffix}", par / f"rank_0001.{suffix}")
    with pytest.raises(
        RankError, match=rf"rank_000[01]\.{suffix} has changed since it was written"
    ):
        ThreadSession(par, timeout=TIMEOUT)


def test_other_sizes(par: Path) -> None:
    with (par / "rank_0001.weights").open("ab") as sink:
        sink.write(b"x")
    with pytest.raises(ModelError, match=r"rank_0001\.weights has 245,761 bytes, not 245,760"):
        ThreadSession(par, timeout=TIMEOUT)


def test_the_command_says_so(par: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(par), "--verify"]) == 0
    flip(par / "rank_0001.weights", 12345)
    capsys.readouterr()
    assert main(["inspect", str(par), "--verify"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("onnxpar: error: ") and said.count("\n") == 1
    assert "rank_0001.weights has changed since it was written" in said and "onnxpar shard" in said


def test_of_large_files_some_blocks_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change in between is found by --verify alone."""
    monkeypatch.setattr(digests, "BLOCK", 100)
    file = tmp_path / "rank_0000.weights"
    file.write_bytes(np.random.default_rng(1).bytes(1950))
    wanted = digests.digests_of([file])
    assert len(wanted[file.name]["sha256"]) == 20
    found = []
    for at in range(0, 1950, 50):
        flip(file, 8 * at)
        with pytest.raises(ModelError, match=f"from byte {at // 100 * 100};"):
            digests.check_files(tmp_path, wanted, True, "copy it again")
        try:
            digests.check_files(tmp_path, wanted, False, "copy it again")
        except ModelError:
            found.append(at // 100)
        flip(file, 8 * at)
    assert sorted({*found}) == [0, 2, 5, 8, 10, 13, 16, 19]


def test_digests_are_those_of_sha256sum(par: Path) -> None:
    """Of a file of one block."""
    said = Bundle.load(par).data["files"]["rank_0000.onnx"]
    data = (par / "rank_0000.onnx").read_bytes()
    assert said == {
        "bytes": len(data),
        "sha256": [hashlib.sha256(data).hexdigest()],
        "ranks": [0],
    }


@pytest.mark.slow
@pytest.mark.usefixtures("medium")
def test_ranks_with_different_models_do_not_start(par: Path, tmp_path: Path) -> None:
    """As after half a copy to other hosts: their collectives are the same, weights are not."""
    proto = onnx.load(MODEL)
    scale = next(t for t in proto.graph.initializer if len(t.dims) == 2)
    scale.CopyFrom(numpy_helper.from_array(2 * numpy_helper.to_array(scale), scale.name))
    onnx.save(proto, tmp_path / MODEL.name)
    other = tmp_path / "other.par"
    sharder.shard(tmp_path / MODEL.name, other, TP)
    assert started([par, par]) == ["", ""]
    for text in started([par, other]):
        assert "the ranks disagree" in text and "plan.json" in text


def test_what_is_whole_runs(par: Path) -> None:
    plan, _ = sharder.plan(MODEL, TP)
    with ThreadSession(par, timeout=TIMEOUT) as session:
        assert session.run(None, feeds_for(plan))
