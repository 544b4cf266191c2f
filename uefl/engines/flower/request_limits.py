"""Limits of the time and the size of Flower's requests: requests that would end this process, wait for hours,
or fill the memory raise an exception here."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import httpx
from flwr.app import Array, ArrayRecord, Message
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject,
    get_object_body,
    get_object_head_values_from_object_content,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    inflate_object_from_contents,
    pull_objects,
)
from flwr.supercore.retry import RetryInvoker

TRIES = 7
"""questions for a part of a message that its sender has not sent yet: 35 s in all, with pauses of 1, 2, 4, 8,
10 and 10 s"""


def stop_at_refusal(invoker: RetryInvoker) -> None:
    """Give up where the SuperLink does not take a signature (401) or a run has ended (403).

    Flower would send this process Ctrl-C, or raise what no ``except Exception`` catches.
    """
    flowers = invoker.should_giveup

    def gives_up(error: Exception) -> bool:
        refused = isinstance(error, httpx.HTTPStatusError) and error.response.status_code in (401, 403)
        return refused or (flowers is not None and flowers(error))

    invoker.should_giveup = gives_up


LARGE = "it has more bytes than it may have"
"""stands in the reason of Flower's error"""
_PART = 1000  # bytes that a part counts in addition to its content, so that many small parts are bounded too
# bytes of the description of an array: the numbers of its parts (820 for 4 GiB) and its shape
_ABOUT_ARRAY = 2**16


class TooLarge(ObjectPullError):  # type: ignore[misc]
    """A message that is given up in the middle."""


def brought(
    tree: ObjectTree, pull: Callable[[str], bytes], confirm: Callable[[str], None], most: int
) -> Message:
    """Bring the parts of a message, and make the message of them.

    Flower names a part by its content, so one part may stand in a message many times. The memory of the
    message is therefore summed from its parts before any of them is decoded.

    Args:
        tree: names of the parts.
        pull: brings one of them.
        confirm: is told the name of the message once all of them are here.
        most: bytes that the message may have, as it travels and in memory.

    Raises:
        TooLarge: it has more.
        TypeError: the parts make no message.
    """
    contents = pull_objects(
        [one.object_id for one in iterate_object_tree(tree)], bounded(pull, most), max_tries_per_object=TRIES
    )
    confirm(tree.object_id)
    check_size(tree.object_id, contents, most)
    message = inflate_object_from_contents(tree.object_id, contents)
    if not isinstance(message, Message):
        raise TypeError(f"expected a message, got {type(message).__name__}")
    return message


def check_size(root: str, contents: Mapping[str, bytes], most: int) -> None:
    """Refuse an object that takes more memory than it may, or has a part that says more of itself than any
    needs to.

    Args:
        root: name of the object.
        contents: of it and of all its parts, by name.
        most: bytes.

    Raises:
        TooLarge: it has more bytes, counting each part as often as it is named.
    """

    @cache
    def size(name: str) -> int:
        kind, children, _ = get_object_head_values_from_object_content(contents[name])
        own = len(contents[name])
        if kind == Array.__qualname__:
            if own > _ABOUT_ARRAY:
                raise TooLarge(name, LARGE)
            children = [children[i] for i in _body(contents[name], Array)["arraychunk_ids"]]
        elif kind == ArrayRecord.__qualname__ and own <= most:
            children = list(_body(contents[name], ArrayRecord).values())
        return own + sum(map(size, children))

    if size(root) > most:
        raise TooLarge(root, LARGE)


def _body(content: bytes, kind: type[InflatableObject]) -> Any:
    return json.loads(get_object_body(content, kind))


def bounded(pull: Callable[[str], bytes], most: int) -> Callable[[str], bytes]:
    """Return a function that fetches the parts of one message in several threads, up to a total number of
    bytes.

    Raises:
        TooLarge: they have.
    """
    lock, total = threading.Lock(), 0

    def limited(name: str) -> bytes:
        nonlocal total
        if total > most:
            raise TooLarge(name, LARGE)
        content = pull(name)
        with lock:
            total += len(content) + _PART
        if total > most:
            raise TooLarge(name, LARGE)
        return content

    return limited
