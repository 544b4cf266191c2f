"""Run ``uefl silo``, after checks of its options."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from ..errors import UserError
from .choices import check_installed, check_private, checked_address, content

if TYPE_CHECKING:
    from ..engines.flower.address import Address
    from .privacy_floor import PrivacyFloor


def silo(options: SimpleNamespace) -> None:
    """Serve one client until the process ends.

    Instead of the option ``data``, ``simulate`` names a client of the run's configuration, and ``data_root``
    the folder of torchvision's data sets.
    """
    check_installed()
    from ..engines.flower.address import Unreachable
    from ..engines.flower.node import serve
    from ..engines.processes import end_with_parent
    from ..run import chosen_device
    from .silo import SiloProgram
    from .silo_folder import SiloFolder, next_to
    from .sources import ClientSource, own

    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    logging.getLogger("uefl").setLevel(logging.INFO)
    end_with_parent()
    address = checked_address(options.superlink, options.root_certificates, options.insecure)
    _check_access(address, options.key, options.strict)
    if (options.data is None) == (options.simulate is None):
        raise UserError("--data: name the folder or the table with this silo's data")
    where = chosen_device(options.device)
    accepted = None if options.algorithms is None else _accepted(options.algorithms)
    if options.data is None:
        source = ClientSource(options.simulate, options.data_root)
        kept = options.state and SiloFolder(options.state, simulated=True)
    else:
        source = own(options.data, options.name, options.label)
        kept = SiloFolder(options.state or next_to(options.data, "silo"))
        check_private(kept.folder, "--state", options.strict, logging.getLogger("uefl").warning)
    floor = _floor(options)
    try:
        print(f"silo {source.name}, for runs at {address.place}; Ctrl-C ends it", flush=True)
        if floor is not None:
            print(f"silo {source.name} requires its own noise: {floor.describe()}", flush=True)
        with nullcontext() if floor is None else floor.locked():
            program = SiloProgram(source, where, floor, accepted, kept)
            serve(address, program, options.key, patience=options.wait)
    except Unreachable as error:
        raise UserError(str(error)) from None


def _check_access(address: Address, key: Path | None, strict: bool) -> None:
    """Refuse a remote SuperLink without a key, a key without TLS, and a file that is not a key."""
    if key is None and not address.is_loopback and not address.insecure:
        raise UserError(
            "--superlink: give this silo's private key with --key, or use --insecure "
            "without key and TLS; see `uefl silo --help`"
        )
    if key is not None and address.insecure:
        raise UserError("--key: keys need TLS; omit --insecure, and give --root-certificates")
    if key is not None:
        _check_key(key, strict)


def _check_key(path: Path, strict: bool) -> None:
    """Refuse a file that ``ssh-keygen -t ecdsa`` has not written, or one with a passphrase."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    made = "a private key as `ssh-keygen -t ecdsa -b 384 -N ''` writes it"
    try:
        key = load_ssh_private_key(content(path, "--key"), None)
    except (ValueError, UnsupportedAlgorithm):
        raise UserError(f"--key: {path} is not {made}") from None
    if not isinstance(key, EllipticCurvePrivateKey):
        raise UserError(f"--key: {path} is not a key of an elliptic curve; expected {made}")
    check_private(path, "--key", strict, logging.getLogger("uefl").warning)


def _accepted(names: str) -> frozenset[str]:
    """Return the algorithms of ``--algorithms``."""
    from ..algorithms.base import find

    found = frozenset(name.strip() for name in names.split(","))
    for name in sorted(found):
        find(name, "--algorithms: ")
    return found


def _floor(options: SimpleNamespace) -> PrivacyFloor | None:
    from .privacy_floor import PrivacyFloor
    from .silo_folder import next_to

    if options.noise_multiplier is None:
        if options.max_epsilon or options.spent is not None:
            raise UserError(
                "--max-epsilon and --spent need --noise-multiplier: they are for a silo that "
                "adds its own noise"
            )
        return None
    if options.spent is None and options.data is None:
        raise UserError("--noise-multiplier: name the file that counts the updates with --spent")
    spent = options.spent or next_to(options.data, "spent.json")
    return PrivacyFloor(options.noise_multiplier, options.delta, options.max_epsilon, spent)
