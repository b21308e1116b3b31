"""Configuration of a node: its fields with defaults and limits, and the source of each value.

The configuration is read before anything starts. A command-line flag overrides the environment (`ROUNDELAY_*`), the
environment overrides the node's file, and the file overrides the default. `resolve_config` records the source of each
value. This module opens only the named file, and receives the environment as an argument. The command line uses `host`,
`port`, `tls_cert`, `tls_key`, `interop` and `agents`. The server uses `behind_proxy` and `web_hosts`, the app uses
`web` and `web_reload`, and the hub uses the other fields.
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
    raise ValueError(f"must be 0, a positive whole number, or unlimited, not {show_value(value)}")


_Allowance = Annotated[int | Literal["unlimited"] | None, PlainValidator(_read_allowance)]


class Limits(Settings):
    """All limits of a hub that a client can exceed. The ``welcome`` frame announces these limits, and
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
    max_root_tokens: _Count | None = None
    max_uncaused_answers: _Count = 10_000
    max_record_tokens: _Count = 10_000_000
    max_connections: _Count = 20_000
    max_unauthenticated: _Count = 1_000
    max_pending_bytes: _Bytes = 64 * 1024 * 1024
    max_reads: _Count = 64
    # The last message of a result may exceed this limit. The result still fits into the largest frame of clients.
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
    # With 0, a takeover lasts until the person ends it.
    takeover_ms: Annotated[int, Field(ge=0, le=30 * 24 * 60 * 60 * 1000)] = 60 * 60 * 1000
    registrations_per_minute: _Count = 12_000  # 10,000 agents may register at once


class Quota(Settings):
    """Limits of one participant, which replace the hub's `Limits`. None keeps the hub's limit."""

    bytes_per_day: _Allowance = None
    messages_per_day: _Allowance = None
    max_created_channels: _Allowance = None


_RoleName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]


def _check_pattern(text: str) -> str:
    if re.fullmatch(r"[a-z0-9*][a-z0-9._*-]{0,127}", text):
        return text
    raise ValueError(f"must be an id or a name in lower case, where * matches any text, not {show_value(text)}")


def _check_addressee(text: str) -> str:
    if re.fullmatch(r"((role|mod):)?[a-z0-9*][a-z0-9._*-]{0,63}", text):
        return text
    raise ValueError(
        f"must be ID, role:NAME or mod:ID, where * matches any text, not {show_value(text)}; list channels under write"
    )


_Pattern = Annotated[str, AfterValidator(_check_pattern)]
_Addressee = Annotated[str, AfterValidator(_check_addressee)]


class Role(Settings):
    """Permissions of one role in `rights`. A participant has the permissions of all its roles. A ``*`` in a pattern
    matches any text."""

    ids: tuple[_Pattern, ...] = ()
    kinds: tuple[Literal["agent", "human", "service"], ...] = ()
    send: tuple[_Addressee, ...] = ()  # to participants, to all with a role, to mods
    broadcast: bool = False
    create: tuple[_Pattern, ...] = ()  # channels, as in the next three fields
    join: tuple[_Pattern, ...] = ()
    read: tuple[_Pattern, ...] = ()
    write: tuple[_Pattern, ...] = ()
    take: tuple[_Pattern, ...] = ()  # threads to take over: channels, and broadcast
    call: tuple[_Pattern, ...] = ()  # operations
    administer: bool = False


class Retain(Settings):
    """Retention of the ledger (docs/operations.md). Without any value in this section, nothing is deleted."""

    days: Annotated[int, Field(ge=1, le=36_500)] | None = None  # messages
    record_days: Annotated[int, Field(ge=1, le=36_500)] | None = None  # turn records
    # Maximum size of the database, including all kinds of rows.
    bytes: Annotated[int, Field(ge=1024, le=1 << 50)] | None = None
    # Time for which a connected session that reads nothing protects its undelivered messages from deletion. The hub
    # checks this time only before it deletes messages.
    patience_minutes: Annotated[int, Field(ge=1, le=60 * 24 * 365)] = 30


class WebHost(NamedTuple):
    """A host name or address that browsers use to reach a node, in lower case and without a final dot. ``port`` is None
    if the text names no port."""

    name: str
    port: int | None

    def at_port(self, scheme: str) -> WebHost:
        """Return the host with a port: its own port, or else the default port of ``scheme`` (``http`` or ``https``)."""
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
            f"must be a host as in a URL, such as hub.example.org or hub.example.org:8443, not {show_value(text)}"
        )
    return text.lower()


_WebHostName = Annotated[str, AfterValidator(check_web_host)]

_URL_PATH = re.compile(r"(?:/[A-Za-z0-9._~%-]+)*/?", re.ASCII)


def check_public_url(text: str) -> str:
    """Return a server's public address without its final slash. Raises `ValueError` for an invalid address."""
    try:
        parts = urlsplit(text)
        is_url = parts.scheme in ("http", "https") and read_web_host(parts.netloc) is not None
        is_url = is_url and not (parts.query or parts.fragment or "?" in text or "#" in text)
    except ValueError:
        is_url = False
    if not is_url or not _URL_PATH.fullmatch(parts.path):
        raise ValueError(
            f"must be an address such as https://hub.example.org or https://example.org/hub, not {show_value(text)}"
        )
    return text.rstrip("/")


PublicUrl = Annotated[str, AfterValidator(check_public_url)]


def _check_log_url(text: object) -> str:
    if not isinstance(text, str):
        # Do not show the value: it may contain a password.
        raise ValueError("must be the address of a log, written as one text value")
    text = text.strip()
    try:
        read_log_url(text)
    except ConfigError as error:
        raise ValueError(f"must be the address of a log, not {show_value(hide_password(text))}: {error}") from error
    return text


_LogUrl = Annotated[str, BeforeValidator(_check_log_url)]


class Interop(Settings):
    """The gateway that a node runs for programs that use other protocols (docs/interop.md). If a file contains
    `interop:` without `serve`, the gateway serves all protocols."""

    serve: tuple[Served, ...] = ()
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8701  # 0: any free port
    # Address of the gateway, including the path, for clients on other machines. Needed if the gateway is behind a
    # proxy.
    public_url: PublicUrl | None = None
    # Hosts that webhooks may call without TLS and at private addresses.
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
    registration: Registration = "local"  # whether agents may register new ids: anywhere, on this machine, or nowhere
    behind_proxy: bool = False  # connections never count as local, and the proxy's headers name the clients' addresses
    web: bool = True  # whether the node serves the web page
    web_hosts: tuple[
        _WebHostName, ...
    ] = ()  # names that browsers use to reach the node, in addition to the names that the node detects itself
    public_url: PublicUrl | None = None  # address of the page for browsers on other machines, used in login links
    web_reload: bool = False  # whether to read the page's files again at each request, for developers of the page
    visibility: Visibility = "people"
    mods: tuple[str, ...] = ("channels", "discovery")
    limits: Limits = Limits()
    retain: Retain = Retain()
    interop: Interop = Interop()
    quotas: dict[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")], Quota] = Field(default_factory=dict)
    rights: Annotated[dict[_RoleName, Role], Field(min_length=1)] | None = None
    # Not validated here: only the package `roundelay.agents` knows the fields of an agent. A text item is the path of
    # an agent file.
    agents: tuple[InstanceOf[YamlNode], ...] = Field(default=(), exclude=True, repr=False)
    _rights_node: YamlNode | None = PrivateAttr(default=None)
    _folder: Path | None = PrivateAttr(default=None)

    @property
    def folder(self) -> Path | None:
        """Folder of the configuration file, or None without a file. Mods are imported from this folder."""
        return self._folder

    @property
    def rights_node(self) -> YamlNode | None:
        """The `rights` section of the file with its line number, or None. The names of operations and mods in `rights`
        are checked later, when the mods are loaded."""
        return self._rights_node


def list_web_hosts(config: NodeConfig) -> list[str]:
    """Return the names that browsers use to reach the page: the configured names, and the host of the public
    address."""
    public = [] if config.public_url is None else [urlsplit(config.public_url).netloc]
    return [*config.web_hosts, *public]


def resolve_config(
    file: Path | None, env: Mapping[str, str], flags: Mapping[str, object]
) -> tuple[NodeConfig, dict[str, str]]:
    """Combine flags, environment, file and defaults, in this order of priority. Return the configuration and the source
    of each field.

    In ``flags`` and in the sources, a dot separates a section from its field (``limits.max_hops``). A participant's
    quota has two dots (``quotas.ann.bytes_per_day``) and can only be set in the file. A flag that is None and an empty
    variable are ignored. A relative path in a file is relative to that file. Raises `ConfigError` for the first wrong
    value.
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
            # Paths are relative to the file, not to the working folder, so that a node finds its database from any
            # folder that it is started in.
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
    # Do not validate strictly, because environment variables are always text. The file's values were already checked
    # strictly.
    config = NodeConfig.model_validate(_nest(values), strict=False)
    record_bytes, record_origin = config.limits.max_record_bytes, origins["limits.max_record_bytes"]
    # Check the record limit only if the user has set it. A default record limit above a lowered frame limit is
    # harmless: no record reaches it.
    if record_origin != "default" and record_bytes > config.limits.max_frame_bytes:
        raise ConfigError(
            f"max_record_bytes ({record_bytes}, {record_origin}) is more than max_frame_bytes "
            f"({config.limits.max_frame_bytes}), but a record must fit into a frame; raise max_frame_bytes too"
        )
    config = config.model_copy(update={"agents": agents})
    config._rights_node = rights_node
    config._folder = None if file is None else file.parent
    return config, origins


def flat_values(config: NodeConfig) -> dict[str, JsonValue]:
    """Return the values of a configuration under the field names of `resolve_config`, without passwords and without
    agents."""
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
    """Return the name of a field's environment variable: ROUNDELAY_LIMITS_MAX_HOPS for ``limits.max_hops``."""
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
        raise listed.error('"agents" must be a list. Each item is an agent, or the path of an agent file')
    return tuple(listed.value)


def _file_values(root: YamlNode) -> Iterator[tuple[str, YamlNode]]:
    """Yield the fields that the file sets, after checking their values. Errors name the line of the wrong value."""
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
                '"rights" has no role; write one, or delete "rights" so that the default permissions apply'
            )
        if {"id", "instruction"} <= kept.keys():
            raise root.error(
                "is the file of an agent, not of a node; run the agent with `roundelay agent run`, or list this file "
                "under `agents:` in the node's file"
            )
        settings = YamlNode(kept, root.path, root.line)
    bind(NodeConfig, settings)
    assert isinstance(settings.value, dict)  # `bind` refuses other values
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

    Other programs may use ROUNDELAY_ variables too, for example for an API key. Therefore an unknown variable is an
    error only if it begins like the name of a limit or resembles a field's name.
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
            raise ConfigError(f"the environment variable {variable} does not name a limit; unset it")


def _check(field: str, value: object, label: str) -> JsonValue:
    """Validate a single value, so that the error can name its flag or variable."""
    if field not in _FIELDS:
        raise ValueError(f"no such field: {field}")  # only a bug in the command line can cause this error
    try:
        # Do not validate strictly: the text "8700" of a variable must count as a number.
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
