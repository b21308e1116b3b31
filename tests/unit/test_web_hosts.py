"""Tests of a node's host names in browsers and of the pages that may connect, by request headers only."""

from __future__ import annotations

import pytest
from websockets.datastructures import Headers

from roundelay.network.config import NodeConfig, WebHost, read_web_host, resolve_config
from roundelay.network.errors import ConfigError
from roundelay.network.hub.origin_policy import OriginPolicy

LOOPBACK, LAN, LAN6 = ("127.0.0.1", 8700), ("192.0.2.7", 8700), ("2001:db8::7", 8700, 0, 0)


@pytest.mark.parametrize(
    ("text", "name", "port"),
    [
        ("127.0.0.1:8700", "127.0.0.1", 8700),
        ("LocalHost", "localhost", None),
        ("hub.example.org.:443", "hub.example.org", 443),
        ("[::1]:8700", "::1", 8700),
        ("[0:0::0001]", "::1", None),
        ("[2001:DB8::7]", "2001:db8::7", None),
    ],
)
def test_a_host_is_read_as_browsers_write_it(text: str, name: str, port: int | None) -> None:
    assert read_web_host(text) == WebHost(name, port)


@pytest.mark.parametrize(
    "text",
    ["", ":8700", "a:", "a:b", "a:70000", "a b", "a/b", "user@127.0.0.1", "a,b", "::1", "[::1", "[::1%25eth0]", "[a]", "a\n", "é"],
)  # fmt: skip
def test_what_is_no_host_is_none(text: str) -> None:
    assert read_web_host(text) is None


@pytest.mark.parametrize(
    ("asked", "local", "listens", "named"),
    [
        ("127.0.0.1:8700", LOOPBACK, "127.0.0.1", []),
        ("localhost:9000", LOOPBACK, "127.0.0.1", []),  # a tunnel on this machine
        ("LOCALHOST.:8700", LOOPBACK, "127.0.0.1", []),
        ("[::1]:8700", ("::1", 8700, 0, 0), "::1", []),
        ("192.0.2.7:8700", LAN, "0.0.0.0", []),
        ("[2001:db8:0::7]:8700", LAN6, "::", []),
        ("192.0.2.7", ("::ffff:192.0.2.7", 8700, 0, 0), "::", []),
        ("hub.lan:8700", LAN, "hub.lan", []),
        ("hub.example.org", LOOPBACK, "127.0.0.1", ["hub.example.org"]),
        ("hub.example.org:8443", LOOPBACK, "127.0.0.1", ["hub.example.org:8443"]),
    ],
)
def test_a_page_is_shown_under_names_of_this_node(asked: str, local: object, listens: str, named: list[str]) -> None:
    doors = OriginPolicy(listens, named, behind_proxy=False)
    assert doors.find_wrong_host(Headers(Host=asked), local) is None


@pytest.mark.parametrize(
    ("asked", "local", "listens", "named"),
    [
        ("evil.example:8700", LOOPBACK, "127.0.0.1", []),
        ("127.0.0.1.evil.example:8700", LOOPBACK, "127.0.0.1", []),
        ("localhost.evil.example", LOOPBACK, "127.0.0.1", []),
        ("localhost:8700", LAN, "0.0.0.0", []),  # the request did not come over loopback
        ("192.0.2.8:8700", LAN, "0.0.0.0", []),
        ("0.0.0.0:8700", LOOPBACK, "0.0.0.0", []),
        ("hub.example.org:8700", LOOPBACK, "127.0.0.1", ["hub.example.org:8443"]),
        ("a.hub.example.org", LOOPBACK, "127.0.0.1", ["hub.example.org"]),
        ("127.0.0.1:8700", "", "127.0.0.1", []),  # a socket without an address
    ],
)
def test_no_page_is_shown_under_another_name(asked: str, local: object, listens: str, named: list[str]) -> None:
    doors = OriginPolicy(listens, named, behind_proxy=False)
    assert "web_hosts" in (doors.find_wrong_host(Headers(Host=asked), local) or "")


OWN = {"host": "127.0.0.1:8700", "is_encrypted": False, "behind_proxy": False, "named": ()}
PROXIED = {"host": "hub.example.org", "is_encrypted": False, "behind_proxy": True, "named": ("hub.example.org",)}


def may_connect(origin: str, *, host: str, is_encrypted: bool, behind_proxy: bool, named: tuple[str, ...]) -> bool:
    doors = OriginPolicy("127.0.0.1", named, behind_proxy=behind_proxy)
    headers = Headers(Host=host, Origin=origin)
    return doors.find_wrong_origin(headers, LOOPBACK, is_encrypted=is_encrypted) is None


@pytest.mark.parametrize(
    ("origin", "how"),
    [
        ("http://127.0.0.1:8700", OWN),
        ("https://127.0.0.1:8700", {**OWN, "is_encrypted": True}),
        ("http://localhost", {**OWN, "host": "localhost:80"}),
        ("https://hub.example.org", PROXIED),
        ("https://hub.example.org", {**PROXIED, "host": "HUB.example.org:443"}),
        ("http://hub.example.org", PROXIED),
        ("https://hub.example.org:8443", {**PROXIED, "host": "hub.example.org:8443"}),
    ],
)
def test_the_page_of_the_node_may_connect(origin: str, how: dict[str, object]) -> None:
    assert may_connect(origin, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("origin", "how"),
    [
        ("null", OWN),
        ("", OWN),
        ("http://127.0.0.1:8701", OWN),
        ("http://127.0.0.1", OWN),
        ("https://127.0.0.1:8700", OWN),
        ("http://localhost:8700", OWN),
        ("http://evil.example", {**OWN, "host": "evil.example"}),  # DNS points this name at the node
        ("http://evil.example:8700", OWN),
        ("http://127.0.0.1:8700@evil.example", OWN),
        ("file://", OWN),
        ("chrome-extension://abcdef", OWN),
        ("http://127.0.0.1:8700/path", OWN),
        ("http://127.0.0.1:8700", {**OWN, "is_encrypted": True}),
        ("https://hub.example.org", {**PROXIED, "behind_proxy": False}),
        ("https://hub.example.org:8443", PROXIED),
        ("https://hub.example.org", {**PROXIED, "named": ()}),
        ("https://hub.example.org", {**PROXIED, "host": "127.0.0.1:8700"}),  # the proxy replaces the name
    ],
)
def test_any_other_page_may_not(origin: str, how: dict[str, object]) -> None:
    assert not may_connect(origin, **how)  # type: ignore[arg-type]


def test_who_says_two_things_is_refused_and_a_program_says_nothing() -> None:
    doors = OriginPolicy("127.0.0.1", (), behind_proxy=False)
    two_origins = Headers([("Host", "127.0.0.1:8700"), ("Origin", "http://127.0.0.1:8700"), ("Origin", "null")])
    two_hosts = Headers([("Host", "127.0.0.1:8700"), ("Host", "evil.example"), ("Origin", "http://127.0.0.1:8700")])
    for headers in (two_origins, two_hosts):
        assert doors.find_wrong_origin(headers, LOOPBACK, is_encrypted=False) is not None
    for headers in (Headers(), Headers(Host="evil.example")):
        assert doors.find_wrong_origin(headers, LOOPBACK, is_encrypted=False) is None
    assert doors.find_wrong_host(two_hosts, LOOPBACK) is not None
    assert doors.find_wrong_host(Headers(), LOOPBACK) is not None


def test_web_hosts_are_hosts() -> None:
    assert NodeConfig(web_hosts=("Hub.Example.org:8443",)).web_hosts == ("hub.example.org:8443",)
    with pytest.raises(ConfigError, match="as in a URL"):
        resolve_config(None, {"ROUNDELAY_WEB_HOSTS": "https://hub.example.org/"}, {})
