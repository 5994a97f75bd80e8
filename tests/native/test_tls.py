"""Connections that are encrypted, with certificates on both ends."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from certificates import authority, certificate
from native.frames import KEY, sockets

from onnxpar.base.errors import OnnxparError
from onnxpar.runtime.ranks import collectives
from onnxpar.runtime.ranks.groups import World


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate, and one that another authority has signed."""
    base = tmp_path_factory.mktemp("certificates")
    return (
        certificate(base / "own", authority(base / "ca")),
        certificate(base / "foreign", authority(base / "another")),
    )


@pytest.fixture
def encrypted(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXPAR_TLS_DIR", str(folders[0]))


def free_store() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"tcp://127.0.0.1:{server.getsockname()[1]}#{KEY}"


def join(size: int, store: str = "", timeout: float = 20) -> list[World]:
    at = store or free_store()

    def each(rank: int) -> World:
        return World.create(f"tls/{at}/{rank}", rank, size, at, timeout=timeout)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(each, range(size)))


def close(worlds: list[World]) -> None:
    for world in worlds:
        world.close()


def total(worlds: list[World], x: np.ndarray) -> list[np.ndarray]:
    with ThreadPoolExecutor(len(worlds)) as pool:
        return list(
            pool.map(lambda world: collectives.all_reduce(world, x * (world.rank + 1)), worlds)
        )


@pytest.mark.matrix
@pytest.mark.parametrize("connections", ["1", "3"])
@pytest.mark.parametrize("length", [1, 5000, 100_003, 5_000_001])
def test_all_reduce(
    encrypted: None, monkeypatch: pytest.MonkeyPatch, length: int, connections: str
) -> None:
    """More than sockets hold goes in both directions at once."""
    monkeypatch.setenv("ONNXPAR_CONNECTIONS", connections)
    worlds = join(3)
    x = np.arange(length, dtype=np.float32) % 1000
    for _ in range(3):
        for y in total(worlds, x):
            np.testing.assert_array_equal(y, 6 * x)
    close(worlds)


def test_an_interrupt_and_a_new_epoch(encrypted: None) -> None:
    worlds = join(3)
    for _ in range(5):
        worlds[1].interrupt("a test")
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(World.renew, worlds)) == ["a test"] * 3
        for y in total(worlds, np.ones(7, np.float32)):
            np.testing.assert_array_equal(y, 6)
    close(worlds)


class Relay:
    """Passes bytes on between a rank and a hub, and keeps them."""

    def __init__(self, hub: int) -> None:
        self.heard = bytearray()
        self._hub = hub
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._server.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._hub))
                except ConnectionRefusedError:  # rank 0 does not listen yet
                    near.close()
                    continue
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self.heard += data
                sink.sendall(data)
            sink.close()

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def relay() -> Iterator[Relay]:
    made = Relay(int(free_store().split("#")[0].split(":")[-1]))
    yield made
    made.close()


def through(relay: Relay) -> bytes:
    """What a relay between rank 1 and the hub hears."""

    def each(rank: int) -> World:
        port = relay.port if rank else relay._hub
        return World.create(f"relay/{port}", rank, 2, f"tcp://127.0.0.1:{port}#{KEY}", timeout=30)

    with ThreadPoolExecutor(2) as pool:
        close(list(pool.map(each, range(2))))
    return bytes(relay.heard)


def test_who_listens_reads_nothing(encrypted: None, relay: Relay) -> None:
    assert len(heard := through(relay)) > 1000
    assert KEY.encode() not in heard
    assert b"memory/" not in heard


def test_without_tls_the_key_stays_secret(relay: Relay) -> None:
    assert KEY.encode() not in (heard := through(relay))
    assert b"memory/" in heard


def refused(folder: Path | None, monkeypatch: pytest.MonkeyPatch, first_waits: float = 3) -> str:
    """What rank 1 says that has this folder, and rank 0 another, which waits so many seconds."""
    at = free_store()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(World.create, f"{at}/0", 0, 2, at, timeout=first_waits)
        while not sockets(int(at.split("#")[0].split(":")[-1]), hub_side=True):
            time.sleep(0.01)  # rank 0 has read its certificates when it is connected to itself
        monkeypatch.delenv("ONNXPAR_TLS_DIR")
        if folder:
            monkeypatch.setenv("ONNXPAR_TLS_DIR", str(folder))
        with pytest.raises(OnnxparError) as error:
            World.create(f"{at}/1", 1, 2, at, timeout=2)
        with pytest.raises(OnnxparError):
            first.result()
    return str(error.value)


@pytest.mark.slow
def test_a_certificate_of_another_authority(
    encrypted: None, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "its certificate is refused: " in refused(folders[1], monkeypatch)


@pytest.mark.slow
def test_a_hub_that_gives_up_first(
    encrypted: None, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That nothing listens there any more does not hide why."""
    assert "its certificate is refused: " in refused(folders[1], monkeypatch, first_waits=1)


@pytest.mark.slow
def test_one_end_without_tls(encrypted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "or other certificates, or is no hub of onnxpar" in refused(None, monkeypatch)


@pytest.mark.parametrize("file", ["ca.crt", "tls.crt", "tls.key"])
@pytest.mark.parametrize("content", [None, "", "-----BEGIN CERTIFICATE-----\nx\n"])
def test_files_that_are_wrong(
    folders: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    file: str,
    content: str | None,
) -> None:
    for each in folders[0].iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_text(content)
    monkeypatch.setenv("ONNXPAR_TLS_DIR", str(tmp_path))
    with pytest.raises(OnnxparError, match=rf"TLS cannot use .*/{file}: .*must have ca\.crt"):
        World.create("wrong", 0, 2, free_store(), timeout=1)


def test_a_key_of_another_certificate(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, folder in [("ca.crt", 0), ("tls.crt", 0), ("tls.key", 1)]:
        (tmp_path / name).write_bytes((folders[folder] / name).read_bytes())
    monkeypatch.setenv("ONNXPAR_TLS_DIR", str(tmp_path))
    with pytest.raises(OnnxparError, match=r"TLS cannot use .*/tls\.key: .*mismatch"):
        World.create("wrong", 0, 2, free_store(), timeout=1)


def test_what_other_hosts_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs certificates, unless somebody says that the network is trusted."""
    with pytest.raises(OnnxparError, match=r"other hosts can reach .*--tls-dir.*--insecure"):
        World.create("open", 0, 2, "hash:open", "", timeout=1)
    monkeypatch.setenv("ONNXPAR_INSECURE", "1")
    with pytest.raises(OnnxparError, match="rank 1 has not joined"):
        World.create("open", 0, 2, "hash:open", "", timeout=0.2)
