"""What a person decides on a call of an agent, asked for at the person's own host of MCP.

Whoever speaks for a person by MCP is a model, so what it writes decides nothing: the host asks its person, by the
protocol's elicitation, and what is answered there is sent. Decides in memory; asks the hub what waits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field

from roundelay.interop.rendering import visible
from roundelay.network.client import AnyMessage, NetworkClient
from roundelay.network.extras import needs

with needs("bridge"):
    from mcp.server.mcpserver import Context
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp.shared.exceptions import MCPError
    from mcp.types import MISSING_REQUIRED_CLIENT_CAPABILITY


MAX_ASKED_CHARS = 8_000
"""Of what a person is asked to decide on: it is shown whole, or it is not decided here."""
_WORDS = ("/approve", "/deny", "/edit")
_ASKS_IN_ANSWERS = "2026-07-28"
"""From this revision on a server asks in its answer, and the host calls again; before it asks over a session."""


class PersonsDecision(BaseModel):
    """The form that a host shows to its person."""

    decision: Literal["approve", "approve thread", "approve always", "deny"] = Field(
        title="Decision",
        description="approve: this call, once. approve thread: the tool in this thread from now on. approve always: the "
        "tool wherever you may decide.",
    )
    reason: str = Field("", title="Reason, where you deny it", max_length=1000)

    def write(self) -> str:
        """The reply by which a person decides."""
        return f"/deny {self.reason}".strip() if self.decision == "deny" else f"/{self.decision}"


async def find_question(
    context: Context[Any, Any], client: NetworkClient, request: AnyMessage, text: str
) -> str | None:
    """Give what the person at the host has to be asked before ``text`` may be sent in reply to a message; None where
    nobody has to be asked. Raises `ToolError` where nobody can decide here, and `MCPError` where the host cannot
    ask."""
    if client.kind != "human":
        return None  # its words decide nothing, whatever they are
    page = await client.call("network.approvals", {"after": request.seq - 1, "limit": 1})
    waiting = next((it for it in page["approvals"] if it["seq"] == request.seq), None)
    told = (request.metadata or {}).get("approval")
    if waiting is None and not isinstance(told, dict) and not text.strip().lower().startswith(_WORDS):
        return None
    if waiting is None:
        raise ToolError(f"#{request.seq} waits for no decision, or for none any more, so nothing was sent.")
    if not waiting["may_decide"]:
        raise ToolError(f"#{request.seq} is not for {client.agent_id} to decide, so nothing was sent.")
    question = _describe(client, request, told if isinstance(told, dict) else {})
    if len(question) > MAX_ASKED_CHARS:
        raise ToolError(f"What #{request.seq} asks for is too long to be shown here. {_elsewhere(request.seq)}")
    _require_host_that_asks(context, request.seq)
    return question


def decision_id(client: NetworkClient, request: int) -> str:
    """The id of the decision of this participant on a request: there is one, however often a host says it."""
    return "decision-" + hashlib.sha256(f"{client.agent_id} {request}".encode()).hexdigest()[:40]


def _describe(client: NetworkClient, request: AnyMessage, told: Mapping[str, Any]) -> str:
    said = {name: visible(told[name]) for name in ("tool", "arguments", "reason") if isinstance(told.get(name), str)}
    call = f"may I call {said.get('tool', 'a tool')} with {said.get('arguments', 'what stands in my message')}?"
    why = [f"Why: {said['reason']}"] if said.get("reason") else []
    message = [visible(request.text)] if not said else []
    return "\n".join(
        [
            f"{request.sender_id} ({request.sender_kind}) asks {client.agent_id} in {visible(request.thread_id)}, "
            f"message #{request.seq}. What follows are its own words:",
            *(f"> {line}" for line in (call, *why, *message)),
        ]
    )


def _require_host_that_asks(context: Context[Any, Any], seq: int) -> None:
    declared = context.client_capabilities.elicitation if context.client_capabilities is not None else None
    can_show = declared is not None and (declared.form is not None or declared.url is None)
    is_modern = (context.protocol_version or "") >= _ASKS_IN_ANSWERS
    if can_show and (is_modern or context.session.can_send_request):
        return
    if is_modern:
        why = "This host does not say that it can ask its person (elicitation)"
        required: dict[str, Any] = {"requiredCapabilities": {"elicitation": {"form": {}}}}
        raise MCPError(MISSING_REQUIRED_CLIENT_CAPABILITY, f"{why}, so nothing was sent. {_elsewhere(seq)}", required)
    how = "this host says no such thing" if context.session.can_send_request else "there is none here by HTTP"
    raise ToolError(
        f"A person decides #{seq}, and by MCP before {_ASKS_IN_ANSWERS} a person is asked over a session that takes "
        f"elicitation: {how}, so nothing was sent. {_elsewhere(seq)}"
    )


def _elsewhere(seq: int) -> str:
    return f"Your person decides on the page, in roundelay chat, or by: roundelay approvals approve {seq}."
