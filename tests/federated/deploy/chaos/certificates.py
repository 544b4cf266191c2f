"""Certificates and keys as docs/deploy.md makes them, with openssl and ssh-keygen."""

from __future__ import annotations

import subprocess
from pathlib import Path


def certificate(folder: Path, host: str, stem: str = "server") -> None:
    """Write a self-signed certificate ``STEM.pem`` and its key ``STEM.key``.

    The commands are the ones of docs/deploy.md.
    """
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "365")
    asked = ("-subj", f"/CN={host}", "-addext", f"subjectAltName=IP:{host}")
    command = ("openssl", "req", "-x509", *curve, *asked, "-keyout", f"{stem}.key", "-out", f"{stem}.pem")
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def node_key(folder: Path, name: str) -> None:
    """Write ``NAME.key`` and ``NAME.key.pub``."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", f"{name}.key"],
        cwd=folder,
        check=True,
    )
