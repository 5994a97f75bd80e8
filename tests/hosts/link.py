"""A slow, lossy network between hosts, in one process, as kernels without netem have none.

Each host gets an interface, `link0` (a TUN device), and this process moves packets between them: it
reads a packet when the sender's link is free, as a network card does, and hands it to its receiver
when its bytes and the latency have passed. Packets are as large as IP allows, so that Python
is fast enough for 1 Gbit/s in both directions; `mtu` makes them smaller.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import TracebackType

from hosts.hosts import Host

NETWORK = "10.92.0"
INTERFACE = "link0"
MTU = 65_000
_TUNSETIFF = 0x400454CA
_TUN_WITHOUT_HEADER = 0x0001 | 0x1000
_NEW_NETWORK = 0x40000000
_CATCH_UP = 0.002
"""Seconds for which a link may make up when this process was not scheduled."""


@dataclass(frozen=True)
class Quality:
    """What a network does to packets of each direction between two hosts.

    rate      bytes per second that a host can send, and receive; 0: no limit
    latency   seconds that a packet is under way
    jitter    most seconds that a packet is under way in addition; packets overtake each other
    loss      probability that a packet is lost
    reorder   probability that a packet comes `late` seconds after its turn
    cut       True if every packet is lost
    """

    rate: float = 0.0
    latency: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    reorder: float = 0.0
    late: float = 0.005
    cut: bool = False


class Network:
    """The network of some hosts; each has the address `addresses[i]` on it."""

    def __init__(
        self,
        hosts: Sequence[Host],
        quality: Quality = Quality(),
        queue: int = 500,
        seed: int = 0,
        mtu: int = MTU,
    ) -> None:
        """`queue` is the number of packets that may wait at each host; further ones are lost. `mtu`
        is the number of bytes in the largest packet."""
        self._hosts, self._quality, self._queue, self._seed = hosts, quality, queue, seed
        self._mtu = mtu
        self.addresses = [f"{NETWORK}.{i + 1}" for i in range(len(hosts))]

    def __enter__(self) -> Network:
        devices = [_device_of(host) for host in self._hosts]
        for host, address in zip(self._hosts, self.addresses, strict=True):
            host.run(["ip", "address", "add", f"{address}/24", "dev", INTERFACE])
            size = ["mtu", str(self._mtu), "txqueuelen", str(self._queue)]
            host.run(["ip", "link", "set", INTERFACE, *size, "up"])
        words = [sys.executable, "-m", "hosts.link", str(self._seed), *map(str, devices)]
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=devices,
            env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(__file__))},
        )
        for device in devices:
            os.close(device)
        self.set(**asdict(self._quality))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def set(self, sender: int | None = None, receiver: int | None = None, **quality: float) -> None:
        """Changes the quality from now on: of packets from one host to another one, both by number;
        None stands for all."""
        self._ask({"sender": sender, "receiver": receiver, "quality": quality})

    def moved(self) -> list[int]:
        """The bytes of packets that each host has sent so far, lost ones among them."""
        return self._ask({})

    def _ask(self, request: dict[str, object]) -> list[int]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "the network has ended"
        return list(json.loads(answer))


def _device_of(host: Host) -> int:
    """A descriptor of a new TUN device on a host; whoever has it writes what the host receives."""
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    theirs = os.open(f"/proc/{host.pid}/ns/net", os.O_RDONLY)
    try:
        _check(libc.setns(theirs, _NEW_NETWORK))
        try:
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            request = struct.pack("16sH22x", INTERFACE.encode(), _TUN_WITHOUT_HEADER)
            fcntl.ioctl(device, _TUNSETIFF, request)
        finally:
            _check(libc.setns(own, _NEW_NETWORK))
    finally:
        os.close(own)
        os.close(theirs)
    return device


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), "cannot enter the namespace of a host")


class _Mover:
    """Moves packets between devices until its input ends."""

    def __init__(self, devices: Sequence[int], seed: int) -> None:
        self._devices = devices
        self._random = random.Random(seed)
        numbers = range(len(devices))
        self._qualities = {pair: Quality() for pair in itertools.permutations(numbers, 2)}
        self._free = [0.0 for _ in numbers]
        self._moved = [0 for _ in numbers]
        self._due: list[tuple[float, int, int, bytes]] = []
        self._order = itertools.count()

    def run(self) -> None:
        while True:
            now = time.monotonic()
            waiting = [d for d, free in zip(self._devices, self._free, strict=True) if free <= now]
            ready, _, _ = select.select([sys.stdin, *waiting], [], [], self._patience(now))
            if sys.stdin in ready and not self._obey():
                return
            self._deliver()
            for sender, device in enumerate(self._devices):
                if device in ready:
                    self._read(sender)

    def _patience(self, now: float) -> float | None:
        """Seconds until a packet is due or a link is free."""
        events = [free for free in self._free if free > now]
        events += [self._due[0][0]] if self._due else []
        return max(0.0, min(events) - now) if events else None

    def _obey(self) -> bool:
        line = sys.stdin.readline()
        request = json.loads(line) if line else {}
        for (sender, receiver), quality in self._qualities.items():
            chosen = request.get("sender") in (None, sender)
            if chosen and request.get("receiver") in (None, receiver):
                changed = {**asdict(quality), **request.get("quality", {})}
                self._qualities[sender, receiver] = Quality(**changed)
        print(json.dumps(self._moved), flush=True)
        return bool(line)

    def _read(self, sender: int) -> None:
        try:
            packet = os.read(self._devices[sender], MTU + 100)
        except OSError:  # the device is down
            return
        receiver = packet[19] - 1 if packet[0] >> 4 == 4 else -1
        quality = self._qualities.get((sender, receiver))
        if quality is None:
            return
        now = time.monotonic()
        self._moved[sender] += len(packet)
        if quality.rate:
            start = max(self._free[sender], now - _CATCH_UP)
            self._free[sender] = start + len(packet) / quality.rate
        if quality.cut or self._random.random() < quality.loss:
            return
        under_way = quality.latency + self._random.uniform(0, quality.jitter)
        if self._random.random() < quality.reorder:
            under_way += quality.late
        due = max(self._free[sender], now) + under_way
        heapq.heappush(self._due, (due, next(self._order), receiver, packet))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            _, _, receiver, packet = heapq.heappop(self._due)
            try:
                os.write(self._devices[receiver], packet)
            except OSError:  # the device is down
                continue


if __name__ == "__main__":
    seed, *numbers = map(int, sys.argv[1:])
    _Mover(numbers, seed).run()
