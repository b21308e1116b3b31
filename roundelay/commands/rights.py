"""``roundelay rights``: explain the permissions that `rights` in a node file grants. The node need not be running."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from roundelay.commands import output
from roundelay.commands.node import pick_file
from roundelay.commands.options import Function, Kind, check_id, debug_option, json_option

if TYPE_CHECKING:
    from roundelay.network.core.rights import Rights, Ruling
    from roundelay.network.mod import Operation

NEEDS = {
    "channels.create": "create",
    "channels.join": "join",
    "channels.members": "read",
    "channels.post": "write",
    "channels.reply": "write",
}
"""Right on the channel that each channel operation also requires, by operation."""
KINDS = click.Choice(("agent", "human", "service"))


@click.group()
def rights() -> None:
    """Explain the permissions that `rights` in a node's file grants. The node need not run."""


def page_options(function: Function) -> Function:
    for option in (
        click.option(
            "--kind",
            type=KINDS,
            default="agent",
            show_default=True,
            help="Kind of ID, because roles can apply to a kind.",
        ),
        click.option(
            "--as",
            "agent_id",
            required=True,
            metavar="ID",
            callback=check_id,
            help="Participant whose rights are checked.",
        ),
        click.option(
            "--file", type=click.Path(path_type=Path, dir_okay=False), help="The node's file (roundelay.yaml)."
        ),
    ):
        function = option(function)
    return function


@rights.command(short_help="Check whether somebody may do something, and by which rule.")
@page_options
@click.option(
    "--op", required=True, help="A verb (send, broadcast, create, join, read, write, administer) or an operation."
)
@click.option("--to", metavar="PLACE", help="Recipient or channel: ID, mod:ID, channel:NAME, broadcast.")
@click.option("--to-kind", type=KINDS, default="agent", show_default=True, help="Kind of the recipient.")
@json_option
@debug_option
def check(file: Path | None, agent_id: str, kind: Kind, op: str, to: str | None, to_kind: Kind, as_json: bool) -> None:
    """Check whether FILE's rights let ID do something, and show the role and rule that decide.

    The exit code is 1 if ID may not do it.
    """
    page, operations = read_page(file)
    decision = decide(page, operations, (agent_id, kind), op, to, to_kind)
    found = {"allowed": decision.allowed, "as": agent_id, "kind": kind, "op": op, "to": to}
    value = {**found, "roles": decision.roles, "rule": decision.rule}
    may = "may" if decision.allowed else "may not"
    output.show(value, lambda _: [f"{agent_id} {may} {_say(op, to)}: {decision.rule}."], as_json=as_json)
    click.get_current_context().exit(0 if decision.allowed else 1)


@rights.command(short_help="List what somebody may do.")
@page_options
@json_option
@debug_option
def show(file: Path | None, agent_id: str, kind: Kind, as_json: bool) -> None:
    """List everything that FILE's rights let ID do: each verb with its targets, and the operations."""
    from roundelay.network.core.rights import VERBS

    page, operations = read_page(file)
    if page is None:
        raise click.UsageError("This file defines no rights: everybody may do what the hub's own rules allow.")
    allowed: dict[str, list[str]] = {verb: page.list_rules(verb, agent_id, kind) for verb in VERBS}
    may_call = [op for op in operations if decide(page, operations, (agent_id, kind), op).allowed]
    roles = page.roles_of(agent_id, kind)
    shown: dict[str, object] = {"as": agent_id, "kind": kind, "roles": roles, **allowed, "operations": may_call}
    rows = [("roles", ", ".join(roles) or "none")]
    rows += [(verb, ", ".join(rules) or "nothing") for verb, rules in allowed.items()]
    rows.append(("operations", ", ".join(may_call) or "none"))
    output.show(shown, output.draw_table(("VERB", "RULES"), rows), as_json=as_json)


def read_page(file: Path | None) -> tuple[Rights | None, Mapping[str, Operation]]:
    """Return the rights that a node file defines, and the node's operations by name. Raises `ConfigError` and
    `ModError`."""
    from roundelay.app import OWN_MODS, make_rights
    from roundelay.network.config import resolve_config
    from roundelay.network.mod import add_mod_folder, load_mods
    from roundelay.network.operations import list_operations

    config, _ = resolve_config(pick_file(file), os.environ, {})
    add_mod_folder(config.folder)
    mods = load_mods(config.mods, OWN_MODS)
    return make_rights(config, mods), list_operations(mods)


def decide(
    page: Rights | None,
    operations: Mapping[str, Operation],
    who: tuple[str, str],
    op: str,
    to: str | None = None,
    to_kind: str = "",
) -> Ruling:
    """Decide as the hub does whether a participant may use a verb or an operation. Raises `click.UsageError` if the
    question is incomplete or unknown.
    """
    from roundelay.network.core.rights import VERBS, Ruling

    known = [*VERBS, *operations]
    if op not in known:
        near = difflib.get_close_matches(op, known, n=1)
        raise click.UsageError(f"There is no verb or operation {op!r}{f'; did you mean {near[0]}?' if near else '.'}")
    verb, thing = ("call", op) if op in operations else _find_verb(op, to)
    if page is None:
        return Ruling(True, "this file defines no rights, so only the hub's own rules count", ())
    administers = page.decide("administer", *who)
    if administers.allowed or verb == "administer":
        return administers
    if (verb, thing) == ("send", f"agent:{who[0]}"):
        return Ruling(True, "all participants may write to themselves", page.roles_of(*who))
    if verb != "call":
        return page.decide(verb, *who, thing, to_kind)
    called = page.decide("call", *who, op)
    if called.allowed and operations[op].is_for_operators:
        return administers._replace(rule=f"it is for operators, and {administers.rule}")
    if called.allowed and to is not None and op in NEEDS:
        more = page.decide(NEEDS[op], *who, to.removeprefix("channel:"))
        return more if not more.allowed else more._replace(rule=f"{called.rule}, and {more.rule}")
    return called


def _say(op: str, to: str | None) -> str:
    """Return a description of the action, in the same words as the hub's refusals."""
    from roundelay.network.core.rights import VERB_PHRASES

    verb, thing = _find_verb(op, to) if op in VERB_PHRASES else ("call", f"{op} for {to}" if to else op)
    return f"{VERB_PHRASES[verb]} {thing or verb}" if verb != "administer" else verb


def _find_verb(op: str, to: str | None) -> tuple[str, str]:
    """Return the verb to check and its target."""
    if op in ("broadcast", "administer") or (op == "send" and to == "broadcast"):
        return ("broadcast" if op == "send" else op), ""
    if to is None:
        raise click.UsageError(f"{op} needs --to: {'whom' if op == 'send' else 'which channel'}.")
    if op != "send":
        return op, to.removeprefix("channel:")
    if to.startswith("channel:"):
        return "write", to.removeprefix("channel:")
    from roundelay.network.addresses import complete_address

    return "send", complete_address(to)
