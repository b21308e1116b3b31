"""`channels`: named channels with members.

The hub itself stores channel memberships, because they decide who receives a message. This mod only offers the
operations that change memberships.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nsmallest
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from roundelay.network.addresses import channel_address
from roundelay.network.core.access import (
    check_member,
    check_owner,
    check_right,
    find_channel,
    has_right_to_read,
    is_found,
    is_found_by,
    owner_of,
)
from roundelay.network.core.tables import Access, History
from roundelay.network.errors import InvalidArguments
from roundelay.network.frames import ID_PATTERN, Seq
from roundelay.network.mod import Change, Mod, Reading, operation
from roundelay.network.operations.paging import take_page
from roundelay.network.operations.views import find_audience

ChannelName = Annotated[str, Meta(pattern=ID_PATTERN, description="The channel's name, without 'channel:'.")]
Topic = Annotated[str, Meta(max_length=1000, description="What the channel is about.")]
Title = Annotated[str, Meta(max_length=100, description="What people call the channel.")]
Who = Annotated[str, Meta(description="The id of an agent, a person or a service.")]
PageLimit = Annotated[int, Meta(ge=1, le=1000)]
MEMBERS_COUNTED = 50_000
"""Maximum number of channel members and listeners that one page examines. The hub is blocked while it examines them."""
Text = Annotated[str, Meta(min_length=1, description="The text to send.")]


class Channels(Mod):
    """Create, join, leave and list channels, list their members, and write in them."""

    id = "channels"

    @operation("change")
    def create(
        self,
        change: Change,
        *,
        name: ChannelName,
        topic: Topic = "",
        history: History = "since_join",
        access: Access = "open",
    ) -> dict[str, Any]:
        """Create a channel, own it and join it. Access "open": anybody may join. "invite": everybody sees the channel,
        and invited participants may join. "closed": only members and invited participants see the channel. With history
        "members", late joiners may read earlier messages."""
        change.create_channel(name, topic=topic, history=history, access=access)
        change.join_channel(name, change.origin.agent_id)
        return {"channel": name}

    @operation("change")
    def join(self, change: Change, *, name: ChannelName) -> dict[str, Any]:
        """Join a channel that is open or that you are invited to. You get its messages and may write in it."""
        change.join_channel(name, change.origin.agent_id)
        return {"channel": name}

    @operation("change")
    def leave(self, change: Change, *, name: ChannelName) -> dict[str, Any]:
        """Leave a channel. To rejoin a channel that is not open you need a new invitation, unless you own it."""
        change.leave_channel(name, change.origin.agent_id)
        return {"channel": name}

    @operation("change")
    def invite(self, change: Change, *, name: ChannelName, agent_id: Who) -> dict[str, Any]:
        """Let a participant join a channel that you own. The participant gets no notice, so write to it."""
        _check_owner(change, name, "invites")
        change.invite_to_channel(name, agent_id)
        return {"channel": name, "agent_id": agent_id}

    @operation("change")
    def remove(self, change: Change, *, name: ChannelName, agent_id: Who) -> dict[str, Any]:
        """Remove a member or an invitation from a channel that you own. A removed member cannot read later messages,
        and needs a new invitation to rejoin."""
        _check_owner(change, name, "removes others")
        if agent_id == change.origin.agent_id:
            raise InvalidArguments(
                f"You cannot remove yourself from {name!r}. Leave with channels.leave, or transfer the channel with "
                "channels.set_owner."
            )
        change.remove_from_channel(name, agent_id)
        return {"channel": name, "agent_id": agent_id}

    @operation("change")
    def set_owner(self, change: Change, *, name: ChannelName, agent_id: Who) -> dict[str, Any]:
        """Transfer a channel that you own to another member."""
        _check_owner(change, name, "transfers it")
        if not change.state.member(name, agent_id).is_in:
            raise InvalidArguments(f"{agent_id!r} is not in the channel {name!r} and must join before owning it.")
        change.set_channel(name, owner=agent_id)
        return {"channel": name, "owner": agent_id}

    @operation("change")
    def set_access(self, change: Change, *, name: ChannelName, access: Access) -> dict[str, Any]:
        """Choose who may join a channel that you own: "open", "invite" or "closed". Its members stay."""
        _check_owner(change, name, "changes who may join")
        change.set_channel(name, access=access)
        return {"channel": name, "access": access}

    @operation("change")
    def set_topic(self, change: Change, *, name: ChannelName, topic: Topic) -> dict[str, Any]:
        """Set the topic of a channel that you are in."""
        check_member(change.state, change.origin, find_channel(change.state, change.origin, name))
        change.set_channel(name, topic=topic)
        return {"channel": name, "topic": topic}

    @operation("change")
    def set_title(self, change: Change, *, name: ChannelName, title: Title) -> dict[str, Any]:
        """Set the display title of a channel that you own. An empty title removes it. The name stays."""
        _check_owner(change, name, "renames it")
        change.set_channel(name, title=" ".join(title.split()))
        return {"channel": name, "title": " ".join(title.split())}

    @operation("change")
    def set_history(self, change: Change, *, name: ChannelName, history: History) -> dict[str, Any]:
        """Choose which messages late joiners of a channel may read. Only its owner or an operator may."""
        channel = find_channel(change.state, change.origin, name)
        # Channels from versions without owners have no owner, so their creator may change the history setting.
        if channel.owner is not None or channel.created_by != change.origin.agent_id:
            check_owner(change.state, change.origin, channel, "changes what late joiners read")
        change.set_channel(name, history=history)
        return {"channel": name, "history": history}

    @operation("change")
    def post(self, change: Change, *, name: ChannelName, text: Text, cause: Seq | None = None) -> dict[str, Any]:
        """Write in a channel that you are in."""
        row = change.post(channel_address(name), text, cause=cause)
        return {"seq": row.seq, "thread_id": row.stream}

    @operation("change")
    def reply(self, change: Change, *, reply_to: Seq, text: Text, cause: Seq | None = None) -> dict[str, Any]:
        """Reply to a channel message in its thread. reply_to is the message's seq."""
        parent = change.head(reply_to)
        if parent.kind != "channel":
            raise InvalidArguments(f"Message {reply_to} is not in a channel. Use a plain message to reply to it.")
        row = change.post(parent.to, text, reply_to=reply_to, cause=cause)
        return {"seq": row.seq, "thread_id": row.stream}

    @operation("read")
    async def list(
        self, reading: Reading, *, after: str = "", limit: PageLimit = 1000, trigger: Seq | None = None
    ) -> dict[str, Any]:
        """List the channels that you may see, by name after `after`: name, topic, access, owner, number of members, and
        whether you are a member or invited."""
        state, origin = reading.hub.state, reading.origin
        listeners = await find_audience(reading, trigger)
        counted, is_cut = 0, False

        def describe() -> Iterator[dict[str, Any]]:
            nonlocal counted, is_cut
            for name, channel in state.ascending("channel", after):
                if not (is_found(state, origin, channel) and _reads(reading, name)):
                    continue
                # If the network defines no rights, everyone may see every channel that is not closed.
                required = listeners if channel.access == "closed" or state.rights is not None else ()
                if not all(
                    is_found_by(state, agent_id, channel) and has_right_to_read(state, agent_id, name)
                    for agent_id in required
                ):
                    continue
                is_cut = counted > MEMBERS_COUNTED
                if is_cut:
                    return
                members, own = state.members(name), state.member(name, origin.agent_id)
                counted += len(members) + len(required)
                entry = {
                    "name": name,
                    "topic": channel.topic,
                    "history": channel.history,
                    "access": channel.access,
                    "members": sum(member.is_in for member in members.values()),
                    "is_member": own.is_in,
                }
                if channel.title:
                    entry["title"] = channel.title
                if (owner := owner_of(state, channel)) is not None:
                    entry["owner"] = owner
                if own.standing == "invited":
                    entry["is_invited"] = True
                yield entry

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
        trigger: Seq | None = None,
    ) -> dict[str, Any]:
        """List the members of a channel by id, after `after`. Members and operators may call this."""
        state, origin = reading.hub.state, reading.origin
        check_right(state, origin, "read", name)
        check_member(state, origin, find_channel(state, origin, name))
        # Repeat the check for each listener. Sort the listeners, so that every hub reports the same listener in the error.
        for agent_id in sorted(await find_audience(reading, trigger)):
            listener = state.participant(agent_id)
            kind = listener.kind if listener is not None else origin.kind
            asking = msgspec.structs.replace(origin, agent_id=agent_id, kind=kind, is_operator=False)
            check_right(state, asking, "read", name)
            check_member(state, asking, find_channel(state, asking, name))
        inside = (agent_id for agent_id, member in state.members(name).items() if member.is_in and agent_id > after)
        members, has_more = take_page(nsmallest(limit + 1, inside), limit, reading.hub.limits.max_result_bytes)
        return {"channel": name, "members": members, "has_more": has_more}


def _check_owner(change: Change, name: str, doing: str) -> None:
    """Raise an error unless the caller owns the channel. ``doing`` names the action in the error."""
    check_owner(change.state, change.origin, find_channel(change.state, change.origin, name), doing)


def _reads(reading: Reading, name: str) -> bool:
    origin, state = reading.origin, reading.hub.state
    return origin.is_operator or has_right_to_read(state, origin.agent_id, name)
