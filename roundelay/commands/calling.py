"""``roundelay call``: call an operation of the hub or of a mod by its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from roundelay.commands.options import identity_options, join, json_option, run
from roundelay.commands.output import show_answer, show_list

if TYPE_CHECKING:
    from roundelay.network.client import NetworkClient
    from roundelay.network.frames import OperationInfo


@click.command(short_help="Call an operation of a mod or of the hub.")
@click.argument("op", required=False, metavar="OP")
@click.argument("arguments", nargs=-1, metavar="NAME=VALUE")
@json_option
@identity_options
def call(op: str | None, arguments: tuple[str, ...], as_json: bool) -> None:
    """Call the operation OP, such as polls.vote or network.info, and print its result. Without OP, list the operations.

    The caller is the login user, or --as ID.

    The type of the parameter decides how VALUE is read: text is used as it is, everything else is parsed as JSON.
    """
    if op is None:
        show_list(
            {"operations": run(_list())},
            {
                "OPERATION": lambda it: it["op"],
                "ARGUMENTS": lambda it: _describe_arguments(it["args_schema"]),
                "WHAT IT DOES": lambda it: it["description"],
            },
            empty="The hub has no operations.",
            as_json=as_json,
        )
        return
    value = run(_call(op, arguments))
    show_answer(value, lambda _: describe_value(value), as_json=as_json)


async def _list() -> list[dict[str, Any]]:
    async with join(as_person=True) as client:
        found = list_operations(client).values()
        return [{"op": it.op, "description": it.description, "args_schema": it.args_schema} for it in found]


async def _call(op: str, arguments: Sequence[str]) -> Any:
    from roundelay.network.errors import ConfigError

    async with join(as_person=True) as client:
        known = list_operations(client)
        if op not in known:
            from difflib import get_close_matches

            near = get_close_matches(op, known, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(f"The hub has no operation {op!r}.{hint} `roundelay call` lists them.")
        return await client.call(op, read_arguments(op, known[op].args_schema, arguments))


def list_operations(client: NetworkClient) -> dict[str, OperationInfo]:
    """Return all operations by name: the mods' operations from the ``welcome`` frame, and the operations of every
    hub."""
    from roundelay.network.operations import network_operations

    mods = {it.op: it for mod in client.welcome.mods for it in mod.operations}
    # Merge the hub's own operations last, so that no mod can replace their schemas.
    return dict(sorted((mods | {it.op: it.info() for it in network_operations()}).items()))


def read_arguments(op: str, schema: Mapping[str, Any], given: Iterable[str]) -> dict[str, Any]:
    """Parse ``name=value`` arguments by their types in the schema. Raises `ConfigError`."""
    from roundelay.network.errors import ConfigError

    properties: Mapping[str, Any] = schema.get("properties", {})
    usage = f"{op} takes {_describe_arguments(schema) or 'no arguments'}."
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{text!r} is not an argument; write NAME=VALUE. {usage}")
        if name not in properties:
            raise ConfigError(f"{op} has no argument {name!r}. {usage}")
        if name in found:
            raise ConfigError(f"The argument {name!r} is given twice. {usage}")
        # Convert before the call: a wrong value is then reported with the usage line and without a request to the hub.
        found[name] = _read_value(name, value, _list_types(properties[name], schema), usage)
    if missing := [it for it in schema.get("required", ()) if it not in found]:
        raise ConfigError(f"{op} also needs {', '.join(missing)}. {usage}")
    return found


def _read_value(name: str, text: str, types: set[str], usage: str) -> Any:
    import json

    from roundelay.network.errors import ConfigError

    # Keep text that looks like a number as text: an id such as 17 must not become an integer.
    if types == {"string"}:
        return text
    try:
        value = json.loads(text)
    except ValueError as error:
        if "string" in types or not types:
            return text
        kinds = " or ".join(sorted(types))
        raise ConfigError(
            f"{name}={text!r} is not of type {kinds}; write it as JSON, in quotes for the shell. {usage}"
        ) from error
    # A parameter that accepts text or an object, but no number, receives 17 as text.
    return text if "string" in types and not isinstance(value, str) and _name_type(value) not in types else value


def _name_type(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case list():
            return "array"
        case _:
            return "object"


def _list_types(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that a schema allows, or an empty result if the schema names no type."""
    if "$ref" in schema:
        return _list_types(whole.get("$defs", {}).get(str(schema["$ref"]).rpartition("/")[2], {}), whole)
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        # A schema with an enum may omit the type, so derive the type from the values.
        return {"string" if isinstance(it, str) else _name_type(it) for it in values}
    if "anyOf" in schema:
        return set().union(*(_list_types(it, whole) for it in schema["anyOf"]))
    found = schema.get("type", [])
    return {found} if isinstance(found, str) else set(found)


def _describe_arguments(schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    return " ".join(f"{name}=..." if name in required else f"[{name}=...]" for name in schema.get("properties", {}))


def describe_value(value: object) -> Iterable[str]:
    """Return a value as lines: one line per member of an object or item of a list. Other values are one line of JSON."""
    from roundelay.display.text import sanitize

    if isinstance(value, Mapping):
        for name, member in value.items():
            # Names come from a mod's result and may hold control characters that would change the terminal.
            yield f"{sanitize(str(name))}: {_write(member)}"
        # Print "Done." for an empty result, such as that of network.watch: no output at all would look like a failure.
        if not value:
            yield "Done."
    elif isinstance(value, list):
        yield from map(_write, value)
    else:
        yield _write(value)


def _write(value: object) -> str:
    from pydantic_core import to_json

    from roundelay.display.text import sanitize

    return sanitize(value) if isinstance(value, str) else sanitize(to_json(value, inf_nan_mode="null").decode())
