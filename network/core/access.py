"""Checks of rights and of channel access, based on the state.

`check_right` applies the rights from the node's configuration (`rights`). `find_channel`, `check_admission` and
`check_owner` decide who can find, enter and manage a channel. A closed channel is hidden from everyone except its
members, its owner, invited participants and operators. Everyone else gets the same error as for a channel that does not
exist. The module `visibility` decides who may *read* messages. No IO, no clock.
"""

from __future__ import annotations

from roundelay.network.addresses import agent_address, mod_address
from roundelay.network.errors import Forbidden, UnknownRecipient

from .entries import Origin
from .rights import VERB_PHRASES, Verb
from .state import State
from .tables import Channel


def check_right(state: State, origin: Origin, verb: Verb, thing: str = "", to_kind: str = "") -> None:
    """Raise `Forbidden` unless the node's rights allow the action. Operators and mods are exempt. ``thing`` and
    ``to_kind`` are the arguments of `Rights.decide`."""
    rights = state.rights
    # An empty session id means a mod's own entry. Operators install mods, so mods need no rights.
    if rights is None or origin.is_operator or not origin.session_id:
        return
    decision = rights.decide(verb, origin.agent_id, origin.kind, thing, to_kind)
    if not decision.allowed:
        raise Forbidden(f"{origin.agent_id} may not {VERB_PHRASES[verb]} {thing or verb}: {decision.rule}.")


def check_right_to_send(state: State, origin: Origin, kind: str, name: str) -> None:
    """Check the right to send to an address. ``kind`` and ``name`` are the results of `parse_address`. Participants may
    always send to themselves. An unregistered recipient passes this check, and a later step refuses it as unknown."""
    match kind:
        case "agent":
            recipient = state.present(name)
            # A participant needs no right for notes to itself. For an unknown recipient, a later step raises the right
            # error.
            if recipient is not None and name != origin.agent_id:
                check_right(state, origin, "send", agent_address(name), recipient.kind)
        case "channel":
            check_right(state, origin, "write", name)
        case "mod":
            check_right(state, origin, "send", mod_address(name))
        case _:
            check_right(state, origin, "broadcast")


def has_right_to_read(state: State, agent_id: str, name: str) -> bool:
    """Return whether the node's rights let a participant read a channel. Without configured rights, everyone may read.
    Membership is not checked."""
    if state.rights is None:
        return True
    participant = state.participant(agent_id)
    return participant is not None and state.rights.decide("read", agent_id, participant.kind, name).allowed


def owner_of(state: State, channel: Channel) -> str | None:
    """Return the owner of a channel, or None if the channel has no owner or the owner was removed. Only operators can
    manage a channel without an owner."""
    return channel.owner if channel.owner is not None and state.present(channel.owner) is not None else None


def is_found(state: State, origin: Origin, channel: Channel) -> bool:
    """Return whether the sender of an entry may know that a channel exists. Operators and mods (origins without a
    session) may know every channel."""
    return origin.is_operator or not origin.session_id or is_found_by(state, origin.agent_id, channel)


def is_found_by(state: State, agent_id: str, channel: Channel) -> bool:
    """Return whether a participant without operator rights may know that a channel exists."""
    if channel.access != "closed" or channel.owner == agent_id:
        return True
    member = state.member(channel.name, agent_id)
    return member.is_in or member.standing == "invited"


def find_channel(state: State, origin: Origin, name: str) -> Channel:
    """Return the channel with this name. Raise `UnknownRecipient` if the channel does not exist or is hidden from the
    origin. The error text is the same in both cases."""
    channel = state.channel(name)
    # A different error for hidden channels would let anyone discover their names.
    if channel is None or not is_found(state, origin, channel):
        raise UnknownRecipient(
            f"There is no channel {name!r}. channels.list lists channels, channels.create creates one."
        )
    return channel


def check_admission(state: State, origin: Origin, channel: Channel) -> None:
    """Raise `Forbidden` unless the origin may join the channel. The caller has already checked that the origin can find
    the channel and is not a member."""
    name, agent_id = channel.name, origin.agent_id
    standing = state.member(name, agent_id).standing
    if origin.is_operator or standing == "invited" or owner_of(state, channel) == agent_id:
        return
    ask = f"ask {owner_of(state, channel) or 'an operator'} for an invitation (channels.invite)."
    if standing == "removed":
        raise Forbidden(f"{agent_id} was removed from the channel {name!r}. To come back, {ask}")
    if channel.access != "open":
        raise Forbidden(f"Only invited participants may join the channel {name!r}. To join, {ask}")


def check_owner(state: State, origin: Origin, channel: Channel, doing: str) -> None:
    """Raise `Forbidden` unless the origin owns the channel or is an operator. ``doing`` is a verb phrase for the error
    text, such as "may invite participants"."""
    owner = owner_of(state, channel)
    if origin.is_operator or owner == origin.agent_id:
        return
    if owner is None:
        raise Forbidden(
            f"The channel {channel.name!r} has no owner, so only an operator {doing}. An operator can set an owner "
            "with channels.set_owner."
        )
    raise Forbidden(f"Only {owner}, who owns the channel {channel.name!r}, or an operator {doing}.")


def check_member(state: State, origin: Origin, channel: Channel) -> None:
    """Raise `Forbidden` unless the origin is a member of the channel or an operator."""
    if not (origin.is_operator or state.member(channel.name, origin.agent_id).is_in):
        raise Forbidden(f"{origin.agent_id} is not a member of the channel {channel.name!r}. Join it first.")
