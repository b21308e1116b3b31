"""Configuration of a node: its fields with defaults and limits, and the source of each value.

The configuration is read before anything starts. A command-line flag overrides the environment (`ROUNDELAY_*`), the
environment overrides the node's file, and the file overrides the default. `resolve_config` records the source of each
value. The environment is an argument, and only the named file is opened. Every field has a reader. The command line
reads `host`, `port`, `tls_cert`, `tls_key`, `interop` and `agents`. The server reads `behind_proxy` and `web_hosts`,
the app reads `web` and `web_reload`, and the hub reads the rest.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    InstanceOf,
    JsonValue,
    PlainValidator,
    PrivateAttr,
    ValidationError,
)

from .errors import ConfigError
from .log_urls import hide_password, read_log_url
from .yaml import Settings, YamlNode, bind, describe_problem, load_yaml, show_value

__all__ = [
    "Interop",
    "Limits",
    "NodeConfig",
    "Quota",
    "Served",
    "WebHost",
    "YamlNode",
    "bind",
    "env_name",
    "flat_values",
    "list_web_hosts",
    "load_yaml",
    "read_web_host",
    "resolve_config",
]

Durability = Literal["full", "normal", "memory"]
Visibility = Literal["people", "strict", "all", "current"]
Registration = Literal["open", "local", "closed"]
Served = Literal["a2a", "http", "mcp", "openai", "webhooks"]

_Bytes = Annotated[int, Field(ge=1024, le=1024 * 1024 * 1024)]
_Milliseconds = Annotated[int, Field(ge=1, le=24 * 60 * 60 * 1000)]
_Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
MAX_NUMBER = (1 << 53) - 1  # the largest integer that every JSON reader keeps exact


def _read_allowance(value: object) -> int | Literal["unlimited"]:
    if value == "unlimited":
        return "unlimited"
    if type(value) is int and 0 <= value <= MAX_NUMBER:
        return value
    raise ValueError(f"must be a whole number from 0 on, or unlimited, not {show_value(value)}")


_Allowance = Annotated[int | Literal["unlimited"] | None, PlainValidator(_read_allowance)]


class Limits(Settings):
    """Limits of one hub: all limits that a client can exceed. The ``welcome`` frame announces them, and
    docs/operations.md explains each limit."""

    max_frame_bytes: _Bytes = 256 * 1024
    max_depth: Annotated[int, Field(ge=1, le=256)] = 64  # beyond this depth, JSON readers of many languages fail
    max_record_bytes: _Bytes = 256 * 1024
    max_batch: _Count = 64
    max_unacked: _Count = 256
    hello_timeout_ms: _Milliseconds = 10_000
    stall_timeout_ms: _Milliseconds = 15_000
    ping_interval_ms: _Milliseconds = 20_000
    session_queue_bytes: _Bytes = 1024 * 1024
    sends_per_s: _Count = 10_000
    root_messages_per_s: _Count = 50
    signals_per_s: _Count = 1_000
    max_hops: _Count = 256
    max_root_messages: _Count = 1024
    max_uncaused_answers: _Count = 10_000
    max_record_tokens: _Count = 10_000_000
    max_connections: _Count = 20_000
    max_unauthenticated: _Count = 1_000
    max_pending_bytes: _Bytes = 64 * 1024 * 1024
    max_reads: _Count = 64
    # a result with one more message stays well below the maximum frame of clients
    max_result_bytes: _Bytes = 4 * 1024 * 1024
    session_result_bytes: _Bytes = 16 * 1024 * 1024
    participant_result_bytes: _Bytes = 64 * 1024 * 1024
    hub_result_bytes: _Bytes = 192 * 1024 * 1024
    max_card_bytes: _Bytes = 16 * 1024
    max_reason_chars: _Count = 2000
    bytes_per_day: Annotated[int, Field(ge=1024, le=MAX_NUMBER)] = 4 * 1024 * 1024 * 1024
    messages_per_day: _Count = 1_000_000
    max_created_channels: _Count = 1000
    max_reactions_per_message: _Count = 16
    max_put_off: _Count = 10_000
    max_marks: _Count = 2_000
    max_questions: _Count = 1_000
    # 0: until the person ends it
    takeover_ms: Annotated[int, Field(ge=0, le=30 * 24 * 60 * 60 * 1000)] = 60 * 60 * 1000
    registrations_per_minute: _Count = 12_000  # 10,000 agents may register at once


class Quota(Settings):
    """Limits of one participant, which replace those in `Limits`. None keeps the general limit."""

    bytes_per_day: _Allowance = None
    messages_per_day: _Allowance = None
    max_created_channels: _Allowance = None


_RoleName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]


def _check_pattern(text: str) -> str:
    if re.fullmatch(r"[a-z0-9*][a-z0-9._*-]{0,127}", text):
        return text
    raise ValueError(f"must be an id or a name in lower case, with * for anything, not {show_value(text)}")


def _check_addressee(text: str) -> str:
    if re.fullmatch(r"((role|mod):)?[a-z0-9*][a-z0-9._*-]{0,63}", text):
        return text
    raise ValueError(
        f"must be ID, role:NAME or mod:ID, with * for anything, not {show_value(text)}; list channels under write"
    )


_Pattern = Annotated[str, AfterValidator(_check_pattern)]
_Addressee = Annotated[str, AfterValidator(_check_addressee)]


class Role(Settings):
    """Permissions of one role. A participant may only do what at least one of its roles allows (`rights`). A ``*`` in a
    pattern matches any text."""

    ids: tuple[_Pattern, ...] = ()
    kinds: tuple[Literal["agent", "human", "service"], ...] = ()
    send: tuple[_Addressee, ...] = ()  # to participants, to all with a role, to mods
    broadcast: bool = False
    create: tuple[_Pattern, ...] = ()  # channels; the next three fields list channels too
    join: tuple[_Pattern, ...] = ()
    read: tuple[_Pattern, ...] = ()
    write: tuple[_Pattern, ...] = ()
    take: tuple[_Pattern, ...] = ()  # threads to take over: channels, and broadcast
    call: tuple[_Pattern, ...] = ()  # operations
    administer: bool = False


class Retain(Settings):
    """Retention of the ledger. Without any value in this section nothing is deleted (docs/operations.md)."""

    days: Annotated[int, Field(ge=1, le=36_500)] | None = None  # messages
    record_days: Annotated[int, Field(ge=1, le=36_500)] | None = None  # turn records
    # maximum size of the database, whatever rows it contains
    bytes: Annotated[int, Field(ge=1024, le=1 << 50)] | None = None
    # How long a connected session that reads nothing keeps its undelivered messages from deletion. Only read when
    # messages are about to be deleted.
    patience_minutes: Annotated[int, Field(ge=1, le=60 * 24 * 365)] = 30


class WebHost(NamedTuple):
    """A host name or address by which browsers reach a node, in lower case and without a final dot. ``port`` is None if
    the text names no port."""

    name: str
    port: int | None

    def at_port(self, scheme: str) -> WebHost:
        """Return the host with a port. Without a port it gets the default port of ``http`` or ``https``."""
        return self if self.port is not None else WebHost(self.name, {"http": 80, "https": 443}[scheme])


_WEB_HOST = re.compile(r"(?:\[([0-9a-f:.]{2,45})\]|([a-z0-9_-][a-z0-9._-]{0,252}))(?::([0-9]{1,5}))?", re.ASCII)


def read_web_host(text: str) -> WebHost | None:
    """Parse the host of a ``Host`` header or a URL (``hub.example.org:8443``, ``[::1]``). Returns None if the text is
    not a host."""
    match = _WEB_HOST.fullmatch(text.lower())
    if match is None or int(match[3] or 0) > 65535:
        return None
    port = int(match[3]) if match[3] else None
    if match[2] is not None:
        return WebHost(match[2].removesuffix("."), port)
    try:
        return WebHost(str(ipaddress.IPv6Address(match[1])), port)
    except ValueError:
        return None


def check_web_host(text: str) -> str:
    if read_web_host(text) is None:
        raise ValueError(
            f"must be a host as it stands in a URL, hub.example.org or hub.example.org:8443, not {show_value(text)}"
        )
    return text.lower()


_WebHostName = Annotated[str, AfterValidator(check_web_host)]

_URL_PATH = re.compile(r"(?:/[A-Za-z0-9._~%-]+)*/?", re.ASCII)


def check_public_url(text: str) -> str:
    """Return a server's public address without a slash at the end. Raises `ValueError`."""
    try:
        parts = urlsplit(text)
        is_url = parts.scheme in ("http", "https") and read_web_host(parts.netloc) is not None
        is_url = is_url and not (parts.query or parts.fragment or "?" in text or "#" in text)
    except ValueError:
        is_url = False
    if not is_url or not _URL_PATH.fullmatch(parts.path):
        raise ValueError(
            f"must be an address as https://hub.example.org or https://example.org/hub, not {show_value(text)}"
        )
    return text.rstrip("/")


PublicUrl = Annotated[str, AfterValidator(check_public_url)]


def _check_log_url(text: object) -> str:
    if not isinstance(text, str):
        # do not show the value: it may contain a password
        raise ValueError("must be the address of a log, as one text")
    text = text.strip()
    try:
        read_log_url(text)
    except ConfigError as error:
        raise ValueError(f"must be the address of a log, not {show_value(hide_password(text))}: {error}") from error
    return text


_LogUrl = Annotated[str, BeforeValidator(_check_log_url)]


class Interop(Settings):
    """The gateway that a node runs for programs of other protocols (docs/interop.md). Without `serve`, `interop:` in a
    file serves all protocols."""

    serve: tuple[Served, ...] = ()
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8701  # 0: any free port
    # address for clients elsewhere, if the gateway is behind a proxy; includes the path
    public_url: PublicUrl | None = None
    # hosts that may be called although they are not public, and without TLS
    webhook_hosts: tuple[_WebHostName, ...] = ()


class NodeConfig(Settings):
    """Configuration of one node: its address, what the node stores and allows, and the agents that it starts."""

    name: Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]{1,64}$")] = "roundelay"
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8700  # 0: any free port
    db: Path = Path("roundelay.db")
    durability: Durability = "full"
    # The shared log of several nodes. With a shared log, `db` is only this node's index of the log. The URL may contain
    # a password.
    log: Annotated[_LogUrl | None, Field(repr=False)] = None
    tls_cert: Path | None = None  # PEM files, both or neither
    tls_key: Path | None = None
    registration: Registration = "local"  # from where an agent may register a new id
    behind_proxy: bool = False  # no connection counts as local, and the proxy names the clients' addresses
    web: bool = True  # whether the node serves the web page
    web_hosts: tuple[
        _WebHostName, ...
    ] = ()  # names by which browsers reach the node, in addition to the names that the node knows itself
    public_url: PublicUrl | None = None  # address of the page for browsers elsewhere, used in login links
    web_reload: bool = False  # read the page's files again at each request, for developers of the page
    visibility: Visibility = "people"
    mods: tuple[str, ...] = ("channels", "discovery")
    limits: Limits = Limits()
    retain: Retain = Retain()
    interop: Interop = Interop()
    quotas: dict[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")], Quota] = Field(default_factory=dict)
    rights: Annotated[dict[_RoleName, Role], Field(min_length=1)] | None = None
    # Unvalidated: only the package `roundelay.agents` knows an agent's fields. A text is the path of an agent file.
    agents: tuple[InstanceOf[YamlNode], ...] = Field(default=(), exclude=True, repr=False)
    _rights_node: YamlNode | None = PrivateAttr(default=None)
    _folder: Path | None = PrivateAttr(default=None)

    @property
    def folder(self) -> Path | None:
        """Folder of the configuration file, or None without a file. Mods are imported from this folder."""
        return self._folder

    @property
    def rights_node(self) -> YamlNode | None:
        """Position of `rights` in the file, or None. The operations and mods named in `rights` are checked later, when
        mods are loaded."""
        return self._rights_node


def list_web_hosts(config: NodeConfig) -> list[str]:
    """Return the names by which browsers reach the page: those in the configuration, and the host of the public
    address."""
    public = [] if config.public_url is None else [urlsplit(config.public_url).netloc]
    return [*config.web_hosts, *public]


def resolve_config(
    file: Path | None, env: Mapping[str, str], flags: Mapping[str, object]
) -> tuple[NodeConfig, dict[str, str]]:
    """Combine flags, environment, file and defaults, in this order of priority. Return the configuration and the source
    of each field.

    A dot names the fields of `limits`, `retain` and `interop` (``limits.max_hops``), in ``flags`` and in the sources. A
    participant's quota has two dots (``quotas.ann.bytes_per_day``) and can only be set in the file. A flag of None and
    an empty variable count as not given. A relative path in a file is relative to that file. Raises `ConfigError` for
    the first wrong value.
    """
    values: dict[str, object] = {}
    origins = dict.fromkeys((*_FIELDS, "agents"), "default")
    agents: tuple[YamlNode, ...] = ()
    rights_node: YamlNode | None = None
    if file is not None:
        root = load_yaml(file)
        agents = _take_agents(root)
        rights_node = root.value.get("rights") if isinstance(root.value, dict) else None
        for field, node in _file_values(root):
            # Relative to the file, not to the working folder: a node must find its database wherever it is started.
            is_path = field in _PATHS and node.value is not None
            values[field] = str(file.parent / str(node.value)) if is_path else node.plain()
            origins[field] = f"file {file}:{node.line}"
        if isinstance(root.value, dict) and "interop" in root.value and "interop.serve" not in values:
            values["interop.serve"] = list(get_args(Served))
            origins["interop.serve"] = f"file {file}:{root.value['interop'].line}"
        if isinstance(root.value, dict) and "agents" in root.value:
            origins["agents"] = f"file {file}:{root.value['agents'].line}"
    for field, text in _env_values(env):
        given = [part.strip() for part in text.split(",")] if field in _LISTS else text
        # Each value is checked alone, so that the error names its source and not the combined configuration.
        values[field] = _check(field, given, env_name(field))
        origins[field] = f"environment {env_name(field)}"
    for field, value in flags.items():
        if value is not None:
            flag = "--" + field.replace("limits.", "").replace(".", "-").replace("_", "-")
            values[field] = _check(field, value, flag)
            origins[field] = f"flag {flag}"
    # Not strict: environment variables are always text. Values of the file were already bound strictly.
    config = NodeConfig.model_validate(_nest(values), strict=False)
    record_bytes, record_origin = config.limits.max_record_bytes, origins["limits.max_record_bytes"]
    # Check only a limit that the user has set. If only the frame limit was lowered, the default record limit is merely
    # never reached, not wrong.
    if record_origin != "default" and record_bytes > config.limits.max_frame_bytes:
        raise ConfigError(
            f"max_record_bytes ({record_bytes}, {record_origin}) is more than max_frame_bytes "
            f"({config.limits.max_frame_bytes}), and a record travels in a frame; raise max_frame_bytes too"
        )
    config = config.model_copy(update={"agents": agents})
    config._rights_node = rights_node
    config._folder = None if file is None else file.parent
    return config, origins


def flat_values(config: NodeConfig) -> dict[str, JsonValue]:
    """Return every value that may be shown, without passwords, under the field names of `resolve_config`. Agents are
    left out."""
    values = _flatten(config)
    if config.log is not None:
        values["log"] = hide_password(config.log)
    return values


def _flatten(config: NodeConfig) -> dict[str, JsonValue]:
    nested: dict[str, JsonValue] = config.model_dump(mode="json")
    for group in _GROUPS:
        members = nested.pop(group)
        assert isinstance(members, dict)
        nested |= {f"{group}.{name}": value for name, value in members.items()}
    if nested["rights"] is None:
        del nested["rights"]
    quotas = nested.pop("quotas")
    assert isinstance(quotas, dict)
    for agent_id, quota in quotas.items():
        assert isinstance(quota, dict)
        nested |= {f"quotas.{agent_id}.{name}": value for name, value in quota.items() if value is not None}
    return nested


def env_name(field: str) -> str:
    """Return the environment variable of a field: ROUNDELAY_LIMITS_MAX_HOPS for ``limits.max_hops``."""
    return f"ROUNDELAY_{field.replace('.', '_').upper()}"


_GROUPS = ("limits", "retain", "interop")
_LISTS = ("mods", "web_hosts", "interop.serve", "interop.webhook_hosts")
_PATHS = ("db", "tls_cert", "tls_key")
_FIELDS = tuple(flat_values(NodeConfig()))
_VARIABLES = {env_name(field): field for field in _FIELDS}
# Variables of the command line and the client. They do not configure a node.
_OTHER_VARIABLES = {
    f"ROUNDELAY_{name}" for name in ("HOME", "URL", "TOKEN", "OWNER_TOKEN", "AS", "DEBUG", "CONNECT_TIMEOUT_S")
}


def _take_agents(root: YamlNode) -> tuple[YamlNode, ...]:
    listed = root.value.get("agents") if isinstance(root.value, dict) else None
    if listed is None or listed.value is None:  # absent, or `agents:` with its lines commented out
        return ()
    if not isinstance(listed.value, list):
        raise listed.error('"agents" must be a list: each item an agent, or the path of an agent file')
    return tuple(listed.value)


def _file_values(root: YamlNode) -> Iterator[tuple[str, YamlNode]]:
    """Yield the fields that the file sets. Each value is already checked, so that errors name its line."""
    if root.value is None:  # an empty file
        return
    settings = root
    if isinstance(root.value, dict):
        kept = {key: node for key, node in root.value.items() if key != "agents"}
        for group in (*_GROUPS, "quotas"):
            if group in kept and kept[group].value is None:
                del kept[group]  # `limits:` with its lines commented out
        if "rights" in kept and kept["rights"].value is None:  # an empty section must not silently allow everything
            raise kept["rights"].error(
                '"rights" has no role; write one, or leave "rights" out, and everybody may do as without it'
            )
        if {"id", "instruction"} <= kept.keys():
            raise root.error(
                "is an agent's file, not a node's; run the agent by `roundelay agent run`, or name its file under "
                "`agents:` of the node's"
            )
        settings = YamlNode(kept, root.path, root.line)
    bind(NodeConfig, settings)
    assert isinstance(settings.value, dict)  # guaranteed, because `bind` refuses other values
    for key, node in settings.value.items():
        if key in _GROUPS and isinstance(node.value, dict):
            yield from ((f"{key}.{name}", member) for name, member in node.value.items())
        elif key == "quotas" and isinstance(node.value, dict):
            for agent_id, quota in node.value.items():
                assert isinstance(quota.value, dict)
                yield from ((f"{key}.{agent_id}.{name}", member) for name, member in quota.value.items())
        else:
            yield key, node


def _env_values(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the fields that the environment sets.

    Other programs may use ROUNDELAY_ variables too, for example for an API key. So an unknown variable is only an error
    if it names a limit or looks like a misspelled field.
    """
    for variable, text in env.items():
        if not variable.startswith("ROUNDELAY_") or variable in _OTHER_VARIABLES or not text:
            continue
        if variable in _VARIABLES:
            yield _VARIABLES[variable], text
            continue
        suffixes = [name.removeprefix("ROUNDELAY_") for name in _VARIABLES]
        near = difflib.get_close_matches(variable.removeprefix("ROUNDELAY_"), suffixes, n=1, cutoff=0.75)
        if near:
            raise ConfigError(f"the environment variable {variable} is unknown; did you mean ROUNDELAY_{near[0]}?")
        if variable.startswith("ROUNDELAY_LIMITS_"):
            raise ConfigError(f"the environment variable {variable} names no limit; unset it")


def _check(field: str, value: object, label: str) -> JsonValue:
    """Validate a single value, so that the error can name its flag or variable."""
    if field not in _FIELDS:
        raise ValueError(f"no such field: {field}")  # a bug in the command line
    try:
        # a variable's "8700" counts as a number
        checked = NodeConfig.model_validate(_nest({field: value}), strict=False)
    except ValidationError as error:
        raise ConfigError(f"{label} {describe_problem(error.errors()[0])}") from error
    return _flatten(checked)[field]


def _nest(flat: Mapping[str, object]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for field, value in flat.items():
        *groups, name = field.split(".")
        if groups[:1] == ["quotas"]:  # a participant's id may contain dots, a limit's name does not
            groups = ["quotas", ".".join(groups[1:])]
        inside = nested
        for group in groups:
            inside = inside.setdefault(group, {})
        inside[name] = value
    return nested
