"""Messages and threads as users see them: pydantic models at the client's edge.

The hub never builds these; it carries messages as bytes (see `frames`). No IO, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from .content import write_content


class BaseMessage(BaseModel):
    """One message of the ledger; fields as in the ``deliver`` frame of docs/protocol.md.

    ``seq`` orders it in its network, ``sent_at`` is in milliseconds since the Unix epoch, stamped by the hub. ``content`` is
    any JSON value; the senders of this package put plain text there as a string.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    seq: int
    message_id: str
    kind: str
    sender_id: str
    sender_kind: str
    to: str
    thread_id: str
    reply_to: int | None = None
    cause: int | None = None
    root: int
    hops: int
    sent_at: int
    content: Any = None
    text_representation: str | None = None
    requires_response: bool | list[str] | None = None
    metadata: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """The message as text: ``text_representation``, else the content, files and data in it as lines (`content.write_content`)."""
        return self.text_representation or write_content(self.content)

    @property
    def said(self) -> str:
        """The words alone, without the files and data beside them: what commands and decisions are read from."""
        if self.text_representation is None and isinstance(self.content, dict):
            words = self.content.get("text")
            return words if isinstance(words, str) else ""
        return self.text


class DirectMessage(BaseMessage):
    """From one participant to another; its thread is ``direct:A~B``, the ids sorted."""

    kind: Literal["direct"] = "direct"


class BroadcastMessage(BaseMessage):
    """To everyone registered at its ``seq``."""

    kind: Literal["broadcast"] = "broadcast"


class ChannelMessage(BaseMessage):
    """To the members of a channel at its ``seq``."""

    kind: Literal["channel"] = "channel"

    @property
    def channel(self) -> str:
        """The channel's name, without ``channel:``."""
        return self.to.partition(":")[2]


class ModMessage(BaseMessage):
    """Between one participant and a mod; its thread is ``mod:ID~PARTICIPANT``."""

    kind: Literal["mod"] = "mod"


Message = Annotated[DirectMessage | BroadcastMessage | ChannelMessage | ModMessage, Field(discriminator="kind")]

_ADAPTER: TypeAdapter[DirectMessage | BroadcastMessage | ChannelMessage | ModMessage] = TypeAdapter(Message)


def message_from_wire(value: Mapping[str, Any]) -> DirectMessage | BroadcastMessage | ChannelMessage | ModMessage:
    """Build the message from the ``message`` object of a frame. Raises `pydantic.ValidationError` on another shape."""
    return _ADAPTER.validate_python(value)


class MessageThread(BaseModel):
    """The messages of one thread that its reader may see, oldest first.

    ``omitted`` counts earlier messages that are left out of this window, where that is known.
    """

    model_config = ConfigDict(frozen=True)

    thread_id: str
    messages: list[Message] = Field(default_factory=list)
    omitted: int = 0
