"""Who may do what: the page ``rights`` of a node's file, compiled once, and the decision that it makes
(docs/rights.md).

A page names roles; somebody has every role that names its id or its kind, and may do what any of them allows. What
none allows is denied. A node without a page has no `Rights` at all. Pure but for what it remembers of its own
answers: no IO, no clock. It is asked by `access.check_right` where something is stored, by
`visibility` where something is read, and by `roundelay rights`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

from roundelay.network.addresses import name_of, short_address

if TYPE_CHECKING:
    from roundelay.network.config import Role

Verb: TypeAlias = Literal["send", "broadcast", "create", "join", "read", "write", "take", "call", "administer"]
VERBS: tuple[Verb, ...] = get_args(Verb)
SAYS: Mapping[str, str] = {
    "send": "send to",
    "broadcast": "send a",
    "create": "create the channel",
    "join": "join the channel",
    "read": "read the channel",
    "write": "write in the channel",
    "take": "take over",
    "call": "call",
    "administer": "administer",
}
"""How a sentence begins that goes on with what it is done to."""
REMEMBERED = 16_384
"""Decisions that are kept; what is asked beyond is decided anew."""


class Ruling(NamedTuple):
    """Whether something is allowed. ``rule`` is the one that says so, or, as the end of a sentence, what would
    have to be changed."""

    allowed: bool
    rule: str
    roles: tuple[str, ...]


class WrongRuleError(Exception):
    """A rule that names what there is not. ``role``, ``field`` and ``index`` say where it stands in the page."""

    def __init__(self, message: str, role: str, field: str, index: int) -> None:
        super().__init__(message)
        self.role, self.field, self.index = role, field, index


class Rights:
    """One page. ``decide`` is quick where it was asked the same before."""

    def __init__(self, page: Mapping[str, Role]) -> None:
        self._page = page
        self._ids = {name: tuple(map(_compile, role.ids)) for name, role in page.items()}
        self._rules: dict[tuple[str, Verb], list[tuple[str, re.Pattern[str]]]] = {
            (name, verb): [(text, _compile(text)) for text in getattr(role, verb)]
            for name, role in page.items()
            for verb in VERBS
            if isinstance(getattr(role, verb), tuple)
        }
        self.roles_of = lru_cache(REMEMBERED)(self._roles_of)
        """The roles of somebody, by its id and kind, in the page's order."""
        self.decide = lru_cache(REMEMBERED)(self._decide)
        """Whether somebody (id, kind) may do something (verb) to something: an address, a channel's name, an
        operation, or nothing. The fifth argument is the kind of the participant that is written to."""

    def has_role(self, name: str) -> bool:
        """Whether the page has a role of this name."""
        return name in self._page

    def _roles_of(self, agent_id: str, kind: str) -> tuple[str, ...]:
        return tuple(
            name
            for name, role in self._page.items()
            if kind in role.kinds or any(pattern.fullmatch(agent_id) for pattern in self._ids[name])
        )

    def _decide(self, verb: Verb, agent_id: str, kind: str, thing: str = "", to_kind: str = "") -> Ruling:
        roles = self.roles_of(agent_id, kind)
        matches = {short_address(thing)} if verb == "send" else {thing}
        if verb == "send" and thing.startswith("agent:"):
            matches |= {f"role:{name}" for name in self.roles_of(name_of(thing), to_kind)}
        for name in roles:
            if verb == "administer" and kind == "agent":  # an agent's id is whoever's that comes first
                break
            if verb in ("broadcast", "administer"):
                if getattr(self._page[name], verb):
                    return Ruling(True, f"rights.{name}.{verb}: true", roles)
                continue
            for text, pattern in self._rules[name, verb]:
                if any(pattern.fullmatch(it) for it in matches):
                    return Ruling(True, f"rights.{name}.{verb}: {text}", roles)
        return Ruling(False, self._missing(verb, thing, kind, roles), roles)

    def list_rules(self, verb: Verb, agent_id: str, kind: str) -> list[str]:
        """The rules of all its roles that let somebody do something of this kind."""
        roles = self.roles_of(agent_id, kind)
        if verb in ("broadcast", "administer"):
            decision = self.decide(verb, agent_id, kind)
            return [decision.rule] if decision.allowed else []
        return [f"rights.{name}.{verb}: {text}" for name in roles for text, _ in self._rules[name, verb]]

    def _missing(self, verb: Verb, thing: str, kind: str, roles: tuple[str, ...]) -> str:
        if verb == "administer" and kind == "agent":
            return "administer is for people and services; an agent that shall administer needs an operator's token"
        if not roles:
            return "it has no role in the node's `rights`; name its id under `ids` of one"
        item = "true" if verb in ("broadcast", "administer") else f"[{short_address(thing)}]"
        which = (
            f"its role {roles[0]} does not allow"
            if len(roles) == 1
            else f"none of its roles ({', '.join(roles)}) allows"
        )
        return f"{which} it; the rule would be rights.{roles[0]}.{verb}: {item} in the node's file"


def compile_rights(page: Mapping[str, Role], operations: Collection[str], mods: Collection[str]) -> Rights:
    """The rights of a page. Raises `WrongRuleError` for the first rule that names a role, an operation or a mod
    that there is not."""
    for name, role in page.items():
        for index, text in enumerate(role.call):
            if not any(map(_compile(text).fullmatch, operations)):
                raise WrongRuleError(f'"{text}" matches no operation{_suggest(text, operations)}', name, "call", index)
        for index, text in enumerate(role.send):
            sort, colon, wanted = text.partition(":")
            known = {"role": page, "mod": mods}.get(sort, ()) if colon else None
            if known is not None and not any(map(_compile(wanted).fullmatch, known)):
                raise WrongRuleError(f'"{wanted}" is no {sort}{_suggest(wanted, known)}', name, "send", index)
        if role.administer and set(role.kinds) == {"agent"} and not role.ids:
            raise WrongRuleError(
                "is for people and services: whoever comes first has an agent's id", name, "administer", 0
            )
    return Rights(page)


def _compile(text: str) -> re.Pattern[str]:
    """``*`` alone is anything; as a part of a pattern it has no colon, so that ``r*`` is ids and not ``role:``,
    which everybody may have."""
    return re.compile((".*" if text == "*" else "[^:]*").join(map(re.escape, text.split("*"))))


def _suggest(text: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(text, names, n=1, cutoff=0.6)
    return f'; did you mean "{near[0]}"?' if near else f"; there are {', '.join(names[:8])}{'...' if names[8:] else ''}"
