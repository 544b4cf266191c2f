"""Certificates and keys as docs/deploy.md makes them, with openssl and ssh-keygen."""

from __future__ import annotations

import subprocess
from pathlib import Path


def certificates(folder: Path, host: str, stem: str = "") -> None:
    """Write ``ca.crt``, ``server.pem`` and ``server.key`` as docs/deploy.md makes them, with ``stem`` before each name."""
    ca, server = f"{stem}ca", f"{stem}server"
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    asked = ("-subj", f"/CN={host}", "-addext", f"subjectAltName=IP:{host}")
    signed = ("-CA", f"{ca}.crt", "-CAkey", f"{ca}.key", "-CAcreateserial", "-days", "365", "-copy_extensions", "copy")
    for command in (
        ("req", "-x509", *curve, "-days", "365", "-subj", "/CN=uefl", "-keyout", f"{ca}.key", "-out", f"{ca}.crt"),
        ("req", *curve, *asked, "-keyout", f"{server}.key", "-out", f"{server}.csr"),
        ("x509", "-req", "-in", f"{server}.csr", *signed, "-out", f"{server}.pem"),
    ):
        subprocess.run(["openssl", *command], cwd=folder, check=True, capture_output=True)


def node_key(folder: Path, name: str) -> None:
    """Write ``NAME.key`` and ``NAME.key.pub``."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", f"{name}.key"], cwd=folder, check=True)
