"""Approvals over MCP: a person decides in an MCP host about a tool call of an agent.

Over MCP, a model sends messages in the name of a person. Text of the model therefore never counts as a decision.
Instead, the host asks the person through MCP's elicitation, and the tool sends the person's answer. This module stores
nothing, because the hub knows which calls wait for a decision.
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
"""Maximum length of a question that a host shows to a person, in characters. For a longer question, the person must
decide on the page, in the chat or with the CLI, where the question is shown in full.
"""
_WORDS = ("/approve", "/deny", "/edit")
_ASKS_IN_ANSWERS = "2026-07-28"
"""First MCP version in which the server asks in its response, and the host calls the tool again. In earlier versions,
the server asks over a session.
"""


class PersonsDecision(BaseModel):
    """Form that an MCP host shows to the person who decides."""

    decision: Literal["approve", "approve thread", "approve always", "deny"] = Field(
        title="Decision",
        description="approve: this call, once. approve thread: the tool in this thread from now on. approve always: the "
        "tool wherever you may decide.",
    )
    reason: str = Field("", title="Reason, where you deny it", max_length=1000)

    def write(self) -> str:
        """Return the text of the reply that states the decision."""
        return f"/deny {self.reason}".strip() if self.decision == "deny" else f"/{self.decision}"


async def find_question(
    context: Context[Any, Any], client: NetworkClient, request: AnyMessage, text: str
) -> str | None:
    """Return the question that a person must answer before ``text`` may be sent as a reply. Return None if the reply
    needs no decision.

    Raises `ToolError` if this participant cannot decide, and `MCPError` if the host cannot ask.
    """
    if client.kind != "human":
        return None  # only replies from people count as decisions
    page = await client.call("network.approvals", {"after": request.seq - 1, "limit": 1})
    waiting = next((approval for approval in page["approvals"] if approval["seq"] == request.seq), None)
    approval = (request.metadata or {}).get("approval")
    # Ask the person also about a reply to another message that starts like /approve, because the hub would treat the
    # reply as a decision.
    if waiting is None and not isinstance(approval, dict) and not text.strip().lower().startswith(_WORDS):
        return None
    if waiting is None:
        raise ToolError(f"#{request.seq} is not waiting for a decision, so nothing was sent.")
    if not waiting["may_decide"]:
        raise ToolError(f"{client.agent_id} may not decide #{request.seq}, so nothing was sent.")
    question = _describe(client, request, approval if isinstance(approval, dict) else {})
    if len(question) > MAX_ASKED_CHARS:
        raise ToolError(f"The call in #{request.seq} is too long to be shown here. {_elsewhere(request.seq)}")
    _require_host_that_asks(context, request.seq)
    return question


def decision_id(client: NetworkClient, request: int) -> str:
    """Return the id of the message with a participant's decision about a request. A host that repeats the decision then
    sends the same message.
    """
    return "decision-" + hashlib.sha256(f"{client.agent_id} {request}".encode()).hexdigest()[:40]


def _describe(client: NetworkClient, request: AnyMessage, approval: Mapping[str, Any]) -> str:
    names = ("tool", "arguments", "reason")
    # Make invisible characters visible. The person must see exactly the text that the tool will get.
    stated = {name: visible(approval[name]) for name in names if isinstance(approval.get(name), str)}
    call = f"may I call {stated.get('tool', 'a tool')} with {stated.get('arguments', 'the arguments in my message')}?"
    why = [f"Why: {stated['reason']}"] if stated.get("reason") else []
    message = [visible(request.text)] if not stated else []
    return "\n".join(
        [
            f"{request.sender_id} ({request.sender_kind}) asks {client.agent_id} in {visible(request.thread_id)}, "
            f"message #{request.seq}. The following lines are its own words:",
            *(f"> {line}" for line in (call, *why, *message)),
        ]
    )


def _require_host_that_asks(context: Context[Any, Any], seq: int) -> None:
    declared = context.client_capabilities.elicitation if context.client_capabilities is not None else None
    # A host that declares neither form nor url uses an earlier version, which supports only forms.
    can_show = declared is not None and (declared.form is not None or declared.url is None)
    is_modern = (context.protocol_version or "") >= _ASKS_IN_ANSWERS
    if can_show and (is_modern or context.session.can_send_request):
        return
    if is_modern:
        why = "This host does not support elicitation, so it cannot ask its person"
        required: dict[str, Any] = {"requiredCapabilities": {"elicitation": {"form": {}}}}
        raise MCPError(MISSING_REQUIRED_CLIENT_CAPABILITY, f"{why}. Nothing was sent. {_elsewhere(seq)}", required)
    how = "this host does not support it" if context.session.can_send_request else "HTTP has no session here"
    raise ToolError(
        f"Only a person may decide about #{seq}. Before MCP {_ASKS_IN_ANSWERS}, asking a person needs a session with "
        f"elicitation, but {how}. Nothing was sent. {_elsewhere(seq)}"
    )


def _elsewhere(seq: int) -> str:
    return f"The person can decide on the page, in roundelay chat, or with: roundelay approvals approve {seq}."
