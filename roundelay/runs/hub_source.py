"""Read a run inside its node, for the explanations of `node_answers`. Unlike `NodeSource`, this source reads many
messages with one call.

The call for many messages is not part of the protocol. With ``network.why``, each message of a prompt would cost a walk
to its root, and a prompt may name thousands of messages. Nothing is cached.
"""

from __future__ import annotations

from collections.abc import Iterable

from roundelay.network.messages import BaseMessage, message_from_wire
from roundelay.runs.node_source import NodeSource, is_seq


class HubSource(NodeSource):
    """Source that reads a run through the operations of its own hub, with the rights of one caller."""

    async def messages(self, seqs: Iterable[int]) -> dict[int, BaseMessage]:
        """Return the messages that the caller may see, by sequence number. Messages that do not fit into one result are
        omitted."""
        page = await self._call("network.messages", {"seqs": list(filter(is_seq, seqs))})
        messages = map(message_from_wire, page["messages"])
        return {message.seq: message for message in messages}
