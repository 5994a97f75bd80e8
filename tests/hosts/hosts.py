"""Hosts that are namespaces of this machine, with names, addresses and /tmp of their own."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

NETWORK = "10.91.0"
_OWN = ("--net", "--uts", "--mount", "--ipc")
"""The namespaces that a host has."""


@functools.cache
def why_not() -> str:
    """Why this machine cannot have such hosts; empty if it can."""
    for tool in ("ip", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"there is no {tool} (on Debian and Ubuntu: apt install iproute2 util-linux)"
    try:
        with Hosts(2) as (a, b):
            a.run(["ping", "-c", "1", b.address] if shutil.which("ping") else ["true"])
    except (OSError, subprocess.SubprocessError) as error:
        return f"this machine does not allow network namespaces ({error})"
    return ""


class Host:
    """One host, which lives as long as a process that does nothing. `rooted` is its /tmp."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self._sleeper = subprocess.Popen(
            ["unshare", *_OWN, "--propagation", "private", "sleep", "infinity"],
            start_new_session=True,
        )
        self.pid = self._sleeper.pid
        end = time.monotonic() + 10
        while os.readlink(f"/proc/{self.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            assert time.monotonic() < end, f"{name} has no namespaces"
            time.sleep(0.01)

    def command(self, words: Sequence[str], folder: str | Path = "/") -> list[str]:
        """The command that runs this one on the host, in a folder."""
        inside = ["nsenter", "-t", str(self.pid), "-n", "-u", "-m", "-i", "--"]
        return [*inside, "env", f"--chdir={folder}", *words]

    def start(
        self,
        words: Sequence[str],
        environment: Mapping[str, str] | None = None,
        folder: str | Path = "/",
        **options: object,
    ) -> subprocess.Popen[str]:
        """A process on this host, whose output is text in pipes unless `options` say otherwise."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        environment = {**os.environ, **(environment or {})}
        command = self.command(words, folder)
        return subprocess.Popen(command, env=environment, **pipes)  # type: ignore[call-overload, no-any-return]

    def run(
        self,
        words: Sequence[str],
        environment: Mapping[str, str] | None = None,
        folder: str | Path = "/",
        timeout: float = 60,
    ) -> str:
        """What a command on this host prints. Errors: CalledProcessError."""
        done = subprocess.run(
            self.command(words, folder),
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if done.returncode:
            raise subprocess.CalledProcessError(
                done.returncode, words, done.stdout, done.stdout + done.stderr
            )
        return done.stdout

    def cut(self) -> None:
        """Nothing reaches this host, and nothing leaves it, from now on."""
        self.run(["ip", "link", "set", "eth0", "down"])

    def mend(self) -> None:
        """Ends a cut."""
        self.run(["ip", "link", "set", "eth0", "up"])

    def end(self) -> None:
        """Kills all processes of the host, as a loss of power does."""
        if self._sleeper.returncode is not None:
            return
        mine = os.readlink(f"/proc/{self.pid}/ns/net")
        for each in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(each / "ns/net") == mine:
                    os.kill(int(each.name), signal.SIGKILL)
            except OSError:  # it has ended
                continue
        self._sleeper.wait()


class Hosts:
    """Hosts a, b, ... of one network, which know each other's names."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._exits = ExitStack()
        self.hosts: list[Host] = []

    def __enter__(self) -> list[Host]:
        with ExitStack() as failing:
            failing.callback(self._close)
            self._make()
            failing.pop_all()
        return self.hosts

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        for host in self.hosts:
            host.end()
        self.hosts.clear()
        self._exits.close()

    def _make(self) -> None:
        switch = Host("switch", "")
        self._exits.callback(switch.end)
        switch.run(["ip", "link", "add", "bridge", "type", "bridge"])
        switch.run(["ip", "link", "set", "bridge", "up"])
        names = [chr(ord("a") + i) for i in range(self._count)]
        known = "127.0.0.1 localhost\n" + "".join(
            f"{NETWORK}.{i + 1} {name}\n" for i, name in enumerate(names)
        )
        for i, name in enumerate(names):
            host = Host(name, f"{NETWORK}.{i + 1}")
            self.hosts.append(host)
            _connect(host, switch)
            _furnish(host, known)


def _connect(host: Host, switch: Host) -> None:
    """Gives a host an interface, eth0, whose other end is a port of the switch."""
    port = f"to-{host.name}"
    peer = ["peer", "name", "eth0", "netns", f"/proc/{host.pid}/ns/net"]
    switch.run(["ip", "link", "add", port, "type", "veth", *peer])
    switch.run(["ip", "link", "set", port, "master", "bridge", "up"])
    host.run(["ip", "link", "set", "lo", "up"])
    host.run(["ip", "address", "add", f"{host.address}/24", "dev", "eth0"])
    host.run(["ip", "link", "set", "eth0", "up"])


def _furnish(host: Host, known: str) -> None:
    """Gives a host its name, the names of the others, and a /tmp of its own, in which there is
    nothing but what this process runs from, if that is in /tmp."""
    host.run(["hostname", host.name])
    kept = {
        str(Path(p).resolve()) for p in (sys.prefix, sys.base_prefix, Path(__file__).parents[2])
    }
    script = (
        "set -e; mkdir -p /run/tmp-of-hosts; mount -t tmpfs none /run/tmp-of-hosts; "
        'for each in $KEPT; do mkdir -p "/run/tmp-of-hosts/${each#/tmp/}"; '
        'mount --rbind "$each" "/run/tmp-of-hosts/${each#/tmp/}"; done; '
        "mount --move /run/tmp-of-hosts /tmp; chmod 1777 /tmp; "
        'printf %s "$KNOWN" > /tmp/.hosts; mount --bind /tmp/.hosts /etc/hosts'
    )
    below = sorted(path for path in kept if path.startswith("/tmp/"))
    host.run(["sh", "-c", script], {"KNOWN": known, "KEPT": " ".join(below)})
