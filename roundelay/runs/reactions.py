"""List open and recent reactions, and format their records for people."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from roundelay.agents.approvals import join_names
from roundelay.network.text import count, cut
from roundelay.runs.reading import Record, RecordedReaction
from roundelay.runs.source import Source


async def list_reactions(source: Source, last: int) -> list[RecordedReaction]:
    """Return open and recent reactions that the caller may see, ordered by trigger and agent.

    A reaction is recent if its prompt contains one of the last messages.
    """
    messages = await source.read_last(last)
    found = await source.reactions_with([message.seq for message in messages])
    return await _read_all(source, found | await source.open_reactions())


async def list_open_reactions(source: Source) -> list[RecordedReaction]:
    """Return all open reactions that the caller may see, ordered by trigger and agent."""
    return [it for it in await _read_all(source, await source.open_reactions()) if it.is_open]


async def _read_all(source: Source, named: Iterable[tuple[str, str]]) -> list[RecordedReaction]:
    found = [
        it for it in await source.read_reactions(named) if it.records
    ]  # skip reactions whose records the caller may not read
    return sorted(found, key=lambda it: (it.trigger, it.agent_id))


def describe_record(record: Record) -> str:
    """Describe a record as text. A record in another program's format is returned as JSON."""
    kind, body = str(record["kind"]), record["body"]
    try:
        told = _describe(kind, body)
    # Any program may write a record of this kind with a different body. One such record must not break the list.
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
            return f"began for #{body['trigger']} in {body['thread_id']}; its prompt contains {seqs or 'no message'}"
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
        case "prompt":
            return "\n".join([f"turn {body['turn']} asks the model:", *describe_prompt(body)])
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
            decided = "approved" if body["is_approved"] else "denied"
            scope = {"thread": " for this thread", "always": " for always"}.get(str(body.get("scope")), "")
            votes = [f"{it['by']} in #{it['seq']}: {it['said']}" for it in body.get("votes", ()) if it["said"]]
            words = f" ({'; '.join(votes)})" if votes else ""
            people = [it["by"] for it in body.get("votes", ()) if body["is_approved"]] or [body["by"]]
            by = join_names(people)
            return f"{place} was {decided} by {by} in #{body['seq']}{scope}{changed}{reason}{words}"
        case "review":
            return _describe_review(body)
        case "used":
            return "\n".join(f"{place} used {it['model']}, {_tell_tokens(it['usage'])}" for it in body["used"])
        case "thinking":
            return f"turn {body['turn']} thinks: {body['text']}"
        case "progress":
            return "\n".join(f"{place} reports: {it}" for it in body["steps"])
        case "stopped":
            written = f", which had written: {body['text']}" if body.get("text") else ""
            return f"turn {body['turn']} was stopped by {body['by']}{written}"
        case "finished":
            calls = f"{count(body['turns'], 'turn')}, {count(body['tool_calls'], 'tool call')}"
            return f"{body['status']} ({body['reason']}): {calls}, {_tell_tokens(body['usage'])}"
        case _:
            return None


def _describe_review(body: Mapping[str, Any]) -> str:
    """Describe the review of an answer, or of a message that a call sends."""
    what = f"message {body['send']} of call {body['turn']}.{body['call']}" if body.get("send") else "answer"
    if body.get("correction"):
        fate = f"the {what} is not sent, and the model is asked for another one: {body['correction']}"
    elif body.get("is_blocked"):
        fate = f"the {what} is blocked"
    elif body["is_accepted"]:
        fate = f"the {what} passed: {body['answer']}"
    else:
        fate = f"the {what} is sent, because the model wrote no better one: {body['answer']}"
    metadata = body.get("metadata") or {}
    beside = [f"with {', '.join(metadata)}"] if metadata else []
    usage = body.get("usage") or {}
    cost = [_tell_tokens(usage)] if usage.get("prompt_tokens") or usage.get("completion_tokens") else []
    return "\n".join([f"turn {body['turn']}: {fate}", *(str(it) for it in body.get("notes", ())), *beside, *cost])


def _tell_tokens(usage: Mapping[str, Any]) -> str:
    return f"{usage['prompt_tokens']} prompt + {usage['completion_tokens']} completion tokens"


def describe_prompt(prompt: Mapping[str, Any]) -> list[str]:
    """Describe a stored prompt as lines of text, message by message."""
    lines = ["(its longest messages are cut)"] if prompt.get("is_cut") else []
    for part in prompt["parts"]:
        head = f"{part['role']} {part['tool']}".strip()
        calls = [f"calls {name} {arguments}" for name, arguments in part["calls"]]
        lines += [f"[{head}]", *part["text"].splitlines(), *calls]
    return [*lines, f"[tools] {', '.join(prompt['tools']) or 'none'}"]
