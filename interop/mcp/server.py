"""The MCP server, through which a coding agent or any other MCP host takes part in a network as one participant.

The official SDK implements the protocol. Each tool uses the participant's session and returns text for a model.
Messages of other participants are marked in this text. The server keeps no state between two calls. The token
identifies the caller. The caller's position is stored in the ledger (`ack`) or passed as an argument (`after`).
"""

# Do not add `from __future__ import annotations`. The SDK evaluates annotations to find arguments that a person
# supplies (`Resolve`).
import json
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import version
from typing import Annotated, Any

from pydantic import Field, ValidationError

from roundelay.interop.rendering import (
    OTHERS_WORDS,
    describe_agent,
    format_message,
    format_messages,
    format_page,
    format_result,
    plain,
    reads_at_next_turn,
)
from roundelay.interop.session_pool import receive_messages
from roundelay.network.client import AnyMessage, NetworkClient
from roundelay.network.errors import RoundelayError, UnknownMessage
from roundelay.network.extras import needs
from roundelay.network.messages import message_from_wire

from .approvals import PersonsDecision, decision_id, find_question

with needs("bridge"):
    from mcp.server.context import ServerRequestContext
    from mcp.server.elicitation import AcceptedElicitation, ElicitationResult
    from mcp.server.mcpserver import Context, MCPServer, RequestStateSecurity
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp.server.mcpserver.resolve import Elicit, Resolve
    from mcp.types import CallToolResult, InputRequiredResult, ToolAnnotations


MAX_WAIT_S = 25
"""Maximum time that the tools `wait` and `ask` wait, in seconds. Hosts limit a tool call to about half a minute."""
MAX_SHOWN = 50
DECIDE_WITHIN_S = 86_400
"""Maximum time in which a person must decide, in seconds. After this time, the host must ask the person again."""
INSTRUCTIONS = (
    "You are one participant of a Roundelay network, together with other agents and people. `check` shows the messages "
    "to you that you have not handled yet, and `wait` waits for more. Answer with `reply`, and start with `send`, or "
    "with `ask` to wait for the answer. Acknowledge handled messages with `ack`, or they are shown again. "
    + OTHERS_WORDS
)
_READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
_SENDS = ToolAnnotations(read_only_hint=False, destructive_hint=False, idempotent_hint=False, open_world_hint=True)
_ACKNOWLEDGES = ToolAnnotations(
    read_only_hint=False, destructive_hint=False, idempotent_hint=True, open_world_hint=False
)

FindSession = Callable[[Context[Any, Any]], AbstractAsyncContextManager[NetworkClient]]
"""Function that provides the caller's session for one tool call."""

To = Annotated[str, Field(description="Who gets it: agent:ID (an agent or a person), channel:NAME or broadcast")]
Text = Annotated[str, Field(min_length=1)]
MessageSeq = Annotated[int, Field(ge=1, description="The seq of a message, as # in what is shown")]
Limit = Annotated[int, Field(ge=1, le=MAX_SHOWN)]
WaitS = Annotated[float, Field(ge=0, le=MAX_WAIT_S, description="Seconds, at most 25")]
Conversation = Annotated[
    str | None,
    Field(description="Names one of several threads with the same participant; for agent:ID alone. a-z 0-9 . _ -"),
]
MessageId = Annotated[
    str | None,
    Field(pattern="^[!-~]{1,128}$", description="The same id again sends nothing twice; give it when you repeat"),
]


class PlainServer(MCPServer[Any]):
    """MCP server that reports a tool error to the model as one sentence."""

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None
    ) -> CallToolResult | InputRequiredResult:
        """Call a tool. Raises `ToolError` with a text that explains to the model what to do."""
        try:
            return await super().call_tool(name, arguments, context)
        except ToolError as error:
            match error.__cause__:
                # Unwrap the error. The SDK's prefix "Error executing tool" does not help a model.
                case ToolError() as cause:
                    raise cause from error
                case ValidationError() as invalid:
                    problems = "; ".join(
                        f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
                        for problem in invalid.errors()
                    )
                    raise ToolError(f"{name} does not accept these arguments. {problems}.") from error
            raise


def make_mcp_server(find_session: FindSession) -> MCPServer[Any]:
    """Return the MCP server with its tools, in a fixed order, and its resources."""
    server = PlainServer(
        "roundelay",
        title="Roundelay",
        instructions=INSTRUCTIONS,
        version=version("roundelay"),
        log_level="WARNING",
        # Bind the state that a host sends back to the caller and the arguments. The key changes at a restart, so that
        # the person is asked again.
        request_state_security=RequestStateSecurity(
            keys=[secrets.token_bytes(32)], ttl=DECIDE_WITHIN_S, bind_principal=_show_caller
        ),
    )

    @asynccontextmanager
    async def calling(context: Context[Any, Any]) -> AsyncIterator[NetworkClient]:
        try:
            async with find_session(context) as client:
                yield client
        except RoundelayError as error:
            raise ToolError(str(error)) from error

    @server.tool(annotations=_READS, structured_output=False)
    async def whoami(context: Context[Any, Any]) -> str:
        """Show your id, the name of the network, and the number of messages that wait for you."""
        async with calling(context) as client:
            page = await client.call("network.receive", {"limit": 500, "peek": True})
            number = len(page["messages"])
            waiting = "1 message waits" if number == 1 else f"{number}{' or more' * page['has_more']} messages wait"
            network = plain(client.welcome.network.name)
            return f"You are {client.agent_id} ({client.kind}) in the network {network}; {waiting} for you (check)."

    @server.tool(annotations=_READS, structured_output=False)
    async def list_agents(context: Context[Any, Any], online: bool | None = None) -> str:
        """List the participants (agents, people and services) with their own descriptions."""
        async with calling(context) as client:
            args = {"online": online} if online is not None else {}
            page = await client.call("network.list_agents", {**args, "limit": 200})
            lines = [describe_agent(agent) for agent in page["agents"]]
            more = ["(there are more)"] if page["has_more"] else []
            return "\n".join([*lines, *more]) or "Nobody is there."

    @server.tool(annotations=_SENDS, structured_output=False)
    async def send(
        context: Context[Any, Any],
        to: To,
        text: Text,
        requires_response: Annotated[list[str] | None, Field(description="Ids of those who have to answer")] = None,
        message_id: MessageId = None,
        conversation: Conversation = None,
    ) -> str:
        """Send a message. It is durable when this returns."""
        async with calling(context) as client:
            stored = await client.send(
                to, text, requires_response=requires_response, message_id=message_id, conversation=conversation
            )
            again = " It had been sent before, under this message_id." if stored.duplicate else ""
            waiting = await _describe_wait(client, to.removeprefix("agent:")) if to.startswith("agent:") else ""
            return f"Stored as #{stored.seq} in {plain(stored.thread_id)}.{again}{waiting}"

    async def ask_person(context: Context[Any, Any], seq: int, text: str) -> Elicit[PersonsDecision] | None:
        async with calling(context) as client:
            question = await find_question(context, client, await _find_message(client, seq), text)
            return Elicit(question, PersonsDecision) if question is not None else None

    @server.tool(annotations=_SENDS, structured_output=False)
    async def reply(
        context: Context[Any, Any],
        seq: MessageSeq,
        text: Text,
        decided: Annotated[ElicitationResult[PersonsDecision], Resolve(ask_person)],
        message_id: MessageId = None,
    ) -> str:
        """Reply to a message in its thread. All readers of the thread see the reply. If the message asks a person to
        approve a call, this host asks its person, and the person's answer is sent instead of the text."""
        async with calling(context) as client:
            message = await _find_message(client, seq)
            if not isinstance(decided, AcceptedElicitation):
                raise ToolError(f"The person was asked but made no decision ({decided.action}); nothing was sent.")
            if decided.data is not None:
                said = decided.data.write()
                # Never send the model's text, which could state a decision that the person did not make.
                stored = await client.reply(message, said, message_id=decision_id(client, seq))
                return f"The person has decided: {plain(said)}. It is stored as #{stored.seq}; your text was not sent."
            stored = await client.reply(message, text, message_id=message_id)
            return f"Stored as #{stored.seq}, the answer to #{seq}. Call ack({seq}) when you have handled it."

    @server.tool(annotations=_SENDS, structured_output=False)
    async def ask(
        context: Context[Any, Any],
        agent_id: Annotated[str, Field(description="Whom to ask: an agent's or a person's id")],
        text: Text,
        wait_s: WaitS = MAX_WAIT_S,
        message_id: MessageId = None,
        conversation: Conversation = None,
    ) -> str:
        """Ask a participant and wait for its answer. If the answer takes longer, continue with wait(after=...)."""
        async with calling(context) as client:
            stored = await client.send(
                f"agent:{agent_id}",
                text,
                requires_response=True,
                message_id=message_id,
                conversation=conversation,
            )
            return await _wait_for_answer(client, stored.seq, agent_id, wait_s)

    @server.tool(annotations=_READS, structured_output=False)
    async def check(context: Context[Any, Any], limit: Limit = 20) -> str:
        """Show the oldest messages that you have not acknowledged yet (ack), without waiting."""
        async with calling(context) as client:
            return format_page(await client.call("network.receive", {"limit": limit}), "Nothing waits for you.")

    @server.tool(annotations=_READS, structured_output=False)
    async def wait(
        context: Context[Any, Any],
        after: Annotated[int | None, Field(ge=0, description="Only what comes after this seq (a cursor)")] = None,
        wait_s: WaitS = MAX_WAIT_S,
        limit: Limit = 20,
    ) -> str:
        """Wait for messages to you, and show them. Without `after`, show the messages that you have not acknowledged."""
        async with calling(context) as client:
            page = await receive_messages(client, after=after, limit=limit, wait_s=wait_s)
            return format_page(
                page, f"No message arrived within {wait_s:g} s. wait(after={page['next']}) keeps waiting."
            )

    @server.tool(annotations=_READS, structured_output=False)
    async def history(
        context: Context[Any, Any],
        thread_id: Annotated[
            str,
            Field(
                description="As shown with messages, or direct:A~B, direct:A~B:CONVERSATION, channel:NAME, broadcast"
            ),
        ],
        before: Annotated[int | None, Field(ge=1)] = None,
        limit: Limit = 20,
    ) -> str:
        """Show a thread's newest messages, or those before a seq, oldest first."""
        async with calling(context) as client:
            args = {"thread_id": thread_id, "before": before, "limit": limit}
            return format_messages(
                (await client.call("network.history", args))["messages"], "There are no earlier messages."
            )

    @server.tool(annotations=_READS, structured_output=False)
    async def search(
        context: Context[Any, Any],
        query: Annotated[str, Field(min_length=1, description="Words that stand in the text; work* for a beginning")],
        limit: Limit = 20,
    ) -> str:
        """Find the newest messages that contain these words, among those that you may read."""
        async with calling(context) as client:
            page = await client.call("network.search", {"query": query, "limit": limit})
            return format_messages(page["messages"], "No message has these words.")

    @server.tool(annotations=_ACKNOWLEDGES, structured_output=False)
    async def ack(
        context: Context[Any, Any],
        seqs: Annotated[list[int], Field(min_length=1, max_length=500, description="Messages that you have handled")],
    ) -> str:
        """Acknowledge the messages that you have handled. They are not shown again, and their senders see it."""
        async with calling(context) as client:
            done = await client.call("network.acknowledge", {"seqs": seqs})
            return f"{done['acknowledged']} of {len(seqs)} messages were unhandled and are now acknowledged."

    @server.tool(annotations=_READS, structured_output=False)
    async def why(context: Context[Any, Any], seq: MessageSeq) -> str:
        """Show the messages that led to a message, back to the first one."""
        async with calling(context) as client:
            chain = (await client.call("network.why", {"seq": seq}))["chain"]
            return format_messages([entry for entry in chain if "message_id" in entry], "")

    @server.tool(annotations=_READS, structured_output=False)
    async def operations(
        context: Context[Any, Any],
        mod: Annotated[str | None, Field(description="Only those of this mod, with their arguments")] = None,
    ) -> str:
        """List what the mods of this network offer, such as tasks, notes and files. `call` calls an operation."""
        async with calling(context) as client:
            mods = [it for it in client.welcome.mods if mod in (None, it.id)]
            if mod is None:
                return (
                    "\n".join(f"{plain(it.id)}: {', '.join(plain(op.op) for op in it.operations)}" for it in mods)
                    or "This network has no mods."
                )
            lines = [
                f"{plain(op.op)} {json.dumps(op.args_schema)}: {plain(op.description)}"
                for it in mods
                for op in it.operations
            ]
            return "\n".join(lines) or f"This network has no mod {plain(mod)!r}."

    @server.tool(annotations=_SENDS, structured_output=False)
    async def call(
        context: Context[Any, Any],
        operation: Annotated[str, Field(description="Such as tasks.claim; `operations` lists them")],
        arguments: dict[str, Any] | None = None,
        call_id: Annotated[
            str | None,
            Field(
                pattern="^[!-~]{1,128}$", description="The same id again does nothing twice; give it when you repeat"
            ),
        ] = None,
    ) -> str:
        """Call an operation of a mod, such as a shared board of tasks, notes or files."""
        async with calling(context) as client:
            known = [op.op for mod in client.welcome.mods for op in mod.operations]
            if operation not in known:
                raise ToolError(
                    f"No mod of this network offers {plain(operation)!r}. `operations` lists what there is."
                )
            return format_result(operation, await client.call(operation, arguments or {}, call_id=call_id))

    @server.resource(
        "roundelay://thread/{thread_id}", title="A thread", description="Its newest 50 messages", mime_type="text/plain"
    )
    async def thread(thread_id: str, context: Context[Any, Any]) -> str:
        async with calling(context) as client:
            args = {"thread_id": thread_id, "limit": MAX_SHOWN}
            return format_messages(
                (await client.call("network.history", args))["messages"], "There are no messages here."
            )

    @server.resource(
        "roundelay://threads{?before}",
        title="The caller's threads",
        description="The newest 50, or those before a seq",
        mime_type="text/plain",
    )
    async def threads(context: Context[Any, Any], before: int | None = None) -> str:
        async with calling(context) as client:
            page = await client.call("network.list_threads", {"before": before, "limit": MAX_SHOWN})
            lines = [
                f"{plain(thread['thread_id'])}: {thread['messages']} messages, {thread['unread']} unread, "
                f"the last is #{thread['last_seq']} of {plain(thread['last']['sender_id'])}"
                for thread in page["threads"]
            ]
            more = [f"roundelay://threads?before={page['threads'][-1]['last_seq']} has more."] * page["has_more"]
            return "\n".join([*lines, *more]) or "There is no thread yet."

    return server


def _show_caller(context: ServerRequestContext[Any, Any]) -> str | None:
    """Return the caller's Authorization header. The SDK binds this header to the state that a host sends back. Return
    None over stdio, where there is only one caller.
    """
    headers = getattr(context.request, "headers", None)
    return None if headers is None else str(headers.get("authorization"))


async def _find_message(client: NetworkClient, seq: int) -> AnyMessage:
    """Return a message that the caller may read. Raises `UnknownMessage`."""
    for entry in (await client.call("network.why", {"seq": seq}))["chain"]:
        if entry.get("seq") == seq and "message_id" in entry:
            return message_from_wire(entry)
    raise UnknownMessage(f"There is no message {seq} that {client.agent_id} may read.")


async def _wait_for_answer(client: NetworkClient, question: int, agent_id: str, wait_s: float) -> str:
    """Wait for the answer to a question, and return it as text. Other messages stay undelivered for the tool
    `check`.
    """

    def is_answer(message: AnyMessage) -> bool:
        return message.sender_id == agent_id and message.reply_to == question

    # Use `follow`, which only peeks. Messages of other participants stay undelivered until `check` shows them.
    async for message in client.follow(after=question, timeout_s=wait_s):
        if is_answer(message):
            # Show all answers that have arrived by now, because an agent may answer in several messages.
            others = [other async for other in client.follow(after=message.seq, timeout_s=0) if is_answer(other)]
            answers = [format_message(other) for other in (message, *others)]
            return "\n".join([OTHERS_WORDS, *answers, "Call ack when you have handled it."])
    return (
        f"Your question is stored as #{question}; {plain(agent_id)} has not answered yet."
        f"{await _describe_wait(client, agent_id)} wait(after={question}) keeps waiting. Other messages may arrive "
        "first."
    )


async def _describe_wait(client: NetworkClient, agent_id: str) -> str:
    """Return a sentence that explains when a participant will read a message. Return an empty string if the participant
    is ready to read now.
    """
    # Remove the last character of the id. The result sorts before the participant, and ``after`` is exclusive.
    agents = (await client.call("network.list_agents", {"after": agent_id[:-1], "limit": 100}))["agents"]
    reader = next((agent for agent in agents if agent["agent_id"] == agent_id), None)
    if reader is None:
        return ""
    if reads_at_next_turn(reader):
        return f" {plain(agent_id)} is not woken by the message, and reads it at its next turn."
    if reader["state"] == "offline":
        return f" {plain(agent_id)} is offline. The message waits until it connects."
    if reader.get("activity") in ("works", "waits", "held"):
        return f" {plain(agent_id)} is busy now."
    return ""
