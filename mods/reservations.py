"""`reservations`: temporary claims on files, so that two participants do not change the same file.

A reservation is advisory: it does not lock the file itself. Every participant sees it, and the hub refuses conflicting
reservations. The holder gets one notice for each other participant that tries to reserve the same files. Reservations expire by the hub's timestamps.

`reserve_all` waits in a queue until it can have all of its paths at once. A request waits only for holders and for
earlier requests that overlap it. Nobody may reserve or extend paths for which somebody else waits, so each request is
granted after the reservations before it. A request that would close a circle of waiting participants is refused.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Annotated, Any

from msgspec import Meta

from roundelay.network.errors import InvalidArguments
from roundelay.network.mod import Change, Mod, operation

MAX_HELD = 500
"""Maximum number of reservations in a network."""
MAX_HELD_BY_ONE = 50
MAX_WAITING = 100
"""Maximum number of waiting requests in a network. Each participant can have one."""
MAX_TOLD = 50
"""Maximum number of participants about whom the holder of one reservation is notified."""

FilePath = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=200,
        description="A path from the project's root: src/a.py, src or src/*.py (* matches any text).",
    ),
]
Paths = Annotated[list[FilePath], Meta(min_length=1, max_length=10)]


class Reservations(Mod):
    """Reserve, release and list paths."""

    id = "reservations"

    @operation("change")
    def reserve(
        self,
        change: Change,
        *,
        paths: Paths,
        minutes: Annotated[int, Meta(ge=1, le=1440)] = 60,
        note: Annotated[str, Meta(max_length=200, description="Purpose of the reservation.")] = "",
    ) -> dict[str, Any]:
        """Reserve files or patterns of files for some minutes before you change them. If another participant holds one
        of them, nothing is reserved: you learn who holds it, and the holder is notified. Your own reservations are
        extended."""
        caller, held, queue = change.origin.agent_id, _read_active(change), change.get("queue") or []
        wanted = list(dict.fromkeys(_normalize(path) for path in paths))
        taken = _find_taken(held, caller, wanted)
        waiting = [request for request in queue if _blocks(request, caller, wanted)]
        if taken or waiting:
            _notify_holders(change, caller, taken)
            change.put("held", held)
            return {"reserved": [], "taken": [_describe(it) for it in taken] + list(map(_describe_waiting, waiting))}
        own = _reserve(held, caller, wanted, change.stamp + minutes * 60_000, note)
        _check_count(held, caller)
        change.put("held", held)
        return {"reserved": [_describe(reservation) for reservation in own], "taken": []}

    @operation("change")
    def reserve_all(
        self,
        change: Change,
        *,
        paths: Paths,
        minutes: Annotated[int, Meta(ge=1, le=1440)] = 60,
        note: Annotated[str, Meta(max_length=200)] = "",
        wait_minutes: Annotated[int, Meta(ge=1, le=1440, description="How long to wait for your turn.")] = 60,
    ) -> dict[str, Any]:
        """Reserve all of these paths at once, and wait in line if others hold some of them. You get a message when you
        have all of them; until then you have none. A new request replaces your earlier one."""
        caller, held, queue = change.origin.agent_id, _read_active(change), change.get("queue") or []
        wanted = list(dict.fromkeys(_normalize(path) for path in paths))
        change.log({"paths": wanted})  # log before sending: a replay repeats the call at its first row
        number = next((it for it, request in enumerate(queue) if request["agent_id"] == caller), len(queue))
        if number < len(queue) and sorted(queue[number]["paths"]) != sorted(wanted):
            del queue[number]
            number = len(queue)
        # A repeated request keeps its position in the queue.
        taken = _find_taken(held, caller, wanted)
        waiting = [request for request in queue[:number] if _blocks(request, caller, wanted)]
        if not (taken or waiting):
            del queue[number : number + 1]
            own = _reserve(held, caller, wanted, change.stamp + minutes * 60_000, note)
            _check_count(held, caller)
            _serve(change, held, queue)
            return {"reserved": [_describe(reservation) for reservation in own], "taken": [], "position": 0}
        if circle := _find_circle(held, queue[:number], caller, wanted):
            raise InvalidArguments(
                f"These participants would wait for each other: {' -> '.join(circle)}. Release your paths first, and "
                "reserve all paths that you need together."
            )
        if number >= MAX_WAITING:
            raise InvalidArguments(f"{MAX_WAITING} requests wait already, which is the maximum. Try again later.")
        request = {
            "agent_id": caller,
            "paths": wanted,
            "minutes": minutes,
            "note": note,
            "until": change.stamp + wait_minutes * 60_000,
        }
        queue[number : number + 1] = [request]
        _notify_holders(change, caller, taken)
        _serve(change, held, queue)
        return {
            "reserved": [],
            "taken": [_describe(it) for it in taken] + list(map(_describe_waiting, waiting)),
            "position": number + 1,
        }

    @operation("change")
    def release(self, change: Change, *, paths: Paths | None = None) -> dict[str, Any]:
        """Release your reservations: the given paths as they were reserved, or all of them. A request that waits for
        only such paths is withdrawn."""
        held, caller = _read_active(change), change.origin.agent_id
        given = None if paths is None else set(map(_normalize, paths))
        released = [
            reservation
            for reservation in held
            if reservation["agent_id"] == caller and (given is None or reservation["path"] in given)
        ]
        queue = [
            request
            for request in change.get("queue") or []
            if request["agent_id"] != caller or (given is not None and not given.issuperset(request["paths"]))
        ]
        if change.get("queue"):
            change.log({"released": _list_paths(released)})
        _serve(change, [reservation for reservation in held if reservation not in released], queue)
        return {"released": _list_paths(released)}

    @operation("change")
    def list(self, change: Change) -> dict[str, Any]:
        """List all reservations with holder and expiry time (milliseconds), and the requests that wait, in order."""
        waiting = [
            {name: request[name] for name in ("agent_id", "paths", "until")} for request in change.get("queue") or []
        ]
        reservations = [_describe(reservation) for reservation in _read_active(change)]
        return {"reservations": reservations, **({"waiting": waiting} if waiting else {})}

    def removed(self, change: Change, agent_id: str) -> None:
        """Release the paths that a removed participant had reserved."""
        held = [reservation for reservation in _read_active(change) if reservation["agent_id"] != agent_id]
        _serve(change, held, change.get("queue") or [])

    def due(self, change: Change, key: str) -> None:
        """Grant waiting requests, because a reservation or a request has expired."""
        _serve(change, _read_active(change), change.get("queue") or [])


def _find_taken(held: list[dict[str, Any]], caller: str, wanted: list[str]) -> list[dict[str, Any]]:
    """Return the reservations of other participants that may overlap the requested paths."""
    return [it for it in held if it["agent_id"] != caller and any(overlaps(path, it["path"]) for path in wanted)]


def _blocks(request: dict[str, Any], caller: str, wanted: list[str]) -> bool:
    """Return whether another participant's earlier request waits for one of the requested paths."""
    return request["agent_id"] != caller and any(overlaps(one, other) for one in wanted for other in request["paths"])


def _notify_holders(change: Change, caller: str, taken: list[dict[str, Any]]) -> None:
    """Send each holder one notice that the caller tried to reserve its paths."""
    for holder in dict.fromkeys(reservation["agent_id"] for reservation in taken):
        theirs = [it for it in taken if it["agent_id"] == holder and _is_news(it, caller)]
        if theirs and change.state.present(holder) is not None:
            change.answer(holder, f"{caller} wants what you have reserved: {', '.join(_list_paths(theirs))}.")
        for other in theirs:  # remember the caller, so that repeated attempts cause no further notices
            other["told"] = [*other["told"], caller]


def _reserve(held: list[dict[str, Any]], caller: str, wanted: list[str], until: int, note: str) -> list[dict[str, Any]]:
    """Add the caller's reservations to the list. They replace the caller's earlier reservations of the same paths."""
    # Keep the list of participants about whom the holder was notified. Extending a reservation must not repeat the
    # notices.
    notified = {it["path"]: it["told"] for it in held if it["agent_id"] == caller}
    own = [
        {"path": path, "agent_id": caller, "until": until, "note": note, "told": notified.get(path, [])}
        for path in wanted
    ]
    held[:] = [*(it for it in held if not (it["agent_id"] == caller and it["path"] in wanted)), *own]
    return own


def _has_room(held: list[dict[str, Any]], caller: str) -> bool:
    return len(held) <= MAX_HELD and sum(it["agent_id"] == caller for it in held) <= MAX_HELD_BY_ONE


def _check_count(held: list[dict[str, Any]], caller: str) -> None:
    if not _has_room(held, caller):
        raise InvalidArguments(
            f"Too many reservations: at most {MAX_HELD_BY_ONE} per participant and {MAX_HELD} in the network. "
            "Release paths that you no longer need."
        )


def _serve(change: Change, held: list[dict[str, Any]], queue: list[dict[str, Any]]) -> None:
    """Grant the waiting requests that nothing blocks, in order. Store the reservations and the queue."""
    left: list[dict[str, Any]] = []
    for request in queue:
        caller, wanted = request["agent_id"], request["paths"]
        if change.state.present(caller) is None:
            continue
        if request["until"] <= change.stamp:
            change.notify(
                caller,
                f"You no longer wait for {', '.join(wanted)}, because others held the reservations for all that time.",
            )
        # An earlier request blocks a later one even if it cannot be granted yet. Otherwise small requests could pass a
        # large one forever.
        elif _find_taken(held, caller, wanted) or any(_blocks(other, caller, wanted) for other in left):
            left.append(request)
        else:
            granted = list(held)
            _reserve(granted, caller, wanted, change.stamp + request["minutes"] * 60_000, request["note"])
            if not _has_room(granted, caller):
                left.append(request)
                continue
            held = granted
            change.notify(caller, f"You have reserved {', '.join(wanted)} for {request['minutes']} minutes.")
    change.put("held", held)
    change.put("queue", left or None)
    if left:
        change.schedule("queue", min(it["until"] for it in (*held, *left)))
    else:
        change.unschedule("queue")


def _find_circle(
    held: list[dict[str, Any]], queue: list[dict[str, Any]], caller: str, wanted: list[str]
) -> list[str] | None:
    """Return the ids of the participants in the deadlock that the caller's request would cause, or None."""

    def find_blockers(agent_id: str, paths: list[str], before: list[dict[str, Any]]) -> set[str]:
        return {it["agent_id"] for it in _find_taken(held, agent_id, paths)} | {
            it["agent_id"] for it in before if _blocks(it, agent_id, paths)
        }

    waits = {it["agent_id"]: find_blockers(it["agent_id"], it["paths"], queue[:at]) for at, it in enumerate(queue)}
    waits[caller] = find_blockers(caller, wanted, queue)
    chains, seen = [[caller]], {caller}
    while chains:
        chain = chains.pop()
        for name in sorted(waits.get(chain[-1], ())):
            if name == caller:
                return [*chain, caller]
            if name not in seen:
                seen.add(name)
                chains.append([*chain, name])
    return None


def overlaps(one: str, other: str) -> bool:
    """Return whether two paths or patterns may match the same file.

    A path without a star is a file or a folder with all of its content. In a comparison with a
    pattern, a path with a file extension (``a.md``) counts as a file, unless the pattern names a path below it. For patterns with several stars the result
    may be a false positive, because only the text before the first and after the last star is compared.
    """
    return _may_meet(one, other) or _contains(one, other) or _contains(other, one)


def _contains(folder: str, other: str) -> bool:
    """Return whether the path ``folder`` may be a folder that contains the path ``other``."""
    is_file = "*" in other and re.search(r"[^/]\.[A-Za-z]\w*$", folder)
    return "*" not in folder and (other.startswith(f"{folder}/") or (not is_file and _may_meet(f"{folder}/*", other)))


def _may_meet(one: str, other: str) -> bool:
    if "*" not in one and "*" not in other:
        return one == other
    starts, ends = (
        [path.partition("*")[0] for path in (one, other)],
        [path.rpartition("*")[2] for path in (one, other)],
    )
    for plain, pattern in ((one, other), (other, one)):
        if "*" not in plain:
            start, end = pattern.partition("*")[0], pattern.rpartition("*")[2]
            return len(plain) >= len(start) + len(end) and plain.startswith(start) and plain.endswith(end)
    return (starts[0].startswith(starts[1]) or starts[1].startswith(starts[0])) and (
        ends[0].endswith(ends[1]) or ends[1].endswith(ends[0])
    )


def _normalize(path: str) -> str:
    """Return a path in a comparable form, relative to the project's root. Raises `InvalidArguments` for a path outside
    of the project."""
    # File systems return the same name in different Unicode forms, so normalize the form before comparing.
    text = unicodedata.normalize("NFC", path.strip()).replace("\\", "/")
    if re.match("/|~|[A-Za-z]:/", text):
        raise InvalidArguments(
            f"{path!r} is outside of the project. Use a path from the project's root, such as src/a.py."
        )
    parts: list[str] = []
    for part in text.split("/"):
        if part == "..":
            if not parts or "*" in parts[-1]:
                raise InvalidArguments(
                    f"{path!r} leads outside of the project, or to an unknown folder. Use a path without `..`."
                )
            parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    is_folder = not parts or text.endswith(("/", "/.", "/.."))
    return "/".join([*parts, "*"] if is_folder else parts)


def _read_active(change: Change) -> list[dict[str, Any]]:
    """Return the reservations that have not expired at the hub's current timestamp."""
    return [held for held in change.get("held") or [] if held["until"] > change.stamp]


def _is_news(held: dict[str, Any], caller: str) -> bool:
    """Return whether the holder still needs a notice about this caller. The holder gets one notice per caller."""
    return caller not in held["told"] and len(held["told"]) < MAX_TOLD


def _describe(held: dict[str, Any]) -> dict[str, Any]:
    return {key: held[key] for key in ("path", "agent_id", "until", "note")}


def _describe_waiting(request: dict[str, Any]) -> dict[str, Any]:
    """Return a waiting request as an entry of ``taken``."""
    return {
        "path": ", ".join(request["paths"]),
        "agent_id": request["agent_id"],
        "until": request["until"],
        "note": "waits for it",
    }


def _list_paths(held: list[dict[str, Any]]) -> list[str]:
    return [reservation["path"] for reservation in held]
