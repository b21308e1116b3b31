"""Reactions as a reader meets them: which ones the last messages are part of, and each record in a line. Read only, from the ledger."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from roundelay.agents.ids import reaction_id
from roundelay.agents.records import fetch_records
from roundelay.agents.text import cut
from roundelay.network.client import NetworkClient
from roundelay.reading.follow import MAX_PAGE, Follower
from roundelay.reading.recording import read_run, read_trigger
from roundelay.reading.usage import ReactionOf, find_reactions, read_few_at_once


@dataclass(frozen=True, slots=True)
class ListedReaction:
    """One reaction. ``state`` is how it ended, else ``open``, or ``waiting`` for others or an approval; ``turns`` have a recorded reply."""

    reaction: str
    agent_id: str
    trigger: int
    thread_id: str
    state: str
    turns: int

    @property
    def is_open(self) -> bool:
        return self.state in ("open", "waiting")

    def to_json(self) -> dict[str, object]:
        return asdict(self)


async def list_reactions(client: NetworkClient, last: int) -> list[ListedReaction]:
    """The reactions whose prompts hold one of the last messages, and all that are open, as far as the caller may see; by trigger and agent."""
    messages = await Follower(client).begin(last)
    found = await find_reactions(client, [message.seq for message in messages])
    return await _read_all(client, found | await _find_open(client))


async def list_open_reactions(client: NetworkClient) -> list[ListedReaction]:
    """The reactions that are open, as far as the caller may see, however long ago they began; by trigger and agent."""
    return [it for it in await _read_all(client, await _find_open(client)) if it.is_open]


async def _find_open(client: NetworkClient) -> set[ReactionOf]:
    found: set[ReactionOf] = set()
    after, has_more = 0, True
    while has_more:
        page = await client.call("network.open_reactions", {"after": after, "limit": MAX_PAGE})
        found |= {(it["reaction"], it["agent_id"]) for it in page["reactions"]}
        after, has_more = max((it["seq"] for it in page["reactions"]), default=after), page["has_more"]
    return found


async def _read_all(client: NetworkClient, reactions: Iterable[ReactionOf]) -> list[ListedReaction]:
    async def read(named: ReactionOf) -> ListedReaction | None:
        reaction, agent_id = named
        return _list_one(reaction, agent_id, await fetch_records(client.call, reaction, agent_id))

    found = await read_few_at_once(read, reactions)
    return sorted((it for it in found if it is not None), key=lambda it: (it.trigger, it.agent_id))


def _list_one(reaction: str, agent_id: str, records: list[Mapping[str, Any]]) -> ListedReaction | None:
    """None for what may not be read."""
    if not records:
        return None
    run = read_run(records)
    if run is None or run.started is None:
        bodies = (it["body"] for it in records if read_trigger(it["kind"], it["body"]) is not None)
        started = next(bodies, {"trigger": 0})
        state = "finished" if any(record["kind"] == "finished" for record in records) else "open"
        return ListedReaction(reaction, agent_id, started["trigger"], str(started.get("thread_id", "")), state, 0)
    state = run.finished.status if run.finished is not None else "waiting" if run.open_waits() else "open"
    return ListedReaction(reaction, agent_id, run.started.trigger, run.started.thread_id, state, len(run.replies))


def choose_author(reaction: str, records: Sequence[Mapping[str, Any]], epoch: str) -> str:
    """The agent whose reaction it is, among those who wrote records under its id: the one of whom it was derived, else the first."""
    for it in records:
        trigger = read_trigger(it["kind"], it["body"])
        if trigger is not None and reaction_id(it["agent_id"], trigger, epoch) == reaction:
            return str(it["agent_id"])
    return str(records[0]["agent_id"])


def describe_record(record: Mapping[str, Any]) -> str:
    """What a record says, for a reader; one of another program's shape is shown as it is."""
    kind, body = str(record["kind"]), record["body"]
    try:
        told = _describe(kind, body)
    except (ValueError, TypeError, KeyError, AttributeError):
        told = None
    if told is None:
        return f"{kind} {json.dumps(body, ensure_ascii=False)}"
    path = f"[{body['path']}] " if body.get("path") else ""
    return f"{path}{told}"


def _describe(kind: str, body: Mapping[str, Any]) -> str | None:
    place = f"{body.get('turn')}.{body.get('call')}"
    match kind:
        case "started":
            seqs = ", ".join(f"#{seq}" for seq in body["manifest"])
            return f"began for #{body['trigger']} in {body['thread_id']}; its prompt holds {seqs or 'nothing'}"
        case "model_reply":
            reply = body["reply"]
            said = [f"says: {reply['text']}"] if reply["text"] else []
            said += [f"calls {it['name']} {it['arguments'] or '{}'}" for it in reply["tool_calls"]]
            return "\n".join([f"turn {body['turn']} of {body['agent']}, {_tell_tokens(reply['usage'])}", *said])
        case "model_failed":
            return f"turn {body['turn']}: the model failed ({body['failure']}): {body['reason']}"
        case "note":
            return (
                f"turn {body['turn']} keeps {body['name']}: {cut(json.dumps(body['value'], ensure_ascii=False), 200)}"
            )
        case "new_messages":
            return f"turn {body['turn']} reads {', '.join(f'#{seq}' for seq in body['seqs'])}"
        case "tool_started":
            return f"{place} runs {body['tool']} {body['args'] or '{}'}"
        case "tool_result":
            return f"{place} {body['tool']} {'gave' if body['ok'] else 'failed'}: {body['content']}"
        case "asking":
            return f"{place} asks {', '.join(body['messages'])}"
        case "waiting":
            asked = ", ".join(f"{who} (#{seq})" for who, seq in body["questions"].items())
            return f"{place} waits for {'an approval by ' if body['is_approval'] else ''}{asked}"
        case "approval":
            reason = f": {body['reason']}" if body["reason"] else ""
            changed = f", with {body['arguments']}" if body["arguments"] is not None else ""
            return f"{place} was {'approved' if body['is_approved'] else 'denied'} by {body['by']} in #{body['seq']}{changed}{reason}"
        case "finished":
            calls = f"{body['turns']} turns, {body['tool_calls']} tool calls"
            return f"{body['status']} ({body['reason']}): {calls}, {_tell_tokens(body['usage'])}"
        case _:
            return None


def _tell_tokens(usage: Mapping[str, Any]) -> str:
    return f"{usage['prompt_tokens']} prompt + {usage['completion_tokens']} completion tokens"
