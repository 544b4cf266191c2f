"""Flower's Grid, with a malformed reply as an error of its sender and not of the run."""

from __future__ import annotations

from collections.abc import Iterable

import httpx
from flwr.app import Error, Message
from flwr.app.message import make_message
from flwr.common.constant import ErrorCode
from flwr.common.serde import metadata_from_proto
from flwr.proto.message_pb2 import Message as Head
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError
from flwr.superlink.grid import HttpGrid

from .limits import brought

UNREADABLE = "its parts make no message"
"""stands in the reason of Flower's error"""


class CheckedGrid(HttpGrid):  # type: ignore[misc]
    """A Grid that counts the bytes of incoming messages, as :func:`.limits.at_most` says, and believes the
    SuperLink about whose message a reply answers: a silo may write anything into a reply."""

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that have arrived for these message numbers; a reply that cannot be fetched is
        an error."""
        found = self._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=message_ids))
        return [
            self._reply(head, tree)
            for head, tree in zip(found.messages_list, found.message_object_trees, strict=True)
        ]

    def _reply(self, head: Head, tree: ObjectTree) -> Message:
        client, run = self._runtime_client, head.metadata.run_id
        pull = make_pull_object_fn_protobuf(client.PullObject, self.node, run)
        confirm = make_confirm_message_received_fn_protobuf(client.ConfirmMessageReceived, self.node, run)
        try:
            message = brought(tree, pull, confirm)
            if message.metadata.reply_to_message_id != head.metadata.reply_to_message_id:
                raise ValueError("it answers another message")
        except httpx.HTTPError:  # of the SuperLink
            raise
        except ObjectPullError as error:
            reason = str(error)
        except Exception:  # a silo can make Flower raise any
            reason = UNREADABLE
        else:
            message.metadata.__dict__["_message_id"] = head.metadata.message_id
            return message
        return make_message(
            metadata_from_proto(head.metadata), error=Error(ErrorCode.MESSAGE_UNAVAILABLE, reason)
        )
