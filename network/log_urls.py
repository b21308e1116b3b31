"""Parser of a shared log's address: `read_log_url`. The errors of this module never repeat a password. This module does
no IO.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

from .credentials import remember_url
from .errors import ConfigError

NATS, POSTGRES = ("nats", "tls"), ("postgres", "postgresql")
MAX_BYTES = 10 * 1024**3
"""Maximum size of a new log whose address sets no ``max_bytes``, in bytes."""
TLS_FILES = ("sslrootcert", "sslcert", "sslkey")
_TLS_OPTIONS = ("sslmode", *TLS_FILES)
_OPTIONS = ("replicas", "max_bytes", "monitor", "network", *_TLS_OPTIONS)
_TLS_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_STREAM = re.compile("[A-Za-z0-9_-]{1,64}")
_NETWORK = re.compile("[a-z0-9_]{1,48}")
_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[^\s:@,/?#\[\]]+)(?::\d{1,5})?"
_URL = re.compile(
    rf"(?P<scheme>{'|'.join(NATS + POSTGRES)})://(?:(?P<user>[^\s@/?#]*)@)?(?P<hosts>{_HOST}(?:,{_HOST})*)"
    r"(?:/(?P<place>[^\s?#]*))?(?:\?(?P<query>[^\s#]*))?"
)


class NatsAddress(NamedTuple):
    """Parts of ``nats://[USER:PASSWORD@]HOST:PORT[,HOST:PORT...]/STREAM?replicas=3&max_bytes=...&monitor=8222``."""

    servers: tuple[str, ...]
    """Addresses of the servers, without user and password."""
    user: str
    password: str | None
    """Password of the user. None if the address contains a token instead of a user and a password."""
    is_encrypted: bool
    """Whether the address requires TLS. With ``nats://``, the server decides whether to use TLS."""
    stream: str
    replicas: int
    max_bytes: int
    monitors: tuple[tuple[str, int], ...]
    """Host and monitoring port of each server. Empty if the address names no monitoring port."""
    shown: str


class PostgresAddress(NamedTuple):
    """Parts of ``postgres://[USER:PASSWORD@]HOST[:PORT][,HOST...]/DATABASE?network=...&max_bytes=...&sslmode=...``."""

    dsn: str
    database: str
    table: str
    max_bytes: int
    tls: dict[str, str]
    """Options of the address that configure TLS: `sslmode` and `TLS_FILES`."""
    shown: str


class _Parts(NamedTuple):
    """Parts of ``SCHEME://[USER[:PASSWORD]@]HOST[:PORT][,HOST...]/PLACE[?OPTIONS]``, not parsed further."""

    scheme: str
    user: str
    """User and password as they appear in the address, percent-encoded."""
    hosts: tuple[str, ...]
    place: str
    options: dict[str, str]


def read_log_url(url: str) -> NatsAddress | PostgresAddress:
    """Parse the address of a shared log. Raises `ConfigError`."""
    parts = _split(url)
    return _read_postgres(parts) if parts.scheme in POSTGRES else _read_nats(parts)


def hide_password(url: str) -> str:
    """Return an address that is safe to show, even if the address is invalid. Everything before the last @ and the
    values of unknown options are removed."""
    # Remove everything up to the last @, because a password may contain an unescaped @.
    without_user = re.sub(r"^([a-z]+://)?.*@", r"\1", url, flags=re.DOTALL)
    return re.sub(rf"([?&](?!(?:{'|'.join(_OPTIONS)})=)[^=&]*=).*", r"\1...", without_user, flags=re.DOTALL)


def _split(url: str) -> _Parts:
    # Remember the password before anything can fail, so that it is removed from errors of libraries that quote the URL.
    remember_url(url)
    match = _URL.fullmatch(url)
    hosts = tuple(match["hosts"].split(",")) if match is not None else ()
    if match is None or not all(map(_is_host, hosts)):
        raise _wrong_form()
    try:
        query = parse_qs(match["query"], strict_parsing=True, keep_blank_values=True) if match["query"] else {}
    except ValueError:  # the original error would quote the field, which may be secret
        raise ConfigError(
            "Write the options of a shared log's address as NAME=VALUE after the ?, separated by &."
        ) from None
    if any("@" in value for name in query.keys() - _OPTIONS for value in query[name]):
        # The password may contain an unescaped ?. Do not show the rest of the password as an option's name.
        raise _wrong_form()
    # Refuse an option with two values, because each parser would choose a different value.
    if repeated := [name for name, values in query.items() if len(values) > 1]:
        raise ConfigError(f"The shared log's address has the option {repeated[0]} twice.")
    options = {name: value for name, (value,) in query.items()}
    return _Parts(match["scheme"], match["user"] or "", hosts, (match["place"] or "").strip("/"), options)


def _wrong_form() -> ConfigError:
    return ConfigError(
        "The address of a shared log is nats://USER:PASSWORD@HOST:PORT/STREAM or "
        "postgres://USER:PASSWORD@HOST:PORT/DATABASE?network=NAME, with commas between several hosts. In a user or a "
        "password write @ as %40, / as %2F, ? as %3F, # as %23 and % as %25."
    )


def _is_host(host: str) -> bool:
    try:
        return urlsplit(f"//{host}").port != 0
    except ValueError:  # an invalid IPv6 address, an invalid port, or letters that Unicode normalization changes
        return False


def _read_nats(parts: _Parts) -> NatsAddress:
    if not _STREAM.fullmatch(parts.place):
        raise ConfigError(
            "The shared log's address must end with the name of its stream, as in nats://127.0.0.1:4222/lab. The name may "
            "contain letters, digits, '_' and '-'."
        )
    options = dict(parts.options)
    max_bytes = _take_max_bytes(options)
    replicas = options.pop("replicas", "1")
    try:
        ports = [int(port) for port in options.pop("monitor", "").split(",") if port]
    except ValueError:
        raise ConfigError(
            "The option monitor of a shared log's address must be a port, or several ports separated by commas."
        ) from None
    _refuse_others(options, "replicas", "max_bytes", "monitor")
    if replicas not in ("1", "3", "5"):
        raise ConfigError("The option replicas of a shared log's address must be 1, 3 or 5.")
    if len(ports) not in (0, 1, len(parts.hosts)) or not all(1 <= port <= 65535 for port in ports):
        raise ConfigError(
            "The option monitor of a shared log's address must be one port for all servers, or one port for each server "
            "in the same order."
        )
    servers = tuple(f"{parts.scheme}://{host}" for host in parts.hosts)
    names = (urlsplit(server).hostname or "" for server in servers)
    # One port applies to all servers, which usually have the same configuration.
    monitors = tuple(zip(names, ports * len(servers) if len(ports) == 1 else ports, strict=False))
    user, colon, password = parts.user.partition(":")
    return NatsAddress(
        servers,
        unquote(user),
        unquote(password) if colon else None,
        parts.scheme == "tls",
        parts.place,
        int(replicas),
        max_bytes,
        monitors,
        f"{parts.scheme}://{','.join(parts.hosts)}/{parts.place}",
    )


def _read_postgres(parts: _Parts) -> PostgresAddress:
    database = unquote(parts.place)
    if not database or "/" in database or "\0" in database:
        raise ConfigError(
            "Write the address of a shared log in PostgreSQL as postgres://USER:PASSWORD@HOST:PORT/DATABASE?network=NAME, "
            "with one database."
        )
    options = dict(parts.options)
    max_bytes = _take_max_bytes(options)
    network = options.pop("network", "")
    tls = {name: options.pop(name) for name in _TLS_OPTIONS if name in options}
    _refuse_others(options, "network", "max_bytes", *_TLS_OPTIONS)
    if not _NETWORK.fullmatch(network):
        raise ConfigError(
            "The shared log's address must name its network in the database, as in postgres://HOST/DATABASE?network=lab. "
            "The name may contain lower-case letters, digits and '_', and at most 48 characters."
        )
    if tls.get("sslmode", "prefer") not in _TLS_MODES:
        raise ConfigError(f"The option sslmode of a shared log's address must be one of {', '.join(_TLS_MODES)}.")
    user, hosts = f"{parts.user}@" if parts.user else "", ",".join(parts.hosts)
    dsn = f"postgresql://{user}{hosts}/{parts.place}" + (f"?{urlencode(tls)}" if tls else "")
    shown = f"postgres://{hosts}/{parts.place}?network={network}"
    return PostgresAddress(dsn, database, f"roundelay_{network}", max_bytes, tls, shown)


def _take_max_bytes(options: dict[str, str]) -> int:
    try:
        max_bytes = int(options.pop("max_bytes", MAX_BYTES))
    except ValueError:
        raise ConfigError("The option max_bytes of a shared log's address must be a whole number.") from None
    if not 1 << 20 <= max_bytes < 1 << 63:
        raise ConfigError("The option max_bytes of a shared log's address must be at least one mebibyte (1048576).")
    return max_bytes


def _refuse_others(options: dict[str, str], *known: str) -> None:
    if options:
        raise ConfigError(f"A shared log's address has no option {min(options)!r}. Its options are {', '.join(known)}.")
