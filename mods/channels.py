"""`channels`: named places with members. Membership itself is the network's (it decides who a message is for); this mod lets
participants change it."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nsmallest
from typing import Annotated, Any, Literal

from msgspec import Meta

from roundelay.network.errors import Forbidden, InvalidArguments, UnknownRecipient
from roundelay.network.frames import Seq
from roundelay.network.listing import take_page
from roundelay.network.mod import Change, Mod, Reading, operation

ChannelName = Annotated[
    str, Meta(pattern="^[a-z0-9][a-z0-9._-]{0,63}$", description="The channel's name, without 'channel:'.")
]
Topic = Annotated[str, Meta(max_length=1000, description="What the channel is about.")]
PageLimit = Annotated[int, Meta(ge=1, le=1000)]
MEMBERS_COUNTED = 50_000
"""So many members of channels one page counts: the hub does nothing else meanwhile."""
Text = Annotated[str, Meta(min_length=1, description="The text to send.")]


class Channels(Mod):
    """Create, join, leave and list channels, and write in them."""

    id = "channels"

    @operation("change")
    def create(
        self,
        change: Change,
        *,
        name: ChannelName,
        topic: Topic = "",
        history: Literal["since_join", "members"] = "since_join",
    ) -> dict[str, Any]:
        """Create a channel and join it. With history "members", late joiners may read what was written before."""
        change.create_channel(name, topic=topic, history=history)
        change.join_channel(name, change.origin.agent_id)
        return {"channel": name}

    @operation("change")
    def join(self, change: Change, *, name: ChannelName) -> dict[str, Any]:
        """Join a channel, to get its messages and to write in it."""
        change.join_channel(name, change.origin.agent_id)
        return {"channel": name}

    @operation("change")
    def leave(self, change: Change, *, name: ChannelName) -> dict[str, Any]:
        """Leave a channel."""
        change.leave_channel(name, change.origin.agent_id)
        return {"channel": name}

    @operation("change")
    def set_topic(self, change: Change, *, name: ChannelName, topic: Topic) -> dict[str, Any]:
        """Say what a channel is about; its members may."""
        _need_member(change, name)
        change.set_channel(name, topic=topic)
        return {"channel": name, "topic": topic}

    @operation("change")
    def set_history(
        self, change: Change, *, name: ChannelName, history: Literal["since_join", "members"]
    ) -> dict[str, Any]:
        """Choose what late joiners may read; whoever created the channel may, or an operator."""
        channel = change.state.channel(name)
        if channel is None:
            raise UnknownRecipient(f"There is no channel {name!r}.")
        if channel.created_by != change.origin.agent_id and not change.origin.is_operator:
            raise Forbidden(
                f"Only {channel.created_by}, who created {name!r}, or an operator changes its history setting."
            )
        change.set_channel(name, history=history)
        return {"channel": name, "history": history}

    @operation("change")
    def post(self, change: Change, *, name: ChannelName, text: Text, cause: Seq | None = None) -> dict[str, Any]:
        """Write in a channel that you are in."""
        row = change.post(f"channel:{name}", text, cause=cause)
        return {"seq": row.seq, "thread_id": row.stream}

    @operation("change")
    def reply(self, change: Change, *, reply_to: Seq, text: Text, cause: Seq | None = None) -> dict[str, Any]:
        """Answer a channel message in its reply thread; reply_to is the message's seq."""
        parent = change.head(reply_to)
        if parent.kind != "channel":
            raise InvalidArguments(f"Message {reply_to} is not in a channel.")
        row = change.post(parent.to, text, reply_to=reply_to, cause=cause)
        return {"seq": row.seq, "thread_id": row.stream}

    @operation("read")
    async def list(self, reading: Reading, *, after: str = "", limit: PageLimit = 1000) -> dict[str, Any]:
        """List the channels: name, topic, how many members, and whether you are one. By name; those above `after`."""
        state = reading.hub.state
        counted, is_cut = 0, False

        def describe() -> Iterator[dict[str, Any]]:
            nonlocal counted, is_cut
            for name, channel in state.ascending("channel", after):
                is_cut = counted > MEMBERS_COUNTED
                if is_cut:
                    return
                members = state.members(name)
                counted += len(members)
                yield {
                    "name": name,
                    "topic": channel.topic,
                    "history": channel.history,
                    "members": sum(member.is_in for member in members.values()),
                    "is_member": state.member(name, reading.origin.agent_id).is_in,
                }

        channels, has_more = take_page(describe(), limit, reading.hub.limits.max_result_bytes)
        return {"channels": channels, "has_more": has_more or is_cut}

    @operation("read")
    async def members(
        self,
        reading: Reading,
        *,
        name: ChannelName,
        after: str = "",
        limit: Annotated[int, Meta(ge=1, le=10_000)] = 10_000,
    ) -> dict[str, Any]:
        """List who is in a channel, by id, those above `after`; its members and operators may ask."""
        state = reading.hub.state
        if state.channel(name) is None:
            raise UnknownRecipient(f"There is no channel {name!r}.")
        if not (reading.origin.is_operator or state.member(name, reading.origin.agent_id).is_in):
            raise Forbidden(f"Only the members of {name!r} see who is in it; join it first.")
        inside = (agent_id for agent_id, member in state.members(name).items() if member.is_in and agent_id > after)
        members, has_more = take_page(nsmallest(limit + 1, inside), limit, reading.hub.limits.max_result_bytes)
        return {"channel": name, "members": members, "has_more": has_more}


def _need_member(change: Change, name: str) -> None:
    if change.state.channel(name) is None:
        raise UnknownRecipient(f"There is no channel {name!r}.")
    if not (change.origin.is_operator or change.state.member(name, change.origin.agent_id).is_in):
        raise Forbidden(f"{change.origin.agent_id} is not a member of {name!r}; join it first.")
