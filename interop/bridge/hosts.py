"""The hosts that the bridge knows: coding agents, what each one's files have to say, and how its hooks are read and
answered.

Pure: texts in, texts out. What a format is taken from, and with which version of a host it was tried, stands on the
page `bridge` of the documents.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from roundelay.network.errors import ConfigError

Moment = Literal["start", "prompt", "tool", "stop"]
"""When a hook runs: a session begins, a person has said something, a tool has ended, the host is about to stop."""
TIMEOUT_S = 5
"""What a host is told to give a hook; one that takes longer is cut off, and its messages come at the next."""
NAME = "roundelay"
WAKE = "ROUNDELAY_BRIDGE_WAKE"
"""In the environment of what a host starts: 1 where it is to be woken."""
_OURS = " bridge deliver "
"""Stands in every hook that is ours, and in no other."""
_ANY_OF_OURS = re.compile(r"\bbridge\W+(deliver|mcp)\b")
"""Stands in every text that holds something of ours, be it a list of words in JSON or TOML."""


class HookCall(NamedTuple):
    """What a host tells one of its hooks."""

    event: str
    moment: Moment
    session: str
    source: str
    """Of a start: startup, resume, clear or compact, where the host says it."""
    transcript: str
    shown: frozenset[int]
    """Messages that a tool of Roundelay's has just shown to the model."""


class HostFile(Protocol):
    """One file of a host's configuration."""

    @property
    def path(self) -> str:
        """Relative to the project."""

    def add(self, before: str | None) -> str:
        """The file with what is ours in it. Raises `ConfigError` for one that cannot be changed without loss."""

    def take_out(self, text: str) -> str | None:
        """The file without what is ours: the same text where nothing is, None where nothing else is in it. Raises
        `ConfigError` as `add` does."""


@dataclass(frozen=True)
class JsonFile:
    """A JSON file in which members are set, and items stand in lists, among those of others."""

    path: str
    members: Mapping[tuple[str, ...], object] = field(default_factory=dict)
    items: Mapping[tuple[str, ...], object] = field(default_factory=dict)
    frame: Mapping[str, object] = field(default_factory=dict)
    """What a new file has besides."""

    def add(self, before: str | None) -> str:
        root = self._read(before, "add") if before is not None and before.strip() else dict(self.frame)
        old = json.dumps(root)
        self._drop(root, keeps=self.items)
        for path, value in self.members.items():
            place = self._reach(root, path[:-1], {})
            place[path[-1]] = self._renew(place.get(path[-1]), value, ".".join(path))
        for path, item in self.items.items():
            listed = self._reach(root, path, [])
            if item not in listed:
                listed.append(item)
        return before if before is not None and json.dumps(root) == old else _write_json(root, before)

    def take_out(self, text: str) -> str | None:
        if not _ANY_OF_OURS.search(text):
            return text
        root = self._read(text, "take out")
        old = json.dumps(root)
        for path, value in self.members.items():
            if _is_our_entry(_find(root, path), value):
                _prune(root, path, removes=True)
        for path in self._drop(root, keeps={}):
            _prune(root, path, removes=False)
        if json.dumps(root) == old:
            return text
        return None if not root or root == dict(self.frame) else _write_json(root, text)

    def _read(self, text: str, purpose: Literal["add", "take out"]) -> dict[str, Any]:
        try:
            root = json.loads(text.removeprefix("\ufeff"), object_pairs_hook=_no_doubles)
        except ValueError as error:
            what_to_do = (
                "Write this into it yourself:"
                if purpose == "add"
                else "Take out yourself what has `bridge deliver` or `bridge mcp` in it; install had written:"
            )
            raise ConfigError(
                f"{self.path} is not plain JSON ({error}), and comments would be lost. {what_to_do}",
                to_paste=self.add(None).rstrip(),
            ) from error
        if not isinstance(root, dict):
            raise ConfigError(f"{self.path} holds no object; move it away, or correct it.")
        return root

    def _renew(self, found: object, value: object, name: str) -> object:
        """What is to stand where something is found: of an entry of ours, what others have added to it stays."""
        if not (isinstance(found, dict) and isinstance(value, dict)) or not _is_our_entry(found, value):
            if found is None:
                return value
            raise ConfigError(
                f"{self.path} has a {name} that {NAME} did not write. Give it another name, or take it out; then "
                "install again."
            )
        return {**{key: it for key, it in found.items() if key in value or key not in _ENTRY_KEYS}, **value}

    def _reach(self, root: dict[str, Any], path: tuple[str, ...], last: Any) -> Any:
        """What stands at a path; made where nothing does."""
        place: Any = root
        for number, key in enumerate(path):
            made: Any = last if number == len(path) - 1 else {}
            found = place.setdefault(key, made)
            if type(found) is not type(made):
                raise ConfigError(f"{self.path}: {'.'.join(path[: number + 1])} is of another kind than {NAME} knows.")
            place = found
        return place

    def _drop(self, root: dict[str, Any], keeps: Mapping[tuple[str, ...], object]) -> list[tuple[str, ...]]:
        """Take hooks of ours out of their lists, but for those that are as they should be; gives where some went."""
        dropped = []
        for path in self.items:
            place = _find(root, path)
            if isinstance(place, list):
                rest = [
                    left for it in place if (left := it if it == keeps.get(path) else _without_ours(it)) is not None
                ]
                dropped += [path] if rest != place else []
                place[:] = rest
        return dropped


@dataclass(frozen=True)
class TomlFile:
    """A TOML file that gets a table of ours at its end; comments and order of the rest stay."""

    path: str
    table: str
    values: Mapping[str, object]

    def add(self, before: str | None) -> str:
        rest = self._without(before or "")
        end = "\r\n" if "\r\n" in rest else "\n"
        block = end.join([self._begin, f"[{self.table}]", *_toml_lines(self.values), self._end, ""])
        gap = "" if not rest or rest.endswith(end * 2) else end if rest.endswith("\n") else end * 2
        text = f"{rest}{gap}{block}"
        try:
            tomllib.loads(rest)
            tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(
                f"{self.path}: {NAME} cannot add its table ({error}). Is there a [{self.table}] already? Remove it, or "
                "write this yourself:",
                to_paste=block.rstrip(),
            ) from error
        return text

    def take_out(self, text: str) -> str | None:
        rest = self._without(text)
        return rest if rest.strip() else None

    @property
    def _begin(self) -> str:
        return f"# {NAME} bridge: begin"

    @property
    def _end(self) -> str:
        return f"# {NAME} bridge: end"

    def _without(self, text: str) -> str:
        """The text without what stands between our marks. A table of somebody else's that has got between them (a
        program that writes TOML adds its own before the last comment) stays."""
        block = rf"(?:\r?\n)?{re.escape(self._begin)}[ \t]*\r?\n(.*?){re.escape(self._end)}[ \t]*(?:\r?\n|\Z)"
        theirs = re.compile(rf"^\[(?!{re.escape(self.table)}[.\]])", flags=re.M)

        def find_theirs(found: re.Match[str]) -> str:
            first = theirs.search(found[1])
            return found[1][first.start() :] if first is not None else ""

        return re.sub(block, find_theirs, text, flags=re.S)


@dataclass(frozen=True)
class OwnFile:
    """A file that is ours as a whole."""

    path: str
    text: str

    def add(self, before: str | None) -> str:
        if before is not None and _OURS.strip() not in before:
            raise ConfigError(f"{self.path} is not of {NAME}'s making; move it away.")
        return self.text

    def take_out(self, text: str) -> str | None:
        return None if _OURS.strip() in text else text


class Commands(NamedTuple):
    """How this program is started, as words: before `bridge deliver HOST`, and what has to be in its environment."""

    words: Sequence[str]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Host:
    """One coding agent."""

    name: str
    title: str
    folder: str
    """In a project; where it is, is the project."""
    moments: Mapping[str, Moment]
    answer: Callable[[str, Moment, str], object]
    """What a hook prints for an event so that the model reads a text."""
    make_files: Callable[[Commands], list[HostFile]]
    keeps_transcript: bool = False
    """Its transcript shows at the end of a turn what its hooks have said in it."""
    shows_notices: bool = True
    """It has a place for what its person is to know, and its model is not told."""
    quiet: str = ""
    """What a hook prints that has nothing to say."""
    needs: str = ""
    """What a person has to do before its hooks run."""
    wakes_by: str = ""
    """What a person has to do so that it can be woken; nothing where nobody can wake it."""

    @property
    def can_be_woken(self) -> bool:
        return bool(self.wakes_by)

    def read(self, told: Mapping[str, Any]) -> HookCall | None:
        """What a hook was told; None where it has nothing to do: another event, or one of a sub-agent, whose context is
        not the session's."""
        event = str(told.get("hook_event_name") or "")
        session = told.get("session_id") or told.get("conversation_id")
        if event not in self.moments or not session or told.get("agent_id"):
            return None
        shown: frozenset[int] = frozenset()
        if NAME in str(told.get("tool_name") or ""):
            given = json.dumps(told.get("tool_response") or told.get("tool_output"))
            shown = frozenset(int(it) for it in re.findall(r'<message seq=\\*"(\d+)\\*" from=', given))
        return HookCall(
            event,
            self.moments[event],
            str(session),
            str(told.get("source") or ""),
            str(told.get("transcript_path") or ""),
            shown,
        )


def _context(event: str, text: str) -> object:
    return {"hookSpecificOutput": {"hookEventName": event, "additionalContext": text}}


def _answer_claude(event: str, _moment: Moment, text: str) -> object:
    return _context(event, text)  # at a stop too: the reason of a `block` would stand in its context twice


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
    return f"{shlex.join(words)}{_OURS}{host}"


def _hook_lists(commands: Commands, host: str, events: Mapping[str, Moment], **more: object) -> dict[Any, object]:
    """Hooks as Claude Code has them, and others after it."""
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
// Tells this session what others on its Roundelay network have written to it. Made by `roundelay bridge install opencode`.
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
            wakes_by="Claude Code takes wakes when it is started so: claude --dangerously-load-development-channels "
            f"server:{NAME}",
        ),
        Host(
            "codex",
            "Codex",
            ".codex",
            _CLAUDE_EVENTS,
            _answer_codex,
            _codex_files,
            True,
            needs="Codex runs hooks of a project that it trusts, once you have looked at them: /hooks",
            wakes_by="Codex takes wakes in sessions of its app server: codex app-server daemon start",
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


# --- JSON and TOML


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def _find(root: object, path: tuple[str, ...]) -> object:
    """What stands at a path; None where nothing does."""
    for key in path:
        root = root.get(key) if isinstance(root, dict) else None
    return root


_ENTRY_KEYS = frozenset({"type", "command", "args", "env", "environment", "enabled"})
"""What an entry of a server of ours is made of."""


def _is_our_entry(found: object, value: object) -> bool:
    """Whether an entry starts this program for the host for which ``value`` would."""
    return _last_words(found) is not None and _last_words(found) == _last_words(value)


def _last_words(entry: object) -> list[str] | None:
    """`bridge mcp HOST`, of an entry that has it."""
    for words in entry.values() if isinstance(entry, dict) else ():
        if isinstance(words, list) and "mcp" in words[1:]:
            at = words.index("mcp", 1) - 1
            return [str(it) for it in words[at : at + 3]] if words[at] == "bridge" else None
    return None


def _without_ours(item: object) -> object:
    """A hook, or a group of hooks, without those that are ours; None where there is no other."""
    if isinstance(item, dict) and isinstance(item.get("hooks"), list):
        rest = [it for it in item["hooks"] if _without_ours(it) is not None]
        return item if rest == item["hooks"] else {**item, "hooks": rest} if rest else None
    command = item.get("command") if isinstance(item, dict) else None
    return None if isinstance(command, str) and _OURS in f"{command} " else item


def _prune(root: dict[str, Any], path: tuple[str, ...], *, removes: bool) -> None:
    """Take out what is empty along a path, and, if it ``removes``, what stands at its end."""
    places: list[dict[str, Any]] = [root]
    for key in path[:-1]:
        inner = places[-1].get(key)
        if not isinstance(inner, dict):
            return
        places.append(inner)
    if path[-1] not in places[-1] or not (removes or places[-1][path[-1]] == []):
        return
    del places[-1][path[-1]]
    for place, key in zip(reversed(places[:-1]), reversed(path[:-1]), strict=True):
        if place.get(key) == {}:
            del place[key]


def _write_json(root: object, before: str | None) -> str:
    """JSON as the file had it: its indentation, its ends of lines."""
    found = re.search(r'^[\[{]\r?\n([ \t]+)"', before or "")
    text = json.dumps(root, indent=found[1] if found else 2, ensure_ascii=False) + "\n"
    if before is not None:
        text = text if before.endswith("\n") or not before else text.rstrip("\n")
        text = text.replace("\n", "\r\n") if "\r\n" in before else text
    return text


def _toml_lines(values: Mapping[str, object]) -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict):
            inner = ", ".join(
                f"{json.dumps(name)} = {json.dumps(it, ensure_ascii=False)}" for name, it in value.items()
            )
            yield f"{key} = {{ {inner} }}"
        else:
            yield f"{key} = {json.dumps(value, ensure_ascii=False)}"
