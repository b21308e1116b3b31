"""Secrets of this process. `read_secret` checks and remembers a secret. `hide_secrets` removes all remembered secrets
from a text.

`read_secret` reads secrets that become HTTP headers. It removes white space that a file, a shell or a copied text puts
around a secret, and refuses characters that are not allowed in a header. Errors of HTTP libraries quote header values,
and errors of servers repeat keys. To keep secrets out of logs, records and screens, every error text of other code
passes through `hide_secrets`. This module does no IO and never puts a secret into an error.
"""

from __future__ import annotations

import base64
import json
import re
import unicodedata
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from .errors import ConfigError

__all__ = [
    "HIDDEN",
    "check_secret_text",
    "check_variable_name",
    "clean_secret",
    "describe_variable",
    "hide_secrets",
    "hide_url_secrets",
    "read_secret",
    "remember_secret",
    "remember_url",
]

HIDDEN = "[hidden]"

MIN_SECRET_CHARS = 6
"""Minimum length of a secret that `hide_secrets` hides. Shorter secrets also occur inside ordinary words."""

MAX_NAME_CHARS = 40
"""Maximum length of a variable's name that an error shows. A longer text may be the secret itself."""

_INVISIBLE = "\ufeff\u200b\u200c\u200d\u2060"
"""Invisible characters, besides white space, that editors and web pages put around copied text."""

_PUBLIC_PARAMETERS = {"api-version", "version"}
"""Names of URL parameters whose values are not secret but ordinary words, such as ``preview``."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONSTANT = re.compile(r"[A-Z_][A-Z0-9_]*|[a-z_][a-z_]*[0-9]{0,3}")

_known: dict[str, None] = {}  # every form in which code may write a remembered secret; entries are never removed


def clean_secret(value: str) -> str:
    """Return a secret without white space, line breaks and invisible characters at both ends."""
    before = None
    # Strip repeatedly, because white space and invisible characters may alternate.
    while value != before:
        before, value = value, value.strip().strip(_INVISIBLE)
    return value


def read_secret(value: str, source: str) -> str:
    """Return a secret that is valid as a header value, and remember it for `hide_secrets`.

    ``source`` is the origin of the secret for error texts (``the variable OPENAI_API_KEY``). Raises a `ConfigError`
    that names the source and the problem, but never the secret.
    """
    secret = clean_secret(value)
    remember_secret(secret)
    for place, char in enumerate(secret):
        if not (" " <= char <= "~" or char == "\t"):
            where = "at its start" if place == 0 else "at its end" if place == len(secret) - 1 else "in its middle"
            raise ConfigError(
                f"The secret in {source} has {_describe_character(char)} {where}, but an HTTP header may contain only "
                "visible ASCII characters. Copy the secret again, as plain text on one line."
            )
    return secret


def remember_secret(secret: str) -> None:
    """Remember a secret in every form in which code and servers write it, so that `hide_secrets` removes it."""
    for text in {secret, *secret.splitlines()}:
        # Errors quote a secret as it is, URL-encoded, as a JSON string, or as a Python literal.
        forms = (text, quote(text, safe=""), quote(text), json.dumps(text)[1:-1], repr(text)[1:-1])
        for form in (*forms, repr(text.encode("utf-8", "surrogatepass"))[2:-1]):
            if len(form) >= MIN_SECRET_CHARS:
                _known[form] = None


def remember_url(url: str) -> None:
    """Remember the secrets in a URL, so that `hide_secrets` removes them: the password (or else the user), and the
    values of the query."""
    try:
        parts = urlsplit(url.strip())
        user, password, query = parts.username, parts.password, parse_qsl(parts.query)
    except ValueError:  # not a URL; callers use `hide_url_secrets` before they show the text
        return
    values = [value for name, value in query if name.lower() not in _PUBLIC_PARAMETERS]
    for secret in filter(None, [password if password is not None else user, *values]):
        remember_secret(secret)
        remember_secret(unquote(secret))
    if password is not None:
        pair = f"{unquote(user or '')}:{unquote(password)}".encode()
        remember_secret(base64.b64encode(pair).decode())  # the header `Proxy-Authorization: Basic ...`


def hide_secrets(text: str) -> str:
    """Replace every remembered secret in a text with `HIDDEN`, and also header values that a library quotes."""
    # Replace the longest secret first. Otherwise, a secret that contains a shorter secret would stay partly visible.
    for secret in sorted((form for form in _known if form in text), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    if "header" in text or "Header" in text:
        text = _QUOTED_HEADER.sub(rf"\1{HIDDEN}", text)
    return _BEARER.sub(rf"\1{HIDDEN}", text)


def hide_url_secrets(url: str) -> str:
    """Return a URL without its user, password and query values, so that it is safe to show."""
    shown = re.sub(r"^([a-zA-Z][a-zA-Z0-9+.-]*:)?//[^/?#]*@", r"\1//", url.strip())
    if "://" not in shown:
        shown = shown.rpartition("@")[2]
    return re.sub(r"=[^&#]*", "=...", shown) if "?" in shown else shown


# Matches errors of HTTP libraries. h11 writes "Illegal header value b'Bearer ...'". http.client writes "Invalid header
# value b'...'". requests writes "Invalid leading whitespace, [...] or return character(s) in header value: '...'".
_QUOTED_HEADER = re.compile(
    r"""(\bheader\ values?:?\s*)  (?:\w+\()?  (?: b?'(?:[^'\\]|\\.)*'? | b?"(?:[^"\\]|\\.)*"? )""",
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)
_BEARER = re.compile(r"(\b(?:Bearer|Basic)\s+)(?=[\w.~+/=:-]*\d)[\w.~+/=:-]{12,}", re.IGNORECASE)


def check_variable_name(name: str) -> str:
    """Check and return the name of an environment variable. The `ValueError` for an invalid name does not quote the
    text, because the text may be the secret itself."""
    if not _VARIABLE.fullmatch(name):
        raise ValueError(
            "must be the name of an environment variable (letters, digits and _), not the secret itself: "
            "export the secret under a name, and write that name here"
        )
    return name


def check_secret_text(value: object) -> object:
    """Check and return the text of a secret in a YAML file. Raises `ValueError` if YAML reads the value as another
    type. The error does not show the value."""
    if not isinstance(value, str):
        raise ValueError(f"must be text and is read as {type(value).__name__}: put it in quotes (it is not shown here)")
    return value


def describe_variable(name: str) -> str:
    """Return a variable's name for an error text. The name is hidden if it may be a secret that was entered by
    mistake."""
    return (
        name if _CONSTANT.fullmatch(name) and len(name) <= MAX_NAME_CHARS else "(not shown: it may be the key itself)"
    )


def _describe_character(char: str) -> str:
    if char in "\r\n\x0b\x0c\x85\u2028\u2029":
        return "a line break"
    if char in "\u2018\u2019\u201a\u201b\u201c\u201d\u201e\u201f\u2039\u203a\xab\xbb":
        return "a typographic quotation mark"
    if unicodedata.category(char) == "Pd":
        return "a typographic dash"
    if unicodedata.category(char) in ("Cc", "Cf"):
        return "an invisible character"
    return "a space that is not plain" if char.isspace() else "a character outside of ASCII"
