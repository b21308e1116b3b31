"""What the official conformance suite asks a server for beside its own tools: fixtures, added to our server for the suite alone.

They are few: those by which the suite tests how the server carries calls, questions to a person and what a host brings
back. Kinds of content that our tools never give have none.
"""

from __future__ import annotations

from typing import Any

from mcp.server.mcpserver import Context, MCPServer
from mcp.shared.exceptions import MCPError
from mcp.types import (
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    CallToolResult,
    CreateMessageRequest,
    CreateMessageRequestParams,
    ElicitRequest,
    ElicitRequestFormParams,
    InputRequiredResult,
    SamplingMessage,
    TextContent,
)

FIXTURE = "Of the conformance suite."
Asked = CallToolResult | InputRequiredResult


def ask(state: str | None, **fields: tuple[str, str, str]) -> InputRequiredResult:
    """Ask by one form for each name: its message, its field, and that one's type."""
    return InputRequiredResult(
        input_requests={
            name: ElicitRequest(
                params=ElicitRequestFormParams(
                    message=message,
                    requested_schema={"type": "object", "properties": {field: {"type": kind}}, "required": [field]},
                )
            )
            for name, (message, field, kind) in fields.items()
        },
        request_state=state,
    )


def say(text: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=text)])


def answer_of(context: Context[Any, Any], name: str, field: str) -> object:
    answer = (context.input_responses or {}).get(name)
    return (getattr(answer, "content", None) or {}).get(field)


def add_fixtures(server: MCPServer[Any]) -> None:
    @server.tool(description=FIXTURE)
    async def test_simple_text() -> Asked:
        return say("This is a simple text response for testing.")

    @server.tool(description=FIXTURE)
    async def test_error_handling() -> Asked:
        raise RuntimeError

    @server.tool(description=FIXTURE)
    async def test_missing_capability(context: Context[Any, Any]) -> Asked:
        capabilities = context.client_capabilities
        if capabilities is None or capabilities.sampling is None:
            required = {"requiredCapabilities": {"sampling": {}}}
            raise MCPError(MISSING_REQUIRED_CLIENT_CAPABILITY, "It takes sampling.", required)
        return say("It is there.")

    @server.tool(description=FIXTURE)
    async def test_input_required_result_elicitation(context: Context[Any, Any]) -> Asked:
        name = answer_of(context, "user_name", "name")
        return say(f"Hello, {name}!") if name else ask(None, user_name=("What is your name?", "name", "string"))

    @server.tool(description=FIXTURE)
    async def test_input_required_result_request_state(context: Context[Any, Any]) -> Asked:
        if context.request_state == "asked" and answer_of(context, "confirm", "ok") is not None:
            return say("state-ok")
        return ask("asked", confirm=("Please confirm", "ok", "boolean"))

    @server.tool(description=FIXTURE)
    async def test_input_required_result_tampered_state(context: Context[Any, Any]) -> Asked:
        return say("state-ok") if context.request_state else ask("asked", confirm=("Please confirm", "ok", "boolean"))

    @server.tool(description=FIXTURE)
    async def test_input_required_result_multi_round(context: Context[Any, Any]) -> Asked:
        if context.request_state is None:
            return ask("1", step1=("Step 1: What is your name?", "name", "string"))
        if context.request_state == "1":
            return ask("2", step2=("Step 2: What is your favorite color?", "color", "string"))
        return say("Done.")

    @server.tool(description=FIXTURE)
    async def test_input_required_result_capabilities(context: Context[Any, Any]) -> Asked:
        capabilities = context.client_capabilities
        if capabilities is not None and capabilities.elicitation is not None:
            return ask(None, name=("Your name?", "name", "string"))
        message = SamplingMessage(role="user", content=TextContent(type="text", text="Say hello."))
        sampling = CreateMessageRequest(params=CreateMessageRequestParams(messages=[message], max_tokens=10))
        return InputRequiredResult(input_requests={"said": sampling})

    @server.tool(description=FIXTURE)
    async def test_trigger_tool_change(context: Context[Any, Any]) -> Asked:
        await context.notify_tools_changed()
        return say("Told.")

    @server.tool(description=FIXTURE)
    async def test_trigger_prompt_change(context: Context[Any, Any]) -> Asked:
        await context.notify_prompts_changed()
        return say("Told.")

    @server.resource("test://static-text", mime_type="text/plain")
    def static_text() -> str:
        return "This is the content of the static text resource."

    @server.resource("test://template/{id}/data", mime_type="text/plain")
    def template(id: str) -> str:  # noqa: A002 - the suite's name
        return f'{{"id": "{id}"}}'

    @server.prompt(description=FIXTURE)
    def test_simple_prompt() -> str:
        return "This is a simple prompt for testing."
