"""`reservations`: temporary claims on files, so that two participants do not change the same file.

A reservation is advisory. It is visible, conflicting reservations are refused, and its holder is notified once of each
participant that wanted its files. Reservations expire by the hub's timestamps.
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
        caller, held = change.origin.agent_id, _read_active(change)
        wanted = list(dict.fromkeys(_normalize(path) for path in paths))
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
                    change.answer(holder, f"{caller} wants what you have reserved: {', '.join(_list_paths(theirs))}.")
                for other in theirs:  # remember the caller, so that repeated attempts cause no further notices
                    other["told"] = [*other["told"], caller]
            change.put("held", held)
            return {
                "reserved": [],
                "taken": [
                    _describe(reservation)
                    for reservation in {reservation["path"]: reservation for _, reservation in taken}.values()
                ],
            }
        until = change.stamp + minutes * 60_000
        kept = [
            reservation
            for reservation in held
            if not (reservation["agent_id"] == caller and reservation["path"] in wanted)
        ]
        # Keep the list of participants about whom the holder was notified. Extending a reservation must not repeat the
        # notices.
        notified = {
            reservation["path"]: reservation["told"] for reservation in held if reservation["agent_id"] == caller
        }
        own = [
            {"path": path, "agent_id": caller, "until": until, "note": note, "told": notified.get(path, [])}
            for path in wanted
        ]
        if (
            len(kept) + len(own) > MAX_HELD
            or len(own) + sum(reservation["agent_id"] == caller for reservation in kept) > MAX_HELD_BY_ONE
        ):
            raise InvalidArguments(
                f"Too many reservations: at most {MAX_HELD_BY_ONE} per participant and {MAX_HELD} in the network. "
                "Release paths that you no longer need."
            )
        change.put("held", [*kept, *own])
        return {"reserved": [_describe(reservation) for reservation in own], "taken": []}

    @operation("change")
    def release(self, change: Change, *, paths: Paths | None = None) -> dict[str, Any]:
        """Release your reservations: the given paths as they were reserved, or all of them."""
        held = _read_active(change)
        released = [
            reservation
            for reservation in held
            if reservation["agent_id"] == change.origin.agent_id
            and (paths is None or reservation["path"] in map(_normalize, paths))
        ]
        change.put("held", [reservation for reservation in held if reservation not in released])
        return {"released": _list_paths(released)}

    @operation("change")
    def list(self, change: Change) -> dict[str, Any]:
        """List all reservations with holder and expiry time (milliseconds)."""
        return {"reservations": [_describe(reservation) for reservation in _read_active(change)]}


def overlaps(one: str, other: str) -> bool:
    """Return whether two paths or patterns may match the same file.

    A path without a star is a file or a folder with all of its content. Compared with a pattern, a path with a file
    extension (``a.md``) is a file, unless the pattern continues below it. For patterns with several stars the result
    may be a false positive, because only the text before the first and after the last star is compared.
    """
    return _may_meet(one, other) or _contains(one, other) or _contains(other, one)


def _contains(folder: str, other: str) -> bool:
    """Return whether a path is a folder that may contain the other path."""
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
    # The same name has several Unicode forms, and file systems return different ones.
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
    """Return the reservations that have not expired by the hub's time."""
    return [held for held in change.get("held") or [] if held["until"] > change.stamp]


def _is_news(held: dict[str, Any], caller: str) -> bool:
    """Return whether to notify the holder of this caller. Each caller is reported once."""
    return caller not in held["told"] and len(held["told"]) < MAX_TOLD


def _describe(held: dict[str, Any]) -> dict[str, Any]:
    return {key: held[key] for key in ("path", "agent_id", "until", "note")}


def _list_paths(held: list[dict[str, Any]]) -> list[str]:
    return [reservation["path"] for reservation in held]
