"""Limits and sanitizes the tools of MCP servers, which are untrusted, and validates arguments in a separate process.

A server chooses the names, descriptions and schemas of its tools. Names, descriptions and schemas are part of every
request, and some models treat them as lines of the system message. Evaluating a schema can be dangerous: matching a
pattern may run forever while it holds the GIL, and a ``$ref`` may name any URL. `read_offer` therefore omits each tool
whose schema is too large or has external references. `read_offer` also escapes each text and puts it on one line. If
checking arguments takes too long, `SchemaCheck` kills the process that runs the check.
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
from roundelay.agents.text import MAX_NAME_CHARS as MAX_TOOL_NAME_CHARS
from roundelay.agents.text import tool_name
from roundelay.agents.tool_arguments import tidy_schema
from roundelay.agents.values import Effect, ToolError
from roundelay.network.elements import escape_text
from roundelay.network.safe_text import sanitize_text
from roundelay.network.text import cut, shorten

if TYPE_CHECKING:
    import mcp_types as types

MAX_TOOLS = 128
"""Maximum number of tools of one server. Providers refuse requests with more tools."""

MAX_NAME_CHARS = 128
MAX_DESCRIPTION_CHARS = 2000
MAX_PARAMETER_CHARS = 500
"""Maximum characters of the description of one parameter."""

MAX_SCHEMA_CHARS = 20_000
MAX_SCHEMA_DEPTH = 32
MAX_OFFER_CHARS = 200_000
"""Maximum total characters of the descriptions and schemas of one server. The maximum corresponds to about 50,000
tokens in every request.
"""

CHECK_S = 2.0
"""Maximum time of one check of arguments, in seconds, not including the start of the process. A typical check takes a
millisecond.
"""

START_S = 30.0

_WORKER = Path(__file__).with_name("schema_worker.py")
_REFERENCES = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
_LOCAL = re.compile(r"#[\w/$.%~-]*")
_TEXTS = frozenset({"description", "title", "$comment", "type"})


class Unfit(Exception):
    """A tool cannot be offered to the model. The text of the exception is the reason."""


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """Tool of an MCP server, with limited and sanitized texts. ``name`` is the name of the tool on the server."""

    name: str
    description: str
    parameters: JsonSchema
    effect: Effect

    @property
    def chars(self) -> int:
        return len(self.description) + len(json.dumps(self.parameters))


def read_offer(offered: Iterable[types.Tool]) -> tuple[list[OfferedTool], dict[str, str]]:
    """Return the tools that can be offered to the model, and a dictionary of the omitted tools with the reason for each
    omission.
    """
    fitting: list[OfferedTool] = []
    omitted: dict[str, str] = {}
    chars = 0
    for tool in offered:
        try:
            offered_tool = _read_tool(tool)
            if len(fitting) == MAX_TOOLS:
                raise Unfit(f"a server may have at most {MAX_TOOLS} tools; select some with `tools`")
            if chars + offered_tool.chars > MAX_OFFER_CHARS:
                raise Unfit(
                    f"the tools of a server may have at most {MAX_OFFER_CHARS} characters; select some with `tools`"
                )
        except Unfit as why:
            omitted[write_line(tool.name, MAX_NAME_CHARS)] = str(why)
            continue
        chars += offered_tool.chars
        fitting.append(offered_tool)
    return fitting, omitted


def write_line(text: str, max_chars: int) -> str:
    """Return an untrusted text on one line, escaped and cut to the maximum length."""
    # Also cut the text before escaping it, because escaping a huge text would take a long time.
    return shorten(escape_text(text[: 2 * max_chars]), max_chars)


def write_text(text: str, max_chars: int) -> str:
    """Return an untrusted text without invisible characters, cut to the maximum length."""
    return sanitize_text(cut(text, max_chars))


def _read_tool(tool: types.Tool) -> OfferedTool:
    if not tool.name.isprintable() or not 0 < len(tool.name) <= MAX_NAME_CHARS:
        raise Unfit(f"its name must have 1 to {MAX_NAME_CHARS} visible characters")
    parameters = _sanitize(tool.input_schema, MAX_SCHEMA_DEPTH)
    assert isinstance(parameters, dict)
    if len(json.dumps(parameters)) > MAX_SCHEMA_CHARS:
        raise Unfit(f"its schema has more than {MAX_SCHEMA_CHARS} characters")
    about = write_line(tool.description or tool.title or tool.name, MAX_DESCRIPTION_CHARS)
    hints = tool.annotations
    effect: Effect = "once"
    if hints is not None and hints.read_only_hint:
        effect = "read_only"
    elif hints is not None and hints.idempotent_hint:
        effect = "idempotent"
    return OfferedTool(tool.name, about, parameters, effect)


def _sanitize(value: object, levels: int) -> object:
    if not isinstance(value, dict | list):
        return value
    if levels == 0:
        raise Unfit(f"its schema is nested deeper than {MAX_SCHEMA_DEPTH} levels")
    if isinstance(value, list):
        return [_sanitize(item, levels - 1) for item in value]
    return {_check_key(key): _sanitize_entry(key, item, levels) for key, item in value.items()}


def _check_key(key: str) -> str:
    if not key.isprintable() or len(key) > MAX_NAME_CHARS:
        raise Unfit("its schema has a name that is too long or has invisible characters")
    return key


def _sanitize_entry(key: str, value: object, levels: int) -> object:
    if not isinstance(value, str):
        return _sanitize(value, levels - 1)
    if key in _REFERENCES and not _LOCAL.fullmatch(value):
        raise Unfit(f"its schema refers to {write_line(value, MAX_NAME_CHARS)}, which is not fetched")
    return write_line(value, MAX_PARAMETER_CHARS) if key in _TEXTS else value


# --- schemas that providers accept


def tidy_parameters(parameters: JsonSchema) -> dict[str, object]:
    """Return a server's schema in the same form as the schemas of Python functions, without the parts that any provider
    refuses.

    A provider that refuses one schema refuses the whole request, so every request of the agent would fail. OpenAI
    refuses arrays without ``items`` and ``anyOf`` at the top
    (https://platform.openai.com/docs/guides/structured-outputs#supported-schemas). Gemini refuses ``$schema`` and names
    in ``required`` without a property (https://ai.google.dev/api/caching#Schema). The server's own schema still applies
    to the arguments (`SchemaCheck`).
    """
    merged = _merge_alternatives(parameters, parameters, {})
    return tidy_schema(_repair(merged, parameters))


def _merge_alternatives(schema: JsonSchema, root: JsonSchema, cache: dict[str, JsonSchema]) -> dict[str, object]:
    """Return an object schema without alternatives at its top level.

    The schema has the properties of all alternatives, and requires only the properties that each alternative requires.
    ``cache`` contains the target of each ``$ref``, so that a repeated or recursive reference is merged once.
    """
    merged = dict(schema)
    properties = _read_mapping(merged.pop("properties", None))
    required = _read_names(merged.pop("required", None))
    parts: list[JsonSchema] = []
    reference = merged.pop("$ref", None)
    if isinstance(reference, str) and isinstance(target := _find(root, reference), dict):
        if reference not in cache:
            # Set the entry before the recursive call. A schema that refers to itself would otherwise recurse forever.
            cache[reference] = {}
            cache[reference] = _merge_alternatives(target, root, cache)
        parts.append(cache[reference])
    for keyword in ("allOf", "anyOf", "oneOf"):
        alternatives = merged.pop(keyword, None)
        branches = [
            branch for branch in (alternatives if isinstance(alternatives, list) else []) if isinstance(branch, dict)
        ]
        merged_branches = [_merge_alternatives(branch, root, cache) for branch in branches]
        if keyword != "allOf" and merged_branches:
            common = set.intersection(*(set(_read_names(branch["required"])) for branch in merged_branches))
            inner = {
                name: schema_ for one in merged_branches for name, schema_ in _read_mapping(one["properties"]).items()
            }
            merged_branches = [
                {
                    "properties": inner,
                    "required": [name for name in _read_names(merged_branches[0]["required"]) if name in common],
                }
            ]
        parts += merged_branches
    for part in parts:
        properties = {**_read_mapping(part.get("properties")), **properties}
        required += _read_names(part.get("required"))
    for keyword in ("not", "enum", "const", "if", "then", "else"):
        merged.pop(keyword, None)
    named = [name for name in dict.fromkeys(required) if name in properties]
    return {**merged, "type": "object", "properties": properties, "required": named}


def _repair(schema: JsonSchema, root: JsonSchema) -> dict[str, object]:
    """Return a schema in a form that every provider accepts. Nested schemas are converted too."""
    repaired: dict[str, object] = {}
    for key, value in schema.items():
        match key, value:
            case (("$schema" | "$id" | "$comment" | "$dynamicRef" | "$recursiveRef"), _):
                continue
            case "$ref", _ if not isinstance(_find(root, value), dict | bool):
                continue  # providers refuse a reference that has no target
            case (("default" | "const" | "examples"), _):
                repaired[key] = value
            case _, None:
                continue
            case "enum", list():
                if value:
                    repaired[key] = value
            case "required", _ if not isinstance(value, list):
                continue  # in draft 3, a property may contain the boolean `required`
            case (("properties" | "$defs" | "definitions" | "patternProperties" | "dependentSchemas"), _):
                repaired[key] = {name: _repair_any(item, root) for name, item in _read_mapping(value).items()}
            case "items", list():  # in draft 7, `items` may list one schema per position
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
    return _repair(value, root) if isinstance(value, dict) else {}  # the schema `true` accepts any value


def _find(root: JsonSchema, reference: object) -> object:
    """Return the target of a local ``$ref``, or None."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    target: object = root
    for part in filter(None, unquote(reference[1:]).split("/")):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and key.isdecimal() and int(key) < len(target):
            target = target[int(key)]
        elif isinstance(target, dict):
            target = target.get(key)
        else:
            return None
    return target


def _read_mapping(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _read_names(value: object) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


# --- names


def name_offered(wanted: Sequence[tuple[str, str]]) -> list[str]:
    """Return the names that the model sees. ``wanted`` lists the tools as pairs of server and original name.

    Providers accept names of at most 64 characters from a small character set, so two converted names may be equal.
    Equal names get a hash of the original name at their end. The name of a tool does not depend on the order of the
    tools.
    """
    plain = [tool_name(f"{server}_{name}") for server, name in wanted]
    # tools whose original name needs no conversion: such a tool keeps its name even if another converted name is equal
    holders: dict[str, tuple[str, str]] = {}
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
    """Process that validates arguments against the schemas of one server.

    `open` starts the process in advance, so that the first call does not have to wait. `close` ends the process. If a
    check had to kill the process, the next check starts the process again.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self._process: asyncio.subprocess.Process | None = None
        self._check_lock = asyncio.Lock()

    async def open(self) -> None:
        """Start the process if it is not running. Raises `OSError` (or its subclass `TimeoutError`) if the process does
        not start.
        """
        async with self._check_lock:
            if self._process is None:
                await self._start()

    async def check(self, name: str, schema: JsonSchema, arguments: Mapping[str, object]) -> None:
        """Raise `ToolError`, with a sentence for the model, if the arguments are invalid or could not be checked."""
        problems = await self._ask(name, schema, arguments)
        if isinstance(problems, str):
            listed = write_line(problems, MAX_PARAMETER_CHARS)
            raise ToolError(f"Not run: the schema of {name} from the MCP server {self._server} is invalid: {listed}.")
        if problems:  # the problems quote the schema, so their texts are untrusted as well
            listed = "; ".join(write_line(problem, MAX_PARAMETER_CHARS) for problem in problems)
            raise ToolError(f"Not run: Wrong arguments for {name}: {listed}.")

    async def close(self) -> None:
        """End the process. Further calls of this method do nothing."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _ask(self, name: str, schema: JsonSchema, arguments: Mapping[str, object]) -> list[str] | str:
        async with self._check_lock:
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
                    f"Not run: checking the arguments of {name} by the schema of the MCP server {self._server} timed "
                    "out. Continue without this tool, or with different arguments."
                ) from error
            except OSError:
                pass  # the process has ended without an answer
            finally:
                if not answer:
                    await self.close()  # otherwise a later check would read the answer to this check
            if not answer:
                raise ToolError(f"Not run: the arguments of {name} could not be checked against its schema.")
        problems: list[str] | str = json.loads(answer)
        return problems

    async def _start(self) -> asyncio.subprocess.Process:
        pipe, devnull = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        # -P: do not import a module named jsonschema from the working directory. The separate process session prevents
        # Ctrl-C from ending the process.
        command = (sys.executable, "-P", str(_WORKER))
        self._process = process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=devnull, start_new_session=True
        )
        assert process.stdout is not None
        # The process prints its first line after its slow imports, so `CHECK_S` limits only the checks.
        async with asyncio.timeout(START_S):
            await process.stdout.readline()
        return process
