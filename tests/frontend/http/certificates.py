"""Certificates for tests, made by the openssl command."""

import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="makes certificates with the openssl command"
)


class Pair(NamedTuple):
    """Two PEM files."""

    certificate: Path
    key: Path

    def options(self) -> dict[str, Any]:
        """The server's."""
        return {"tls_certificate": str(self.certificate), "tls_key": str(self.key)}


def make_pair(folder: Path) -> Pair:
    """A certificate for this machine that signs itself, and its key."""
    folder.mkdir(exist_ok=True)
    pair = Pair(folder / "cert.pem", folder / "key.pem")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command += ["-out", str(pair.certificate), "-keyout", str(pair.key)]
    subprocess.run(command, check=True, capture_output=True)
    return pair
