"""What an MCP server says is a stranger's: `read_offer` bounds and cleans it, `SchemaCheck` holds arguments against its
schemas in a process of its own.

A server writes the names, descriptions and schemas of its tools. They stand in every request, some models read them as
lines of the system message, and a schema is a small program: a pattern can run for ever, holding Python's lock, and a
``$ref`` may name any address. So a tool whose schema refers to something outside of it, or is too large, is left out;
texts become one escaped line; and a check that takes too long is killed with its process.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from roundelay.agents.models.model import JsonSchema
from roundelay.agents.prompt import escape_text
from roundelay.agents.text import MAX_NAME_CHARS as MAX_TOOL_NAME_CHARS
from roundelay.agents.text import tool_name
from roundelay.agents.tool_arguments import tidy_schema
from roundelay.agents.values import ToolError
from roundelay.network.safe_text import sanitize_text
from roundelay.network.text import cut, shorten

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
    for tool in offered:
        try:
            made = _read_tool(tool)
            if len(fit) == MAX_TOOLS:
                raise Unfit(f"a server may have {MAX_TOOLS} tools; choose with `tools`")
            if chars + made.chars > MAX_OFFER_CHARS:
                raise Unfit(f"a server's tools may have {MAX_OFFER_CHARS} characters together; choose with `tools`")
        except Unfit as why:
            left_out[write_line(tool.name, MAX_NAME_CHARS)] = str(why)
            continue
        chars += made.chars
        fit.append(made)
    return fit, left_out


def write_line(text: str, max_chars: int) -> str:
    """Give a stranger's text as one escaped line."""
    return shorten(escape_text(text[: 2 * max_chars]), max_chars)


def write_text(text: str, max_chars: int) -> str:
    """Give a stranger's text without what a reader does not see, and cut where it is too long."""
    return sanitize_text(cut(text, max_chars))


def _read_tool(tool: types.Tool) -> OfferedTool:
    if not tool.name.isprintable() or not 0 < len(tool.name) <= MAX_NAME_CHARS:
        raise Unfit(f"its name has to be 1 to {MAX_NAME_CHARS} characters that can be seen")
    parameters = _clean(tool.input_schema, MAX_SCHEMA_DEPTH)
    assert isinstance(parameters, dict)
    if len(json.dumps(parameters)) > MAX_SCHEMA_CHARS:
        raise Unfit(f"its schema has more than {MAX_SCHEMA_CHARS} characters")
    about = write_line(tool.description or tool.title or tool.name, MAX_DESCRIPTION_CHARS)
    hints = tool.annotations
    is_idempotent = hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)
    return OfferedTool(tool.name, about, parameters, is_idempotent)


def _clean(value: object, levels: int) -> object:
    if not isinstance(value, dict | list):
        return value
    if levels == 0:
        raise Unfit(f"its schema is nested deeper than {MAX_SCHEMA_DEPTH}")
    if isinstance(value, list):
        return [_clean(item, levels - 1) for item in value]
    return {_check_key(key): _clean_entry(key, item, levels) for key, item in value.items()}


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


# --- schemas as providers take them


def tidy_parameters(parameters: JsonSchema) -> dict[str, object]:
    """Return a server's schema as a model is shown it: like those of our own functions, and without what one provider
    or another refuses.

    A refused schema fails every request of the agent. OpenAI refuses arrays without ``items`` and ``anyOf`` at the top
    (https://platform.openai.com/docs/guides/structured-outputs#supported-schemas), Gemini refuses ``$schema`` and names
    in ``required`` that are no property (https://ai.google.dev/api/caching#Schema). The server's own schema still holds
    for the arguments (`SchemaCheck`).
    """
    merged = _merge_alternatives(parameters, parameters, {})
    return tidy_schema(_repair(merged, parameters))


def _merge_alternatives(schema: JsonSchema, root: JsonSchema, known: dict[str, JsonSchema]) -> dict[str, object]:
    """Return an object schema without alternatives at its top: with the properties of all of them, of which those are
    required that each alternative requires.

    ``known`` holds what each ``$ref`` led to, so that one which is named often, or names itself, is merged once.
    """
    merged = dict(schema)
    properties = _read_mapping(merged.pop("properties", None))
    required = _read_names(merged.pop("required", None))
    parts: list[JsonSchema] = []
    reference = merged.pop("$ref", None)
    if isinstance(reference, str) and isinstance(target := _find(root, reference), dict):
        if reference not in known:
            known[reference] = {}
            known[reference] = _merge_alternatives(target, root, known)
        parts.append(known[reference])
    for keyword in ("allOf", "anyOf", "oneOf"):
        found = merged.pop(keyword, None)
        branches = [branch for branch in (found if isinstance(found, list) else []) if isinstance(branch, dict)]
        made = [_merge_alternatives(branch, root, known) for branch in branches]
        if keyword != "allOf" and made:
            common = set.intersection(*(set(_read_names(branch["required"])) for branch in made))
            inner = {name: schema_ for one in made for name, schema_ in _read_mapping(one["properties"]).items()}
            made = [
                {"properties": inner, "required": [name for name in _read_names(made[0]["required"]) if name in common]}
            ]
        parts += made
    for part in parts:
        properties = {**_read_mapping(part.get("properties")), **properties}
        required += _read_names(part.get("required"))
    for keyword in ("not", "enum", "const", "if", "then", "else"):
        merged.pop(keyword, None)
    named = [name for name in dict.fromkeys(required) if name in properties]
    return {**merged, "type": "object", "properties": properties, "required": named}


def _repair(schema: JsonSchema, root: JsonSchema) -> dict[str, object]:
    """Return a schema, and all in it, in a form that each provider reads."""
    repaired: dict[str, object] = {}
    for key, value in schema.items():
        match key, value:
            case (("$schema" | "$id" | "$comment" | "$dynamicRef" | "$recursiveRef"), _):
                continue
            case "$ref", _ if not isinstance(_find(root, value), dict | bool):
                continue  # it leads nowhere, and providers look
            case (("default" | "const" | "examples"), _):
                repaired[key] = value
            case _, None:
                continue
            case "enum", list():
                if value:
                    repaired[key] = value
            case "required", _ if not isinstance(value, list):
                continue  # draft 3 wrote true beside a property
            case (("properties" | "$defs" | "definitions" | "patternProperties" | "dependentSchemas"), _):
                repaired[key] = {name: _repair_any(item, root) for name, item in _read_mapping(value).items()}
            case "items", list():  # draft 7: one schema for each place
                branches = [_repair_any(item, root) for item in value]
                repaired[key] = {"anyOf": branches} if branches else {}
            case (("items" | "not" | "contains"), _):
                repaired[key] = _repair_any(value, root)
            case (("anyOf" | "oneOf" | "allOf" | "prefixItems"), list()):
                if value:
                    repaired[key] = [_repair_any(item, root) for item in value]
            case _, dict():
                repaired[key] = _repair(value, root)
            case _:
                repaired[key] = value
    if "properties" in repaired and isinstance(named := repaired.get("required"), list):
        properties = _read_mapping(repaired["properties"])
        repaired["required"] = [name for name in named if name in properties]
    return repaired


def _repair_any(value: object, root: JsonSchema) -> dict[str, object]:
    return _repair(value, root) if isinstance(value, dict) else {}  # true: anything


def _find(root: JsonSchema, reference: object) -> object:
    """Return what a local ``$ref`` names, or None."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: object = root
    for part in filter(None, unquote(reference[1:]).split("/")):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        elif isinstance(found, dict):
            found = found.get(key)
        else:
            return None
    return found


def _read_mapping(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _read_names(value: object) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


# --- names


def name_offered(wanted: Sequence[tuple[str, str]]) -> list[str]:
    """Return the names under which a model is offered tools, given by server and by the server's own name.

    Providers take few kinds of characters and 64 of them, so names may become equal. Such names end with a hash of the
    original. No name depends on the order in which tools are listed.
    """
    plain = [tool_name(f"{server}_{name}") for server, name in wanted]
    holders: dict[str, tuple[str, str]] = {}  # who keeps a plain name: the first whose own name it is
    for name, original in sorted(zip(plain, wanted, strict=True)):
        if name == "_".join(original):
            holders.setdefault(name, original)
    counts = Counter(plain)
    return [
        name
        if counts[name] == 1 or holders.get(name) == original
        else f"{name[: MAX_TOOL_NAME_CHARS - 9]}_{_hash(original)}"
        for name, original in zip(plain, wanted, strict=True)
    ]


def _hash(names: tuple[str, str]) -> str:
    return hashlib.sha256("\0".join(names).encode("utf-8", "surrogatepass")).hexdigest()[:8]


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
            told = "; ".join(write_line(problem, MAX_PARAMETER_CHARS) for problem in problems)
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
