"""Run ``uefl silo``, after checks of its options."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError
from .choices import check_installed, check_private, checked_address

if TYPE_CHECKING:
    from ..engines.flower.address import Address
    from .privacy_floor import PrivacyFloor


def silo(
    *,
    data: Path | None,
    simulate: str | None,
    superlink: str,
    name: str | None,
    label: str,
    root_certificates: Path | None,
    key: Path | None,
    insecure: bool,
    wait: float,
    device: str,
    noise_multiplier: float | None,
    delta: float,
    max_epsilon: float,
    spent: Path | None,
    algorithms: str | None,
    state: Path | None,
    strict: bool,
    data_root: Path | None,
) -> None:
    """Serve one client until the process ends; the arguments are the options of ``uefl silo``.

    Args:
        simulate: instead of ``data``: the client of the run's configuration that this process plays.
        data_root: where torchvision's data sets lie.

    Raises:
        UserError: options that do not go together, data that cannot be read, a SuperLink that is not there.
    """
    check_installed()
    from ..engines.flower.address import Unreachable
    from ..engines.flower.node import serve
    from ..engines.processes import end_with_parent
    from ..run import chosen_device
    from .silo import SiloProgram
    from .silo_folder import SiloFolder
    from .sources import ClientSource, PartitionedSource, own

    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    logging.getLogger("uefl").setLevel(logging.INFO)
    end_with_parent()
    address = _with_access(checked_address(superlink, root_certificates, insecure), key, strict)
    if (data is None) == (simulate is None):
        raise UserError("--data: name the folder of this silo's images")
    where = chosen_device(device)
    answered = None if algorithms is None else _answered(algorithms)
    source: ClientSource
    kept = None
    if simulate is not None:
        source = PartitionedSource(simulate, data_root)
        if state is not None:
            state.mkdir(mode=0o700, parents=True, exist_ok=True)
    else:
        assert data is not None
        source = own(data, name, label)
        kept = SiloFolder(state or data.resolve().with_name(f"{data.resolve().name}.silo"))
    floor = _floor(noise_multiplier, delta, max_epsilon, spent, data)
    try:
        print(f"silo {source.name}, for runs at {address.place}; Ctrl-C ends it", flush=True)
        if floor is not None:
            print(f"silo {source.name} requires its own noise: {floor.describe()}", flush=True)
        with nullcontext() if floor is None else floor.locked():
            program = SiloProgram(source, where, floor, answered, kept, state)
            serve(address, program, key, patience=wait)
    except Unreachable as error:
        raise UserError(str(error)) from None


def _with_access(address: Address, key: Path | None, strict: bool) -> Address:
    """Return the address; refuse a remote SuperLink without a key, a key without TLS, and an unfit key."""
    if key is None and not address.is_loopback and not address.insecure:
        raise UserError(
            "--superlink: give this silo's private key with --key, or use --insecure "
            "without key and TLS; see docs/deploy.md"
        )
    if key is not None and address.insecure:
        raise UserError("--key: keys need TLS; leave out --insecure, and give --root-certificates")
    if key is not None:
        _check_key(key, strict)
    return address


def _check_key(path: Path, strict: bool) -> None:
    """Refuse a file that ``ssh-keygen -t ecdsa`` has not written, or one with a passphrase."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    made = "a private key as `ssh-keygen -t ecdsa -b 384 -N ''` writes it"
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        raise UserError(f"--key: {path} cannot be read ({error.strerror})") from None
    except (ValueError, UnsupportedAlgorithm):
        raise UserError(f"--key: {path} is not {made}") from None
    if not isinstance(key, EllipticCurvePrivateKey):
        raise UserError(f"--key: {path} is not a key of an elliptic curve; expected {made}")
    check_private(path, "--key", strict, logging.getLogger("uefl").warning)


def _answered(names: str) -> frozenset[str]:
    """Return the algorithms of ``--algorithms``."""
    from ..algorithms.base import find

    found = frozenset(name.strip() for name in names.split(","))
    for name in sorted(found):
        find(name, "--algorithms: ")
    return found


def _floor(
    noise_multiplier: float | None, delta: float, max_epsilon: float, spent: Path | None, data: Path | None
) -> PrivacyFloor | None:
    from .privacy_floor import PrivacyFloor

    if noise_multiplier is None:
        if max_epsilon or spent is not None:
            raise UserError(
                "--max-epsilon and --spent need --noise-multiplier: they are for a silo that "
                "adds its own noise"
            )
        return None
    if spent is None:
        if data is None:
            raise UserError("--noise-multiplier: name the file that counts the updates with --spent")
        spent = data.resolve().with_name(f"{data.resolve().name}.spent.json")
    return PrivacyFloor(noise_multiplier, delta, max_epsilon, spent)
