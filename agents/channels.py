"""Being in channels: what an agent's ``channels`` asks for at the start."""

from __future__ import annotations

from roundelay.network.client import NetworkClient
from roundelay.network.errors import InvalidArguments, UnknownRecipient


async def join_channel(client: NetworkClient, name: str) -> None:
    """Be a member of a channel, which is made if there is none. Joining again changes nothing."""
    try:
        await client.call("channels.join", {"name": name})
        return
    except UnknownRecipient:
        pass
    try:
        await client.call("channels.create", {"name": name})  # which joins it
    except InvalidArguments:
        await client.call("channels.join", {"name": name})  # somebody else was faster
