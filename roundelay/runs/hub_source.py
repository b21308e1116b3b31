"""A run read inside its node, for the explanations of `node_answers`: `NodeSource` with one read for many messages.

The read is not in the protocol. By ``network.why`` each message of a prompt would cost a walk to its root, and a prompt
may name thousands of them. Nothing is cached.
"""

from __future__ import annotations

from collections.abc import Iterable

from roundelay.network.messages import BaseMessage, message_from_wire
from roundelay.runs.node_source import NodeSource, is_seq


class HubSource(NodeSource):
    """A run as the operations of its own hub show it to one caller."""

    async def messages(self, seqs: Iterable[int]) -> dict[int, BaseMessage]:
        """Return those of these messages that the caller may see, by seq, as far as they fit into a result."""
        page = await self._call("network.messages", {"seqs": list(filter(is_seq, seqs))})
        messages = map(message_from_wire, page["messages"])
        return {message.seq: message for message in messages}
