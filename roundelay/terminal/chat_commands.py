"""Commands of a chat, which begin with /. Each command is a function of the chat and the text after the command's name."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from roundelay.display.activity import list_work
from roundelay.display.screen import format_participants, format_table
from roundelay.display.text import sanitize
from roundelay.network.errors import InvalidArguments
from roundelay.runs.approvals import check_arguments, find_message
from roundelay.runs.lists import list_channels, list_participants, list_threads
from roundelay.terminal.actions import check_place, choose_request, end_takeover, resume, start_takeover, stop_work
from roundelay.terminal.chat import HISTORY_MESSAGES, MAX_THREADS, Chat, Command
from roundelay.terminal.places import BROADCAST
from roundelay.terminal.saving import save_files, send_file

SCOPES = ("", "thread", "always")


async def show_work(chat: Chat, _rest: str) -> None:
    rows = list_work(await list_participants(chat.client), time.time_ns() // 1_000_000)
    head = ("AGENT", "DOES", "THREAD", "FOR")
    chat.screen.write(format_table(head, rows, paint=chat.screen.paint) if rows else "There are no agents.")


async def show_participants(chat: Chat, _rest: str) -> None:
    chat.screen.write(format_participants(await list_participants(chat.client), paint=chat.screen.paint))


async def write_to(chat: Chat, rest: str) -> None:
    agent_id, _, text = rest.partition(" ")
    if not agent_id:
        raise InvalidArguments("Write /dm ID. ID is the participant to write to; /agents lists the participants.")
    await chat.go_and_say(f"agent:{agent_id.removeprefix('agent:')}", text)


async def broadcast(chat: Chat, rest: str) -> None:
    await chat.go_and_say("broadcast", rest)


async def go_to(chat: Chat, rest: str) -> None:
    if rest:
        await check_place(chat.client, rest, await list_participants(chat.client))
        await chat.go(rest)
    chat.show_place()


async def show_threads(chat: Chat, _rest: str) -> None:
    threads = await list_threads(chat.client, limit=MAX_THREADS)
    # The list of threads is available here, so use it to update the prompt.
    chat.activity.load_takeovers(threads)
    rows = [
        (it["thread_id"], it.get("title", ""), it["messages"], f"#{it['last_seq']}", it.get("held", {}).get("by", ""))
        for it in threads
    ]
    head = ("THREAD", "TITLE", "MESSAGES", "LAST", "TAKEN OVER BY")
    chat.screen.write(format_table(head, rows, paint=chat.screen.paint) if rows else "There are no messages yet.")


async def show_channels(chat: Chat, _rest: str) -> None:
    rows = []
    for it in await list_channels(chat.client):
        membership = "yes" if it["is_member"] else "invited" if it.get("is_invited") else ""
        rows.append((it["name"], it["members"], membership, it["access"], it["topic"]))
    head = ("CHANNEL", "MEMBERS", "YOU ARE IN", "ACCESS", "TOPIC")
    chat.screen.write(format_table(head, rows, paint=chat.screen.paint) if rows else "There are no channels yet.")


async def take(chat: Chat, rest: str) -> None:
    chat.screen.note(await start_takeover(chat.client, chat.activity, rest or chat.place.thread_id))


async def give(chat: Chat, rest: str) -> None:
    chat.screen.note(await end_takeover(chat.client, chat.activity, rest or chat.place.thread_id))


async def join(chat: Chat, rest: str) -> None:
    if not rest:
        raise InvalidArguments("Write /join CHANNEL with the name of a channel. A new name creates one.")
    await chat.go_and_say(f"channel:{rest.removeprefix('channel:')}")


async def create(chat: Chat, rest: str) -> None:
    name, _, access = rest.removeprefix("channel:").partition(" ")
    access = access.strip() or "open"
    if not name or access not in ("open", "invite", "closed"):
        raise InvalidArguments("Write /create CHANNEL ACCESS. ACCESS is open (anybody may join), invite or closed.")
    await chat.client.call("channels.create", {"name": name, "access": access})
    await chat.go_and_say(f"channel:{name}")


async def invite(chat: Chat, rest: str) -> None:
    agent_id, name = _read_member_and_channel(chat, "invite", rest)
    await chat.client.call("channels.invite", {"name": name, "agent_id": agent_id})
    chat.screen.note(
        f"{sanitize(agent_id)} may join the channel {sanitize(name)} now. They are not notified: write to them."
    )


async def remove(chat: Chat, rest: str) -> None:
    agent_id, name = _read_member_and_channel(chat, "remove", rest)
    await chat.client.call("channels.remove", {"name": name, "agent_id": agent_id})
    chat.screen.note(f"{sanitize(agent_id)} is out of the channel {sanitize(name)}, and needs an invitation to return.")


async def leave(chat: Chat, rest: str) -> None:
    name = (rest or chat.place.to).removeprefix("channel:")
    if not rest and not chat.place.to.startswith("channel:"):
        raise InvalidArguments("You are in no channel now; write /leave CHANNEL.")
    await chat.client.call("channels.leave", {"name": name})
    # Return to the broadcast: otherwise further lines would go to a channel that the person has just left.
    if chat.place.to == f"channel:{name}":
        chat.place = BROADCAST
    chat.screen.note(f"You left the channel {sanitize(name)}.")
    chat.show_place()


async def open_thread(chat: Chat, rest: str) -> None:
    if rest:
        await chat.go_and_say(rest)
    else:
        chat.screen.note(f"You are in {sanitize(chat.place.thread_id)}.")


async def show_history(chat: Chat, rest: str) -> None:
    thread_id = rest or chat.place.thread_id
    history = await chat.client.history(thread_id, limit=HISTORY_MESSAGES)
    more = f", the last {len(history.messages)}" if history.has_more else ""
    chat.screen.note(f"{sanitize(thread_id)}{more}:")
    for message in history.messages:
        chat.screen.message(message, await chat.requests.describe(message))


async def reply(chat: Chat, rest: str) -> None:
    number, _, text = rest.removeprefix("#").partition(" ")
    if not number.isdecimal() or not text.strip():
        raise InvalidArguments("Write /reply SEQ TEXT with the number of the message that you answer.")
    await chat.answer(await find_message(chat.client, int(number)), text.strip())


async def approve(chat: Chat, rest: str) -> None:
    seq, scope = _read_request(chat, "approve", rest)
    if scope not in SCOPES:
        raise InvalidArguments(
            f"Unknown scope {sanitize(scope)!r}. Write /approve SEQ, then thread, always or nothing."
        )
    await chat.decide("approve", seq, scope)


async def deny(chat: Chat, rest: str) -> None:
    await chat.decide("deny", *_read_request(chat, "deny", rest))


async def edit(chat: Chat, rest: str) -> None:
    seq, arguments = _read_request(chat, "edit", rest)
    check_arguments(arguments)
    await chat.decide("edit", seq, arguments)


async def stop(chat: Chat, rest: str) -> None:
    sentence = await stop_work(chat.client, chat.activity, rest or chat.place.thread_id)
    if rest:
        await chat.client.history(rest, limit=1)  # raises an error if the thread does not exist
    chat.screen.note(sentence)


async def resume_work(chat: Chat, rest: str) -> None:
    if not rest:
        raise InvalidArguments("Write /resume SEQ or /resume AGENT, as in the notice.")
    chat.screen.note(await resume(chat.client, rest.removeprefix("#")))


async def show_cost(chat: Chat, _rest: str) -> None:
    # Import on first use: the code for costs is slow to load, and most chats never need it.
    from roundelay.runs.cost import read_usage
    from roundelay.runs.cost_text import describe_usage

    usage = await read_usage(chat.client, chat.activity.reactions, chat.sent)
    chat.screen.write(describe_usage(usage, paint=chat.screen.paint))


async def save(chat: Chat, rest: str) -> None:
    number = rest.removeprefix("#")
    if not number.isdecimal():
        raise InvalidArguments("Write /save SEQ with the number of the message whose files you want.")
    for line in await save_files(chat.client, await find_message(chat.client, int(number)), Path.cwd()):
        chat.screen.note(line)


async def attach(chat: Chat, rest: str) -> None:
    path, _, text = rest.partition(" ")
    if not path:
        raise InvalidArguments("Write /attach PATH with the file to send. A text may follow.")
    stored = await send_file(chat.client, chat.place, Path(path), text.strip())
    chat.screen.note(f"Sent {sanitize(Path(path).name)} in #{stored.seq}.")


async def show_help(chat: Chat, _rest: str) -> None:
    for usage, meaning in [*((it.usage, it.meaning) for it in COMMANDS.values()), ("/quit", "leave")]:
        chat.screen.write(f"  {usage:<28} {chat.screen.paint.dim(meaning)}")
    chat.show_place()


_LISTED: tuple[tuple[str, str, Callable[[Chat, str], Awaitable[None]]], ...] = (
    ("/who", "show what each agent is doing", show_work),
    ("/agents", "show who is registered, and what they can do", show_participants),
    ("/dm ID [TEXT]", "write to one participant, and stay there", write_to),
    ("/broadcast [TEXT]", "write to everyone, and stay there", broadcast),
    ("/to [PLACE]", "go to an ID, channel:NAME, broadcast or thread:SEQ; or show where lines go", go_to),
    ("/threads", "show your threads, newest first", show_threads),
    ("/channels", "show the channels that you can see", show_channels),
    ("/take [THREAD]", "take over this thread or another: its agents are silent until /give", take),
    ("/give [THREAD]", "end the takeover: agents read the messages since the takeover, and answer again", give),
    ("/join CHANNEL", "join or create a channel, and go there", join),
    ("/create CHANNEL [ACCESS]", "create a channel; ACCESS: open (default), invite or closed", create),
    ("/invite ID [CHANNEL]", "let somebody join a channel that you own", invite),
    ("/remove ID [CHANNEL]", "remove somebody from it", remove),
    ("/leave [CHANNEL]", "leave a channel", leave),
    ("/thread THREAD", "go to a thread, such as thread:15 or direct:ann~mia", open_thread),
    ("/history [THREAD]", f"show the last {HISTORY_MESSAGES} messages of this thread or another", show_history),
    ("/save SEQ", "save the files of a message into this folder", save),
    ("/attach PATH [TEXT]", "store a file, and send it here", attach),
    ("/reply SEQ TEXT", "answer one message, and stay here", reply),
    ("/approve [SEQ] [SCOPE]", "approve an agent's call; SCOPE: thread or always", approve),
    ("/deny [SEQ] [REASON]", "deny it", deny),
    ("/edit [SEQ] JSON", "approve it with these arguments instead", edit),
    ("/stop [THREAD]", "stop what agents do in this thread or another", stop),
    ("/resume SEQ|AGENT", "resume a conversation that reached its limit, or a stopped agent", resume_work),
    ("/cost", "show the tokens that agents have used since you joined", show_cost),
    ("/help", "show this list", show_help),
)
COMMANDS = {usage.split()[0].removeprefix("/"): Command(usage, meaning, run) for usage, meaning, run in _LISTED}
"""Chat commands by name, in the order of ``/help``."""


def _read_request(chat: Chat, word: str, rest: str) -> tuple[int, str]:
    """Return the sequence number of the request that a command decides, and the text after the number.

    Without a number, use the only waiting request.
    """
    number, _, text = rest.removeprefix("#").partition(" ")
    if number.isdecimal():
        return int(number), text.strip()
    if number[:1].isdecimal():
        raise InvalidArguments(f"{sanitize(number)!r} is not the number of a message. Write /{word} SEQ.")
    return choose_request(word, chat.activity.list_own_requests()), rest.strip()


def _read_member_and_channel(chat: Chat, word: str, rest: str) -> tuple[str, str]:
    """Return the participant's id and the channel that a command names. The default is the current channel."""
    agent_id, _, channel = rest.partition(" ")
    place = channel.strip() or chat.place.to
    if not agent_id or (not channel.strip() and not place.startswith("channel:")):
        raise InvalidArguments(f"Write /{word} ID CHANNEL. Without CHANNEL the current channel is meant.")
    return agent_id.removeprefix("agent:"), place.removeprefix("channel:")
