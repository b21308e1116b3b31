"""`channels`: named places with members. Membership itself is the network's (it decides who a message is for); this mod
lets participants change it."""

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
"""So many members of channels, and of those for whom a reaction is, one page looks at: the hub does nothing else
meanwhile."""
Text = Annotated[str, Meta(min_length=1, description="The text to send.")]


class Channels(Mod):
    """Create, join, leave and list channels, say who is in them, and write in them."""

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
        """Create a channel, own it and join it. Access "open": anybody may join; "invite": everybody sees it, only
        those whom you invite may join; "closed": nobody else even sees that there is one. With history "members",
        late joiners may read what was written before.
        """
        change.create_channel(name, topic=topic, history=history, access=access)
        change.join_channel(name, change.origin.agent_id)
        return {"channel": name}

    @operation("change")
    def join(self, change: Change, *, name: ChannelName) -> dict[str, Any]:
        """Join a channel that is open or that you are invited to, to get its messages and to write in it."""
        change.join_channel(name, change.origin.agent_id)
        return {"channel": name}

    @operation("change")
    def leave(self, change: Change, *, name: ChannelName) -> dict[str, Any]:
        """Leave a channel. To come back to one that is not open you need another invitation, unless you own it."""
        change.leave_channel(name, change.origin.agent_id)
        return {"channel": name}

    @operation("change")
    def invite(self, change: Change, *, name: ChannelName, agent_id: Who) -> dict[str, Any]:
        """Let somebody join a channel that you own. Nobody is told: write to them, so that they join."""
        _own(change, name, "invites")
        change.invite_to_channel(name, agent_id)
        return {"channel": name, "agent_id": agent_id}

    @operation("change")
    def remove(self, change: Change, *, name: ChannelName, agent_id: Who) -> dict[str, Any]:
        """Take a member, or an invitation, out of a channel that you own. Who was removed reads nothing that is
        written afterwards, and comes back only if it is invited again."""
        _own(change, name, "removes others")
        if agent_id == change.origin.agent_id:
            raise InvalidArguments(
                f"To go yourself, call channels.leave; channels.set_owner gives {name!r} to another member."
            )
        change.remove_from_channel(name, agent_id)
        return {"channel": name, "agent_id": agent_id}

    @operation("change")
    def set_owner(self, change: Change, *, name: ChannelName, agent_id: Who) -> dict[str, Any]:
        """Give a channel that you own to another member of it."""
        _own(change, name, "gives it away")
        if not change.state.member(name, agent_id).is_in:
            raise InvalidArguments(f"{agent_id!r} is not in the channel {name!r}; it has to join before it can own it.")
        change.set_channel(name, owner=agent_id)
        return {"channel": name, "owner": agent_id}

    @operation("change")
    def set_access(self, change: Change, *, name: ChannelName, access: Access) -> dict[str, Any]:
        """Choose who may join a channel that you own: "open", "invite" or "closed". Its members stay."""
        _own(change, name, "says who may join")
        change.set_channel(name, access=access)
        return {"channel": name, "access": access}

    @operation("change")
    def set_topic(self, change: Change, *, name: ChannelName, topic: Topic) -> dict[str, Any]:
        """Say what a channel is about; its members may."""
        check_member(change.state, change.origin, find_channel(change.state, change.origin, name))
        change.set_channel(name, topic=topic)
        return {"channel": name, "topic": topic}

    @operation("change")
    def set_title(self, change: Change, *, name: ChannelName, title: Title) -> dict[str, Any]:
        """Say what people call a channel that you own; an empty title takes that away. Its name stays."""
        _own(change, name, "renames it")
        change.set_channel(name, title=" ".join(title.split()))
        return {"channel": name, "title": " ".join(title.split())}

    @operation("change")
    def set_history(self, change: Change, *, name: ChannelName, history: History) -> dict[str, Any]:
        """Choose what late joiners may read; the channel's owner may, or an operator."""
        channel = find_channel(change.state, change.origin, name)
        # who made it before there were owners may
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
        """Answer a channel message in its reply thread; reply_to is the message's seq."""
        parent = change.head(reply_to)
        if parent.kind != "channel":
            raise InvalidArguments(f"Message {reply_to} is not in a channel.")
        row = change.post(parent.to, text, reply_to=reply_to, cause=cause)
        return {"seq": row.seq, "thread_id": row.stream}

    @operation("read")
    async def list(
        self, reading: Reading, *, after: str = "", limit: PageLimit = 1000, trigger: Seq | None = None
    ) -> dict[str, Any]:
        """List the channels that you may see: name, topic, who may join, who owns it, how many members, and
        whether you are one or are invited. By name; those above `after`."""
        state, origin = reading.hub.state, reading.origin
        listeners = await find_audience(reading, trigger)
        counted, is_cut = 0, False

        def describe() -> Iterator[dict[str, Any]]:
            nonlocal counted, is_cut
            for name, channel in state.ascending("channel", after):
                if not (is_found(state, origin, channel) and _reads(reading, name)):
                    continue
                asked = listeners if channel.access == "closed" or state.rights is not None else ()
                if not all(
                    is_found_by(state, agent_id, channel) and has_right_to_read(state, agent_id, name)
                    for agent_id in asked
                ):
                    continue
                is_cut = counted > MEMBERS_COUNTED
                if is_cut:
                    return
                members, own = state.members(name), state.member(name, origin.agent_id)
                counted += len(members) + len(asked)
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
        """List who is in a channel, by id, those above `after`; its members and operators may ask."""
        state, origin = reading.hub.state, reading.origin
        check_right(state, origin, "read", name)
        check_member(state, origin, find_channel(state, origin, name))
        for agent_id in sorted(await find_audience(reading, trigger)):  # as if each asked, in one order everywhere
            listener = state.participant(agent_id)
            kind = listener.kind if listener is not None else origin.kind
            asking = msgspec.structs.replace(origin, agent_id=agent_id, kind=kind, is_operator=False)
            check_right(state, asking, "read", name)
            check_member(state, asking, find_channel(state, asking, name))
        inside = (agent_id for agent_id, member in state.members(name).items() if member.is_in and agent_id > after)
        members, has_more = take_page(nsmallest(limit + 1, inside), limit, reading.hub.limits.max_result_bytes)
        return {"channel": name, "members": members, "has_more": has_more}


def _own(change: Change, name: str, doing: str) -> None:
    """Make sure that the caller owns a channel, of which the owner alone does this."""
    check_owner(change.state, change.origin, find_channel(change.state, change.origin, name), doing)


def _reads(reading: Reading, name: str) -> bool:
    origin, state = reading.origin, reading.hub.state
    return origin.is_operator or has_right_to_read(state, origin.agent_id, name)
