"""Ranks fetch what their folders lack from ranks that have it. Here ranks are threads or processes
with folders of their own, as on hosts that share no file system."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from agreement import feeds_for
from committed import MODELS

import onnxpar
from onnxpar.base.digests import BLOCK, sealed
from onnxpar.base.errors import OnnxparError
from onnxpar.runtime.ranks import check_start, fetch, transfers
from onnxpar.runtime.ranks.fetch import complete
from onnxpar.runtime.ranks.groups import thread_worlds
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.threads import ThreadSession

LLAMA = MODELS / "llama.dynamo.static.onnx"
TIMEOUT = 20.0
over_both = pytest.mark.usefixtures("medium")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks; 0 and 2 hold the same shards, and so do 1 and 3; some weights are in all."""
    par = tmp_path_factory.mktemp("made") / "m.par"
    onnxpar.shard(LLAMA, par, mesh="dp=2,tp=2", preset="hybrid")
    return par


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that each file takes several."""
    for module in (transfers, "onnxpar.runtime.ranks.file_traffic"):
        name = module if isinstance(module, str) else module.__name__
        monkeypatch.setattr(f"{name}.PIECE", BLOCK)


class Ended(NamedTuple):
    """What a rank has of the model, or its error."""

    bundle: Bundle | None
    error: str


def fetched(folders: Sequence[Path]) -> list[Ended]:
    """Starts a rank for each folder; a rank that fails ends the world, as in a session."""
    worlds = thread_worlds(len(folders), TIMEOUT)

    def start(rank: int) -> Ended:
        try:
            return Ended(complete(folders[rank], worlds[rank]), "")
        except OnnxparError as error:
            worlds[rank].abort(f"rank {rank} failed: {error}")
            return Ended(None, str(error))

    with ThreadPoolExecutor(len(folders)) as pool:
        ended = list(pool.map(start, range(len(folders))))
    for world in worlds:
        world.close()
    return ended


def check_like(folder: Path, made: Path, ranks: Sequence[int]) -> None:
    """The folder has the files that these ranks read, as they were written, and nothing else."""
    files = Bundle.load(made).files
    wanted = {"plan.json", *(name for rank in ranks for name in files.of(rank))}
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert found == wanted
    for name in wanted:
        assert (folder / name).read_bytes() == (made / name).read_bytes()


def leftovers(folder: Path) -> list[str]:
    """Hidden files, and what is not of a sharded model."""
    return sorted(p.name for p in folder.rglob("*") if p.name.startswith("."))


def part(made: Path, to: Path, ranks: Sequence[int]) -> Path:
    """A copy of the files of some ranks."""
    to.mkdir(parents=True)
    files = Bundle.load(made).files
    for name in {"plan.json", *(name for rank in ranks for name in files.of(rank))}:
        (to / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(made / name, to / name)
    return to


@over_both
def test_ranks_without_a_folder(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two on one host, one on another."""
    one, two = (tmp_path / host / "m.par" for host in ("one", "two"))
    for folder in (one, two):
        folder.parent.mkdir()
    ended = fetched([made, one, one, two])
    assert not any(rank.error for rank in ended)
    assert len({rank.bundle.digest for rank in ended if rank.bundle}) == 1
    check_like(one, made, [1, 2])
    check_like(two, made, [3])
    assert not leftovers(tmp_path)
    said = capsys.readouterr().err.splitlines()
    size = sum((one / name).stat().st_size for name in os.listdir(one) if name != "plan.json")
    host = os.uname().nodename
    assert said[0] == (
        f"onnxpar: fetching 4 files of {one}, {size / 1000:g} kB, to ranks 1 and 2 (host {host}) "
        f"from rank 0 (host {host})"
    )
    assert said[1].startswith(f"onnxpar: fetching 2 files of {two}, ")
    assert said[2].startswith("onnxpar: fetched ") and len(said) == 3
    assert not any(rank.error for rank in fetched([made, one, one, two]))
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_what_was_fetched_runs(made: Path, tmp_path: Path) -> None:
    """In ranks that never saw the whole folder; the weights are spread over all of them."""
    folders = [part(made, tmp_path / str(rank) / "m.par", [rank]) for rank in range(2)]
    folders += [tmp_path / "2" / "m.par", tmp_path / "3" / "m.par"]
    for folder in folders[2:]:
        folder.parent.mkdir()
    graphs = [part(made, tmp_path / "graphs" / "m.par", [2, 3])]
    assert not any(rank.error for rank in fetched([*folders[:2], *graphs, *graphs]))
    for graph in graphs:
        for name in ("shared_0000.weights", "shared_0001.weights"):
            (graph / name).unlink()
    assert not any(rank.error for rank in fetched([*folders[:2], *graphs, *graphs]))
    check_like(graphs[0], made, [2, 3])
    for rank in (0, 1):
        part_files = Bundle.load(folders[rank]).files
        for name in part_files.of(rank):
            shutil.copyfile(folders[rank] / name, graphs[0] / name)
    plan = onnxpar.plan(LLAMA, mesh="dp=2,tp=2", preset="hybrid")
    feeds = feeds_for(plan)
    with ThreadSession(graphs[0]) as own, ThreadSession(made) as other:
        for mine, theirs in zip(own.run(None, feeds), other.run(None, feeds), strict=True):
            np.testing.assert_array_equal(mine, theirs)


@over_both
def test_a_rank_that_lacks_a_file(made: Path, tmp_path: Path) -> None:
    own = tmp_path / "m.par"
    for name in ("rank_0001.onnx", "shared_0001.weights"):
        shutil.rmtree(own, ignore_errors=True)
        shutil.copytree(made, own)
        (own / name).unlink()
        assert not any(rank.error for rank in fetched([made, own, made, made]))
        assert (own / name).read_bytes() == (made / name).read_bytes()
        assert not leftovers(tmp_path)


@over_both
def test_a_folder_without_a_plan(made: Path, tmp_path: Path) -> None:
    """As after a copy that was interrupted: what is there is verified."""
    own = part(made, tmp_path / "m.par", [1])
    (own / "plan.json").unlink()
    (own / "rank_0001.onnx").unlink()
    assert not any(rank.error for rank in fetched([made, own, made, made]))
    check_like(own, made, [1])
    (own / "plan.json").unlink()
    assert not any(rank.error for rank in fetched([made, own, made, made]))
    check_like(own, made, [1])
    (own / "plan.json").unlink()
    flip(own / "shared_0001.weights")
    ended = fetched([made, own, made, made])
    assert all("shared_0001.weights has changed since it was written" in r.error for r in ended)
    assert not (own / "plan.json").exists() and not leftovers(own)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_files_beside_one_that_is_fetched_are_verified(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = part(made, tmp_path / "m.par", [1])
    (own / "rank_0001.onnx").unlink()
    flip(own / "shared_0001.weights")
    monkeypatch.setattr(fetch, "planned", None)  # before anything travels
    monkeypatch.setattr(fetch._Fetch, "_transfers", lambda self: [])
    for rank in fetched([made, own, made, made]):
        assert "shared_0001.weights has changed since it was written" in rank.error


@over_both
def test_a_file_that_no_rank_has(made: Path, tmp_path: Path) -> None:
    """One error, the same on all ranks, and at once."""
    parts = [part(made, tmp_path / str(rank) / "m.par", [0, 1]) for rank in range(2)]
    parts += [tmp_path / "2" / "m.par", tmp_path / "3" / "m.par"]
    for folder in parts[2:]:
        folder.parent.mkdir()
    for rank in fetched(parts):
        assert "no rank has rank_0002.onnx, which rank 2 (host " in rank.error
        assert "onnxpar shard --ranks 2`" in rank.error
    assert not parts[2].exists() and not parts[3].exists() and not leftovers(tmp_path)


@over_both
def test_no_rank_has_the_folder(tmp_path: Path) -> None:
    for rank in fetched([tmp_path / "none.par"] * 3):
        assert f"there is no folder {tmp_path / 'none.par'}" in rank.error
    assert not list(tmp_path.iterdir())


@over_both
@pytest.mark.parametrize("at", [0, 245_759])
def test_a_file_that_is_damaged_where_it_is_fetched_from(
    at: int, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ends are named, and nothing is left."""
    name_hosts(monkeypatch, {"bad": "alpha", "own": "beta"})
    bad, own = tmp_path / "bad" / "m.par", tmp_path / "own" / "m.par"
    shutil.copytree(made, bad)
    data = bytearray((bad / "shared_0001.weights").read_bytes())
    data[at] ^= 1
    (bad / "shared_0001.weights").write_bytes(data)
    own.parent.mkdir()
    ended = fetched([bad, own, bad, own])
    for rank in ended:
        way = r"shared_0001\.weights from rank [02] \(host alpha\) to rank [13] \(host beta\)"
        fault = "SHA-256 differs in the 1 MiB from byte 0; the first has a file that has changed"
        assert re.search(f"fetching {way}: {fault}", rank.error), rank.error
    assert not own.exists() and not leftovers(tmp_path)


def name_hosts(monkeypatch: pytest.MonkeyPatch, hosts: dict[str, str]) -> None:
    """Gives ranks the host of their folder's parent."""
    place = check_start.place_of

    def named(folder: Path) -> dict[str, Any]:
        return {**place(folder), "host": hosts.get(folder.parent.name, "gamma")}

    for module in (check_start, fetch):
        monkeypatch.setattr(module, "place_of", named)


def test_a_file_of_another_size_is_no_source(made: Path, tmp_path: Path) -> None:
    bad, own = tmp_path / "bad" / "m.par", tmp_path / "own" / "m.par"
    shutil.copytree(made, bad)
    own.parent.mkdir()
    with (bad / "rank_0003.onnx").open("ab") as file:
        file.write(b"x")
    ended = fetched([bad, made, bad, own])
    assert not any(rank.error for rank in ended)
    check_like(own, made, [3])
    for rank in fetched([bad, bad, bad, tmp_path / "own" / "n.par"]):
        assert "no rank has rank_0003.onnx" in rank.error


def test_a_link_out_of_the_folder_is_not_sent(made: Path, tmp_path: Path) -> None:
    """A hostile folder must not make a rank read anything else."""
    bad, own = tmp_path / "bad" / "m.par", tmp_path / "own" / "m.par"
    shutil.copytree(made, bad)
    own.parent.mkdir()
    shutil.copyfile(bad / "rank_0003.onnx", tmp_path / "secret")
    (bad / "rank_0003.onnx").unlink()
    (bad / "rank_0003.onnx").symlink_to("../../secret")
    for rank in fetched([bad, bad, bad, own]):
        assert "no rank has rank_0003.onnx" in rank.error


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "encoder/../../evil"])
def test_a_plan_that_names_files_elsewhere(name: str, made: Path, tmp_path: Path) -> None:
    bad, own = tmp_path / "bad" / "m.par", tmp_path / "own" / "m.par"
    shutil.copytree(made, bad)
    own.parent.mkdir()
    plan = json.loads((bad / "plan.json").read_text())
    plan["files"][name] = {"bytes": 1, "sha256": ["0" * 64]}
    (bad / "plan.json").write_text(sealed(plan))
    for rank in fetched([bad, bad, bad, own]):
        assert "plan.json is damaged" in rank.error and "is not the name of a file" in rank.error
    assert not own.exists() and not (tmp_path / "evil").exists()


@pytest.mark.slow
def test_a_link_in_the_way(made: Path, tmp_path: Path) -> None:
    """Nothing is written through it."""
    par, own, other = tmp_path / "t5.par", tmp_path / "own.par", tmp_path / "other"
    onnxpar.shard(MODELS / "llm" / "t5", par, devices=1)
    own.mkdir()
    other.mkdir()
    (own / "encoder").symlink_to(other)
    two = fetched_alone([par, own], par)
    assert "outside of the folder" in two[1].error and not list(other.iterdir())


def fetched_alone(folders: Sequence[Path], model: Path) -> list[Ended]:
    """Like `fetched`, for a model of one rank that is told to have one for each folder."""
    plan = json.loads((model / "plan.json").read_text())
    plan["mesh"] = [["dp", len(folders)]]
    for name, each in plan["files"].items():
        if name.startswith("rank_"):
            each["ranks"] = [*range(len(folders))]
    (model / "plan.json").write_text(sealed(plan))
    return fetched(folders)


@pytest.mark.slow
def test_an_encoder_decoder(tmp_path: Path) -> None:
    """The folder of the encoder is fetched when its session opens."""
    par, own = tmp_path / "t5.par", tmp_path / "own.par"
    onnxpar.shard(MODELS / "llm" / "t5", par, devices=2, preset="tensor-parallel")
    assert not any(rank.error for rank in fetched([par, own]))
    check_like(own, par, [1])
    assert [path.name for path in (own / "encoder").iterdir()] == ["plan.json"]
    assert not any(rank.error for rank in fetched([par / "encoder", own / "encoder"]))
    check_like(own / "encoder", par / "encoder", [1])


@over_both
def test_other_plans_are_refused(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name_hosts(monkeypatch, {made.parent.name: "alpha", "b": "beta"})
    other = tmp_path / "b" / "m.par"
    other.parent.mkdir()
    onnxpar.shard(LLAMA, other, devices=4, preset="data-parallel")
    for rank in fetched([made, made, other, made]):
        assert "the ranks disagree on the model" in rank.error
        assert "on rank 0 (host alpha)" in rank.error and "on rank 2 (host beta)" in rank.error


def test_another_number_of_ranks(made: Path, tmp_path: Path) -> None:
    for rank in fetched([made, tmp_path / "m.par", made]):
        assert "has 4 ranks, but 3 processes were started" in rank.error
    assert not list(tmp_path.iterdir())


def test_a_folder_of_something_else(made: Path, tmp_path: Path) -> None:
    """Is not filled with files."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(b"x")
    ended = fetched([made, tmp_path / "photos", made, made])
    assert "is not a sharded model" in ended[1].error and "'a.png'" in ended[1].error
    assert all(rank.error for rank in ended)
    assert [p.name for p in (tmp_path / "photos").iterdir()] == ["a.png"]


def test_no_room(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 8, 1))
    ended = fetched([made, tmp_path / "m.par", made, made])
    assert re.search(r"^cannot fetch .*m\.par: it lacks .*B, and .* 1 B free$", ended[1].error)
    assert all(rank.error for rank in ended) and not list(tmp_path.iterdir())


@over_both
def test_a_disk_that_fills_up(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("onnxpar.runtime.ranks.received_file.os.pwrite", full)
    ended = fetched([made, tmp_path / "m.par", made, made])
    assert "cannot write" in ended[1].error and "no space left on device" in ended[1].error
    assert all(rank.error for rank in ended) and not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written(made: Path, tmp_path: Path) -> None:
    ended = fetched([made, tmp_path / "no" / "m.par", made, made])
    assert re.search(r"^cannot fetch .*m\.par: cannot write ", ended[1].error)
    assert all(rank.error for rank in ended)


RANK = """
import resource, sys
from pathlib import Path
from onnxpar.runtime.ranks import transfers
from onnxpar.runtime.ranks.fetch import complete
from onnxpar.runtime.ranks.groups import World

def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))

par, rank, size, store = Path(sys.argv[1]), *map(int, sys.argv[2:4]), sys.argv[4]
with World.create("fetch", rank, size, store, timeout=20) as world:
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    print("ready", flush=True)
    complete(par, world)
    print(memory("VmHWM") - before)
"""


def started(folders: Sequence[Path], tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    store = f"file:{tmp_path}/store"
    for rank, folder in enumerate(folders):
        command = [sys.executable, "-c", RANK, folder, str(rank), str(len(folders)), store]
        yield subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def large(folder: Path, megabytes: int) -> Path:
    """A model of two ranks with weights of so many megabytes on each."""
    rows = megabytes * 2 * 1024
    weight = np.random.default_rng(0).standard_normal((rows, 256)).astype(np.float32)
    text = f"""<ir_version: 8, opset_import: ["" : 17]> m (float[4,{rows}] x) => (float[4,256] y)
    {{ y = MatMul(x, w) }}"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(model, folder / "m.onnx", save_as_external_data=True)
    strategy = {"mesh": {"tp": 2}, "tensors": {"w": ["tp", None]}}
    onnxpar.shard(folder / "m.onnx", folder / "m.par", strategy=strategy, search="propagation")
    return folder / "m.par"


@pytest.mark.slow
@over_both
def test_memory_does_not_grow_with_the_files(tmp_path: Path) -> None:
    """It has room for a few pieces of 4 MiB, also while 64 MB arrive."""
    par, own = large(tmp_path, 64), tmp_path / "own.par"
    ranks = [*started([par, own], tmp_path)]
    told = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    assert sum(f.stat().st_size for f in own.iterdir()) > 60_000_000
    most = [int(out.split()[-1]) for out, _ in told]
    assert max(most) < 32 << 20, most


@pytest.mark.slow
@pytest.mark.matrix
@over_both
@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_meanwhile(killed: int, tmp_path: Path) -> None:
    """The other names both ends, and leaves nothing; the next start removes what the killed one
    left."""
    par, own = large(tmp_path, 100), tmp_path / "own" / "m.par"
    own.parent.mkdir()
    ranks = [*started([par, own], tmp_path)]
    end = time.monotonic() + 60
    while not list(own.parent.glob(".onnxpar-fetch-*/*.weights")):
        assert time.monotonic() < end and all(rank.poll() is None for rank in ranks)
    ranks[killed].send_signal(signal.SIGKILL)
    told = [rank.communicate(timeout=60) for rank in ranks]
    assert ranks[1 - killed].returncode == 1
    error = told[1 - killed][1]
    ends = (
        rf"rank_0001\.\w+ from rank 0 \(host .*\) to rank 1 \(host .*\)': rank {killed} \(pid \d+\)"
    )
    assert re.search(ends, error), error
    assert not own.exists()
    if killed == 0:
        assert not list(own.parent.iterdir())
    shutil.rmtree(tmp_path / "store", ignore_errors=True)
    again = [*started([par, own], tmp_path)]
    assert [rank.wait(60) for rank in again] == [0, 0]
    check_like(own, par, [1])
    assert not leftovers(own.parent)


@pytest.mark.slow
def test_under_a_launcher(tmp_path: Path) -> None:
    """The commands: a relative path, and each rank in a folder of its own."""
    model, par = MODELS / "gpt2.dynamo.static.onnx", tmp_path / "0" / "m.par"
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    plan = onnxpar.shard(model, par, devices=2, preset="tensor-parallel")
    np.savez(tmp_path / "in.npz", **feeds_for(plan))
    command = [sys.executable, "-m", "onnxpar", "run", "m.par", "--inputs", tmp_path / "in.npz"]
    common = {"ONNXPAR_WORLD_SIZE": "2", "ONNXPAR_STORE": f"file:{tmp_path}/store"}
    ranks = [
        subprocess.Popen(
            [*command, "--outputs", f"{tmp_path}/out.npz", "--verify"],
            env={**os.environ, **common, "ONNXPAR_RANK": str(rank)},
            cwd=tmp_path / str(rank),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    assert "logits: float32" in told[0][0] and told[1][0] == ""
    assert "fetching 3 files of m.par" in told[0][1] and told[1][1] == ""
    check_like(tmp_path / "1" / "m.par", par, [1])
    with ThreadSession(par) as session, np.load(tmp_path / "out.npz") as found:
        (logits,) = session.run(["logits"], dict(np.load(tmp_path / "in.npz")))
        np.testing.assert_allclose(found["logits"], logits, rtol=1e-4, atol=1e-5)


GENERATE = """
import json, sys
from onnxpar.llm.generator import Generator
with Generator(sys.argv[1], timeout=30) as generator:
    print(json.dumps(generator.generate([[3, 1, 4, 1, 5]], max_new_tokens=8)[0].tokens))
"""
TRAIN = """
import json, sys
import numpy as np
import onnxpar
data = dict(np.load(sys.argv[2]))
steps = onnxpar.training.train(sys.argv[1], data, lr=0.1, timeout=30)
print(json.dumps([step.values for step in steps]))
"""


def run_in_each(script: str, par: Path, *more: object) -> list[Any]:
    """What a script prints on two ranks, of which the second one lacks the folder."""
    folder = par.parent
    common = {"ONNXPAR_WORLD_SIZE": "2", "ONNXPAR_STORE": f"file:{folder}/store"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, own, *map(str, more)],
            env={**os.environ, **common, "ONNXPAR_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, own in enumerate((par, folder / "own.par"))
    ]
    told = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    return [json.loads(out.splitlines()[-1]) for out, _ in told]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_language_models(name: str, tmp_path: Path) -> None:
    par = tmp_path / "m.par"
    onnxpar.shard(MODELS / "llm" / name, par, devices=2, preset="tensor-parallel")
    one, two = run_in_each(GENERATE, par)
    assert one == two and len(one) > 0
    assert (tmp_path / "own.par" / "tokenizer.json").is_file()
    assert (tmp_path / "own.par" / "encoder" / "rank_0001.onnx").is_file() == (name == "t5")


@pytest.mark.slow
def test_training(tmp_path: Path) -> None:
    step, par = tmp_path / "step.onnx", tmp_path / "step.par"
    model = MODELS / "dlrm.legacy.training.onnx"
    spec = onnxpar.training.grad(model, step, loss="bce", optimizer="adamw")
    plan = onnxpar.shard(step, par, devices=2, preset="zero3")
    feeds = feeds_for(plan)
    np.savez(tmp_path / "data.npz", **{name: feeds[name] for name in spec.data})
    one, two = run_in_each(TRAIN, par, tmp_path / "data.npz")
    assert one == two and len(one) == 1
    check_like(tmp_path / "own.par", par, [1])
