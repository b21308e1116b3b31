"""``roundelay approvals``: list the calls that wait for a decision, and decide on a call by its number."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from roundelay.commands.options import SEQ, ask_hub, identity_options, join, json_option, run
from roundelay.commands.output import list_answer, show

if TYPE_CHECKING:
    from roundelay.network.client import Stored

_seq_argument = click.argument("seq", type=SEQ)


@click.group(invoke_without_command=True, short_help="List and decide calls that wait for a person's approval.")
@json_option
@identity_options
@click.pass_context
def approvals(context: click.Context, as_json: bool) -> None:
    """List agents' calls that wait for a person, and decide on them. Without a command, list the calls of all agents.

    With --as ID, list the calls that ID may read. People who use the owner's token are operators and read all calls. If
    the agent's author names approvers, only they decide. Otherwise operators and everybody who may read the request's
    thread decide.
    """
    if context.invoked_subcommand is not None:
        if as_json:
            raise click.UsageError(f"Write --json after {context.invoked_subcommand}.")
        return
    _show_waiting(as_json=as_json)


@approvals.command("list", short_help="List the calls that wait for a decision. Same as without a command.")
@json_option
@identity_options
def list_waiting(as_json: bool) -> None:
    """List all calls that wait for a person's decision."""
    _show_waiting(as_json=as_json)


def _show_waiting(*, as_json: bool) -> None:
    from roundelay.runs.approvals import format_until, list_requests

    list_answer(
        {"approvals": [it.to_json() for it in ask_hub(list_requests)]},
        {
            "REQUEST": lambda it: f"#{it['seq']}",
            "AGENT": lambda it: it["agent_id"],
            "TOOL": lambda it: it["tool"],
            "ARGUMENTS": lambda it: _write_json(it["arguments"]),
            "THREAD": lambda it: it["thread_id"],
            "UNTIL": lambda it: format_until(it["until"]),
            "APPROVERS": lambda it: ", ".join(it["deciders"] or ()),
            "APPROVED BY": lambda it: ", ".join(it["approved_by"]),
            "REASON": lambda it: it["reason"],
        },
        empty="Nothing waits for a decision.",
        as_json=as_json,
    )


@approvals.command("show", short_help="Show the call that #SEQ asks for, and who decided.")
@_seq_argument
@json_option
@identity_options
def show_one(seq: int, as_json: bool) -> None:
    """Show the call that the request SEQ asks for, and each decision with its person, time and text."""
    from roundelay.runs.approvals import describe_request, show_request

    value = ask_hub(lambda client: show_request(client, seq))
    show(value, lambda _: describe_request(value), as_json=as_json)


@approvals.command(short_help="Approve the call that #SEQ asks for.")
@_seq_argument
@click.option(
    "--for",
    "scope",
    type=click.Choice(("once", "thread", "always")),
    default="once",
    show_default=True,
    help="Approve this call, all calls of the tool in this thread, or all that you may decide.",
)
@json_option
@identity_options
def approve(seq: int, scope: str, as_json: bool) -> None:
    """Approve the call that the request SEQ asks for."""
    _decide(seq, "/approve" if scope == "once" else f"/approve {scope}", as_json=as_json)


@approvals.command(short_help="Deny the call that #SEQ asks for.")
@_seq_argument
@click.argument("reason", default="")
@json_option
@identity_options
def deny(seq: int, reason: str, as_json: bool) -> None:
    """Deny the call that the request SEQ asks for. The agent receives the REASON."""
    _decide(seq, f"/deny {reason}".strip(), as_json=as_json)


@approvals.command(short_help="Approve the call with other arguments.")
@_seq_argument
@click.argument("arguments")
@json_option
@identity_options
def edit(seq: int, arguments: str, as_json: bool) -> None:
    """Approve the call that the request SEQ asks for, but with other ARGUMENTS: a JSON object.

    If the arguments do not fit the tool, the agent rejects them in the thread, and the request keeps waiting.
    """
    from roundelay.runs.approvals import check_arguments

    # Check the JSON before sending: the agent would not recognize wrong JSON as a decision and would keep waiting.
    check_arguments(arguments)
    _decide(seq, f"/edit {arguments}", as_json=as_json)


def _write_json(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _decide(seq: int, decision: str, *, as_json: bool) -> None:
    from roundelay.display.text import sanitize
    from roundelay.runs.approvals import decide

    async def send() -> tuple[Any, Stored]:
        # Only a person can decide, and the commands' default identity is a service.
        async with join(as_person=True) as client:
            return await decide(client, seq, decision)

    request, stored = run(send())
    value = {"seq": seq, "agent_id": request.sender_id, "decision": decision, "decided_in": stored.seq}
    told = f"Told {sanitize(request.sender_id)} in #{stored.seq}: {sanitize(decision)}."
    show(value, lambda _: [told], as_json=as_json)
