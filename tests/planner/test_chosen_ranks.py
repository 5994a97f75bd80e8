"""`shard --ranks`: the files of some ranks, byte by byte those that all ranks together have."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from agreement import TIMEOUT, feeds_for
from committed import MODELS

import onnxpar
from onnxpar.base import new_folder
from onnxpar.base.errors import ModelError, OnnxparError, StrategyError
from onnxpar.cli.command_line import main
from onnxpar.compiler.plan import foreign_part
from onnxpar.planner.write_bundle import _have_same_plan
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.threads import ThreadSession

LLAMA = MODELS / "llama.dynamo.static.onnx"
HYBRID: dict[str, Any] = {"mesh": "dp=2,tp=2", "preset": "hybrid"}
"""Ranks 0 and 2 hold the same shards, and so do 1 and 3."""


def files_of(folder: Path) -> dict[str, bytes]:
    """The content of each file, by its path in the folder."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def step(folder: Path) -> Path:
    path = folder / "step.onnx"
    model = MODELS / "gpt2.legacy.training.onnx"
    onnxpar.training.grad(model, path, loss="softmax-cross-entropy", optimizer="adamw")
    return path


def dlrm_step(folder: Path) -> Path:
    """With tables on the host."""
    path = folder / "step.onnx"
    model = MODELS / "dlrm.legacy.training.onnx"
    onnxpar.training.grad(model, path, loss="bce", optimizer="sgd", lazy=["*"])
    return path


CASES: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "whole": (lambda folder: LLAMA, {"devices": 3, "preset": "data-parallel"}),
    "replicated shards": (lambda folder: LLAMA, HYBRID),
    "by the search": (lambda folder: MODELS / "bert.legacy.static.onnx", {"devices": 4}),
    "open sizes": (lambda folder: MODELS / "gpt2.dynamo.dynamic.onnx", {"devices": 2}),
    "experts": (lambda folder: MODELS / "mixtral.dynamo.static.onnx", {"devices": 4}),
    "training": (step, {"devices": 4, "preset": "zero3"}),
    "training by the search": (step, {"devices": 2}),
    "pages": (lambda folder: MODELS / "llm" / "llama", {"devices": 2, "preset": "tensor-parallel"}),
    "an encoder-decoder": (lambda folder: MODELS / "llm" / "t5", {"devices": 2}),
    "an embedding model": (lambda folder: MODELS / "embed" / "bert", {"devices": 2}),
}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", CASES)
def test_the_files_of_a_rank_are_those_of_the_whole(name: str, tmp_path: Path) -> None:
    model, options = CASES[name]
    path = model(tmp_path)
    whole = tmp_path / "whole.par"
    plan = onnxpar.shard(path, whole, **options)
    every = files_of(whole)
    found: dict[str, bytes] = {}
    for rank in range(plan.mesh.size):
        part = tmp_path / f"{rank}.par"
        onnxpar.shard(path, part, ranks=[rank], **options)
        own = files_of(part)
        assert own.items() <= every.items()
        assert own["plan.json"] == every["plan.json"]
        others = {f"rank_{r:04d}.onnx" for r in range(plan.mesh.size) if r != rank}
        assert f"rank_{rank:04d}.onnx" in own and others.isdisjoint(own)
        check_reads(part, rank)
        found |= own
    assert found == every


def check_reads(folder: Path, rank: int) -> None:
    """The files of a rank are complete, and no other files are there."""
    for path in (folder, *(p for p in (folder / "encoder",) if p.is_dir())):
        bundle = Bundle.load(path)
        listed = bundle.files.of(rank)
        assert {name for name in bundle.files.listed if bundle.files.has(name)} == {*listed}
        for name in (name for name in listed if name.endswith(".onnx")):
            model = onnx.load(path / name)  # with all external data, which must be there
            del model


def test_what_several_ranks_hold_is_apart_from_what_one_holds(tmp_path: Path) -> None:
    """So that no rank needs a file for a part of it."""
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    weights = [onnx.numpy_helper.from_array(x + i, name) for i, name in enumerate("abc")]
    text = """<ir_version: 8, opset_import: ["" : 17]> m (float[4,64] x) => (float[4,64] y)
    { [one] h = MatMul(x, a) [two] i = MatMul(h, b) [three] y = MatMul(i, c) }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(weights)
    strategy = {
        "mesh": {"p": 2, "q": 2},
        "tensors": {"a": [["p", "q"], None], "b": ["p", None], "c": [None, None]},
    }
    par = tmp_path / "m.par"
    onnxpar.shard(model, par, strategy=strategy, search="propagation")
    listed = Bundle.load(par).files.listed
    readers = {name: each.get("ranks") for name, each in listed.items() if "weights" in name}
    assert readers == {
        **{f"rank_{rank:04d}.weights": [rank] for rank in range(4)},
        "shared_0000.weights": [0, 1],
        "shared_0001.weights": [2, 3],
        "shared.weights": None,
    }


@pytest.mark.slow
def test_ranks_that_come_later_join(tmp_path: Path) -> None:
    whole, par = tmp_path / "whole.par", tmp_path / "m.par"
    plan = onnxpar.shard(LLAMA, whole, **HYBRID)
    for ranks in ([3], [0, 1], [2]):
        assert not par.exists() or Bundle.load(par).files.absent
        onnxpar.shard(LLAMA, par, ranks=ranks, **HYBRID)
    assert files_of(par) == files_of(whole)
    with ThreadSession(par, timeout=TIMEOUT) as session:
        session.run(None, feeds_for(plan))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.slow
def test_another_plan_replaces_what_is_there(tmp_path: Path) -> None:
    par = tmp_path / "m.par"
    onnxpar.shard(LLAMA, par, ranks=[0, 1], **HYBRID)
    onnxpar.shard(LLAMA, par, ranks=[2], devices=4, preset="data-parallel")
    assert Bundle.load(par).files.absent == [0, 1, 3]
    onnxpar.shard(LLAMA, par, **HYBRID)
    assert not Bundle.load(par).files.absent


def test_hosts_that_write_to_one_folder_at_once(tmp_path: Path) -> None:
    """No file is lost, whoever comes first."""
    plan = {"format": 4, "model": "m", "mesh": [], "ranks": 8}
    for number in range(20):
        place = tmp_path / f"{number}.par"
        start = threading.Barrier(8)

        def write(rank: int, place: Path = place, start: threading.Barrier = start) -> None:
            with new_folder.new_folder(place, foreign_part, _have_same_plan) as folder:
                (folder / "plan.json").write_text(json.dumps(plan))
                (folder / "encoder").mkdir()
                (folder / "encoder" / "plan.json").write_text(json.dumps(plan))
                (folder / f"rank_{rank:04d}.onnx").write_text(str(rank))
                start.wait()

        with ThreadPoolExecutor(8) as pool:
            deque(pool.map(write, range(8)), maxlen=0)
        names = {f"rank_{rank:04d}.onnx" for rank in range(8)}
        assert files_of(place).keys() == names | {"plan.json", "encoder/plan.json"}


@pytest.mark.slow
def test_a_folder_that_appears_at_the_last_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, par, other = (tmp_path / f"{name}.par" for name in ("whole", "m", "other"))
    onnxpar.shard(LLAMA, whole, **HYBRID)
    onnxpar.shard(LLAMA, other, ranks=[0, 1, 3], **HYBRID)
    exists = os.path.lexists

    def late(path: Any) -> bool:
        there = exists(path)
        if Path(path) == par and not there:
            other.rename(par)
        return there

    monkeypatch.setattr(new_folder.os.path, "lexists", late)
    onnxpar.shard(LLAMA, par, ranks=[2], **HYBRID)
    assert files_of(par) == files_of(whole)


MORE = """
import json, sys
import onnxpar
model, par, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
onnxpar.shard(model, par, ranks=[0], **options)
print(onnxpar.inspect(par).data["sha256"])
"""


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("mixtral.dynamo.static.onnx", {"devices": 4}),
        ("gpt2.dynamo.dynamic.onnx", {"devices": 2}),
        ("step.onnx", {"mesh": "dp=2,tp=2"}),
        ("llm/t5", {"devices": 2, "preset": "tensor-parallel"}),
    ],
)
def test_hosts_find_the_same_plan(model: str, options: dict[str, Any], tmp_path: Path) -> None:
    """In processes with other orders of sets, from other folders, to other folders, and whatever
    was measured of the host."""
    path = step(tmp_path) if model == "step.onnx" else MODELS / model
    digests = set()
    for number in range(2):
        folder = tmp_path.joinpath(f"host{number}", *["deep"] * number)
        folder.mkdir(parents=True)
        environment = {
            **os.environ,
            "PYTHONHASHSEED": str(number),
            "XDG_CACHE_HOME": str(folder / "cache"),
            **({"OMP_NUM_THREADS": "1"} if number else {}),
        }
        environment.pop("ONNXPAR_MEASURE", None)  # commands do measure this host otherwise
        done = subprocess.run(
            [sys.executable, "-c", MORE, path, folder / f"m{number}.par", json.dumps(options)],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        assert "measured this host" not in done.stderr
        digests.add(done.stdout)
    assert len(digests) == 1


@pytest.mark.slow
def test_the_memory_of_a_host_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks on other hosts do not take it."""
    digests, path = [], "onnxpar.planner.memory_limit.host_bytes"
    for memory in (1 << 40, 1 << 20):
        monkeypatch.setattr(path, lambda memory=memory: memory)
        onnxpar.shard(LLAMA, tmp_path / "m.par", ranks=[0], devices=4)
        digests.append(Bundle.load(tmp_path / "m.par").digest)
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([4], r"--ranks 4: there is no such rank; ranks are numbered from 0 to 3"),
        ([-1, 0], r"--ranks -1: there is no such rank"),
        ([], "--ranks names no rank"),
    ],
)
def test_ranks_that_there_are_not(ranks: list[int], message: str, tmp_path: Path) -> None:
    for options in (HYBRID, {"devices": 4}):
        with pytest.raises(StrategyError, match=message):
            onnxpar.shard(LLAMA, tmp_path / "m.par", ranks=ranks, **options)
    assert not list(tmp_path.iterdir())


def test_ranks_of_a_mesh_that_only_the_plan_has(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("{mesh: {tp: 2}}")
    with pytest.raises(StrategyError, match="--ranks 2: there is no such rank"):
        onnxpar.shard(LLAMA, tmp_path / "m.par", ranks=[2], strategy=tmp_path / "s.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "'x': give numbers of ranks, such as 0,1 or 4-7"),
        ("0,,1", "give numbers of ranks"),
        ("3-1", "give the lower rank first"),
        ("0-99999999", "ranks are below"),
        ("-1", "give numbers of ranks|expected one argument"),
        ("9", "--ranks 9: there is no such rank"),
    ],
)
def test_what_is_no_list_of_ranks(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["shard", str(LLAMA), "--devices", "2", "-o", str(tmp_path / "m.par")]
    try:
        status = main([*arguments, "--ranks", text])
    except SystemExit as end:
        status = end.code
    assert status == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and re.search(message, said), said
    assert not list(tmp_path.iterdir())


def test_the_command_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    par = tmp_path / "m.par"
    command = ["shard", str(LLAMA), "--mesh", "dp=2,tp=2", "--preset", "hybrid", "-o", str(par)]
    assert main([*command, "--ranks", "0,2-3"]) == 0
    *_, written, ranks = capsys.readouterr().out.splitlines()
    assert written == f"written to {par}"
    digest = Bundle.load(par).digest
    assert ranks == (
        f"ranks 0, 2 and 3 of 4; the SHA-256 of the plan begins with {digest[:8]}, and must on "
        "each host"
    )
    assert main(["inspect", str(par), "--verify"]) == 0
    said = capsys.readouterr().out
    assert "verified: every byte of 5 files" in said and "no files of rank 1\n" in said
    assert digest in said


def test_a_run_names_the_ranks_that_are_missing(tmp_path: Path) -> None:
    par = tmp_path / "m.par"
    onnxpar.shard(LLAMA, par, ranks=[1], **HYBRID)
    for kind in (onnxpar.InferenceSession, ThreadSession):
        with pytest.raises(ModelError) as failed:
            kind(par, timeout=TIMEOUT)
        said = str(failed.value)
        assert "it has no files of ranks 0, 2 and 3 of its 4 ranks" in said
        assert "--ranks 0,2,3" in said and "mpirun" in said


def test_nothing_is_left_of_ranks_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    par = tmp_path / "m.par"
    onnxpar.shard(LLAMA, par, ranks=[0], **HYBRID)
    before = files_of(par)

    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("onnxpar.base.write_digested.os.pwrite", full)
    with pytest.raises(OnnxparError, match="no space left on device; free some space"):
        onnxpar.shard(LLAMA, par, ranks=[1], **HYBRID)
    assert files_of(par) == before and [*tmp_path.iterdir()] == [par]
