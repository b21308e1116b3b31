"""Proxies and certificates from the environment, for HTTP requests to models and MCP servers.

A wrong variable is a local mistake, and retries do not fix it. `check_environment` and `load_certificates` report it
with the variable's name. Without these checks, requests would fail and people would blame the provider. The rules are
the same as in `httpx2`, which sends the requests to MCP servers (https://www.python-httpx.org/environment_variables/).
"""

from __future__ import annotations

import functools
import importlib.util
import ipaddress
import os
import ssl
from typing import NamedTuple
from urllib.parse import urlsplit

from roundelay.network.credentials import hide_url_secrets, remember_url
from roundelay.network.errors import ConfigError
from roundelay.network.home import is_loopback

_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_KINDS = ("http", "https", "socks5", "socks5h")


class ProxyInUse(NamedTuple):
    """Proxy of a request: its address without secrets, and the variable that names it."""

    url: str
    variable: str


def check_environment() -> None:
    """Raise `ConfigError` for any invalid proxy, even for a proxy that no request needs."""
    for name in _PROXIES:
        variable, url = _read(name)
        if not url:
            continue
        # Remember the address before an error can quote it, because its password must not reach a log.
        remember_url(url)
        if url != url.strip():
            raise ConfigError(f"{variable} has white space around the address of its proxy. Remove the white space.")
        kind = urlsplit(url).scheme.lower() if "://" in url else "http"
        if kind not in _KINDS:
            advice = " (for a SOCKS proxy: socks5://)" if kind.startswith("socks") else ""
            raise ConfigError(
                f"{variable} names a proxy of the kind {kind}://, which is not supported. Supported kinds: "
                f"{', '.join(f'{it}://' for it in _KINDS)}{advice}. Change or unset {variable}."
            )
        # Requests to models need `aiohttp_socks`. Requests to MCP servers use `httpx2`, which needs `socksio`.
        lacking = [it for it in ("aiohttp_socks", "socksio") if importlib.util.find_spec(it) is None]
        if kind.startswith("socks") and lacking:
            raise ConfigError(
                f"{variable} names a SOCKS proxy, and the package {lacking[0]} is not installed. "
                f"Install it (pip install {' '.join(lacking)}), or unset {variable}."
            )
        try:
            parts = urlsplit(_complete(url))
            is_address = bool(parts.hostname) and url.split() == [url] and parts.port != 0
        except ValueError:
            is_address = False
        if not is_address:
            raise ConfigError(f"{variable} is not the address of a proxy, such as http://127.0.0.1:3128.")


def find_proxy(url: str) -> ProxyInUse | None:
    """Return the proxy that requests to this address use, or None."""
    variable, proxy = _choose_proxy(url)
    return ProxyInUse(hide_url_secrets(proxy), variable) if proxy else None


def find_proxy_address(url: str) -> str | None:
    """Return the proxy's whole URL, which may contain a password, or None if requests to this address use none."""
    _, proxy = _choose_proxy(url)
    return _complete(proxy) if proxy else None


def _choose_proxy(url: str) -> tuple[str, str]:
    """Return the name of the variable that sets the proxy for requests to ``url``, and the proxy. Both values are empty
    if no proxy is used.
    """
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    if host and not _is_exempt(host, url):
        for name in (f"{parts.scheme.upper()}_PROXY", "ALL_PROXY"):
            variable, proxy = _read(name)
            if proxy:
                return variable, proxy
    return "", ""


def _complete(proxy: str) -> str:
    return proxy if "://" in proxy else f"http://{proxy}"


def describe_proxy(url: str) -> str:
    """Return a sentence about the proxy for requests to this address, or an empty string if no proxy is used."""
    proxy = find_proxy(url)
    if proxy is None:
        return ""
    sentence = f" The request went through the proxy {proxy.url} ({proxy.variable})"
    host = urlsplit(url).hostname or ""
    if is_loopback(host) or host.endswith(".localhost"):
        return f"{sentence}, but a server on this machine needs no proxy. Set NO_PROXY={host}."
    return f"{sentence}."


def load_certificates() -> ssl.SSLContext:
    """Return the certificates that servers are checked against. All models of a process share one context, because
    each context takes 20 ms and 0.8 MB. Raises `ConfigError`.
    """
    return _load(os.environ.get("SSL_CERT_FILE", ""), os.environ.get("SSL_CERT_DIR", ""))


@functools.cache
def _load(file: str, folder: str) -> ssl.SSLContext:
    variable, path = ("SSL_CERT_FILE", file) if file else ("SSL_CERT_DIR", folder)
    if path and not os.path.exists(path):
        raise ConfigError(f"{variable} names {path}, which does not exist. Correct the path, or unset {variable}.")
    try:
        if path:
            return ssl.create_default_context(cafile=file or None, capath=None if file else folder)
        paths = ssl.get_default_verify_paths()
        if not (paths.cafile or paths.capath):  # OpenSSL finds no certificates on macOS, Windows and some Linux systems
            import truststore

            return truststore.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        return ssl.create_default_context()
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "reason", None) or error.strerror or str(error)
        if not path:
            raise ConfigError(f"The certificates of this machine cannot be loaded ({reason}).") from error
        raise ConfigError(
            f"{variable} names {path}, and no certificates can be loaded from it ({reason}). "
            f"Name a file with certificates in PEM, or unset {variable}."
        ) from error


def _read(name: str) -> tuple[str, str]:
    """Return the name and value of the variable that applies. The lower-case name has priority, as in
    `urllib.request`.
    """
    low = name.lower()
    if os.environ.get(low):
        return low, os.environ[low]
    if name == "HTTP_PROXY" and "REQUEST_METHOD" in os.environ:
        return name, ""  # under CGI, the request header `Proxy` sets this variable: https://httpoxy.org
    return name, os.environ.get(name, "")


def _is_exempt(host: str, url: str) -> bool:
    """Return whether NO_PROXY names the host."""
    for entry in _read("NO_PROXY")[1].split(","):
        name = entry.strip().lower()
        if name == "*":
            return True
        if "://" in name:
            wanted = urlsplit(name)
            if wanted.hostname == host and wanted.scheme in ("all", urlsplit(url).scheme):
                return True
            continue
        name = name.strip("[]")
        if "/" in name:
            try:
                if ipaddress.ip_address(host) in ipaddress.ip_network(name, strict=False):
                    return True
            except ValueError:
                pass
            continue
        name = name.removeprefix("*").removeprefix(".") if name.startswith("*.") else name
        # A bare name covers its subdomains too, as in `httpx2`.
        if name and (host == name or host.endswith(name if name.startswith(".") else f".{name}")):
            return True
    return False
