"""Decisions about the rights of participants, compiled from the section ``rights`` of a node's file (docs/rights.md).

The section defines roles. A participant has every role that names the participant's id or kind, and may do whatever at
least one of these roles allows. A node without the section has no `Rights` object.

`access.check_right` uses `Rights` before anything is stored, and `visibility` uses it before anything is read. The
command `roundelay rights` explains the decisions to operators. No IO, no clock. The only state is a cache of decisions.
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
VERB_PHRASES: Mapping[str, str] = {
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
"""Text for each verb in error messages. The name of the object follows the text."""
CACHE_SIZE = 16_384
"""Maximum number of cached decisions."""


class Ruling(NamedTuple):
    """Decision of `Rights` about one action. If the action is allowed, ``rule`` is the rule that allows it. Otherwise
    ``rule`` is a clause for the error message, with the reason and how to allow the action. ``roles`` are the roles of
    the participant."""

    allowed: bool
    rule: str
    roles: tuple[str, ...]


class WrongRuleError(Exception):
    """Raised for an invalid rule in the section ``rights``, such as a rule with an unknown role. ``role``, ``field``
    and ``index`` are the position of the rule in the section."""

    def __init__(self, message: str, role: str, field: str, index: int) -> None:
        super().__init__(message)
        self.role, self.field, self.index = role, field, index


class Rights:
    """Compiled rights of one node. The results of ``decide`` and ``roles_of`` are cached."""

    def __init__(self, page: Mapping[str, Role]) -> None:
        self._page = page
        # Compile the patterns once, because they are matched for every new participant and every new address.
        self._ids = {name: tuple(map(_compile, role.ids)) for name, role in page.items()}
        self._rules: dict[tuple[str, Verb], list[tuple[str, re.Pattern[str]]]] = {
            (name, verb): [(text, _compile(text)) for text in getattr(role, verb)]
            for name, role in page.items()
            for verb in VERBS
            if isinstance(getattr(role, verb), tuple)
        }
        # Cache the results, because every message needs them. The rights never change while the node runs.
        self.roles_of = lru_cache(CACHE_SIZE)(self._roles_of)
        """Roles of a participant, by id and kind, in the order of the section."""
        self.decide = lru_cache(CACHE_SIZE)(self._decide)
        """Decide whether a participant may do an action. The arguments are the verb, the participant's id and kind, the
        object (an address, a channel's name, an operation or nothing), and the recipient's kind."""

    def has_role(self, name: str) -> bool:
        """Return whether a role of this name exists."""
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
            # A rule may also name a role of the recipient. Then the rule does not have to list all recipients.
            matches |= {f"role:{name}" for name in self.roles_of(name_of(thing), to_kind)}
        # Rules can only allow, so the first match decides, and the order of the roles does not matter.
        for name in roles:
            if verb == "administer" and kind == "agent":  # any new client can register an unused id as an agent
                break
            if verb in ("broadcast", "administer"):
                if getattr(self._page[name], verb):
                    return Ruling(True, f"rights.{name}.{verb}: true", roles)
                continue
            for text, pattern in self._rules[name, verb]:
                if any(pattern.fullmatch(name_or_role) for name_or_role in matches):
                    return Ruling(True, f"rights.{name}.{verb}: {text}", roles)
        return Ruling(False, self._missing(verb, thing, kind, roles), roles)

    def list_rules(self, verb: Verb, agent_id: str, kind: str) -> list[str]:
        """Return the rules about a verb in all roles of a participant. For ``broadcast`` and ``administer``, return
        only the rule that allows the action, if any."""
        roles = self.roles_of(agent_id, kind)
        if verb in ("broadcast", "administer"):
            decision = self.decide(verb, agent_id, kind)
            return [decision.rule] if decision.allowed else []
        return [f"rights.{name}.{verb}: {text}" for name in roles for text, _ in self._rules[name, verb]]

    def _missing(self, verb: Verb, thing: str, kind: str, roles: tuple[str, ...]) -> str:
        if verb == "administer" and kind == "agent":
            return "administer is for people and services; give an agent an operator's token instead"
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
    """Compile the rights of a node. Raise `WrongRuleError` for the first rule that names an unknown role, operation or
    mod, or that lets every agent administer the node."""
    for name, role in page.items():
        for index, text in enumerate(role.call):
            if not any(map(_compile(text).fullmatch, operations)):
                raise WrongRuleError(f'"{text}" matches no operation{_suggest(text, operations)}', name, "call", index)
        for index, text in enumerate(role.send):
            sort, colon, wanted = text.partition(":")
            names = {"role": page, "mod": mods}.get(sort, ()) if colon else None
            if names is not None and not any(map(_compile(wanted).fullmatch, names)):
                raise WrongRuleError(f'"{wanted}" is no {sort}{_suggest(wanted, names)}', name, "send", index)
        # The first client that uses an unused agent id owns this id. If all agents could administer the node, any new
        # client would be an operator.
        if role.administer and set(role.kinds) == {"agent"} and not role.ids:
            raise WrongRuleError(
                "is for people and services, because the first client that uses an agent's id owns it",
                name,
                "administer",
                0,
            )
    return Rights(page)


def _compile(text: str) -> re.Pattern[str]:
    """Return the regular expression for a rule. The rule ``*`` matches any text. In a longer rule, ``*`` matches any
    characters except colons. Otherwise ``r*`` would also match ``role:...``."""
    return re.compile((".*" if text == "*" else "[^:]*").join(map(re.escape, text.split("*"))))


def _suggest(text: str, candidates: Iterable[str]) -> str:
    names = sorted(candidates)
    near = difflib.get_close_matches(text, names, n=1, cutoff=0.6)
    return f'; did you mean "{near[0]}"?' if near else f"; there are {', '.join(names[:8])}{'...' if names[8:] else ''}"
