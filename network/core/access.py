"""What a node's page of rights and the channels let somebody do, asked with the state.

`check_right` asks the page (`rights`). A channel is found, entered and run by whom `find_channel`, `check_admission`
and `check_owner` say: a closed one is there for its members, for those it has invited, for its owner and for operators;
to everybody else its name is one of a channel that does not exist. Who may *read* is `visibility`'s to say. No IO, no
clock.
"""

from __future__ import annotations

from roundelay.network.addresses import agent_address, mod_address
from roundelay.network.errors import Forbidden, UnknownRecipient

from .entries import Origin
from .rights import SAYS, Verb
from .state import State
from .tables import Channel


def check_right(state: State, origin: Origin, verb: Verb, thing: str = "", to_kind: str = "") -> None:
    """Raises `Forbidden` where the page does not allow it. Operators and mods are not asked. ``thing`` and
    ``to_kind`` as `Rights.decide` takes them."""
    rights = state.rights
    if rights is None or origin.is_operator or not origin.session_id:
        return
    decision = rights.decide(verb, origin.agent_id, origin.kind, thing, to_kind)
    if not decision.allowed:
        raise Forbidden(f"{origin.agent_id} may not {SAYS[verb]} {thing or verb}: {decision.rule}.")


def check_right_to_send(state: State, origin: Origin, kind: str, name: str) -> None:
    """`check_right` for what goes to an address, as `parse_address` gives it. One's own id is free, and who is not
    registered is told as that."""
    match kind:
        case "agent":
            recipient = state.present(name)
            if recipient is not None and name != origin.agent_id:
                check_right(state, origin, "send", agent_address(name), recipient.kind)
        case "channel":
            check_right(state, origin, "write", name)
        case "mod":
            check_right(state, origin, "send", mod_address(name))
        case _:
            check_right(state, origin, "broadcast")


def has_right_to_read(state: State, agent_id: str, name: str) -> bool:
    """Whether the page, if there is one, lets a participant read a channel; that it is in it is another matter."""
    if state.rights is None:
        return True
    participant = state.participant(agent_id)
    return participant is not None and state.rights.decide("read", agent_id, participant.kind, name).allowed


def owner_of(state: State, channel: Channel) -> str | None:
    """Who runs a channel; None where nobody does but operators: it never had an owner, or that is no participant
    any more."""
    return channel.owner if channel.owner is not None and state.present(channel.owner) is not None else None


def is_found(state: State, origin: Origin, channel: Channel) -> bool:
    """Whether this channel is there for somebody. Mods themselves, whose entries have no session, find all."""
    return origin.is_operator or not origin.session_id or is_found_by(state, origin.agent_id, channel)


def is_found_by(state: State, agent_id: str, channel: Channel) -> bool:
    """As `is_found`, of a participant that is no operator."""
    if channel.access != "closed" or channel.owner == agent_id:
        return True
    member = state.member(channel.name, agent_id)
    return member.is_in or member.standing == "invited"


def find_channel(state: State, origin: Origin, name: str) -> Channel:
    """Raises `UnknownRecipient`, in the same words whether there is no such channel or one that is closed to who
    asks."""
    channel = state.channel(name)
    if channel is None or not is_found(state, origin, channel):
        raise UnknownRecipient(f"There is no channel {name!r}; channels.list lists them, channels.create makes one.")
    return channel


def check_admission(state: State, origin: Origin, channel: Channel) -> None:
    """Raises `Forbidden` unless somebody who is not in a channel that it finds may come into it."""
    name, agent_id = channel.name, origin.agent_id
    standing = state.member(name, agent_id).standing
    if origin.is_operator or standing == "invited" or owner_of(state, channel) == agent_id:
        return
    ask = f"ask {owner_of(state, channel) or 'an operator'} for an invitation (channels.invite)."
    if standing == "removed":
        raise Forbidden(f"{agent_id} was removed from the channel {name!r}; {ask}")
    if channel.access != "open":
        raise Forbidden(f"The channel {name!r} takes only those who are invited; {ask}")


def check_owner(state: State, origin: Origin, channel: Channel, doing: str) -> None:
    """Raises `Forbidden` unless this is the channel's owner, or an operator. ``doing`` is what the owner alone
    does, as a verb."""
    owner = owner_of(state, channel)
    if origin.is_operator or owner == origin.agent_id:
        return
    if owner is None:
        raise Forbidden(
            f"The channel {channel.name!r} has no owner, so only an operator {doing}; an operator gives it one by "
            "channels.set_owner."
        )
    raise Forbidden(f"Only {owner}, who owns the channel {channel.name!r}, or an operator {doing}.")


def check_member(state: State, origin: Origin, channel: Channel) -> None:
    """Raises `Forbidden` unless this is a member of the channel, or an operator."""
    if not (origin.is_operator or state.member(channel.name, origin.agent_id).is_in):
        raise Forbidden(f"{origin.agent_id} is not a member of the channel {channel.name!r}; join it first.")
