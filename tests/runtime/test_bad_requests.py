"""A request that the model cannot answer fails on all ranks, and the next run works."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from runtime.bad_requests import BATCH, ROWS, STRATEGIES, decoder

import onnxpar
from onnxpar.base.errors import InputError, OnnxparError, RunError
from onnxpar.runtime.session.session import InferenceSession, Session
from onnxpar.runtime.session.threads import ThreadSession

pytestmark = [pytest.mark.usefixtures("medium"), pytest.mark.processes]

KINDS = pytest.mark.parametrize("kind", [ThreadSession, InferenceSession])


@pytest.fixture(scope="module")
def pars(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The decoder, split by each strategy."""
    folder = tmp_path_factory.mktemp("decoder")
    model = decoder(folder)
    for name, text in STRATEGIES.items():
        strategy = folder / f"{name}.yaml"
        strategy.write_text(text)
        states = [("s", "next")]
        onnxpar.shard(model, folder / f"{name}.par", strategy=strategy, states=states)
    return {name: folder / f"{name}.par" for name in STRATEGIES}


@pytest.fixture(params=list(STRATEGIES))
def par(request: pytest.FixtureRequest, pars: dict[str, Path]) -> Path:
    return pars[request.param]


def requests(count: int) -> list[np.ndarray]:
    random = np.random.default_rng(1)
    return [random.integers(-ROWS, ROWS, (BATCH, 1)) for _ in range(count)]


def start(session: Session) -> None:
    session.states.write("s", np.zeros((BATCH, 1, 8), np.float32))


def step(session: Session, ids: np.ndarray) -> np.ndarray:
    return session.run(["y"], {"ids": ids}, keep_states=True)[0]


@pytest.mark.matrix
@KINDS
def test_a_bad_request_in_a_loop(kind: Callable[..., Session], par: Path) -> None:
    """It fails by the global name and place, and the loop goes on as if it had not been."""
    with kind(par, timeout=60) as session:
        start(session)
        wanted = [step(session, ids) for ids in requests(8)]
        start(session)
        for number, ids in enumerate(requests(8)):
            if number in (0, 5):
                for row, value in ((3, 99999), (0, ROWS), (2, -ROWS - 1)):
                    bad = ids.copy()
                    bad[row, 0] = value
                    text = (
                        f"input 'ids': index {value} at [{row}, 0] is out of range for 'table' of "
                        f"{ROWS} rows"
                    )
                    with pytest.raises(InputError, match=re.escape(text)):
                        step(session, bad)
            np.testing.assert_array_equal(step(session, ids), wanted[number])


def held() -> tuple[int, int]:
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.matrix
@KINDS
def test_many_bad_requests_leave_nothing(kind: Callable[..., Session], par: Path) -> None:
    good, bad = requests(1)[0], np.full((BATCH, 1), 2 * ROWS)
    with kind(par, timeout=60) as session:
        start(session)

        def fail(times: int) -> None:
            for _ in range(times):
                with pytest.raises(InputError, match="out of range"):
                    step(session, bad)

        fail(10)
        processes = getattr(session._ranks, "_processes", None)
        pids = [r.process.pid for r in processes.ranks] if processes else [os.getpid()]
        fds = [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]
        before, memory = held(), [resident(pid) for pid in pids]
        fail(50)
        assert held() == before
        assert [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids] == fds
        for pid, was in zip(pids, memory, strict=True):
            assert resident(pid) < was + (16 << 20)
        step(session, good)


BODY = """<ir_version: 8, opset_import: ["" : 17]>
bad (float[4,8] x, int64[2] shape, int64[4] by, int64 at)
  => (float[a,b] z, int64[4] q, float[1,8] p)
{ [product] m = MatMul(x, w)
  [shaped] z = Reshape(m, shape)
  [halves] q = Div(numbers, by)
  [places] row = Unsqueeze(at, zero)
  [found] p = Gather(positions, row) }"""
REQUESTS: dict[str, dict[str, Any]] = {
    "reshape": {"shape": np.array([3, 5])},
    "position": {"at": np.array(7)},
    "divisor": {"by": np.array([1, 2, 0, 4])},
}
NAMED = {"reshape": "Reshape 'shaped'", "position": "node 'found'", "divisor": "Div 'halves'"}


@pytest.mark.matrix
@KINDS
@pytest.mark.parametrize("name", REQUESTS)
def test_requests_that_only_data_decide(
    kind: Callable[..., Session], name: str, tmp_path: Path
) -> None:
    proto = onnx.parser.parse_model(BODY)
    arrays = {
        "w": np.eye(8, dtype=np.float32),
        "numbers": np.arange(4),
        "zero": np.zeros(1, np.int64),
        "positions": np.ones((4, 8), np.float32),
    }
    for key, array in arrays.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, key))
    onnx.save(proto, tmp_path / "bad.onnx")
    strategy = {"mesh": {"tp": 2}, "shard": {"product": [[None, "tp"], ["tp", None]]}}
    onnxpar.shard(tmp_path / "bad.onnx", tmp_path / "bad.par", strategy=strategy)
    x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    good = {"x": x, "shape": np.array([8, 4]), "by": np.ones(4, np.int64), "at": np.array(1)}
    with kind(tmp_path / "bad.par", timeout=60) as session:
        for _ in range(2):
            with pytest.raises(OnnxparError) as caught:
                session.run(None, {**good, **REQUESTS[name]})
            assert isinstance(caught.value, (RunError, InputError))
            assert NAMED[name] in str(caught.value)
            np.testing.assert_allclose(session.run(["z"], good)[0], x.reshape(8, 4), rtol=1e-6)
