"""`reservations`: who works on which files, for a while, so that two do not write the same one.

A reservation hinders nobody by force: it is known, collisions are refused, and the holder is told once of who came for
what it holds. It ends by itself, by the hub's stamps.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Annotated, Any

from msgspec import Meta

from roundelay.network.errors import InvalidArguments
from roundelay.network.mod import Change, Mod, operation

MAX_HELD = 500
"""In a network."""
MAX_HELD_BY_ONE = 50
MAX_TOLD = 50
"""Of so many who come for one reservation its holder is told."""

FilePath = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=200,
        description="A path from the project's root: src/a.py, src or src/*.py (* is any text).",
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
        note: Annotated[str, Meta(max_length=200, description="What for.")] = "",
    ) -> dict[str, Any]:
        """Reserve files or patterns of files for some minutes before you change them. If somebody else holds one of
        them, nothing is reserved: you are told who, and the holder is told of you. Your own are prolonged.
        """
        caller, held = change.origin.agent_id, _read(change)
        wanted = list(dict.fromkeys(_clean(path) for path in paths))
        taken = [
            (own, reservation)
            for own in wanted
            for reservation in held
            if reservation["agent_id"] != caller and overlaps(own, str(reservation["path"]))
        ]
        if taken:
            for holder in dict.fromkeys(reservation["agent_id"] for _, reservation in taken):
                theirs = [
                    reservation
                    for _, reservation in taken
                    if reservation["agent_id"] == holder and _is_news(reservation, caller)
                ]
                if theirs and change.state.present(holder) is not None:
                    change.answer(holder, f"{caller} wants what you have reserved: {', '.join(_names(theirs))}.")
                for other in theirs:
                    other["told"] = [*other["told"], caller]
            change.put("held", held)
            return {
                "reserved": [],
                "taken": [
                    _show(reservation)
                    for reservation in {reservation["path"]: reservation for _, reservation in taken}.values()
                ],
            }
        until = change.stamp + minutes * 60_000
        kept = [
            reservation
            for reservation in held
            if not (reservation["agent_id"] == caller and reservation["path"] in wanted)
        ]
        told = {reservation["path"]: reservation["told"] for reservation in held if reservation["agent_id"] == caller}
        own = [
            {"path": path, "agent_id": caller, "until": until, "note": note, "told": told.get(path, [])}
            for path in wanted
        ]
        if (
            len(kept) + len(own) > MAX_HELD
            or len(own) + sum(reservation["agent_id"] == caller for reservation in kept) > MAX_HELD_BY_ONE
        ):
            raise InvalidArguments(
                f"At most {MAX_HELD_BY_ONE} paths are reserved by one, and {MAX_HELD} in all; release what is done."
            )
        change.put("held", [*kept, *own])
        return {"reserved": [_show(reservation) for reservation in own], "taken": []}

    @operation("change")
    def release(self, change: Change, *, paths: Paths | None = None) -> dict[str, Any]:
        """Give up what you have reserved: these paths, as they were reserved, or all of it."""
        held = _read(change)
        given_up = [
            reservation
            for reservation in held
            if reservation["agent_id"] == change.origin.agent_id
            and (paths is None or reservation["path"] in map(_clean, paths))
        ]
        change.put("held", [reservation for reservation in held if reservation not in given_up])
        return {"released": _names(given_up)}

    @operation("change")
    def list(self, change: Change) -> dict[str, Any]:
        """List what is reserved, by whom and until when (milliseconds)."""
        return {"reservations": [_show(reservation) for reservation in _read(change)]}


def overlaps(one: str, other: str) -> bool:
    """Whether two paths or patterns may meet in a file. A path without a star is a file, or a folder with all that is
    in it: beside a pattern one whose name ends as files' do (``a.md``) is a file, unless the pattern leads into it. Of
    patterns with several stars it may see one too many, since only what stands before the first and after the last is
    compared."""
    return _may_meet(one, other) or _holds(one, other) or _holds(other, one)


def _holds(folder: str, other: str) -> bool:
    """Whether a path is a folder in which the other may be."""
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


def _clean(path: str) -> str:
    """A path as it is compared: from the project's root, in one spelling. Raises `InvalidArguments` for one that leads
    out of the project."""
    text = unicodedata.normalize("NFC", path.strip()).replace("\\", "/")
    if re.match("/|~|[A-Za-z]:/", text):
        raise InvalidArguments(f"{path!r} is no path in the project; name it from the project's root, as src/a.py.")
    parts: list[str] = []
    for part in text.split("/"):
        if part == "..":
            if not parts or "*" in parts[-1]:
                raise InvalidArguments(
                    f"{path!r} leads out of the project, or nobody knows where; name it without `..`."
                )
            parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    is_folder = not parts or text.endswith(("/", "/.", "/.."))
    return "/".join([*parts, "*"] if is_folder else parts)


def _read(change: Change) -> list[dict[str, Any]]:
    """What is reserved still, by the hub's time."""
    return [held for held in change.get("held") or [] if held["until"] > change.stamp]


def _is_news(held: dict[str, Any], caller: str) -> bool:
    """Whether the holder is to be told of who came, once for each."""
    return caller not in held["told"] and len(held["told"]) < MAX_TOLD


def _show(held: dict[str, Any]) -> dict[str, Any]:
    return {key: held[key] for key in ("path", "agent_id", "until", "note")}


def _names(held: list[dict[str, Any]]) -> list[str]:
    return [reservation["path"] for reservation in held]
