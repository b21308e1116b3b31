"""YAML with line numbers, strict binding, and the layers of a node's configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from roundelay.network.config import (
    Limits,
    NodeConfig,
    Quota,
    Retain,
    Role,
    YamlNode,
    bind,
    env_name,
    flat_values,
    load_yaml,
    resolve_config,
)
from roundelay.network.errors import ConfigError


class Model(BaseModel):
    kind: Literal["scripted", "openai"] = "scripted"
    temperature: float = 0.0


class Agent(BaseModel):
    id: Annotated[str, Field(min_length=1)]
    tools: tuple[str, ...] = ()
    model: Model | None = None
    notes: dict[str, Model] = {}


class Team(BaseModel):
    title: str = ""
    size: int = 0
    is_open: bool = True
    folder: Path = Path()
    agents: list[Agent] = []


@pytest.fixture
def write(tmp_path: Path):
    def write_file(text: str | bytes) -> Path:
        path = tmp_path / "team.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write_file


def refusal(path: Path, cls: type[BaseModel] = Team) -> str:
    """Return the error for an invalid file, without the directory."""
    with pytest.raises(ConfigError) as caught:
        bind(cls, load_yaml(path))
    return str(caught.value).replace(f"{path.parent}/", "")


@pytest.mark.parametrize(
    ("made", "given"),
    [
        (Limits, {"max_hops": 0}),
        (Limits, {"max_hops": "3"}),
        (Limits, {"max_hops": True}),
        (Limits, {"max_hops": 3.5}),
        (Limits, {"max_hopps": 3}),
        (Limits, {"max_depth": 1000, "max_hops": -1}),
        (Quota, {"bytes_per_day": -1}),
        (Quota, {"bytes_per_day": "much"}),
        (Retain, {"days": 0}),
        (Retain, {"bytes": 1 << 60}),
        (Role, {"broadcast": "yes"}),
        (Role, {"send": ["everybody!"]}),
        (Role, {"sends": ["*"]}),
        (NodeConfig, {"port": "8700"}),
        (NodeConfig, {"rights": {}}),
        (NodeConfig, {"rights": {"staff": {"kinds": ["people"]}}}),
        (NodeConfig, {"limits": {"max_hops": 0}}),
    ],
)
def test_a_program_is_refused_what_a_file_is_and_by_the_same_sentence(
    write, made: type[BaseModel], given: dict[str, object]
) -> None:
    told, _, further = refusal(write(json.dumps(given)), made).partition(": ")[2].partition(" (1 more")
    assert bool(further) == (len(given) > 1)
    with pytest.raises(ConfigError) as caught:
        made(**given)
    assert str(caught.value) == f"{made.__name__}: {told}"


def test_a_file_becomes_its_model(write) -> None:
    path = write(
        "title: no\nsize: 3\nis_open: false\nfolder: data\n"
        "agents:\n  - {id: ada, tools: [a:b], model: {temperature: 1}}\n  - id: bob\n    notes: {x: {}}\n"
    )
    assert bind(Team, load_yaml(path)) == Team(
        title="no",
        size=3,
        is_open=False,
        folder=Path("data"),
        agents=[Agent(id="ada", tools=("a:b",), model=Model(temperature=1)), Agent(id="bob", notes={"x": Model()})],
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("12:30", "12:30"),
        ("2024-01-31", "2024-01-31"),
        ("1_000", "1_000"),
        (".nan", ".nan"),
        ("<<", "<<"),
        ("007", 7),
        ("0x1F", 31),
        ("-1", -1),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("true", True),
        ("~", None),
        ("", None),
        ("'8'", "8"),
        ("!!str 8", "8"),
        ("!!int '8'", 8),
    ],
)
def test_scalars_are_those_of_yaml_1_2(write, text: str, value: object) -> None:
    plain = load_yaml(write(f"key: {text}\n")).plain()
    assert plain == {"key": value}
    assert type(plain["key"]) is type(value)


def test_nodes_know_the_lines_of_their_keys(write) -> None:
    root = load_yaml(write("# a comment\nlimits:\n  max_hops:\n    3\nagents:\n  - one\n  -\n    id: two\n"))
    assert isinstance(root.value, dict)
    limits, agents = root.value["limits"], root.value["agents"]
    assert isinstance(limits.value, dict)
    assert isinstance(agents.value, list)
    assert (limits.line, limits.value["max_hops"].line, agents.line) == (2, 3, 5)
    assert [item.plain() for item in agents.value] == ["one", {"id": "two"}]


def test_an_alias_repeats_its_anchor(write) -> None:
    assert load_yaml(write("a: &x [1, 2]\nb: *x\n")).plain() == {"a": [1, 2], "b": [1, 2]}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("titel: x\n", 'team.yaml:1: unknown key "titel"; did you mean "title"?'),
        ("\nzzz: x\n", 'team.yaml:2: unknown key "zzz"; known here: agents, folder, is_open, size, title'),
        (
            "agents:\n- id: a\n  model:\n    temprature: 1\n",
            'team.yaml:4: unknown key "temprature"; did you mean "temperature"?',
        ),
        ("agents:\n- id: a\n  notes: {x: {kin: 1}}\n", 'team.yaml:3: unknown key "kin"; did you mean "kind"?'),
        (
            "temperature: 1\n",
            'team.yaml:1: unknown key "temperature"; known here: agents, folder, is_open, size, title',
        ),
        ("tools: [x]\n", 'team.yaml:1: unknown key "tools"; it belongs under "agents"'),
        ("size: many\n", 'team.yaml:1: "size" must be a whole number, not "many"'),
        ("size: '3'\n", 'team.yaml:1: "size" must be a whole number, not "3"'),
        ("size: 1.5\n", 'team.yaml:1: "size" must be a whole number, not 1.5'),
        ("is_open: yes\n", 'team.yaml:1: "is_open" must be true or false, not "yes"'),
        ("title: 5\n", 'team.yaml:1: "title" must be text, not 5; put it in quotes'),
        ("title:\n  - 5\n", 'team.yaml:1: "title" must be text, not [5]'),
        ("agents: ada\n", 'team.yaml:1: "agents" must be a list (`- item` lines), not "ada"'),
        ("agents:\n- ada\n", 'team.yaml:2: "agents.1" must be a mapping (`key: value` lines), not "ada"'),
        ("agents:\n- {}\n- tools: []\n", 'team.yaml:2: "agents.1.id" is missing (1 more, on line 3)'),
        (
            "agents:\n- id: a\n  model: {kind: gpt}\n",
            "team.yaml:3: \"agents.1.model.kind\" must be 'scripted' or 'openai', not \"gpt\"",
        ),
        ("size: x\ntitel: y\n", 'team.yaml:1: "size" must be a whole number, not "x" (1 more, on line 2)'),
        ("- a\n", 'team.yaml:1: must be a mapping (`key: value` lines), not ["a"]'),
        ("", "team.yaml:1: must be a mapping (`key: value` lines), not null"),
        ("title: a\nsize: 1\ntitle: b\n", 'team.yaml:3: the key "title" is already on line 1; keep one of the two'),
        ("title: [\n", "team.yaml:2: is not valid YAML: expected the node content, but found '<stream end>'"),
        (
            "title: a\n\tsize: 1\n",
            "team.yaml:2: is not valid YAML: found character '\\t' that cannot start any token; indent with spaces",
        ),
        (
            "title: a: b\n",
            "team.yaml:1: is not valid YAML: mapping values are not allowed here; put text that contains `: ` in quotes",
        ),
        (
            "title: a\n---\ntitle: b\n",
            "team.yaml:2: is not valid YAML: a second document (`---`) begins; write one document per file",
        ),
        (
            "a: &x {b: 1}\nc:\n  <<: *x\n",
            "team.yaml:3: merge keys (`<<`) are not supported; repeat the keys, or alias the whole value",
        ),
        ("? [a]\n: b\n", "team.yaml:1: a key must be text"),
        ("title: !!int x\n", 'team.yaml:1: "x" is not a valid number'),
        ("size: " + "9" * 5000 + "\n", f'team.yaml:1: "{"9" * 56}... is not a valid number'),
    ],
)
def test_a_wrong_file_is_refused_by_line(write, text: str, sentence: str) -> None:
    assert refusal(write(text)) == sentence


@pytest.mark.parametrize(
    "text",
    [
        "a: !!python/object/apply:os.system ['true']\n",
        "a: !!python/name:os.system x\n",
        "a: !custom {b: 1}\n",
        "a: !!binary aGk=\n",
        "a: !!timestamp 2024-01-31\n",
        "a: !!set {x}\n",
        "a: 1e999\n",
    ],
)
def test_tags_that_name_types_are_refused(write, text: str) -> None:
    assert " is not allowed; write " in refusal(write(text))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "a: &a [x, x]\n" + "".join(f"k{i}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(20)),
            "split",
        ),
        ("a: &a [*a]\n", "nested deeper"),
        ("[" * 100_000, "nested deeper"),
        ("[" * 70 + "]" * 70, "nested deeper"),
        ("a: " + "x" * 1024 * 1024, "larger than"),
        (b"a: b\nc: \xff\n", "team.yaml:2: is not UTF-8"),
        (b"a: \x07\n", "is not valid YAML"),
    ],
)
def test_bombs_and_foreign_bytes_are_refused(write, text: str | bytes, reason: str) -> None:
    assert reason in refusal(write(text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read \(no such file or directory\)"):
        load_yaml(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="is a directory"):
        load_yaml(tmp_path)


@given(st.text(max_size=60) | st.lists(st.sampled_from(list("[]{}&*!|>-:?,#'\"%a1 \n")), max_size=60).map("".join))
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text.encode())
    try:
        bind(Team, load_yaml(path))
    except ConfigError as error:
        refused = str(error)
    else:
        return
    assert refused.startswith(str(path))


# --- layers


def resolve(
    file: Path | None = None, env: dict[str, str] | None = None, flags: dict[str, object] | None = None
) -> tuple[NodeConfig, dict[str, str]]:
    return resolve_config(file, env or {}, flags or {})


def test_without_layers_everything_is_default() -> None:
    config, origins = resolve()
    assert config == NodeConfig()
    assert set(origins.values()) == {"default"}
    assert origins.keys() == flat_values(config).keys() | {"agents"}


def test_flag_goes_before_environment_before_file_before_default(write) -> None:
    file = write("host: file\nport: 1\nname: file\nlimits:\n  max_hops: 1\n  max_unacked: 1\n")
    env = {"ROUNDELAY_HOST": "env", "ROUNDELAY_PORT": "2", "ROUNDELAY_LIMITS_MAX_HOPS": "2"}
    config, origins = resolve(file, env, {"host": "flag", "port": None, "durability": "memory"})
    assert (config.host, config.port, config.name, config.durability) == ("flag", 2, "file", "memory")
    assert (config.limits.max_hops, config.limits.max_unacked, config.limits.max_depth) == (2, 1, 64)
    assert {field: origin for field, origin in origins.items() if origin != "default"} == {
        "host": "flag --host",
        "port": "environment ROUNDELAY_PORT",
        "name": f"file {file}:3",
        "durability": "flag --durability",
        "limits.max_hops": "environment ROUNDELAY_LIMITS_MAX_HOPS",
        "limits.max_unacked": f"file {file}:6",
    }


@pytest.mark.parametrize("field", flat_values(NodeConfig()))
def test_every_field_can_come_from_the_environment(field: str) -> None:
    words = {"durability": "normal", "visibility": "strict", "registration": "closed", "behind_proxy": "true"}
    words |= {
        "log": "nats://127.0.0.1:4222/shared",
        "interop.serve": "http, mcp",
        "interop.webhook_hosts": "hooks:9000",
        "interop.public_url": "https://hub.example.org/hub",
    }
    words |= {"public_url": "https://hub.example.org"}
    words |= {"web": "false", "web_reload": "true", "web_hosts": "hub.example.org, hub:8443"}
    given = (words | {"mods": "channels, tasks"}).get(field, "1024")
    read = {"mods": ["channels", "tasks"], "behind_proxy": True, "web": False, "web_reload": True}
    expected: object = (
        read
        | {"web_hosts": ["hub.example.org", "hub:8443"]}
        | {"interop.serve": ["http", "mcp"], "interop.webhook_hosts": ["hooks:9000"]}
    ).get(field, given)
    if field == "limits.max_depth":
        given = expected = "128"
    config, origins = resolve(env={env_name(field): given})
    assert str(flat_values(config)[field]) == str(expected)
    assert origins[field] == f"environment {env_name(field)}"


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({"ROUNDELAY_PORT": "many"}, 'ROUNDELAY_PORT must be a whole number, not "many"'),
        ({"ROUNDELAY_PORT": "70000"}, 'ROUNDELAY_PORT must be less than or equal to 65535, not "70000"'),
        (
            {"ROUNDELAY_DURABILITY": "none"},
            "ROUNDELAY_DURABILITY must be 'full', 'normal' or 'memory', not \"none\"",
        ),
        ({"ROUNDELAY_PROT": "1"}, "the environment variable ROUNDELAY_PROT is unknown; did you mean ROUNDELAY_PORT?"),
        ({"ROUNDELAY_LIMITS_X": "1"}, "the environment variable ROUNDELAY_LIMITS_X does not name a limit; unset it"),
    ],
)
def test_a_wrong_variable_is_named(env: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(env=env)
    assert str(caught.value) == sentence


def test_variables_of_others_and_empty_ones_are_ignored() -> None:
    env = {"ROUNDELAY_HOME": "/x", "ROUNDELAY_TOKEN": "x", "ROUNDELAY_API_KEY": "x", "ROUNDELAY_PORT": "", "PORT": "1"}
    assert resolve(env=env)[0] == NodeConfig()


def test_a_wrong_flag_is_named() -> None:
    with pytest.raises(ConfigError, match="--port must be a whole number"):
        resolve(flags={"port": "x"})


def test_a_wrong_node_file_is_refused_by_line(write) -> None:
    assert refusal(write("limits:\n  max_hop: 1\n"), NodeConfig) == (
        'team.yaml:2: unknown key "max_hop"; did you mean "max_hops"?'
    )
    with pytest.raises(ConfigError, match=r"team\.yaml:2: \"port\" must be less than or equal to 65535, not 70000"):
        resolve(write("name: x\nport: 70000\n"))


def test_an_agents_file_where_a_nodes_belongs_is_called_what_it_is(write) -> None:
    with pytest.raises(
        ConfigError, match="is the file of an agent, not of a node; run the agent with `roundelay agent run`"
    ):
        resolve(write("id: ann\ninstruction: x\nmodel: {rules: []}\n"))


def test_agents_are_kept_as_they_were_read(write) -> None:
    config, origins = resolve(write("name: x\nagents:\n  - agents/ada.yaml\n  - id: bob\n"))
    assert [(node.plain(), node.line) for node in config.agents] == [("agents/ada.yaml", 3), ({"id": "bob"}, 4)]
    assert all(isinstance(node, YamlNode) for node in config.agents)
    assert origins["agents"].endswith("team.yaml:2")
    with pytest.raises(ConfigError, match=r'team\.yaml:1: "agents" must be a list'):
        resolve(write("agents: ada\n"))


def test_a_section_with_its_lines_commented_out_is_absent(write) -> None:
    assert resolve(write("limits:\n#  max_hops: 1\nagents:\n"))[0].model_dump() == NodeConfig().model_dump()
    assert resolve(write("# nothing\n"))[0].model_dump() == NodeConfig().model_dump()


def test_a_path_in_a_file_is_relative_to_the_file(write, tmp_path: Path) -> None:
    assert resolve(write("db: team.db\n"))[0].db == tmp_path / "team.db"
    assert resolve(write("db: /var/team.db\n"))[0].db == Path("/var/team.db")
    assert resolve(flags={"db": "team.db"})[0].db == Path("team.db")
    config, _ = resolve(write("tls_cert: tls/cert.pem\ntls_key: /etc/key.pem\n"))
    assert (config.tls_cert, config.tls_key) == (tmp_path / "tls" / "cert.pem", Path("/etc/key.pem"))
    assert resolve(write("tls_cert: null\ntls_key: null\n"))[0].model_dump() == NodeConfig().model_dump()


def test_a_record_limit_above_the_frame_is_refused_with_its_origin() -> None:
    with pytest.raises(
        ConfigError, match=r"max_record_bytes \(300000, environment ROUNDELAY_LIMITS_MAX_RECORD_BYTES\)"
    ):
        resolve(env={"ROUNDELAY_LIMITS_MAX_RECORD_BYTES": "300000"})
    both = {"ROUNDELAY_LIMITS_MAX_RECORD_BYTES": "300000", "ROUNDELAY_LIMITS_MAX_FRAME_BYTES": "300000"}
    assert resolve(env=both)[0].limits.max_record_bytes == 300_000
    assert resolve(env={"ROUNDELAY_LIMITS_MAX_FRAME_BYTES": "2048"})[0].limits == Limits(max_frame_bytes=2048)


# --- quotas


def test_quotas_of_participants_are_read_and_shown_with_their_lines(write) -> None:
    file = write(
        "limits: {bytes_per_day: 5000}\nquotas:\n  ann: {bytes_per_day: unlimited}\n  a.b:\n    messages_per_day: 0\n    max_created_channels: 3\n"
    )
    config, origins = resolve(file)
    assert config.quotas == {
        "ann": Quota(bytes_per_day="unlimited"), "a.b": Quota(messages_per_day=0, max_created_channels=3)
    }  # fmt: skip
    shown = {name: value for name, value in flat_values(config).items() if name.startswith("quotas")}
    assert shown == {
        "quotas.ann.bytes_per_day": "unlimited", "quotas.a.b.messages_per_day": 0, "quotas.a.b.max_created_channels": 3
    }  # fmt: skip
    assert origins["quotas.ann.bytes_per_day"] == f"file {file}:3"
    assert origins["quotas.a.b.messages_per_day"] == f"file {file}:5"
    assert flat_values(config).keys() <= origins.keys()
    assert resolve(write("quotas:\n#  ann: {}\n"))[0].model_dump() == NodeConfig().model_dump()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "quotas:\n  ann:\n    bytes_per_day: many\n",
            'team.yaml:3: "quotas.ann.bytes_per_day" must be 0, a positive whole number, or unlimited, not "many"',
        ),
        (
            "quotas:\n  ann: {bytes_per_dy: 1}\n",
            'team.yaml:2: unknown key "bytes_per_dy"; did you mean "bytes_per_day"?',
        ),
        (
            "quotas:\n  ann: {messages_per_day: -1}\n",
            'team.yaml:2: "quotas.ann.messages_per_day" must be 0, a positive whole number, or unlimited, not -1',
        ),
        ("quotas:\n  ann:\n", 'team.yaml:2: "quotas.ann" must be a mapping (`key: value` lines), not null'),
        ("quotas: 5\n", 'team.yaml:1: "quotas" must be a mapping (`key: value` lines), not 5'),
    ],
)
def test_a_wrong_quota_is_refused_by_line(write, text: str, sentence: str) -> None:
    assert refusal(write(text), NodeConfig) == sentence


def test_a_quota_is_for_an_id(write) -> None:
    assert refusal(write("quotas:\n  Ann: {}\n"), NodeConfig).startswith('team.yaml:2: "quotas.Ann" ')


def test_that_interop_stands_in_a_file_means_all_of_it_unless_it_says_what(tmp_path: Path) -> None:
    served = {
        "interop:": ("a2a", "http", "mcp", "openai", "webhooks"),
        "interop: {port: 9000}": ("a2a", "http", "mcp", "openai", "webhooks"),
        "interop: {serve: [mcp]}": ("mcp",),
        "interop: {serve: []}": (),
        "port: 0": (),
    }
    for text, expected in served.items():
        file = tmp_path / "node.yaml"
        file.write_text(text)
        assert resolve(file)[0].interop.serve == expected, text
        assert resolve(file, flags={"interop.serve": ()})[0].interop.serve == ()
        assert resolve(file, env={"ROUNDELAY_INTEROP_SERVE": "http"})[0].interop.serve == ("http",)
