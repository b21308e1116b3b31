"""Tests of optional modules without their extras: the error names the extra and the command that installs it."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from roundelay.network.extras import MissingExtra, how_to_add, name_command, needs

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
HIDE = """
import importlib, json, os, sys

import roundelay.agents.runner, roundelay.network.client

class Hidden:
    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for extra, (hidden, modules) in json.loads(sys.argv[1]).items():
    if os.fork():
        os.wait()
        continue
    sys.meta_path.insert(0, Hidden(hidden.split(",")))
    for module in modules:
        try:
            importlib.import_module(module)
            print(extra, "imported", module, flush=True)
        except Exception as error:
            print(extra, str(error).replace(chr(10), " "), flush=True)
    os._exit(0)
"""
GROUPS = {
    "gateway": (
        "a2a,jwt,starlette,uvicorn,standardwebhooks",
        ("roundelay.interop.gateway", "roundelay.interop.http.api", "roundelay.interop.openai.api", "roundelay.interop.a2a.server",
         "roundelay.interop.a2a.parts", "roundelay.interop.a2a.push", "roundelay.interop.webhooks.posts", "roundelay.adapters.a2a"),
    ),
    "bridge": (
        "mcp,mcp_types",
        ("roundelay.interop.mcp.server", "roundelay.interop.mcp.recording", "roundelay.interop.bridge.wakeups", "roundelay.interop.mcp.approvals"),
    ),
    "langgraph": ("langgraph,langchain_core", ("roundelay.adapters.langgraph",)),
    "pydantic-ai": ("pydantic_ai", ("roundelay.adapters.pydantic_ai",)),
    "openai-agents": ("agents", ("roundelay.adapters.openai_agents",)),
    "agent-framework": ("agent_framework", ("roundelay.adapters.agent_framework",)),
    "autogen": ("autogen_agentchat", ("roundelay.adapters.autogen",)),
    "agentscope": ("agentscope", ("roundelay.adapters.agentscope",)),
    "cluster": ("nats,asyncpg", ("roundelay.network.cluster.jetstream", "roundelay.network.cluster.postgres")),
    "tui": ("textual", ("roundelay.tui.app", "roundelay.tui.desk")),
    "otel": ("opentelemetry", ("roundelay.agents.features.tracing",)),
}  # fmt: skip


def test_a_module_without_its_extra_says_how_to_add_it() -> None:
    assert GROUPS.keys() <= EXTRAS.keys()
    # One interpreter forks for each extra: starting an interpreter for each takes half a second.
    command = [sys.executable, "-c", HIDE, json.dumps(GROUPS)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=ROOT).stdout.splitlines()
    assert len(told) == sum(len(modules) for _, modules in GROUPS.values())
    for line in told:
        extra = line.partition(" ")[0]
        assert re.search(rf"pip install 'roundelay\[{extra}\]'", line), line


def test_each_adapter_is_tried() -> None:
    tried = {name for _, modules in GROUPS.values() for name in modules}
    written = {f"roundelay.adapters.{it.stem}" for it in (ROOT / "adapters").glob("*.py")}
    assert written - tried == {"roundelay.adapters.__init__", "roundelay.adapters.participant"}


def test_no_adapter_and_no_module_of_interop_imports_an_extra_bare() -> None:
    optional = {
        "a2a",
        "mcp",
        "jwt",
        "starlette",
        "uvicorn",
        "standardwebhooks",
        "langgraph",
        "langchain_core",
        "pydantic_ai",
        "nats",
        "asyncpg",
    }
    for path in [
        *(ROOT / "adapters").glob("*.py"),
        *(ROOT / "interop").glob("*.py"),
        *(ROOT / "network/cluster").glob("*.py"),
    ]:
        for node in ast.parse(path.read_text("utf-8")).body:
            names = [it.name for it in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert optional.isdisjoint(it.partition(".")[0] for it in names), f"{path.name}: {names}"


def test_a_fault_of_our_own_is_no_missing_extra() -> None:
    with pytest.raises(ModuleNotFoundError) as error, needs("interop"):
        import roundelay.no_such_module  # type: ignore[import-not-found]  # noqa: F401
    assert not isinstance(error.value, MissingExtra)
    with pytest.raises(MissingExtra, match="the extra interop"), needs("interop"):
        raise ModuleNotFoundError("No module named 'starlette'", name="starlette.routing")


def test_a_clone_that_dev_runs_is_told_of_dev(monkeypatch: pytest.MonkeyPatch) -> None:
    assert how_to_add("tui") == "pip install 'roundelay[tui]'"
    assert name_command(ROOT) == "roundelay"
    monkeypatch.setenv("ROUNDELAY_DEV", "1")
    for folder in (ROOT, ROOT / "docs"):
        monkeypatch.chdir(folder)
        assert (folder / how_to_add("tui").removesuffix(" add tui")).resolve() == ROOT / "dev"
        assert name_command(folder) == ("./dev roundelay" if folder == ROOT else "../dev roundelay")
