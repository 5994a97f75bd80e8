"""Rank 0 of a launch makes all calls, and the other ranks follow it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from committed import MODELS
from runtime.bad_requests import STRATEGIES, decoder
from runtime.bundles import k_split, weight_of_k_split
from runtime.led_program import PROMPTS

import onnxpar
from onnxpar.base.errors import RankError
from onnxpar.llm.generator import Generator
from onnxpar.runtime.launch.launch import Launched
from onnxpar.runtime.launch.lead import Lead
from onnxpar.runtime.ranks.orders import Order, Orders
from onnxpar.runtime.ranks.planned_run import Request
from onnxpar.runtime.states.host_memory import HostMemory, memory_of_hosts

TIMEOUT = 4.0
"""The timeout of ranks, in seconds."""


class Led:
    """Processes that are the ranks of a launch: the first one leads."""

    def __init__(self, folder: Path, what: str, *pars: Path, ranks: int = 2) -> None:
        command = [sys.executable, "-m", "runtime.led_program", what, str(TIMEOUT), *map(str, pars)]
        common = {"ONNXPAR_WORLD_SIZE": str(ranks), "ONNXPAR_STORE": f"file:{folder}/store"}
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.processes = [
            subprocess.Popen(
                command,
                env={**os.environ, **common, **paths, "ONNXPAR_RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]

    def wait_until_up(self) -> None:
        assert self.processes[0].stdout is not None
        assert self.processes[0].stdout.readline() == "up\n"

    def ends(self) -> list[tuple[int, str]]:
        """The exit status of each process, and what it prints; all must end soon."""
        said = [p.communicate(timeout=60)[0] for p in self.processes]
        return [(p.returncode, text) for p, text in zip(self.processes, said, strict=True)]

    def kill(self) -> None:
        for each in self.processes:
            each.kill()
            each.communicate()


Start = Callable[..., Led]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts ranks, which end with the test."""
    made: list[Led] = []

    def started(what: str, *pars: Path, ranks: int = 2) -> Led:
        made.append(Led(tmp_path, what, *pars, ranks=ranks))
        return made[-1]

    yield started
    for each in made:
        each.kill()


@pytest.fixture(params=list(STRATEGIES))
def split(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A decoder with a state, over two ranks."""
    (tmp_path / "s.yaml").write_text(STRATEGIES[request.param])
    par = tmp_path / "m.par"
    onnxpar.shard(decoder(tmp_path), par, strategy=tmp_path / "s.yaml", states=[("s", "next")])
    return par


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.usefixtures("medium")
def test_answers(split: Path, start: Start) -> None:
    """They are those of the whole model, also after a pause beyond the timeout, and after errors,
    which all ranks share."""
    (status, said), other = start("answers", split).ends()
    assert (status, other) == (0, (0, ""))
    errors = said.splitlines()
    assert errors[0].startswith("InputError input 'ids': index 1000 at [3, 0] is out of")
    assert errors[1].startswith("InputError input 'ids': index 1000 at [0, 0] is out of")
    whole = ort.InferenceSession(split.with_name("decode.onnx"), None, ["CPUExecutionProvider"])
    state, wanted = np.zeros((4, 1, 8), np.float32), []
    for number in (0, 2, 4):
        feeds = {"ids": np.arange(4)[:, None] + number, "s": state}
        y, state = whole.run(["y", "next"], feeds)
        wanted.append(y)
    found = np.load(split.with_name("found.npy"))
    np.testing.assert_allclose(found, np.stack(wanted), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_each_call(split: Path, start: Start) -> None:
    (status, said), other = start("calls", split).ends()
    assert (status, other) == (0, (0, "")), said
    whole = ort.InferenceSession(split.with_name("decode.onnx"), None, ["CPUExecutionProvider"])
    feeds = {"ids": np.arange(4)[:, None], "s": np.ones((4, 1, 8), np.float32)}
    (y,) = whole.run(["y"], feeds)
    words = said.split()
    assert words[0] == "True"
    assert float(words[1]) == pytest.approx(float(y.sum()), rel=1e-3)


@pytest.mark.slow
def test_two_sessions(tmp_path: Path, start: Start) -> None:
    """By turns; one that is closed leaves the other one."""
    pars = [k_split(tmp_path / "a.par"), k_split(tmp_path / "b.par", k=7)]
    (status, said), other = start("two", *pars).ends()
    assert (status, other) == (0, (0, "")), said
    x = np.arange(28, dtype=np.float32).reshape(4, 7)
    total = float((x @ weight_of_k_split()).sum())
    wanted = [total, total, 2 * total, 2 * total, total, total, total]
    assert [float(word) for word in said.split()] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "llama"])
def test_a_language_model(tmp_path: Path, start: Start, name: str) -> None:
    """Its tokens are those without a launcher."""
    par = tmp_path / "m.par"
    onnxpar.shard(MODELS / "llm" / name, par, devices=2, preset="tensor-parallel")
    (status, said), other = start("generate", par).ends()
    assert (status, other) == (0, (0, "")), said
    with Generator(par) as generator:
        wanted = [generator.generate(p, max_new_tokens=12)[0].tokens for p in PROMPTS]
    assert [[int(word) for word in line.split()] for line in said.splitlines()] == wanted


def lose(led: Led, lost: int, number: int) -> list[str]:
    """Sends a signal to a rank of three; returns what the others say at their end, which comes
    within the timeout, with exit status 2."""
    led.wait_until_up()
    time.sleep(0.5)
    led.processes[lost].send_signal(number)
    begin = time.monotonic()
    others = [led.processes[rank] for rank in range(3) if rank != lost]
    said = [process.communicate(timeout=60)[0] for process in others]
    assert time.monotonic() - begin < 2 * TIMEOUT + 5
    assert [process.returncode for process in others] == [2, 2]
    return said


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize("what", ["idle", "busy"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_follower_is_lost(tmp_path: Path, start: Start, what: str, number: int) -> None:
    """The others end with an error that names it."""
    said = lose(start(what, k_split(tmp_path / "m.par", ranks=3), ranks=3), 2, number)
    assert said[0].startswith("LaunchError ") and "rank 2" in said[0], said
    assert "RankError" in said[1] and "rank 2" in said[1], said


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize("what", ["idle", "busy"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_rank_0_is_lost(tmp_path: Path, start: Start, what: str, number: int) -> None:
    """All others end with an error that names it."""
    for text in lose(start(what, k_split(tmp_path / "m.par", ranks=3), ranks=3), 0, number):
        assert text.startswith("RankError ") and "rank 0" in text, text


@pytest.mark.slow
def test_another_number_of_ranks(tmp_path: Path, start: Start) -> None:
    """All of them say so."""
    for status, said in start("idle", k_split(tmp_path / "m.par", ranks=3)).ends():
        assert status == 2
        assert "has 3 ranks, but 2 processes were started" in said


def test_threads_share_a_lead(tmp_path: Path) -> None:
    """Orders of several threads do not mix."""
    told: list[str] = []

    class Alone(Orders):
        def tell(self, order: bytes) -> None:
            told.append(Order.unpack(order).do)

    orders = Alone(Launched(0, 1, 1, "hash:alone"), 60.0)
    with Lead(orders) as lead:

        def call(name: str) -> None:
            for _ in range(20):
                lead.all_do(Order(name), lambda: (time.sleep(0.001), told.append(name)))

        threads = [threading.Thread(target=call, args=(name,)) for name in "abc"]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    calls = [name for name in told if name in "abc"]
    assert calls[::2] == calls[1::2] and len(calls) == 120
    assert told[-1] == "end"


def test_orders_are_what_they_were() -> None:
    request = Request(["y"], True, None, (3, 4), 2, {"a": "b"})
    feeds = {"x": np.arange(3, dtype=np.float16), "text": np.array(["a", "b"], object)}
    found = Order.unpack(Order("run", 3, (dict(vars(request)), feeds)).pack())
    assert (found.do, found.session) == ("run", 3)
    assert Request(**found.given[0]) == request
    for name, array in feeds.items():
        assert found.given[1][name].dtype == array.dtype
        np.testing.assert_array_equal(found.given[1][name], array)
    for data in (b"", b"N", Order("x").pack()[:-1], Order("x", "1").pack(), b"\x80\x04."):  # type: ignore[arg-type]
        with pytest.raises(RankError, match="no order"):
            Order.unpack(data)


def test_the_memory_of_hosts() -> None:
    """Of ranks of one host, the least that one of them saw free counts."""
    told = [
        {"id": "1", "host": "a", "free": 8, "total": 10},
        {"id": "2", "host": "b", "free": 5, "total": 6},
        {"id": "1", "host": "a", "free": 7, "total": 10},
    ]
    assert memory_of_hosts(told) == [HostMemory("a", 2, 7, 10), HostMemory("b", 1, 5, 6)]
