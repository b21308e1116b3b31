"""A coding agent without a model, which runs a script line by line.

    python scripted_host.py claude PROJECT SESSION

It starts its MCP server and its hooks by the files in a project, like Claude Code, Codex and Gemini CLI. Each line on
stdin is a JSON object: {"do": "start", "source": "startup"}, {"do": "prompt", "text": ...}, {"do": "tool"}, {"do":
"stop"} or {"do": "use", "tool": ..., "arguments": {...}}. The response is a line with the texts that its model gets.
The model's context is written to SESSION.jsonl, like a host's transcript. Except for Gemini CLI, hooks get the path of
that file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tomllib
from pathlib import Path
from typing import Any

from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

EVENTS = {"start": "SessionStart", "prompt": "UserPromptSubmit", "tool": "PostToolUse", "stop": "Stop"}
TIMEOUT_S = 5
GEMINI_EVENTS = {"start": "SessionStart", "prompt": "BeforeAgent", "tool": "AfterTool", "stop": "AfterAgent"}


class ScriptedHost:
    def __init__(self, kind: str, project: Path, session: str) -> None:
        self.kind = kind
        self.session = session
        self.project = project
        self.transcript = project / f"{session}.jsonl"
        if kind == "claude":
            self.hooks = json.loads((project / ".claude/settings.json").read_text())["hooks"]
            self.server = json.loads((project / ".mcp.json").read_text())["mcpServers"]["roundelay"]
        elif kind == "gemini":
            settings = json.loads((project / ".gemini/settings.json").read_text())
            self.hooks, self.server = settings["hooks"], settings["mcpServers"]["roundelay"]
        else:
            self.hooks = json.loads((project / ".codex/hooks.json").read_text())["hooks"]
            self.server = tomllib.loads((project / ".codex/config.toml").read_text())["mcp_servers"]["roundelay"]
        self.stack = contextlib.AsyncExitStack()
        self.client: Client | None = None

    def remember(self, text: str) -> None:
        """Add a text to the model's context."""
        with self.transcript.open("a") as file:
            file.write(json.dumps({"text": text}) + "\n")
            file.flush()

    async def run_hooks(self, moment: str, kill_after_s: float | None = None, **more: Any) -> str:
        """Run the hooks of an event in order, and return their texts."""
        event = (GEMINI_EVENTS if self.kind == "gemini" else EVENTS)[moment]
        payload = {
            "session_id": self.session,
            "transcript_path": str(self.transcript) if self.kind != "gemini" else "",
            "cwd": str(self.project),
            "hook_event_name": event,
            **more,
        }
        texts = []
        for group in self.hooks.get(event, []):
            for hook in group["hooks"]:
                process = await asyncio.create_subprocess_shell(
                    hook["command"],
                    cwd=self.project,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    start_new_session=True,
                )
                assert process.stdin is not None
                assert process.stdout is not None
                reading = asyncio.create_task(process.stdout.read())
                process.stdin.write(json.dumps(payload).encode())
                process.stdin.close()
                try:
                    async with asyncio.timeout(TIMEOUT_S if kill_after_s is None else kill_after_s):
                        await process.wait()
                except TimeoutError:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                output = await reading
                if await process.wait() and self.kind == "codex":
                    continue  # the other hosts use the output of a killed hook
                with contextlib.suppress(ValueError):
                    answer = json.loads(output)
                    text = answer.get("hookSpecificOutput", {}).get("additionalContext") or answer.get("reason")
                    if text:
                        texts.append(text)
                        self.remember(text)
        return "\n".join(texts)

    async def use(self, tool: str, arguments: dict[str, Any]) -> str:
        """Let the model call a tool of the MCP server, and run the hooks that follow."""
        if self.client is None:
            server = StdioServerParameters(
                command=self.server["command"],
                args=self.server["args"],
                env={**os.environ, **self.server.get("env", {})},
                cwd=self.project,
            )
            self.client = await self.stack.enter_async_context(Client(stdio_client(server)))
        result = await self.client.call_tool(tool, arguments)
        text = "".join(it.text for it in result.content if it.type == "text")
        self.remember(text)
        after = await self.run_hooks(
            "tool", tool_name=f"mcp__roundelay__{tool}", tool_response=[{"type": "text", "text": text}]
        )
        return f"{text}\n{after}".strip()


async def main(kind: str, project: str, session: str) -> None:
    host = ScriptedHost(kind, Path(project), session)
    lines = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with host.stack:
        while line := await lines.readline():
            step = json.loads(line)
            do = step.pop("do")
            if do == "prompt":
                host.remember(step["text"])
                step["prompt"] = step.pop("text")
            if do == "use":
                text = await host.use(step["tool"], step.get("arguments", {}))
            else:
                text = await host.run_hooks(do, **step)
            print(json.dumps(text), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
