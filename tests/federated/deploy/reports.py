"""Reports of silos as the server reads them."""

from __future__ import annotations

from collections.abc import Mapping

from uefl.config import Config
from uefl.data.federation import Federation
from uefl.deploy.agreement import agree, fitting
from uefl.deploy.report import read
from uefl.engines.codec import Packet
from uefl.errors import UserError


def refusal(packet: Packet) -> str | None:
    """Return why a report is refused, or None."""
    try:
        read(packet)
    except UserError as error:
        return str(error)
    return None


def agreed(packets: Mapping[str, Packet], cfg: Config) -> Federation:
    """Return the federation of the silos with these reports, or raise why one of them does not fit."""
    reports = {name: read(packet) for name, packet in packets.items()}
    _, why = fitting(reports, cfg)
    if why:
        raise UserError(*why.values())
    return agree(reports, cfg, "there:1")
