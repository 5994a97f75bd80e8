"""An sshd on each host, and a user who may log in to all."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hosts.hosts import Host

SSHD = "/usr/sbin/sshd"


def why_not() -> str:
    """Why this machine has no sshd; empty if it has."""
    if Path(SSHD).exists() and shutil.which("ssh"):
        return ""
    return "there is no sshd (on Debian and Ubuntu: apt install openssh-server openssh-client)"


def serve(hosts: Sequence[Host], folder: Path) -> dict[str, str]:
    """Starts an sshd on each host, and returns the environment in which `ssh HOST` works, whoever
    this user is."""
    folder.mkdir(parents=True, exist_ok=True)
    wrapper = folder / "bin" / "ssh"
    path = f"{wrapper.parent}:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    for name in ("host", "user"):
        key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(key, check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    (folder / "sshd_config").write_text(
        f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\nStrictModes no\n"
        "PermitRootLogin yes\nPasswordAuthentication no\nUsePAM no\nPidFile none\n"
        f"SetEnv PATH={path} HOME={folder}\n"  # whose .bashrc could be slow
    )
    (folder / "ssh_config").write_text(
        f"IdentityFile {folder}/user\nUserKnownHostsFile {folder}/known\nIdentitiesOnly yes\n"
        "StrictHostKeyChecking no\nLogLevel ERROR\n"
    )
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    wrapper.chmod(0o755)
    for host in hosts:
        host.run(["mkdir", "-p", "/run/sshd"])
        host.start(
            [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        log_in = f"{wrapper} {host.name} true"
        host.run(["sh", "-c", f"for i in $(seq 100); do {log_in} && exit; sleep 0.1; done; false"])
    return {"PATH": path}
