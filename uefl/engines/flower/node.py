"""A client's end of Flower: receive a message, answer it, send the answer; the program that a run may ship is
never fetched.

One process is one node. It asks for messages itself, so it needs no open port, and it stays: its data and its
network are loaded once.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Message, RecordDict
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError, push_objects
from flwr.supernode import fleet_http_connection as fleet

from .. import bounds
from .address import Address, Unreachable
from .request_limits import TooLarge, brought, stop_at_refusal

logging.getLogger("flwr").setLevel(logging.ERROR)
_LOG = logging.getLogger("uefl")

# seconds between two questions for a message, after a message and when there has been none for long
_SHORT, _LONG = 0.05, 1.0
_AGAIN = 3.0  # seconds before a lost connection is tried again


class _Refused(Exception):
    """A SuperLink does not let this node in; its text is the context."""


def _refuse(*arguments: object, **keys: object) -> None:
    raise _Refused


class _Heartbeat(HeartbeatSender):  # type: ignore[misc]
    """Flower's thread ends silently if the SuperLink does not take a heartbeat:
    :attr:`current` is looked at for that."""

    current: _Heartbeat

    def __init__(self, heartbeat_fn: Callable[[], bool]) -> None:
        super().__init__(heartbeat_fn)
        _Heartbeat.current = self

    def _run(self) -> None:
        with suppress(_Refused, httpx.HTTPError, RuntimeError):
            super()._run()


def _invoker() -> Any:
    invoker = _flowers_invoker()
    stop_at_refusal(invoker)
    return invoker


_flowers_invoker = fleet.make_simple_http_retry_invoker
fleet.make_simple_http_retry_invoker = _invoker  # type: ignore[assignment]
fleet.HeartbeatSender = _Heartbeat  # type: ignore[misc]
# Flower would end this process, or send it Ctrl-C, without a reason
fleet.flwr_exit = _refuse  # type: ignore[attr-defined, assignment]
fleet.os = SimpleNamespace(getpid=os.getpid, kill=_refuse)  # type: ignore[attr-defined, assignment]


def serve(
    address: Address,
    answer: Callable[[RecordDict], RecordDict],
    key: EllipticCurvePrivateKey | None = None,
    *,
    patience: float,
) -> None:
    """Answer messages until the process ends.

    Args:
        address: of the SuperLink.
        answer: to the content of a message; must not raise.
        key: identifies this node at the SuperLink. None: a new key for each connection, for a SuperLink
            that has no registered keys.
        patience: seconds to wait for a SuperLink that is not there, at first or after it was lost, or that
            does not accept this node. Flower needs up to a minute to notice that a process has ended. Before
            that, it does not accept another process with the same key.

    Raises:
        Unreachable: the SuperLink is not there, cannot be trusted, or does not know the key.
    """
    address.avoid_proxy()
    keys = None if key is None else (key, key.public_key())
    refused: float | None = None
    while True:
        address.wait(patience)
        try:
            with fleet.http_request_response(
                address.place, address.insecure, address.root_certificates, keys, max_retries=3
            ) as connection:
                refused = None
                _answer_all(connection, answer)
        except _Refused as refusal:
            if refused is None:
                refused = time.monotonic()
                _LOG.warning(
                    "not accepted yet: its key is not registered, the SuperLink still knows an "
                    "earlier process, or its clock is wrong"
                )
            if (key is None and _is_final(refusal.__context__)) or time.monotonic() - refused > patience:
                why = (
                    "give its private key with --key, if it has one, and "
                    if key is None
                    else "register its public key there, and "
                )
                raise Unreachable(
                    f"the SuperLink at {address.place} does not let this silo in; {why}check the clock of"
                    " this machine"
                ) from None
        time.sleep(_AGAIN)


def _is_final(error: BaseException | None) -> bool:
    """Return True if it is an answer of a healthy SuperLink."""
    return isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500


def _answer_all(connection: tuple[Any, ...], answer: Callable[[RecordDict], RecordDict]) -> None:
    """Answer messages until the connection is lost; after an incomplete message the server sends it to the
    next node."""
    _, receive, send, _, _, pull, push, confirm = connection
    pause = _SHORT
    while _Heartbeat.current.is_running:
        received = receive()
        if received is None:
            time.sleep(pause)
            pause = min(1.5 * pause, _LONG)
            continue
        pause = _SHORT
        (head, tree), run = received, received[0].metadata.run_id
        try:
            try:
                message = brought(tree, partial(pull, run), partial(confirm, run), bounds.MESSAGE)
                content = message.content
            except TooLarge:
                _LOG.warning("a message is refused: it has more than %d bytes", bounds.MESSAGE)
                message, content = head, RecordDict()
            message.metadata.__dict__["_message_id"] = head.metadata.message_id
            reply = Message(answer(content), reply_to=message)
            # the reply expires with the message, even if the clock of this machine is wrong
            reply.metadata.created_at, reply.metadata.ttl = message.metadata.created_at, message.metadata.ttl
            reply.metadata.__dict__["_message_id"] = reply.object_id
            wanted, session = send(reply, get_object_tree(reply), 0.0)
            push_objects(
                get_all_nested_objects(reply), partial(push, run, session), object_ids_to_push=wanted
            )
        except httpx.HTTPStatusError as error:
            if error.response.status_code >= 500:
                raise
            _LOG.warning(
                "a message or its reply is dropped (%d): its run has ended", error.response.status_code
            )
        except (ObjectPullError, ObjectPushError):
            _LOG.warning("a message or its answer was incomplete; connecting again")
            return


def read_key(path: Path) -> EllipticCurvePrivateKey:
    """Read a private key as ``ssh-keygen -t ecdsa`` writes it, without a passphrase.

    Raises:
        ValueError: it is none, or cannot be read.
    """
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        raise ValueError(f"--key: {path} cannot be read ({error.strerror})") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ValueError(
            f"{path} is no private key as `ssh-keygen -t ecdsa -b 384 -N ''` writes it"
        ) from None
    if not isinstance(key, EllipticCurvePrivateKey):
        raise ValueError(
            f"{path} is no key of an elliptic curve; make one with: ssh-keygen -t ecdsa -b 384 -N '' -f FILE"
        )
    return key
