"""Generate docs/api.md from the docstrings: ``python -m tests.support.api_page > docs/api.md``.

`PAGE` lists the public names of each module. An empty list means the names in the module's ``__all__``. A name that
several modules export is described at its first occurrence.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel

from roundelay.agents.tools import Tool

F = "roundelay.agents.features"
PAGE: dict[str, tuple[str, ...]] = {
    "roundelay": (),
    "roundelay.network.client": (),
    "roundelay.network.client.gather": ("Gathered", "gather"),
    "roundelay.network.client.files": ("download_file", "upload_file"),
    "roundelay.mods.files": ("Files",),
    "roundelay.agents": (),
    "roundelay.agents.runner": ("RunnerOptions",),
    "roundelay.agents.tools": (),
    "roundelay.agents.lead_tools": ("gather", "wait_until_quiet"),
    "roundelay.agents.policy": ("GrowingWindow", "KeptRecords", "MessageFilter"),
    "roundelay.agents.values": ("PromptPart", "Trigger"),
    "roundelay.agents.middleware": ("Answer", "CallModel", "middleware_of"),
    "roundelay.agents.models": (),
    "roundelay.agents.models.scripted": (
        "Action",
        "Answer",
        "broadcast",
        "call",
        "finish",
        "say",
        "send",
        "think",
        "ScriptedModel",
    ),
    "roundelay.agents.events": (
        "Event",
        "Resumed",
        "TurnStart",
        "ModelOutput",
        "ModelRetry",
        "ToolRequests",
        "ToolCallStart",
        "ToolOutput",
        "ToolCallEnd",
        "Waiting",
        "Progress",
        "RemoteOutput",
        "RemoteCall",
        "TurnEnd",
        "AnswerReviewed",
        "HandedOver",
        "Finished",
    ),
    "roundelay.agents.team": ("AgentSpec", "ModelChoice", "OpenAIChoice", "LocalChoice", "build_runner", "load_agents"),
    "roundelay.agents.lookback": ("read_history", "search_history", "why"),
    f"{F}.attachments": ("Attachments", "Attachment", "show_images"),
    f"{F}.budget": ("Budget", "MoneyLimits", "TokenLimits"),
    f"{F}.context_engine": ("ContextEngine",),
    f"{F}.data_policy": ("DataPolicy",),
    f"{F}.evaluations": ("Evaluations", "Check", "Evidence", "Grounding", "Rule"),
    f"{F}.few_shot": ("FewShot", "Example", "ExampleCall"),
    f"{F}.forced_tools": ("ForcedTools",),
    f"{F}.fragments": ("Fragments", "Fragment"),
    f"{F}.keep_results": ("KeepResults",),
    f"{F}.long_results": ("LongResults",),
    f"{F}.many_results": ("ManyResults",),
    f"{F}.mcp_servers": ("McpServers", "ServerOptions"),
    f"{F}.memory": ("Memory",),
    f"{F}.postprocessors": ("Postprocessors", "FollowUps"),
    f"{F}.prompt_budget": ("PromptBudget",),
    f"{F}.prompts": ("Prompts", "PromptFacts", "ToolNotes"),
    f"{F}.references": ("References", "Reference"),
    f"{F}.registry": ("ToolRegistry", "ToolSet"),
    f"{F}.shown_results": ("ShownResults",),
    f"{F}.structured": ("StructuredAnswer",),
    f"{F}.tracing": ("Tracing",),
    "roundelay.agents.models.model": (
        "Model",
        "ModelDelta",
        "ModelReply",
        "ModelRequest",
        "OnDelta",
        "Usage",
        "UserMessage",
    ),
    "roundelay.adapters.participant": ("AdaptedAgent", "IncomingTurn"),
    "roundelay.adapters.pydantic_ai": ("PydanticAIAgent",),
    "roundelay.adapters.langgraph": ("LangGraphAgent",),
    "roundelay.adapters.agent_framework": ("AgentFrameworkAgent",),
    "roundelay.testing": (),
    "roundelay.simulation": (),
    "roundelay.network.mod": (),
    "roundelay.network.visibility": (),
    "roundelay.network.config": ("Quota", "load_yaml", "NodeConfig"),
    "roundelay.app": ("Network", "Node", "serve"),
    "roundelay.network.ledger": ("Row",),
    "roundelay.network.ledger.log_file": ("read_log",),
    "roundelay.runs.recording": ("Recording",),
    "roundelay.runs.replay": ("replay",),
}

INTERNAL = {
    "NetworkClient": (
        "make_hello",
        "check_welcome",
        "check_refusal",
        "begin_session",
        "take_frame",
        "take_event",
        "end",
    )
}
"""Methods that only other modules of the package call. The page leaves these methods out."""

HEAD = """\
# The Python API

Made from the docstrings by `python -m tests.support.api_page > docs/api.md`; a test compares the two. The names at the
root, `from roundelay import ...`, are meant to stay; what is below may still change. [agents.md](agents.md),
[mods.md](mods.md) and [scenarios.md](scenarios.md) show how these are used, [protocol.md](protocol.md) what goes over
the wire. `await`, `async with` or `async for` before a name says how it is called.

"""


def write_page() -> str:
    described: dict[tuple[str, int], str] = {}
    parts: list[str] = []
    for path, given in PAGE.items():
        module = importlib.import_module(path)
        parts += [f"## {path}", prose(module.__doc__ or "").partition("\n\n")[0]]
        elsewhere = []
        for name in given or module.__all__:
            value = getattr(module, name)
            if (name, id(value)) in described:
                elsewhere.append(f"`{name}` of [{described[name, id(value)]}](#{anchor(described[name, id(value)])})")
            else:
                described[name, id(value)] = path
                parts += describe(path, name, value)
        if elsewhere:
            parts.append(f"And {', '.join(elsewhere)}.")
    contents = "\n".join(f"- [{path}](#{anchor(path)})" for path in PAGE)
    return HEAD + contents + "\n\n" + "\n\n".join(it for it in parts if it) + "\n"


def anchor(path: str) -> str:
    return path.replace(".", "")


def describe(path: str, name: str, value: Any) -> Iterator[str]:
    """Yield the paragraphs that describe one name."""
    yield f"### {name}"
    if inspect.isclass(value):
        yield from describe_class(value)
    elif isinstance(value, Tool):
        yield f"A tool for agents. {prose(value.description)}"
    elif inspect.isfunction(value):
        yield f"`{signature(name, value)}`"
        yield prose(inspect.getdoc(value) or "")
    else:
        written, about = module_docs(path).get(name, ("", ""))
        yield f"`{name} = {written or plain(repr(value))}`"
        yield prose(about)


def describe_class(cls: type) -> Iterator[str]:
    fields = list(list_fields(cls))
    is_plain_error = issubclass(cls, Exception) and "__init__" not in vars(cls)
    if not (fields or is_plain_error or getattr(cls, "_is_protocol", False)):
        yield f"`{signature(cls.__name__, cls)}`"
    bases = ", ".join(f"`{it.__name__}`" for it in cls.__bases__ if it in list_public())
    notes = [f"Base: {bases}."] if bases else []
    if issubclass(cls, Exception) and "code" in vars(cls):
        notes.append(f"On the wire: `{vars(cls)['code']}`.")
    about = inspect.cleandoc(cls.__doc__ or "")
    if about.startswith(f"{cls.__name__}("):  # the default docstring of a dataclass, which repeats the signature
        about = ""
    yield " ".join([*notes, prose(about)]).strip()
    yield "\n".join(fields)
    yield "\n".join(list_methods(cls))


@functools.cache
def list_public() -> list[object]:
    """Return the objects that the page describes."""
    modules = {path: importlib.import_module(path) for path in PAGE}
    return [getattr(module, name) for path, module in modules.items() for name in PAGE[path] or module.__all__]


def list_bases(cls: type) -> list[type]:
    """Return the class and those of its base classes that have no entry on the page. The members of these base
    classes are listed with the class.
    """
    return [
        it for it in cls.__mro__ if it is cls or (it.__module__.startswith("roundelay") and it not in list_public())
    ]


def list_fields(cls: type) -> Iterator[str]:
    """Yield one line per field of a data class, with name, type, default and description."""
    is_values = dataclasses.is_dataclass(cls) or issubclass(cls, BaseModel | msgspec.Struct) or typing.is_typeddict(cls)
    for base in reversed(list_bases(cls)) if is_values else ():
        names = vars(sys.modules[base.__module__])
        for name, (written, about) in read_docs(parse_class(base).body, names).items():
            if ":" in written and not name.startswith("_") and "ClassVar" not in written:
                yield f"- `{written}`" + (f": {one_line(prose(about))}" if about else "")


def list_methods(cls: type) -> Iterator[str]:
    """Yield the public methods and properties. Skip an override without a docstring if a base class on the page
    describes the method.
    """
    for name, value in {name: it for base in reversed(list_bases(cls)) for name, it in vars(base).items()}.items():
        function = inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", value))
        if not inspect.isfunction(function) or not function.__module__.startswith("roundelay"):
            continue
        is_known = any(hasattr(base, name) for base in cls.__mro__[1:] if base in list_public())
        if name.startswith("_") or name in INTERNAL.get(cls.__name__, ()) or (is_known and not function.__doc__):
            continue
        if isinstance(value, property):
            shown = f"{name}: {plain(inspect.signature(function).return_annotation, function.__globals__)}"
        else:
            shown = signature(name, getattr(value, "__func__", value), drops_first=not isinstance(value, staticmethod))
        about = prose(inspect.getdoc(function) or "")
        yield f"- **`{shown}`**" + (f"\\\n{textwrap.indent(about, '  ')}" if about else "")


def signature(name: str, value: Any, *, drops_first: bool = False) -> str:
    """Return a function's signature as one line."""
    found, target = inspect.signature(value), inspect.unwrap(value)
    names = vars(sys.modules[target.__module__])
    parameters = [
        it.replace(
            annotation=it.annotation if it.annotation is it.empty else Written(plain(it.annotation, names)),
            default=it.default if it.default is it.empty else Written(write_default(it.default)),
        )
        for it in [*found.parameters.values()][drops_first:]
        if not it.name.startswith("_")
    ]
    written = name + str(found.replace(parameters=parameters, return_annotation=found.empty))
    if inspect.isclass(value) or found.return_annotation is found.empty:
        return written
    given = plain(found.return_annotation, names)
    if inspect.isasyncgenfunction(target):
        begin = "async with" if target is not value else "async for ... in"
        given = re.sub(r"Async(Iterator|Generator)\[(.*?)(, None)?\]$", r"\2", given)
        return f"{begin} {written} -> {given}"
    return f"{'await ' if inspect.iscoroutinefunction(target) else ''}{written} -> {given}"


class Written(str):
    """String whose `repr` has no quotes, for annotations and defaults in a signature."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def write_default(value: Any) -> str:
    """Return a default value as a reader would write it, without memory addresses and long reprs."""
    if inspect.isfunction(value) or inspect.isclass(value):
        return str(value.__name__)
    text = f"Path({str(value)!r})" if isinstance(value, PurePath) else repr(value)
    return "..." if " at 0x" in text or len(text) > 60 or text == "<factory>" else text


def plain(annotation: object, names: Mapping[str, object] = {}) -> str:
    """Return a type annotation without `Annotated` metadata and module prefixes. ``names`` is the namespace of the
    annotation's module.
    """
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError:
        return text
    return ast.unparse(Bare(names).visit(tree)).replace("typing.", "").replace("collections.abc.", "")


class Bare(ast.NodeTransformer):
    """Replace `Annotated[T, ...]` by `T`, also behind an alias, and a dotted name by its last part."""

    def __init__(self, names: Mapping[str, object]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        stands_for = self._names.get(node.id)
        if typing.get_origin(stands_for) is not Annotated or not inspect.isclass(typing.get_args(stands_for)[0]):
            return node
        return ast.Name(typing.get_args(stands_for)[0].__name__)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == "Annotated" and isinstance(node.slice, ast.Tuple):
            return node.slice.elts[0]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return ast.Name(node.attr)


def module_docs(path: str) -> dict[str, tuple[str, str]]:
    """Return the assignments of a module with their docstrings, including those of the project's modules that it
    imports from.
    """
    module = sys.modules[path]
    body = ast.parse(inspect.getsource(module)).body
    found = {}
    for node in ast.walk(ast.Module(body, [])):
        if isinstance(node, ast.ImportFrom):
            name = importlib.util.resolve_name("." * node.level + (node.module or ""), module.__package__)
            if name.startswith("roundelay") and inspect.ismodule(other := importlib.import_module(name)):
                found |= read_docs(ast.parse(inspect.getsource(other)).body)
    return {name: (it.partition(" = ")[2], about) for name, (it, about) in (found | read_docs(body)).items()}


def parse_class(cls: type) -> ast.ClassDef:
    [node] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    return node


def read_docs(body: list[ast.stmt], names: Mapping[str, object] = {}) -> dict[str, tuple[str, str]]:
    """Return the assignments in ``body`` by name. Each entry has the source (with type or value) and the docstring
    below it.
    """
    found = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name, written = node.target.id, f"{node.target.id}: {plain(ast.unparse(node.annotation), names)}"
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = written = node.targets[0].id
        else:
            continue
        if node.value is not None and not re.search(r"\b(field|Field|_no)\(", value := ast.unparse(node.value)):
            written += f" = {plain(value)}" if value != "UNSET" else ""
        text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
        found[name] = (written, inspect.cleandoc(text) if isinstance(text, str) else "")
    return found


def prose(text: str) -> str:
    """Convert a docstring to Markdown. Double backticks become single backticks, and ``::`` before an indented block
    is removed.
    """
    return re.sub(r"``([^`]+)``", r"`\1`", text).replace("::\n\n    ", "\n\n    ").strip()


def one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    sys.stdout.write(write_page())
