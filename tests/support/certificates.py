"""Certificates for tests, created with the `openssl` command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(folder: Path, *, name: str = "DNS:localhost,IP:127.0.0.1", stem: str = "tls") -> tuple[Path, Path]:
    """Return a self-signed certificate for a name, and its key. Skip the test if `openssl` is not installed."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command here")
    certificate, key = folder / f"{stem}-cert.pem", folder / f"{stem}-key.pem"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "30",
            "-subj", "/CN=roundelay-test", "-addext", f"subjectAltName={name}", "-keyout", str(key), "-out", str(certificate),
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return certificate, key
