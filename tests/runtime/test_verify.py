"""`--verify`: before anything runs, ranks compare every byte that they read with its SHA-256."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from agreement import TIMEOUT, feeds_for
from committed import MODELS
from runtime.bundles import started

import onnxpar
from onnxpar.base import digests, write_digested
from onnxpar.base.digests import blocks_of
from onnxpar.base.errors import OnnxparError
from onnxpar.cli.command_line import main
from onnxpar.compiler.plan import write_plan
from onnxpar.llm.generator import Generator
from onnxpar.runtime.ranks import check_start
from onnxpar.runtime.ranks.groups import thread_worlds
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.bundle_files import BundleFiles

LLAMA = MODELS / "llama.dynamo.static.onnx"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, each with weights of its own, and feeds."""
    folder = tmp_path_factory.mktemp("made")
    plan = onnxpar.shard(LLAMA, folder / "m.par", devices=2, preset="tensor-parallel")
    np.savez(folder / "in.npz", **feeds_for(plan))
    return folder


@pytest.fixture
def par(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made / "m.par", tmp_path / "m.par")
    return tmp_path / "m.par"


def flip(file: Path, at: int = -1000) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def swap(par: Path) -> None:
    one, two, kept = par / "rank_0000.weights", par / "rank_0001.weights", par / "kept"
    one.rename(kept)
    two.rename(one)
    kept.rename(two)


def cut(par: Path) -> None:
    file = par / "rank_0001.weights"
    file.write_bytes(file.read_bytes()[:-1])


def link_out(par: Path) -> None:
    (par / "rank_0001.weights").rename(par.parent / "elsewhere")
    (par / "rank_0001.weights").symlink_to("../elsewhere")


def link_to_nothing(par: Path) -> None:
    for file in [*par.glob("rank_0001.*")]:
        file.unlink()
        file.symlink_to("nothing")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (
        lambda par: flip(par / "rank_0001.weights"),
        r"rank_0001\.weights has changed since it was written: SHA-256 differs in the 1 MiB from",
    ),
    "flipped graph": (lambda par: flip(par / "rank_0000.onnx"), r"rank_0000\.onnx has changed"),
    "truncated": (cut, r"rank_0001\.weights has 245,759 bytes, not 245,760"),
    "missing": (
        lambda par: (par / "rank_0001.weights").unlink(),
        r"m\.par lacks rank_0001\.weights",
    ),
    "swapped": (swap, r"rank_000[01]\.weights has changed since it was written"),
    "extra": (
        lambda par: (par / "tokenizer.json").write_text("{}"),
        r"tokenizer\.json is not in the list of files of plan\.json; remove it",
    ),
    "an extra encoder": (
        lambda par: (par / "encoder").mkdir(),
        r"encoder is not in the list of files of plan\.json; remove it",
    ),
    "links to nothing": (link_to_nothing, r"m\.par lacks rank_0001\.onnx, though its plan has 2"),
    "a link out of the folder": (link_out, r"rank_0001\.weights is a link to .*elsewhere, outside"),
}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", DAMAGE)
def test_the_command_names_the_file_and_the_remedy(
    name: str, par: Path, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, message = DAMAGE[name]
    damage(par)
    out = par.parent / "out.npz"
    run = ["run", str(par), "--inputs", str(made / "in.npz"), "--outputs", str(out), "--verify"]
    for arguments in (
        run,
        ["inspect", str(par), "--verify"],
        ["inspect", str(par), "--sha256sums"],
    ):
        capsys.readouterr()
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert said.startswith("onnxpar: error: ") and said.count("\n") == 1, said
        assert re.search(message, said), said
        assert "copy" in said or "remove it" in said
    assert not out.exists()


def test_what_is_whole_runs(par: Path, made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (par / "README.md").write_text("nothing reads this")
    (par / ".cache").mkdir()
    assert main(["run", str(par), "--inputs", str(made / "in.npz"), "--verify"]) == 0
    assert main(["inspect", str(par), "--verify"]) == 0
    assert "verified: every byte of 4 files is what was written\n" in capsys.readouterr().out


@pytest.mark.matrix
@pytest.mark.parametrize("name", [*DAMAGE])
def test_a_session_does_not_start(name: str, par: Path) -> None:
    damage, message = DAMAGE[name]
    damage(par)
    with pytest.raises(OnnxparError, match=message) as failed:
        onnxpar.InferenceSession(par, verify=True, timeout=TIMEOUT)
    assert "\n  rank " not in str(failed.value), "each rank says the same, which is told once"


@pytest.mark.slow
def test_a_change_between_samples_is_found_by_every_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In threads, so that they have blocks of 64 bytes."""
    for module in (digests, write_digested):
        monkeypatch.setattr(module, "BLOCK", 64)
    onnxpar.shard(LLAMA, tmp_path / "m.par", devices=2, preset="tensor-parallel")
    flip(tmp_path / "m.par" / "rank_0001.weights", 100000)
    assert started([tmp_path / "m.par"] * 2) == ["", ""]
    for said in started([tmp_path / "m.par"] * 2, verify=True):
        assert "rank_0001.weights has changed since it was written" in said


@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize("damaged", [0, 1])
def test_all_ranks_say_the_same(damaged: int, par: Path, tmp_path: Path) -> None:
    """Also those whose own folder is whole."""
    other = tmp_path / "other.par"
    shutil.copytree(par, other)
    flip([par, other][damaged] / f"rank_{damaged:04d}.weights")
    one, two = started([par, other], verify=True)
    assert one == two and f"rank_{damaged:04d}.weights has changed" in one


@pytest.mark.usefixtures("medium")
def test_several_hosts_are_named(
    par: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.par"
    shutil.copytree(par, other)
    hosts = {par: "alpha", other: "beta"}
    place = check_start.place_of
    monkeypatch.setattr(
        check_start, "place_of", lambda folder: {**place(folder), "host": hosts[folder]}
    )
    flip(other / "rank_0001.weights")
    for said in started([par, other], verify=True):
        assert (
            said.startswith("rank 1 (host beta) failed: ")
            and "rank_0001.weights has changed" in said
        )
    flip(other / "rank_0001.weights")
    plan = json.loads((other / "plan.json").read_text())
    (other / "plan.json").write_text(digests.sealed({**plan, "notes": ["another"]}))
    for said in started([par, other]):
        assert "the ranks disagree on the model" in said
        assert "on rank 0 (host alpha) and" in said and "on rank 1 (host beta)" in said


def test_ranks_of_which_only_some_verify(par: Path, tmp_path: Path) -> None:
    """The others wait for them, and fail with them."""
    worlds = thread_worlds(2, TIMEOUT)
    flip(par / "rank_0001.weights")

    def start(rank: int) -> str:
        try:
            check_start.check_start(Bundle.load(par), worlds[rank], whole=rank == 1)
        except OnnxparError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        assert all("has changed" in said for said in pool.map(start, range(2)))
    for world in worlds:
        world.close()


def test_many_blocks_take_several_rounds(par: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_start, "ROUND", 1)
    assert started([par, par], verify=True) == ["", ""]
    flip(par / "rank_0000.weights")
    for said in started([par, par], verify=True):
        assert "rank_0000.weights has changed" in said


@pytest.mark.parametrize("beside", [[[0, 1, 2, 3]], [[0, 2], [1, 3]], [[0], [1], [2], [3]]])
def test_ranks_of_a_folder_share_the_work(beside: list[list[int]]) -> None:
    """In each folder, each block that its ranks read is checked once."""
    size = 10 * digests.BLOCK
    each = {"bytes": size, "sha256": [f"{i}" for i in range(10)]}
    listed = {
        "shared.weights": each,
        "shared_0000.weights": {**each, "ranks": [0, 2]},
        **{f"rank_{rank:04d}.onnx": {**each, "ranks": [rank]} for rank in range(4)},
    }
    files = BundleFiles(Path("m.par"), listed, 4)
    for ranks in beside:
        checked = Counter(block for rank in ranks for block in files.share(rank, ranks))
        read = {name: own for rank in ranks for name, own in files.of(rank).items()}
        assert checked == Counter(blocks_of(read))
        most = max(len(files.share(rank, ranks)) for rank in ranks)
        assert most <= 10 + 10 // len(ranks) + 10


@pytest.mark.slow
def test_a_folder_without_digests(
    par: Path, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_plan(par, Bundle.load(par).data, files={})
    with onnxpar.InferenceSession(par, timeout=TIMEOUT):
        pass
    for arguments in (["inspect"], ["run", "--inputs", str(made / "in.npz")]):
        assert main([*arguments, str(par), "--verify"]) == 2
        said = capsys.readouterr().err
        assert "carries no digests, so its files cannot be verified; shard the model again" in said


def test_folders_that_do_not_say_who_reads_what(par: Path) -> None:
    """As they were written before: any rank may read any weights."""
    plan = Bundle.load(par).data
    listed = {
        name: {key: value for key, value in each.items() if key != "ranks"}
        for name, each in plan["files"].items()
    }
    write_plan(par, plan, files=listed)
    files = Bundle.load(par).files
    assert set(files.of(0)) == {"rank_0000.onnx", "rank_0000.weights", "rank_0001.weights"}
    assert files.absent == []
    assert started([par, par], verify=True) == started([par, par]) == ["", ""]
    (par / "encoder").mkdir()  # was not in the list
    assert started([par, par], verify=True) == ["", ""]
    flip(par / "rank_0001.weights")
    assert all("has changed" in said for said in started([par, par], verify=True))


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "encoder/rank_0001.onnx"])
def test_every_file_of_an_encoder_decoder(name: str, tmp_path: Path) -> None:
    par = tmp_path / "t5.par"
    onnxpar.shard(MODELS / "llm" / "t5", par, devices=2, preset="tensor-parallel")
    listed = Bundle.load(par).files.listed
    assert {"encoder/plan.json", "tokenizer.json", "config.json"} <= listed.keys()
    onnxpar.inspect(par, verify=True)
    flip(par / name, -2 if name.endswith("json") else 500)
    with pytest.raises(OnnxparError, match="has changed since it was written"):
        onnxpar.inspect(par, verify=True)
    with pytest.raises(OnnxparError, match=r"has changed since|cannot be read"):
        Generator(par, timeout=TIMEOUT, verify=True)


@pytest.mark.slow
def test_an_encoder_of_another_model(tmp_path: Path) -> None:
    """Whose own files are whole."""
    par, other = tmp_path / "t5.par", tmp_path / "bart.par"
    for path in (par, other):
        onnxpar.shard(MODELS / "llm" / path.stem, path, devices=1)
    shutil.rmtree(par / "encoder")
    shutil.copytree(other / "encoder", par / "encoder")
    with pytest.raises(OnnxparError, match=r"encoder/plan\.json (has changed|has [\d,]+ bytes)"):
        onnxpar.inspect(par, verify=True)


@pytest.mark.slow
def test_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step, par = tmp_path / "step.onnx", tmp_path / "step.par"
    model = MODELS / "dlrm.legacy.training.onnx"
    spec = onnxpar.training.grad(model, step, loss="bce", optimizer="adamw")
    plan = onnxpar.shard(step, par, devices=2, preset="data-parallel")
    feeds = feeds_for(plan)
    data = {name: feeds[name] for name in spec.data}
    np.savez(tmp_path / "data.npz", **data)
    onnxpar.training.train(par, data, lr=0.1, verify=True, timeout=TIMEOUT)
    names = {"rank_0001.states.onnx", "rank_0001.evaluation.onnx"}
    assert names < Bundle.load(par).files.listed.keys()
    for name in sorted(names):
        flip(par / name, 60)
        train = ["train", str(par), "--data", str(tmp_path / "data.npz"), "--lr", "0.1"]
        log = ["--log-dir", str(tmp_path / "log")]
        assert main([*train, *log, "--verify"]) == 2
        assert f"{name} has changed since it was written" in capsys.readouterr().err
        flip(par / name, 60)
    (par / "tokenizer.json").write_text("{}")  # which ranks do not look for
    assert main([*train, *log]) == 0
    assert main([*train, *log, "--verify"]) == 2
    with pytest.raises(OnnxparError, match="not in the list of files"):
        onnxpar.training.train(par, data, lr=0.1, verify=True, timeout=TIMEOUT)


def test_sums_are_those_of_sha256sum(par: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(par), "--sha256sums"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = {name: digest for digest, name in (line.split("  ") for line in lines)}
    assert found == {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in par.iterdir()
    }


@pytest.mark.slow
def test_sums_of_an_encoder_decoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    par = tmp_path / "t5.par"
    onnxpar.shard(MODELS / "llm" / "t5", par, devices=1)
    assert main(["inspect", str(par), "--sha256sums"]) == 0
    names = [line.split("  ")[1] for line in capsys.readouterr().out.splitlines()]
    files = [path for path in par.rglob("*") if path.is_file()]
    assert sorted(names) == sorted(path.relative_to(par).as_posix() for path in files)
