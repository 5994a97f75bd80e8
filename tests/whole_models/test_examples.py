"""The C++ program of examples/ as the ranks of a world, by their environment alone."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from agreement import run_unsplit
from onnx import numpy_helper

from onnxpar.planner import sharder
from onnxpar.planner.options import Options
from onnxpar.runtime.ranks.library import library_path
from onnxpar.strategy.strategy import Strategy

EXAMPLES = Path(__file__).parents[2] / "examples"
MLP = """<ir_version: 8, opset_import: ["" : 17]>
mlp (float[4,6] x, float[6,8] w, float[8,5] v) => (float[4,5] y)
{ [up] h = MatMul(x, w)  r = Relu(h)  [down] y = MatMul(r, v) }"""
Environment = Callable[[int, Path], Mapping[str, str]]


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, built with the system's compiler against the runtime of the wheel."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    runtimes = sorted(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*"))
    if not runtimes:
        pytest.skip("this onnxruntime wheel has no libonnxruntime.so")
    folder = tmp_path_factory.mktemp("rank")
    runtime, program = folder / "libonnxruntime.so.1", folder / "rank"
    runtime.symlink_to(runtimes[0])
    source = EXAMPLES / "rank.cc"
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-Wl,-rpath,{folder}"]
    subprocess.run([compiler, *flags, source, runtime, "-o", program], check=True)
    return program


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLP, and beside it split over 2 ranks: columns, then rows, y whole on both."""
    folder = tmp_path_factory.mktemp("model")
    model = onnx.parser.parse_model(MLP)
    for port in [i for i in model.graph.input if i.name in "wv"]:
        shape = [d.dim_value for d in port.type.tensor_type.shape.dim]
        value = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(value, port.name))
        model.graph.input.remove(port)
    onnx.save(model, folder / "model.onnx")
    down = [[None, "tp"], ["tp", None]]
    strategy = Strategy.of({"mesh": {"tp": 2}, "shard": {"down": down}})
    sharder.shard(folder / "model.onnx", folder / "model.par", Options(strategy=strategy))
    return folder / "model.onnx"


def own(rank: int, folder: Path) -> Mapping[str, str]:
    store = f"file:{folder}/store"
    return {"ONNXPAR_RANK": str(rank), "ONNXPAR_WORLD_SIZE": "2", "ONNXPAR_STORE": store}


def slurm(rank: int, folder: Path) -> Mapping[str, str]:
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "3", "SLURM_NTASKS": "2"}
    return {**job, "SLURM_PROCID": str(rank)}


def torchrun(rank: int, folder: Path) -> Mapping[str, str]:
    port = str(31000 + os.getpid() % 1000)
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    return {**world, "RANK": str(rank), "ONNXPAR_KEY": "a secret of this test"}


def start(rank: Path, model: Path, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    arguments = [rank, model.with_suffix(".par"), library_path(), "x", "y", "4", "6"]
    pipe = subprocess.PIPE
    environment = {"ONNXPAR_TIMEOUT": "20", **environment}
    return subprocess.Popen(arguments, env=environment, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("environment", [own, slurm, torchrun])
def test_two_programs_are_a_world(
    rank: Path, model: Path, tmp_path: Path, environment: Environment
) -> None:
    """Both print what the unsplit model computes."""
    ranks = [start(rank, model, environment(number, tmp_path)) for number in range(2)]
    x = (np.float32(0.1) * np.arange(24, dtype=np.float32)).reshape(4, 6)
    (wanted,) = run_unsplit(model, {"x": x})
    for process in ranks:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        found = np.array(out.split(), np.float32).reshape(wanted.shape)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_variables_that_contradict_each_other(rank: Path, model: Path, tmp_path: Path) -> None:
    process = start(rank, model, {**slurm(0, tmp_path), **torchrun(1, tmp_path)})
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "SLURM_PROCID=0, SLURM_STEP_NUM_TASKS=2 and RANK=1, WORLD_SIZE=2 contradict" in err
