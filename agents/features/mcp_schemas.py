"""What an MCP server says is a stranger's: `read_offer` bounds and cleans it, `SchemaCheck` holds arguments against its
schemas in a process of its own.

A server writes the names, descriptions and schemas of its tools. They stand in every request, some models read them as
lines of the system message, and a schema is a small program: a pattern can run for ever, holding Python's lock, and a
``$ref`` may name any address. So a tool whose schema refers to something outside of it, or is too large, is left out;
texts become one escaped line; and a check that takes too long is killed with its process.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from roundelay.agents.models.model import JsonSchema
from roundelay.agents.prompt import escape_text, strip_unseen
from roundelay.agents.text import cut
from roundelay.agents.values import ToolError

if TYPE_CHECKING:
    import mcp_types as types

MAX_TOOLS = 128
"""Of one server; providers take no more in a request."""

MAX_NAME_CHARS = 128
MAX_DESCRIPTION_CHARS = 2000
MAX_PARAMETER_CHARS = 500
"""Of what describes one parameter."""

MAX_SCHEMA_CHARS = 20_000
MAX_SCHEMA_DEPTH = 32
MAX_OFFER_CHARS = 200_000
"""Of the descriptions and schemas of one server's tools together: about 50,000 tokens, in every request."""

CHECK_S = 2.0
"""For one check, once the process is there; an ordinary one takes a millisecond."""

START_S = 30.0

_WORKER = Path(__file__).with_name("schema_worker.py")
_REFERS = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
_LOCAL = re.compile(r"#[\w/$.%~-]*")
_TEXTS = frozenset({"description", "title", "$comment", "type"})


class Unfit(Exception):
    """A tool cannot be offered; the text says why."""


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A server's tool, bounded and cleaned: ``name`` as the server knows it."""

    name: str
    description: str
    parameters: JsonSchema
    is_idempotent: bool

    @property
    def chars(self) -> int:
        return len(self.description) + len(json.dumps(self.parameters))


def read_offer(offered: Iterable[types.Tool]) -> tuple[list[OfferedTool], dict[str, str]]:
    """Give the tools that can be offered, and of the others why not, by their names."""
    fit: list[OfferedTool] = []
    left_out: dict[str, str] = {}
    chars = 0
    for it in offered:
        try:
            made = _read_tool(it)
            if len(fit) == MAX_TOOLS:
                raise Unfit(f"a server may have {MAX_TOOLS} tools; choose with `tools`")
            if chars + made.chars > MAX_OFFER_CHARS:
                raise Unfit(f"a server's tools may have {MAX_OFFER_CHARS} characters together; choose with `tools`")
        except Unfit as why:
            left_out[write_line(it.name, MAX_NAME_CHARS)] = str(why)
            continue
        chars += made.chars
        fit.append(made)
    return fit, left_out


def write_line(text: str, max_chars: int) -> str:
    """Give a stranger's text as one escaped line."""
    line = " ".join(escape_text(text[: 2 * max_chars]).split())
    return line if len(line) <= max_chars else f"{line[: max_chars - 3]}..."


def write_text(text: str, max_chars: int) -> str:
    """Give a stranger's text without what a reader does not see, and cut where it is too long."""
    return strip_unseen(cut(text, max_chars))


def _read_tool(it: types.Tool) -> OfferedTool:
    if not it.name.isprintable() or not 0 < len(it.name) <= MAX_NAME_CHARS:
        raise Unfit(f"its name has to be 1 to {MAX_NAME_CHARS} characters that can be seen")
    parameters = _clean(it.input_schema, MAX_SCHEMA_DEPTH)
    assert isinstance(parameters, dict)
    if len(json.dumps(parameters)) > MAX_SCHEMA_CHARS:
        raise Unfit(f"its schema has more than {MAX_SCHEMA_CHARS} characters")
    about = write_line(it.description or it.title or it.name, MAX_DESCRIPTION_CHARS)
    hints = it.annotations
    is_idempotent = hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)
    return OfferedTool(it.name, about, parameters, is_idempotent)


def _clean(value: object, levels: int) -> object:
    if not isinstance(value, dict | list):
        return value
    if levels == 0:
        raise Unfit(f"its schema is nested deeper than {MAX_SCHEMA_DEPTH}")
    if isinstance(value, list):
        return [_clean(it, levels - 1) for it in value]
    return {_check_key(key): _clean_entry(key, it, levels) for key, it in value.items()}


def _check_key(key: str) -> str:
    if not key.isprintable() or len(key) > MAX_NAME_CHARS:
        raise Unfit("its schema has a name that is too long or cannot be seen")
    return key


def _clean_entry(key: str, value: object, levels: int) -> object:
    if not isinstance(value, str):
        return _clean(value, levels - 1)
    if key in _REFERS and not _LOCAL.fullmatch(value):
        raise Unfit(f"its schema refers to {write_line(value, MAX_NAME_CHARS)}, which is not fetched")
    return write_line(value, MAX_PARAMETER_CHARS) if key in _TEXTS else value


class SchemaCheck:
    """The process that holds arguments against the schemas of one server: `open` starts it, so that no call waits for
    that, `close` ends it. One that was ended because of a check is started anew by the next."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._process: asyncio.subprocess.Process | None = None
        self._one_at_a_time = asyncio.Lock()

    async def open(self) -> None:
        """Start the process, unless it is there. Raises `OSError`, `TimeoutError` among them, if it does not start."""
        async with self._one_at_a_time:
            if self._process is None:
                await self._start()

    async def check(self, name: str, schema: JsonSchema, arguments: Mapping[str, object]) -> None:
        """Raises `ToolError` with a sentence for the model: the arguments are wrong, or they could not be checked."""
        problems = await self._ask(name, schema, arguments)
        if isinstance(problems, str):
            told = write_line(problems, MAX_PARAMETER_CHARS)
            raise ToolError(f"Not run: the schema of {name}, by the MCP server {self._server}, is wrong: {told}.")
        if problems:  # they quote the schema
            told = "; ".join(write_line(it, MAX_PARAMETER_CHARS) for it in problems)
            raise ToolError(f"Not run: Wrong arguments for {name}: {told}.")

    async def close(self) -> None:
        """End the process. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _ask(self, name: str, schema: JsonSchema, arguments: Mapping[str, object]) -> list[str] | str:
        async with self._one_at_a_time:
            answer = b""
            try:
                process = self._process or await self._start()
                async with asyncio.timeout(CHECK_S):
                    assert process.stdin is not None
                    assert process.stdout is not None
                    process.stdin.write(json.dumps([schema, arguments]).encode() + b"\n")
                    await process.stdin.drain()
                    answer = await process.stdout.readline()
            except TimeoutError as error:
                raise ToolError(
                    f"Not run: holding the arguments of {name} against the schema of the MCP server {self._server} "
                    "took too long and was stopped. Go on without this tool, or with other arguments."
                ) from error
            except OSError:
                pass  # it is gone: there is no answer
            finally:
                if not answer:
                    await self.close()  # else a later check would read this one's answer
            if not answer:
                raise ToolError(f"Not run: the arguments of {name} could not be held against its schema.")
        problems: list[str] | str = json.loads(answer)
        return problems

    async def _start(self) -> asyncio.subprocess.Process:
        pipe, nowhere = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        # -P: a module of the working directory is not taken for jsonschema. A session of its own: Ctrl-C is for others.
        command = (sys.executable, "-P", str(_WORKER))
        self._process = process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=nowhere, start_new_session=True
        )
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            await process.stdout.readline()
        return process
