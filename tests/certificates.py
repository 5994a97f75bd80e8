"""Certificates for tests, made by openssl: an authority, and a host that it vouches for."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def authority(folder: Path) -> Path:
    """A folder with ca.crt and ca.key."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    folder.mkdir(parents=True)
    _openssl(
        folder,
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=ca "
        "-keyout ca.key -out ca.crt",
    )
    return folder


def certificate(folder: Path, of: Path) -> Path:
    """A folder for ONNXPAR_TLS_DIR, whose certificate the authority `of` has signed."""
    folder.mkdir(parents=True)
    shutil.copy(of / "ca.crt", folder)
    _openssl(
        folder,
        "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=host -keyout tls.key "
        "-out request",
    )
    _openssl(
        folder,
        f"x509 -req -in request -days 2 -CA ca.crt -CAkey {of}/ca.key -CAcreateserial -out tls.crt",
    )
    return folder


def _openssl(folder: Path, arguments: str) -> None:
    subprocess.run(["openssl", *arguments.split()], cwd=folder, check=True, capture_output=True)
