"""Secrets that this process knows: `read_secret` cleans them, and `hide_secrets` removes them from every text that is
shown.

Secrets that become HTTP headers are read by `read_secret`. It removes the white space that a file, a shell or a copied
text puts around the secret. It refuses characters that no header can carry. HTTP libraries quote header values in their
errors, and servers repeat keys in their errors. Such errors reach logs, records and screens. So every text that other
code wrote passes through `hide_secrets` first. This module does no IO and never writes a secret into an error.
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
"""Minimum length of a secret that is searched for. Shorter texts also occur inside ordinary words."""

MAX_NAME_CHARS = 40
"""Maximum length of a variable's name that an error shows."""

_INVISIBLE = "\ufeff\u200b\u200c\u200d\u2060"
"""Invisible characters that editors and web pages put around copied text, in addition to white space."""

_PUBLIC_PARAMETERS = {"api-version", "version"}
"""URL parameters whose values are ordinary words, such as ``preview``, and not secret."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONSTANT = re.compile(r"[A-Z_][A-Z0-9_]*|[a-z_][a-z_]*[0-9]{0,3}")

_known: dict[str, None] = {}  # each form in which a secret may be written; it only grows, within one process


def clean_secret(value: str) -> str:
    """Return a secret without white space, line breaks and invisible characters at both ends."""
    before = None
    # Repeated, because white space and invisible characters may alternate.
    while value != before:
        before, value = value, value.strip().strip(_INVISIBLE)
    return value


def read_secret(value: str, source: str) -> str:
    """Return a secret that is valid as a header value, and remember it for `hide_secrets`.

    ``source`` says where the secret comes from (``the variable OPENAI_API_KEY``). Raises `ConfigError` with the source
    and the problem, but never with the secret.
    """
    secret = clean_secret(value)
    remember_secret(secret)
    for place, char in enumerate(secret):
        if not (" " <= char <= "~" or char == "\t"):
            where = "at its start" if place == 0 else "at its end" if place == len(secret) - 1 else "in its middle"
            raise ConfigError(
                f"The secret in {source} has {_describe_character(char)} {where}, and an HTTP header holds visible "
                "ASCII characters only: copy it again, as plain text on one line."
            )
    return secret


def remember_secret(secret: str) -> None:
    """Register a secret, so that `hide_secrets` removes it from texts, in each form in which code and servers write
    it."""
    for text in {secret, *secret.splitlines()}:
        # Errors quote a secret as in a URL, as in JSON or as Python writes it, and each form must be found.
        forms = (text, quote(text, safe=""), quote(text), json.dumps(text)[1:-1], repr(text)[1:-1])
        for form in (*forms, repr(text.encode("utf-8", "surrogatepass"))[2:-1]):
            if len(form) >= MIN_SECRET_CHARS:
                _known[form] = None


def remember_url(url: str) -> None:
    """Register the secrets in a URL: the password, a user without a password, and the values of the query."""
    try:
        parts = urlsplit(url.strip())
        user, password, query = parts.username, parts.password, parse_qsl(parts.query)
    except ValueError:  # not a URL; `hide_url_secrets` hides it where it is shown
        return
    values = [value for name, value in query if name.lower() not in _PUBLIC_PARAMETERS]
    for secret in filter(None, [password if password is not None else user, *values]):
        remember_secret(secret)
        remember_secret(unquote(secret))
    if password is not None:
        pair = f"{unquote(user or '')}:{unquote(password)}".encode()
        remember_secret(base64.b64encode(pair).decode())  # the header `Proxy-Authorization: Basic ...`


def hide_secrets(text: str) -> str:
    """Return a text in which `HIDDEN` replaces every known secret, and header values that a library quotes."""
    # The longest first: a secret that contains another one must not leave a part of itself behind.
    for secret in sorted((form for form in _known if form in text), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    if "header" in text or "Header" in text:
        text = _QUOTED_HEADER.sub(rf"\1{HIDDEN}", text)
    return _BEARER.sub(rf"\1{HIDDEN}", text)


def hide_url_secrets(url: str) -> str:
    """Return a URL that is safe to show: without user, password and query values."""
    shown = re.sub(r"^([a-zA-Z][a-zA-Z0-9+.-]*:)?//[^/?#]*@", r"\1//", url.strip())
    if "://" not in shown:
        shown = shown.rpartition("@")[2]
    return re.sub(r"=[^&#]*", "=...", shown) if "?" in shown else shown


# h11: "Illegal header value b'Bearer ...'"; http.client: "Invalid header value b'...'"; requests: "Invalid leading
# whitespace, reserved character(s), or return character(s) in header value: '...'".
_QUOTED_HEADER = re.compile(
    r"""(\bheader\ values?:?\s*)  (?:\w+\()?  (?: b?'(?:[^'\\]|\\.)*'? | b?"(?:[^"\\]|\\.)*"? )""",
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)
_BEARER = re.compile(r"(\b(?:Bearer|Basic)\s+)(?=[\w.~+/=:-]*\d)[\w.~+/=:-]{12,}", re.IGNORECASE)


def check_variable_name(name: str) -> str:
    """Return the name of an environment variable. Raises `ValueError` without the text, because the text may be the
    secret."""
    if not _VARIABLE.fullmatch(name):
        raise ValueError(
            "must be the name of an environment variable (letters, digits and _), not the secret itself: "
            "export the secret under a name, and write that name here"
        )
    return name


def check_secret_text(value: object) -> object:
    """Return the text of a secret in a file. Raises `ValueError` if YAML reads the value as another type. The error
    does not show the value."""
    if not isinstance(value, str):
        raise ValueError(f"must be text and is read as {type(value).__name__}: put it in quotes (it is not shown here)")
    return value


def describe_variable(name: str) -> str:
    """Return how an error names a variable. The name is hidden if it may be a secret, entered by mistake."""
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
