"""What a model was asked, as a few hashes: enough to notice that it is asked something else now, and to name what.

`print_request` is kept with each recorded reply (``request`` in the journal's ``model_reply``), `find_drift` compares a
print with the request of today. Ids of tool calls count by their place, so that another provider's ids are no
difference. Pure.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from .model import AssistantMessage, ChatMessage, Model, ModelRequest, SystemMessage, ToolMessage, ToolSpec, UserMessage

MAX_LINES = 2000
"""Of the instruction and of the prompt, each: how many lines are told apart."""
MAX_SHOWN_CHARS = 160

Print = Mapping[str, Any]
"""``hash`` of messages, tools and choice; ``model``, ``settings`` and ``tool_choice``; ``messages``, each as the first
letter of its role and a hash; ``attached``, a hash of each image and file, where there are any; ``tools`` by name in the
first turn of a run, later one hash of all; ``lines`` of the first two messages, in the first turn."""


def print_request(model: Model, request: ModelRequest) -> dict[str, Any]:
    """Give the print of a request to a model, as plain JSON."""
    messages = _digest_messages(request.messages)
    tools = {tool.name: _digest_tool(tool) for tool in request.tools}
    settings = {name: _digest(_write(value)) for name, value in sorted(read_settings(model).items())}
    choice = _write_choice(request)
    all_tools = _digest(*tools, *tools.values())
    attached = [_digest(it) for it in _list_attached(request.messages)]
    whole = _digest(choice, all_tools, *messages, *attached)
    made: dict[str, Any] = {
        "hash": whole, "model": model.name, "messages": [it[:9] for it in messages],
        "tools": all_tools[:8],
    }  # fmt: skip
    if settings:
        made["settings"] = {name: value[:8] for name, value in settings.items()}
    if choice != "auto":
        made["tool_choice"] = choice
    if attached:
        made["attached"] = [it[:8] for it in attached]
    if not any(isinstance(message, AssistantMessage) for message in request.messages):
        made["tools"] = {name: value[:8] for name, value in tools.items()}
        made["lines"] = [_print_lines(message.content or "") for message in request.messages[:2]]
    return made


def read_settings(model: Model) -> Mapping[str, object]:
    """Give what the model sends beside the request (``temperature``, ...), as far as it says."""
    settings = getattr(model, "settings", None)
    return settings if isinstance(settings, Mapping) else {}


def find_drift(recorded: Print, model: Model, request: ModelRequest, *, any_model: bool = False) -> str | None:
    """Give the nearest difference between what was asked then and what is asked now, None if there is none.

    ``any_model``: whose model it is, and how that is set, does not count.
    """
    now = print_request(model, request)
    drift = None if any_model else _compare_models(recorded, now)
    if drift is not None or recorded.get("hash") == now["hash"]:
        return drift
    return (
        _compare_choices(recorded, now)
        or _compare_tools(recorded.get("tools"), request)
        or _compare_messages(recorded, now, request.messages)
        or _compare_attached(recorded, now)
        or "the request is another one"
    )


def _compare_models(recorded: Print, now: Print) -> str | None:
    if recorded.get("model") != now["model"]:
        return f'the model was "{recorded.get("model")}" and is "{now["model"]}" now'
    then, present = recorded.get("settings") or {}, now.get("settings") or {}
    for name in sorted({*then, *present}):
        if then.get(name) != present.get(name):
            how = "is new" if name not in then else "is gone" if name not in present else "has another value"
            return f'the setting "{name}" of model "{now["model"]}" {how}'
    return None


def _compare_choices(recorded: Print, now: Print) -> str | None:
    was, choice = recorded.get("tool_choice", "auto"), now.get("tool_choice", "auto")
    return f"the choice of tool was {was} and is {choice} now" if was != choice else None


def _compare_tools(recorded: Any, request: ModelRequest) -> str | None:
    present = {tool.name: _digest_tool(tool)[:8] for tool in request.tools}
    if not isinstance(recorded, Mapping):
        is_same = recorded == _digest(*present, *(_digest_tool(tool) for tool in request.tools))[:8]
        return None if is_same else f"the tools are others; now they are: {', '.join(present) or 'none'}"
    added = [tool for tool in request.tools if tool.name not in recorded]
    gone = [name for name in recorded if name not in present]
    for name in gone:
        for tool in added:
            if _digest(name, tool.description, _write(tool.parameters))[:8] == recorded[name]:
                return f'the tool "{name}" is called "{tool.name}" now'
    if gone or added:
        new = [tool.name for tool in added]
        return ", and ".join([*_tell_tools(gone, "is gone", "are gone"), *_tell_tools(new, "was added", "were added")])
    for name, value in present.items():
        if recorded[name] != value:
            return f'the tool "{name}" has another description or other parameters'
    if list(recorded) != list(present):
        return f"the tools are in another order: {', '.join(present)}"
    return None


def _tell_tools(names: Sequence[str], one: str, many: str) -> list[str]:
    if not names:
        return []
    listed = ", ".join(f'"{name}"' for name in names)
    return [f"the tool {listed} {one}" if len(names) == 1 else f"the tools {listed} {many}"]


def _compare_messages(recorded: Print, now: Print, messages: Sequence[ChatMessage]) -> str | None:
    then, present = list(recorded.get("messages") or ()), list(now["messages"])
    for place, (was, it) in enumerate(zip(then, present, strict=False)):
        if was == it:
            continue
        name = f"message {place} ({_ROLES.get(it[:1], 'unknown')})"
        if was in present[place:] and it in then[place:]:
            return f"{name} stands in another place; it says now: {_show(messages[place].content)}"
        if was[:1] != it[:1]:
            return f"{name} was of the role {_ROLES.get(was[:1], 'unknown')}; it says now: {_show(messages[place].content)}"
        lines = recorded.get("lines")
        if isinstance(lines, list) and place < len(lines):
            return f"{name}: {_compare_lines(lines[place], messages[place].content or '')}"
        return f"{name} is another; it says now: {_show(messages[place].content)}"
    if len(then) < len(present):
        it = present[len(then)]
        return f"message {len(then)} ({_ROLES.get(it[:1], 'unknown')}) is new: {_show(messages[len(then)].content)}"
    if len(then) > len(present):
        return f"message {len(present)} ({_ROLES.get(then[len(present)][:1], 'unknown')}) is gone"
    return None


def _compare_attached(recorded: Print, now: Print) -> str | None:
    then, present = list(recorded.get("attached") or ()), list(now.get("attached") or ())
    for place, (was, it) in enumerate(zip(then, present, strict=False), 1):
        if was != it:
            return f"of the images and files, number {place} is another"
    if len(then) != len(present):
        return f"there were {len(then)} images and files, and there are {len(present)} now"
    return None


def _compare_lines(recorded: str, text: str) -> str:
    """Name the first line that is another one, in a message that is."""
    then = [recorded[start : start + 4] for start in range(0, len(recorded), 4)]
    lines = text.split("\n")
    printed = _print_lines(text)
    present = [printed[start : start + 4] for start in range(0, len(printed), 4)]
    note = "the same lines in another order; " if Counter(then) == Counter(present) else ""
    for kind, start, end, first, last in SequenceMatcher(None, then, present, autojunk=False).get_opcodes():
        if kind == "replace":
            return f"{note}line {first + 1} is another; it says now: {_show(lines[first])}"
        if kind == "insert":
            count = "a line" if last - first == 1 else f"{last - first} lines"
            return f"{note}{count} more at line {first + 1}: {_show(lines[first])}"
        if kind == "delete":
            count = "a line" if end - start == 1 else f"{end - start} lines"
            where = f"after {_show(lines[first - 1])}" if first else "at the beginning"
            return f"{note}{count} missing {where}"
    return "a line beyond the first 2000 is another, or two differ that look alike"


_ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


def _show(text: str | None) -> str:
    shown = (text or "").strip()
    return f'"{shown[:MAX_SHOWN_CHARS]}{"..." if len(shown) > MAX_SHOWN_CHARS else ""}"'


def _digest_messages(messages: Sequence[ChatMessage]) -> list[str]:
    places: dict[str, int] = {}  # of call ids, in the order of their calls
    digests = []
    for message in messages:
        match message:
            case SystemMessage(content):
                digests.append("s" + _digest(content))
            case UserMessage(content):
                digests.append("u" + _digest(content))
            case AssistantMessage(content, calls):
                parts = ["" if content is None else content]
                for call in calls:
                    places[call.id] = len(places)
                    parts += [call.name, call.arguments]
                digests.append("a" + _digest(*parts))
            case ToolMessage(call_id, content):
                digests.append("t" + _digest(str(places.get(call_id, "")), content))
    return digests


def _list_attached(messages: Sequence[ChatMessage]) -> list[str]:
    said = [it for it in messages if isinstance(it, UserMessage)]
    return [
        it
        for message in said
        for it in (*message.images, *("\x1f".join((file.name, file.media_type, file.data)) for file in message.files))
    ]


def _digest_tool(tool: ToolSpec) -> str:
    known = _tools.get(id(tool.parameters))
    if known is not None and known[0] is tool.parameters and known[1] == (tool.name, tool.description):
        return known[2]
    digest = _digest(tool.name, tool.description, _write(tool.parameters))
    if len(_tools) >= MAX_KNOWN_TOOLS:
        _tools.clear()
    _tools[id(tool.parameters)] = (tool.parameters, (tool.name, tool.description), digest)
    return digest


MAX_KNOWN_TOOLS = 4096
# Digests by the identity of a schema, which is held so that it stays one.
_tools: dict[int, tuple[object, tuple[str, str], str]] = {}


def _write_choice(request: ModelRequest) -> str:
    choice = request.tool_choice
    return choice if isinstance(choice, str) else f"the tool {choice.name}"


def _print_lines(text: str) -> str:
    lines = text.encode("utf-8", "replace").split(b"\n", MAX_LINES)[:MAX_LINES]
    return struct.pack(f">{len(lines)}H", *[zlib.crc32(line) & 0xFFFF for line in lines]).hex()


def _write(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\x1f".join(parts).encode("utf-8", "replace"), digest_size=16).hexdigest()
