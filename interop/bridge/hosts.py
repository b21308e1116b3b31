"""The coding agents that the bridge supports, with the entries in their files and the input and output of their hooks.

This module performs no IO. docs/bridge.md names the source of each format, and the version of each host that was
tested.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from .host_files import HOOK_MARK, NAME, HostFile, JsonFile, OwnFile, TomlFile

Moment = Literal["start", "prompt", "tool", "stop"]
"""Moment at which a hook runs: at the start of a session, after the user's prompt, after a tool call, or before the
host stops.
"""
TIMEOUT_S = 5
"""Time limit of a hook in the host's configuration, in seconds. The host cancels a slower hook and drops its output."""
WAKE = "ROUNDELAY_BRIDGE_WAKE"
"""Environment variable in the processes that a host starts. The value 1 means that the bridge wakes the idle host."""


class HookCall(NamedTuple):
    """Input of one hook call, in a form that is independent of the host."""

    event: str
    moment: Moment
    session: str
    source: str
    """Way in which the session started, if the host reports it: startup, resume, clear or compact."""
    transcript: str
    shown: frozenset[int]
    """Seqs of messages that a Roundelay tool has just shown to the model."""


class Commands(NamedTuple):
    """Command with which a host starts this program. The command consists of the words before `bridge deliver HOST`,
    and of environment variables.
    """

    words: Sequence[str]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Host:
    """One coding agent that the bridge supports."""

    name: str
    title: str
    folder: str
    """Folder of the host's configuration in a project. The parent of this folder is the project."""
    moments: Mapping[str, Moment]
    answer: Callable[[str, Moment, str], object]
    """Function that returns the output of a hook for an event. The output makes the model read a text."""
    make_files: Callable[[Commands], list[HostFile]]
    keeps_transcript: bool = False
    """Whether the host's transcript contains the output of its hooks at the end of each turn."""
    shows_notices: bool = True
    """Whether the host can show a notice to its user without showing it to the model."""
    quiet: str = ""
    """Text that a hook prints when there are no messages."""
    needs: str = ""
    """Steps that the user must take before the hooks run. The installer shows these steps."""
    wakes_by: str = ""
    """Steps that the user must take so that the bridge can wake the host. The text is empty if the host cannot be
    woken.
    """

    @property
    def can_be_woken(self) -> bool:
        return bool(self.wakes_by)

    def read(self, event_data: Mapping[str, Any]) -> HookCall | None:
        """Read the input of a hook. Return None for an event that the bridge does not handle. Events of a sub-agent
        also return None, because a sub-agent has a separate context.
        """
        event = str(event_data.get("hook_event_name") or "")
        session = event_data.get("session_id") or event_data.get("conversation_id")
        if event not in self.moments or not session or event_data.get("agent_id"):
            return None
        shown: frozenset[int] = frozenset()
        if NAME in str(event_data.get("tool_name") or ""):
            # Search the result as text. Each host wraps the result differently, but the message tags are always the
            # same.
            result = json.dumps(event_data.get("tool_response") or event_data.get("tool_output"))
            shown = frozenset(int(seq) for seq in re.findall(r'<message seq=\\*"(\d+)\\*" from=', result))
        return HookCall(
            event,
            self.moments[event],
            str(session),
            str(event_data.get("source") or ""),
            str(event_data.get("transcript_path") or ""),
            shown,
        )


def _context(event: str, text: str) -> object:
    return {"hookSpecificOutput": {"hookEventName": event, "additionalContext": text}}


def _answer_claude(event: str, _moment: Moment, text: str) -> object:
    # the event Stop uses this output too, because its output `block` would add the text to the context twice
    return _context(event, text)


def _answer_codex(event: str, moment: Moment, text: str) -> object:
    return {"decision": "block", "reason": text} if moment == "stop" else _context(event, text)


def _answer_gemini(event: str, moment: Moment, text: str) -> object:
    return {"decision": "deny", "reason": text} if moment == "stop" else _context(event, text)


def _answer_cursor(_event: str, moment: Moment, text: str) -> object:
    return {"followup_message": text} if moment == "stop" else {"additional_context": text}


def _answer_plain(_event: str, _moment: Moment, text: str) -> object:
    return {"text": text}


def _mcp(commands: Commands, host: str) -> dict[str, object]:
    entry: dict[str, object] = {"command": commands.words[0], "args": [*commands.words[1:], "bridge", "mcp", host]}
    return {**entry, "env": dict(commands.environment)} if commands.environment else entry


def _hook(commands: Commands, host: str) -> str:
    variables = [f"{name}={value}" for name, value in commands.environment.items()]
    words = [*(["env", *variables] if variables else []), *commands.words]
    return f"{shlex.join(words)}{HOOK_MARK}{host}"


def _hook_lists(commands: Commands, host: str, events: Mapping[str, Moment], **more: object) -> dict[Any, object]:
    """Return hooks in the format of Claude Code, which other hosts have adopted."""
    run = {"type": "command", "command": _hook(commands, host), "timeout": TIMEOUT_S, **more}
    return {("hooks", event): {"hooks": [run]} for event in events}


_CLAUDE_EVENTS: dict[str, Moment] = {
    "SessionStart": "start",
    "UserPromptSubmit": "prompt",
    "PostToolUse": "tool",
    "Stop": "stop",
}
_GEMINI_EVENTS: dict[str, Moment] = {
    "SessionStart": "start",
    "BeforeAgent": "prompt",
    "AfterTool": "tool",
    "AfterAgent": "stop",
}
_CURSOR_EVENTS: dict[str, Moment] = {"sessionStart": "start", "postToolUse": "tool", "stop": "stop"}


def _claude_files(commands: Commands) -> list[HostFile]:
    return [
        JsonFile(".mcp.json", {("mcpServers", NAME): _mcp(commands, "claude")}),
        JsonFile(".claude/settings.json", items=_hook_lists(commands, "claude", _CLAUDE_EVENTS)),
    ]


def _codex_files(commands: Commands) -> list[HostFile]:
    return [
        TomlFile(".codex/config.toml", f"mcp_servers.{NAME}", _mcp(commands, "codex")),
        JsonFile(".codex/hooks.json", items=_hook_lists(commands, "codex", _CLAUDE_EVENTS)),
    ]


def _gemini_files(commands: Commands) -> list[HostFile]:
    # Convert the timeout to milliseconds, the unit of Gemini CLI.
    hooks = _hook_lists(commands, "gemini", _GEMINI_EVENTS, name=NAME, timeout=TIMEOUT_S * 1000)
    return [JsonFile(".gemini/settings.json", {("mcpServers", NAME): _mcp(commands, "gemini")}, hooks)]


def _cursor_files(commands: Commands) -> list[HostFile]:
    hooks: dict[tuple[str, ...], object] = {
        ("hooks", event): {"command": _hook(commands, "cursor")} for event in _CURSOR_EVENTS
    }
    return [
        JsonFile(".cursor/mcp.json", {("mcpServers", NAME): _mcp(commands, "cursor")}),
        JsonFile(".cursor/hooks.json", items=hooks, frame={"version": 1}),
    ]


def _opencode_files(commands: Commands) -> list[HostFile]:
    entry: dict[str, object] = {
        "type": "local",
        "command": [*commands.words, "bridge", "mcp", "opencode"],
        "enabled": True,
    }
    if commands.environment:
        entry["environment"] = dict(commands.environment)
    plugin = _PLUGIN.replace("%COMMAND%", json.dumps(_hook(commands, "opencode")))
    return [
        JsonFile("opencode.json", {("mcp", NAME): entry}, frame={"$schema": "https://opencode.ai/config.json"}),
        OwnFile(f".opencode/plugins/{NAME}.js", plugin),
    ]


_PLUGIN = """\
// Shows this session what others in its Roundelay network have written to it. Made by `roundelay bridge install opencode`.
import { spawn } from "node:child_process"

const COMMAND_LINE = %COMMAND%

function ask(event, session, directory, more = {}) {
  return new Promise((resolve) => {
    const child = spawn(COMMAND_LINE, { cwd: directory, shell: true, timeout: 5000, stdio: ["pipe", "pipe", "ignore"] })
    let said = ""
    child.stdout.on("data", (part) => (said += part))
    child.stdin.on("error", () => {})
    child.on("error", () => resolve(""))
    child.on("close", (code) => {
      try {
        resolve(code === 0 && said ? JSON.parse(said).text : "")
      } catch {
        resolve("")
      }
    })
    child.stdin.end(JSON.stringify({ hook_event_name: event, session_id: session, ...more }))
  })
}

export const Roundelay = async ({ client, directory }) => {
  const children = new Set() // sessions of sub-agents: what they read is not in their parent's context
  return {
    "chat.message": async (input, output) => {
      if (children.has(input.sessionID) || output.parts.some((it) => it.metadata?.roundelay)) return
      const text = await ask("chat.message", input.sessionID, directory)
      if (!text) return
      const id = `prt_roundelay${Date.now()}`
      output.parts.push({ id, sessionID: input.sessionID, messageID: output.message.id, type: "text", text, synthetic: true })
    },
    "tool.execute.after": async (input, output) => {
      if (!output || children.has(input.sessionID)) return
      const parts = Array.isArray(output.content) ? output.content : null // of a tool of an MCP server, which has no output yet
      const said = parts ? parts.map((it) => it.text ?? "").join("\\n") : output.output
      const more = { tool_name: input.tool, tool_response: input.tool.includes("roundelay") ? said : "" }
      const text = await ask("tool.execute.after", input.sessionID, directory, more)
      if (!text) return
      if (parts) parts.unshift({ type: "text", text }) // first, since the end of a long result is cut
      else output.output = `${output.output}\\n\\n${text}`
    },
    event: async ({ event }) => {
      if (event.type === "session.created" && event.properties.info?.parentID) children.add(event.properties.info.id)
      const session = event.properties?.sessionID
      if (event.type !== "session.idle" || children.has(session)) return
      const text = await ask("session.idle", session, directory)
      const parts = [{ type: "text", text, synthetic: true, metadata: { roundelay: true } }]
      if (text) await client.session.promptAsync({ path: { id: session }, body: { parts } })
    },
  }
}
"""

HOSTS: dict[str, Host] = {
    host.name: host
    for host in (
        Host(
            "claude",
            "Claude Code",
            ".claude",
            _CLAUDE_EVENTS,
            _answer_claude,
            _claude_files,
            True,
            wakes_by="To let the bridge wake Claude Code, start it with: claude "
            f"--dangerously-load-development-channels server:{NAME}",
        ),
        Host(
            "codex",
            "Codex",
            ".codex",
            _CLAUDE_EVENTS,
            _answer_codex,
            _codex_files,
            True,
            needs="Codex runs the hooks only in a trusted project, after you have reviewed them with /hooks",
            wakes_by="The bridge can wake Codex only in sessions of its app server: codex app-server daemon start",
        ),
        Host("gemini", "Gemini CLI", ".gemini", _GEMINI_EVENTS, _answer_gemini, _gemini_files, quiet="{}"),
        Host(
            "opencode",
            "opencode",
            ".opencode",
            {"chat.message": "prompt", "tool.execute.after": "tool", "session.idle": "stop"},
            _answer_plain,
            _opencode_files,
            shows_notices=False,
        ),
        Host(
            "cursor",
            "Cursor",
            ".cursor",
            _CURSOR_EVENTS,
            _answer_cursor,
            _cursor_files,
            shows_notices=False,
            quiet="{}",
        ),
    )
}
