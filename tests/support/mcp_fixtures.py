"""Fixtures of the official conformance suite, which only the suite's server adds.

The fixtures share a server with the project's own tools, so that the suite tests that server's calls, content types,
questions and answers from hosts. The suite defines the names, arguments and contents.
"""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import zlib
from typing import Any

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.prompts.base import UserMessage
from mcp.shared.exceptions import MCPError
from mcp.types import (
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    AudioContent,
    CallToolResult,
    Completion,
    CompletionArgument,
    CompletionContext,
    CreateMessageRequest,
    CreateMessageRequestParams,
    ElicitRequest,
    ElicitRequestFormParams,
    EmbeddedResource,
    ImageContent,
    InputRequiredResult,
    ListRootsRequest,
    PromptReference,
    ResourceTemplateReference,
    SamplingMessage,
    TextContent,
    TextResourceContents,
)

FIXTURE = "Of the conformance suite."
Asked = CallToolResult | InputRequiredResult


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


RED_PIXEL = b"\x89PNG\r\n\x1a\n" + b"".join((
    _chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)), _chunk(b"IDAT", zlib.compress(b"\0\xff\0\0")), _chunk(b"IEND", b"")
))  # fmt: skip
SILENCE = (
    b"RIFF"
    + struct.pack("<I", 36)
    + b"WAVEfmt "
    + struct.pack("<IHHIIHH", 16, 1, 1, 8000, 8000, 1, 8)
    + b"data\0\0\0\0"
)
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}


def image() -> ImageContent:
    return ImageContent(type="image", data=base64.b64encode(RED_PIXEL).decode(), mime_type="image/png")


def resource(uri: str, mime_type: str, text: str) -> EmbeddedResource:
    return EmbeddedResource(type="resource", resource=TextResourceContents(uri=uri, mime_type=mime_type, text=text))


def ask_model(text: str) -> CreateMessageRequest:
    message = SamplingMessage(role="user", content=TextContent(type="text", text=text))
    return CreateMessageRequest(params=CreateMessageRequestParams(messages=[message], max_tokens=100))


def ask(state: str | None, **fields: tuple[str, str, str]) -> InputRequiredResult:
    """Ask with one form per name. ``fields`` maps a name to the message, the field's name and the field's type."""
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
        return InputRequiredResult(input_requests={"said": ask_model("Say hello.")})

    @server.tool(description=FIXTURE)
    async def test_trigger_tool_change(context: Context[Any, Any]) -> Asked:
        await context.notify_tools_changed()
        return say("Told.")

    @server.tool(description=FIXTURE)
    async def test_trigger_prompt_change(context: Context[Any, Any]) -> Asked:
        await context.notify_prompts_changed()
        return say("Told.")

    add_contents(server)
    add_questions(server)
    add_resources_and_prompts(server)


def add_contents(server: MCPServer[Any]) -> None:
    """Add tools that return every type of content."""

    @server.tool(description=FIXTURE)
    async def test_image_content() -> Asked:
        return CallToolResult(content=[image()])

    @server.tool(description=FIXTURE)
    async def test_audio_content() -> Asked:
        data = base64.b64encode(SILENCE).decode()
        return CallToolResult(content=[AudioContent(type="audio", data=data, mime_type="audio/wav")])

    @server.tool(description=FIXTURE)
    async def test_embedded_resource() -> Asked:
        text = "This is an embedded resource content."
        return CallToolResult(content=[resource("test://embedded-resource", "text/plain", text)])

    @server.tool(description=FIXTURE)
    async def test_multiple_content_types() -> Asked:
        told = TextContent(type="text", text="Multiple content types test:")
        data = resource("test://mixed-content-resource", "application/json", json.dumps({"test": "data", "value": 123}))
        return CallToolResult(content=[told, image(), data])

    @server.tool(description=FIXTURE)
    async def test_tool_with_progress(context: Context[Any, Any]) -> Asked:
        for done in (0, 50, 100):
            await context.report_progress(done, 100)
            await asyncio.sleep(0.05)  # the suite's own delay
        return say("Done.")

    @server.tool(name="json_schema_2020_12_tool", description=FIXTURE)
    async def json_schema_tool() -> Asked:
        return say("Read.")

    tool = server._tool_manager.get_tool("json_schema_2020_12_tool")
    assert tool is not None
    tool.parameters = SCHEMA


def add_questions(server: MCPServer[Any]) -> None:
    """Add tools and a prompt that ask a host's model, roots or user."""

    @server.tool(description=FIXTURE)
    async def test_input_required_result_sampling(context: Context[Any, Any]) -> Asked:
        answer = (context.input_responses or {}).get("capital_question")
        if answer is None:
            question = ask_model("What is the capital of France?")
            return InputRequiredResult(input_requests={"capital_question": question})
        return say(str(getattr(getattr(answer, "content", None), "text", "")))

    @server.tool(description=FIXTURE)
    async def test_input_required_result_list_roots(context: Context[Any, Any]) -> Asked:
        answer = (context.input_responses or {}).get("client_roots")
        if answer is None:
            return InputRequiredResult(input_requests={"client_roots": ListRootsRequest()})
        return say(" ".join(str(it.uri) for it in getattr(answer, "roots", [])))

    @server.tool(description=FIXTURE)
    async def test_input_required_result_multiple_inputs(context: Context[Any, Any]) -> Asked:
        asked = ask("asked", user_name=("What is your name?", "name", "string")).input_requests or {}
        asked |= {"greeting": ask_model("Generate a greeting"), "client_roots": ListRootsRequest()}
        if context.request_state == "asked" and asked.keys() <= (context.input_responses or {}).keys():
            return say("Done.")
        return InputRequiredResult(input_requests=asked, request_state="asked")

    @server.prompt(description=FIXTURE)
    async def test_input_required_result_prompt(context: Context[Any, Any]) -> Any:
        given = answer_of(context, "user_context", "context")
        question = ("What context should the prompt use?", "context", "string")
        return UserMessage(f"Context: {given}") if given else ask(None, user_context=question)


def add_resources_and_prompts(server: MCPServer[Any]) -> None:
    @server.resource("test://static-text", mime_type="text/plain")
    def static_text() -> str:
        return "This is the content of the static text resource."

    @server.resource("test://static-binary", mime_type="image/png")
    def static_binary() -> bytes:
        return RED_PIXEL

    @server.resource("test://template/{id}/data", mime_type="text/plain")
    def template(id: str) -> str:  # noqa: A002 - the suite's name
        return f'{{"id": "{id}"}}'

    @server.prompt(description=FIXTURE)
    def test_simple_prompt() -> str:
        return "This is a simple prompt for testing."

    @server.prompt(description=FIXTURE)
    def test_prompt_with_arguments(arg1: str, arg2: str) -> str:
        return f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'"

    @server.prompt(description=FIXTURE)
    def test_prompt_with_embedded_resource(resourceUri: str) -> list[UserMessage]:  # noqa: N803 - the suite's name
        embedded = resource(resourceUri, "text/plain", "Embedded resource content for testing.")
        return [UserMessage(embedded), UserMessage("Please process the embedded resource above.")]

    @server.prompt(description=FIXTURE)
    def test_prompt_with_image() -> list[UserMessage]:
        return [UserMessage(image()), UserMessage("Please analyze the image above.")]

    @server.completion()
    async def complete(
        ref: PromptReference | ResourceTemplateReference, argument: CompletionArgument, _: CompletionContext | None
    ) -> Completion | None:
        words = ("test", "testing", "testValue1") if isinstance(ref, PromptReference) else ()
        return Completion(values=[it for it in words if it.startswith(argument.value)], has_more=False)
