"""Tests of the rights file on its own: decisions, refused files, and the output of `roundelay rights` without a node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roundelay.app import OWN_MODS, Network, make_rights
from roundelay.network.config import Role, resolve_config
from roundelay.network.core.rights import Rights
from roundelay.network.errors import ConfigError, Forbidden
from roundelay.network.mod import load_mods
from roundelay.nodes.doctor import check_mods
from tests.support.command import invoke, run

ROOT = Path(__file__).parents[2]
PAGE = """\
mods: [channels, discovery]
rights:
  team:
    ids: [ann, 'dev-*']
    send: [role:team, mod:channels]
    read: ['dev*']
    call: [network.*, channels.*]
  people:
    kinds: [human]
    send: ['*']
    broadcast: true
    administer: true
"""


@pytest.mark.parametrize(
    ("who", "verb", "thing", "allowed", "rule"),
    [
        (("ann", "agent"), "send", "agent:dev-1", True, "rights.team.send: role:team"),
        (("ann", "agent"), "send", "agent:bob", False, "its role team does not allow it; the rule would be rights.team.send: [bob]"),
        (("ann", "agent"), "send", "mod:channels", True, "rights.team.send: mod:channels"),
        (("ann", "agent"), "send", "mod:discovery", False, "rights.team.send: [mod:discovery]"),
        (("ann", "agent"), "broadcast", "", False, "rights.team.broadcast: true"),
        (("ann", "agent"), "read", "dev.x", True, "rights.team.read: dev*"),
        (("ann", "agent"), "read", "ops", False, "rights.team.read: [ops]"),
        (("ann", "agent"), "call", "network.history", True, "rights.team.call: network.*"),
        (("ann", "agent"), "call", "networkXhistory", False, "call: [networkXhistory]"),
        (("ann", "human"), "send", "agent:bob", True, "rights.people.send: *"),
        (("ann", "human"), "read", "ops", False, "none of its roles (team, people) allows it"),
        (("zoe", "human"), "administer", "", True, "rights.people.administer: true"),
        (("zoe", "agent"), "administer", "", False, "for people and services"),
        (("zoe", "agent"), "join", "dev", False, "it has no role in the node's `rights`"),
    ],
)  # fmt: skip
def test_what_none_of_ones_roles_allows_is_denied(
    tmp_path: Path, who: tuple[str, str], verb: str, thing: str, allowed: bool, rule: str
) -> None:
    rights = read(tmp_path, PAGE)
    assert rights is not None
    decision = rights.decide(verb, *who, thing, "agent")  # type: ignore[arg-type]
    assert decision.allowed is allowed
    assert rule in decision.rule


def read(folder: Path, text: str) -> Rights | None:
    file = folder / "node.yaml"
    file.write_text(text)
    config, _ = resolve_config(file, {}, {})
    return make_rights(config, load_mods(config.mods, OWN_MODS))


@pytest.mark.parametrize(
    ("rule", "thing", "allowed"),
    [
        ("r*", "agent:robin", True),
        ("r*", "agent:ann", False),  # only the address form is role:ROLE
        ("*m", "agent:ann", False),
        ("role:*", "agent:ann", True),
        ("role:*", "agent:robin", False),
        ("m*", "mod:channels", False),
        ("mod:*", "mod:channels", True),
        ("*", "agent:robin", True),
        ("*", "mod:channels", True),
    ],
)
def test_a_pattern_of_ids_names_neither_roles_nor_mods(tmp_path: Path, rule: str, thing: str, allowed: bool) -> None:
    rights = read(tmp_path, PAGE.replace("[role:team, mod:channels]", f"['{rule}']"))
    assert rights is not None
    assert rights.decide("send", "ann", "agent", thing, "agent").allowed is allowed


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("network.*", "network.histroy", 7, 'rights.team.call: "network.histroy" matches no operation; did you mean "network.history"?'),
        ("network.*", "tasks.*", 7, '"tasks.*" matches no operation'),
        ("mod:channels]", "mod:chanels]", 5, 'rights.team.send: "chanels" is no mod; did you mean "channels"?'),
        ("role:team", "role:taem", 5, '"taem" is no role; did you mean "team"?'),
        ("[role:team", "[channel:dev", 5, "channel:dev"),
        ("    read:", "    reed:", 6, 'unknown key "reed"; did you mean "read"?'),
        ("broadcast: true", "broadcast: yes", 11, "must be true or false"),
        ("kinds: [human]", "kinds: [person]", 9, "person"),
        ("'dev-*'", "Dev", 4, "Dev"),
        ("rights:\n", "rights:\nname: x\n", 2, "rights"),
    ],
)  # fmt: skip
def test_a_wrong_page_is_refused_with_its_line(tmp_path: Path, old: str, new: str, line: int, says: str) -> None:
    text = PAGE.replace(old, new)
    if old == "rights:\n":  # a file without a role
        text = text.partition("  team:")[0]
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'node.yaml'}:{line}: ")
    assert says in str(caught.value)


def test_without_a_page_there_are_no_rights(tmp_path: Path) -> None:
    assert read(tmp_path, "name: team\n") is None
    assert read(tmp_path, "") is None


async def test_a_network_in_this_process_takes_a_page_too() -> None:
    async with Network.open(rights={"r": Role(ids=("ann",), send=("bob",))}) as network:
        ann, bob = await network.join("ann"), await network.join("bob")
        await ann.send_text("bob", "hi")
        with pytest.raises(Forbidden):
            await bob.send_text("ann", "hi")


async def test_the_command_explains_a_page_without_a_node(tmp_path: Path) -> None:
    (tmp_path / "node.yaml").write_text(PAGE)

    async def check(*args: str, code: int) -> dict[str, object]:
        file = str(tmp_path / "node.yaml")
        done = await invoke("rights", "check", "--file", file, *args, "--json", code=code)
        answer: dict[str, object] = json.loads(done.out)
        assert answer["allowed"] is (code == 0)
        return answer

    found = await check("--as", "ann", "--op", "send", "--to", "dev-2", code=0)
    assert found == {
        "allowed": True, "as": "ann", "kind": "agent", "op": "send", "to": "dev-2", "roles": ["team"],
        "rule": "rights.team.send: role:team",
    }  # fmt: skip
    found = await check("--as", "ann", "--op", "channels.join", "--to", "channel:dev", code=1)
    assert "rights.team.join: [dev]" in str(found["rule"])
    found = await check("--as", "ann", "--op", "network.remove", code=1)
    assert "it is for operators" in str(found["rule"])
    await check("--as", "mia", "--kind", "human", "--op", "network.remove", code=0)
    await check("--as", "bob", "--op", "send", "--to", "bob", code=0)  # no rule applies, and none is required
    shown = await invoke("rights", "show", "--file", str(tmp_path / "node.yaml"), "--as", "ann")
    assert "rights.team.read: dev*" in shown.out
    assert "channels.join" in shown.out
    assert "network.remove" not in shown.out
    shown = await invoke("rights", "show", "--file", str(tmp_path / "node.yaml"), "--as", "ann", "--json")
    rules = json.loads(shown.out)
    assert (rules["as"], rules["roles"], rules["read"]) == ("ann", ["team"], ["rights.team.read: dev*"])
    wrong = await invoke(
        "rights", "check", "--file", str(tmp_path / "node.yaml"), "--as", "ann", "--op", "raed", code=2
    )
    assert "did you mean read?" in wrong.err


async def test_the_page_of_the_documents_does_what_they_say(tmp_path: Path) -> None:
    page = (ROOT / "docs/rights.md").read_text(encoding="utf-8")
    rights = read(tmp_path, page.partition("```yaml\n")[2].partition("```")[0])
    assert rights is not None
    assert rights.decide("send", "ann", "agent", "agent:build-1", "agent").allowed
    refused = rights.decide("send", "guest-1", "agent", "agent:ann", "agent")
    assert f"guest-1 may not send to agent:ann: {refused.rule}." in page
    ask = ("rights", "check", "--file", str(tmp_path / "node.yaml"), "--as", "guest-1", "--op")
    said = await invoke(*ask, "send", "--to", "ann", code=1)
    assert f"> {said.out}" in page  # the hub's own error text
    said = await invoke(*ask, "channels.leave", "--to", "lobby", code=1)
    assert said.out.startswith("guest-1 may not call channels.leave for lobby: its role guests")
    said = await invoke(*ask, "broadcast", "--kind", "human", code=0)
    assert said.out.startswith("guest-1 may send a broadcast: rights.people.broadcast")
    assert rights.decide("call", "bob", "human", "network.watch").allowed  # `chat` calls this operation first


async def test_a_node_does_not_start_with_a_wrong_page(tmp_path: Path) -> None:
    (tmp_path / "node.yaml").write_text(PAGE.replace("network.*", "network.histroy"))
    done = await run("up", str(tmp_path / "node.yaml"), "--port", "0", "--db", str(tmp_path / "a.db"), code=2)
    assert f"{tmp_path / 'node.yaml'}:7: rights.team.call" in done.err
    config, origins = resolve_config(tmp_path / "node.yaml", {}, {})
    assert "did you mean" in check_mods(config, origins["mods"]).detail
