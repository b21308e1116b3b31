"""The address of a log that several nodes share, taken apart: what is the same for each engine. No IO."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from .errors import ConfigError

ENGINES = ("nats", "tls", "postgres", "postgresql")
_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[^\s:@,/?#\[\]]+)(?::\d{1,5})?"
_URL = re.compile(
    rf"(?P<scheme>{'|'.join(ENGINES)})://(?:(?P<user>[^\s@/?#]*)@)?(?P<hosts>{_HOST}(?:,{_HOST})*)"
    r"(?:/(?P<place>[^\s?#]*))?(?:\?(?P<query>[^\s#]*))?"
)


class LogUrl(NamedTuple):
    """``SCHEME://[USER[:PASSWORD]@]HOST[:PORT][,HOST...]/PLACE[?OPTIONS]``, as it was written."""

    scheme: str
    user: str
    """With the password, and escaped: `credentials` reads it."""
    hosts: tuple[str, ...]
    place: str
    options: dict[str, str]

    @property
    def credentials(self) -> tuple[str, str | None]:
        user, colon, password = self.user.partition(":")
        return unquote(user), unquote(password) if colon else None


def split_log_url(url: str) -> LogUrl:
    """Raises `ConfigError`, which repeats nothing of a password."""
    found = _URL.fullmatch(url)
    hosts = tuple(found["hosts"].split(",")) if found is not None else ()
    if found is None or not all(map(_is_host, hosts)):
        raise ConfigError(
            "A shared log is named as nats://USER:PASSWORD@HOST:PORT/STREAM or postgres://USER:PASSWORD@HOST:PORT/DATABASE"
            "?network=NAME (several hosts with commas between them); in a user or a password @ is written %40, / is %2F, "
            "? is %3F, # is %23 and % is %25."
        )
    try:
        query = parse_qs(found["query"], strict_parsing=True, keep_blank_values=True) if found["query"] else {}
    except ValueError as error:
        raise ConfigError("What follows the ? of a shared log's address is NAME=VALUE, with & between them.") from error
    if twice := [name for name, values in query.items() if len(values) > 1]:
        raise ConfigError(f"A shared log's address says {twice[0]} twice.")
    options = {name: value for name, (value,) in query.items()}
    return LogUrl(found["scheme"], found["user"] or "", hosts, (found["place"] or "").strip("/"), options)


def _is_host(host: str) -> bool:
    try:
        return urlsplit(f"//{host}").port != 0
    except ValueError:  # no address of IPv6, a port that is none, or letters that stand for others
        return False


def hide_password(url: str) -> str:
    """An address as it may be shown, also one that is none: without what stands before its last @."""
    without_user = re.sub(r"^([a-z]+://)?.*@", r"\1", url, flags=re.DOTALL)
    return re.sub(r"(?<=[?&]password=)[^&\s]*", "...", without_user)
