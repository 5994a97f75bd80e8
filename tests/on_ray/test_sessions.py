"""Sessions on two nodes of a Ray cluster return what the unsplit model does, and keep states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from certificates import authority, certificate
from committed import MODELS
from on_ray.on_nodes import TIMEOUT, actors, groups, pids
from onnx import helper
from runtime.bundles import Tensor, is_alive, k_split, wait_until, write_par

import onnxpar
from onnxpar.base.errors import InputError, ModelError, RankError
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.options import SessionSpec

pytest.importorskip("ray")
pytestmark = pytest.mark.usefixtures("cluster")
GPT2 = MODELS / "gpt2.dynamo.static.onnx"
RNG = np.random.default_rng(0)


def opened(par: Path, strategy: str = "SPREAD", **options: Any) -> Any:
    from onnxpar.ray import InferenceSession

    return InferenceSession(par, actors=actors(strategy), timeout=TIMEOUT, **options)


@pytest.mark.parametrize("ranks", [2, 4])
def test_results_are_those_of_the_unsplit_model(ranks: int, tmp_path: Path) -> None:
    par = tmp_path / "gpt2.par"
    onnxpar.shard(GPT2, par, devices=ranks, preset="tensor-parallel")
    ids = RNG.integers(0, 500, (4, 16))
    feeds = {"input_ids": ids, "attention_mask": np.ones((4, 16), np.int64)}
    (wanted,) = ort.InferenceSession(GPT2).run(["logits"], feeds)
    with onnxpar.InferenceSession(par, timeout=TIMEOUT) as here:
        (same,) = here.run(["logits"], feeds)
    with opened(par) as session:
        (group,) = groups()
        assert len(set(group["bundles_to_node_id"].values())) == 2
        for _ in range(3):
            (found,) = session.run(["logits"], feeds)
            np.testing.assert_array_equal(found, same)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_inputs_above_what_travels_in_a_call(tmp_path: Path) -> None:
    shape, nodes = (300, 400), [helper.make_node("Add", ["x", "b"], ["y"])]
    par = write_par(
        tmp_path / "model.par",
        "dp=2,tp=2",
        [Tensor("x", shape, ("dp", None)), Tensor("b", shape, ("dp", None))],
        [Tensor("y", shape, ("dp", None))],
        lambda rank: nodes,
    )
    x, b = (RNG.standard_normal(shape).astype(np.float32) for _ in "xb")
    with opened(par) as session:
        (y,) = session.run(None, {"x": x, "b": b})
        y += 1  # what a session returns belongs to the caller
    np.testing.assert_array_equal(y, x + b + 1)


@pytest.fixture
def counter(tmp_path: Path) -> Path:
    """s' = s + x and y = 2 s', with s split."""
    split, shape = (None, "tp"), (3, 5)
    return write_par(
        tmp_path / "model.par",
        "tp=2",
        [Tensor("x", shape, split), Tensor("s", shape, split)],
        [Tensor("y", shape, split), Tensor("s_next", shape, split)],
        lambda rank: [
            helper.make_node("Add", ["s", "x"], ["s_next"]),
            helper.make_node("Add", ["s_next", "s_next"], ["y"]),
        ],
        states={"s": "s_next"},
    )


def test_states_stay_on_their_nodes(counter: Path, tmp_path: Path) -> None:
    x, s = np.ones((3, 5), np.float32), np.zeros((3, 5), np.float32)
    saved = tmp_path / "saved"
    saved.mkdir()
    with opened(counter, "STRICT_SPREAD") as session:
        session.run(["y"], {"x": x, "s": s}, keep_states=True)
        (y,) = session.run(["y"], {"x": x}, keep_states=True)
        np.testing.assert_array_equal(y, 4 * x)
        np.testing.assert_array_equal(session.states.read("s"), 2 * x)
        session.states.save(saved)
        session.states.write("s", 7 * x)
        (y,) = session.run(["y"], {"x": x}, keep_states=True)
        np.testing.assert_array_equal(y, 16 * x)
        session.states.load(saved, ["s"])
        np.testing.assert_array_equal(session.states.read("s"), 2 * x)
        session.states.reset()
        with pytest.raises(InputError, match="'s'"):
            session.run(["y"], {"x": x})


def test_states_in_a_folder_that_a_node_does_not_see(counter: Path, tmp_path: Path) -> None:
    x = np.ones((3, 5), np.float32)
    with opened(counter) as session:
        session.run(["y"], {"x": x, "s": x}, keep_states=True)
        with pytest.raises(RankError, match=r"does not see .*gone; give a folder that all hosts"):
            session._ranks.save_states(str(tmp_path / "gone"), ())
        np.testing.assert_array_equal(session.states.read("s"), 2 * x)  # the session goes on


def test_a_profile_of_all_nodes(tmp_path: Path) -> None:
    par, x = k_split(tmp_path / "model.par"), np.ones((4, 7), np.float32)
    with opened(par, profile=True) as session:
        for _ in range(2):
            session.run(None, {"x": x})
        trace = session.end_profile(tmp_path / "trace.json")
    assert trace is not None and (tmp_path / "trace.json").is_file()


def test_the_end_of_a_session(tmp_path: Path) -> None:
    par, x = k_split(tmp_path / "model.par"), np.ones((4, 7), np.float32)
    with opened(par) as session:
        session.run(None, {"x": x})
        processes = pids(session)
        assert len(groups()) == 1
    assert wait_until(lambda: not any(map(is_alive, processes)), 30)
    assert groups() == []
    with pytest.raises(RankError, match=r"this session is closed: close\(\) was called"):
        session.run(None, {"x": x})


def test_nodes_need_certificates_or_trust(tmp_path: Path) -> None:
    from onnxpar.ray import Actors, InferenceSession

    par, x = k_split(tmp_path / "model.par"), np.ones((4, 7), np.float32)
    with pytest.raises(RankError, match=r"rank 0 on host \S+ .* tls_dir or, .* insecure=True"):
        InferenceSession(par, actors=Actors(strategy="STRICT_SPREAD"), timeout=TIMEOUT)
    assert groups() == []
    with InferenceSession(
        par, actors=Actors(strategy="STRICT_PACK"), timeout=TIMEOUT, verify=True
    ) as session:
        assert session.run(["d"], {"x": x})[0][0, 0] == 2


def test_certificates(tmp_path: Path) -> None:
    from onnxpar.ray import Actors, InferenceSession

    par, x = k_split(tmp_path / "model.par"), np.ones((4, 7), np.float32)
    certificates = certificate(tmp_path / "tls", authority(tmp_path / "ca"))
    where = Actors(strategy="STRICT_SPREAD", tls_dir=certificates)
    with InferenceSession(par, actors=where, timeout=TIMEOUT) as session:
        assert session.run(["d"], {"x": x})[0][0, 0] == 2
    (certificates / "tls.key").unlink()
    with pytest.raises(RankError, match=r"rank 0 on host .* failed: TLS cannot use .*tls\.key"):
        InferenceSession(par, actors=where, timeout=TIMEOUT)


def test_a_cluster_without_room(tmp_path: Path) -> None:
    from onnxpar.ray import InferenceSession

    par = k_split(tmp_path / "model.par")
    with pytest.raises(RankError, match=r"2 times \{'CPU': 64\} .* no room .* 1 s: it has"):
        InferenceSession(par, actors=actors(cpus=64), timeout=1)
    assert groups() == []


def test_another_model_on_a_node(tmp_path: Path) -> None:
    from onnxpar.ray.rank_actor import Joining, RankActor

    par = k_split(tmp_path / "model.par", ranks=1)
    alone = Joining(1, 1, "hash:alone", "", TIMEOUT, 1)
    with pytest.raises(ModelError, match=r"begins with [0-9a-f]* here and 01234567 there"):
        RankActor(0, {}).start(str(par), "0123456789", SessionSpec(), alone)


def test_a_node_that_lacks_the_model(cluster: Any, tmp_path: Path) -> None:
    """Its rank fetches it. Nodes of one machine have one file system, so the path is another."""
    import ray

    from onnxpar.ray.rank_actor import Joining, RankActor

    par, other = k_split(tmp_path / "model.par"), tmp_path / "other.par"
    handles = [ray.remote(RankActor).remote(rank, {}) for rank in range(2)]
    joining = Joining(2, 2, ray.get(handles[0].meet.remote("127.0.0.1")), "", TIMEOUT, 1)
    digest = Bundle.load(par).digest
    paths = [str(par), str(other)]
    starts = zip(handles, paths, strict=True)
    ray.get([h.start.remote(path, digest, SessionSpec(), joining) for h, path in starts])
    assert sorted(file.name for file in other.iterdir()) == ["plan.json", "rank_0001.onnx"]
    for handle in handles:
        ray.kill(handle)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"log_dir": "logs"}, "log_dir is for ranks on this host"),
        ({"bind": "none"}, "bind is for ranks on this host"),
        ({"ranks_per_numa": 1}, "ranks_per_numa is for ranks on this host"),
    ],
)
def test_options_of_processes_are_refused(options: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=text):
        opened(k_split(tmp_path / "model.par"), **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cpus": 0}, "cpus is 0"),
        ({"resources": {"CPU": 1}}, "resources has CPU"),
    ],
)
def test_actors_that_cannot_be(options: Any, text: str) -> None:
    with pytest.raises(InputError, match=text):
        actors(**options)
    with pytest.raises(InputError, match="strategy is 'WIDE'; give one of PACK, "):
        actors("WIDE")


def test_a_launcher_and_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    par = k_split(tmp_path / "model.par")
    for name, value in (("RANK", "0"), ("STORE", "hash:x"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(f"ONNXPAR_{name}", value)
    with pytest.raises(RankError, match="rank 0 of 2, and start_ranks starts ranks elsewhere"):
        opened(par)
