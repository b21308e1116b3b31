"""Tests of secrets: white space around them is removed, invalid header characters are refused, and secrets are hidden
in every quote.
"""

from __future__ import annotations

import logging
import traceback
from pathlib import Path

import pytest

from roundelay.agents.isolation import describe_error
from roundelay.agents.models.model import ModelError
from roundelay.agents.models.openai_model import OpenAIModel
from roundelay.agents.team import build_runner, load_agents
from roundelay.network.credentials import (
    HIDDEN,
    check_variable_name,
    hide_secrets,
    hide_url_secrets,
    read_secret,
    remember_url,
)
from roundelay.network.errors import ConfigError
from roundelay.nodes.logs import _JsonFormatter, _LineFormatter
from tests.support import fake_openai as fake
from tests.support.fake_openai import FakeOpenAI
from tests.unit.test_models_openai import ASK, model_for

KEY = "sk-canary-0123456789"
AROUND = ["{}\n", "{}\r\n", "\n{}", " {}\t", "\ufeff{}", "{}\u200b\n", "\u00a0{}\u00a0", "{}\x0b\x0c"]
UNSENDABLE = {
    "\u201c" + KEY + "\u201d": "a typographic quotation mark at its start",
    KEY + "\u2019": "a typographic quotation mark at its end",
    KEY[:5] + "\n" + KEY[5:]: "a line break in its middle",
    KEY[:5] + "\r" + KEY[5:]: "a line break in its middle",
    KEY[:5] + "\u2013" + KEY[5:]: "a typographic dash in its middle",
    KEY[:5] + "\x00" + KEY[5:]: "an invisible character in its middle",
    KEY[:5] + "\u00e9" + KEY[5:]: "a character outside of ASCII in its middle",
    KEY[:5] + "\u00a0" + KEY[5:]: "a space that is not plain in its middle",
}


@pytest.mark.parametrize("form", AROUND)
@pytest.mark.parametrize("way", ["variable", "argument"])
async def test_a_key_is_sent_without_what_is_around_it(form: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = form.format(KEY)
    monkeypatch.setenv("TEAM_KEY", written if way == "variable" else "")
    options = {"api_key_env": "TEAM_KEY"} if way == "variable" else {"api_key": written}
    async with FakeOpenAI([fake.text("ok")], api_key=KEY) as server, model_for(server, **options) as model:
        assert (await model.complete(ASK)).text == "ok"


# No environment variable can hold a NUL.
@pytest.mark.parametrize("written", [it for it in UNSENDABLE if "\x00" not in it])
@pytest.mark.parametrize("variable", ["TEAM_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_quoted(
    written: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEAM_KEY", "fine")
    monkeypatch.setenv(variable, written)
    with pytest.raises(ModelError, match=f"the variable {variable} has {UNSENDABLE[written]}") as caught:
        OpenAIModel("m", base_url="https://models.example/v1", api_key_env="TEAM_KEY")
    assert (caught.value.reason, caught.value.retryable) == ("misconfigured", False)
    assert KEY[5:] not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_secret_from_anywhere_is_refused_with_its_source() -> None:
    for written, problem in UNSENDABLE.items():
        with pytest.raises(ConfigError, match=f"the file key.txt has {problem}") as caught:
            read_secret(written, "the file key.txt")
        assert KEY[5:] not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "LocalProtocolError: Illegal header value b'Bearer sk-unknown-1\\n'",
        "ValueError: Invalid header value b'Bearer sk-unknown-1\\n'",
        'Invalid header value b"Bearer sk-unknown-1 it\'s"',
        "Invalid leading whitespace, reserved character(s), or return character(s) in header value: 'sk-unknown-1\\n'",
        "Illegal header value bytearray(b'Bearer sk-unknown-1\\n')",
        "authorization: Bearer sk-unknown-1",
    ],
)
def test_a_header_value_that_a_library_quotes_is_hidden(text: str) -> None:
    for shown in (hide_secrets(text), str(ModelError(text, reason="server")), describe_error(ValueError(text))):
        assert "sk-unknown" not in shown
        assert HIDDEN in shown


def test_a_known_secret_is_hidden_however_it_is_written() -> None:
    read_secret('pass"word/with+odd=signs\n', "a test")
    remember_url("https://tom:p%40ssw0rd-canary@proxy.example:3128/x?api_key=query-canary-1")
    for text in (
        'pass"word/with+odd=signs', r"pass\"word/with+odd=signs", "pass%22word%2Fwith%2Bodd%3Dsigns",
        "p%40ssw0rd-canary", "p@ssw0rd-canary", "query-canary-1", "dG9tOnBAc3N3MHJkLWNhbmFyeQ==",
    ):  # fmt: skip
        assert hide_secrets(f"it said {text}.") == f"it said {HIDDEN}."


def test_ordinary_words_stay() -> None:
    text = "Bearer authentication is needed; the header value is missing; Basic instructions follow"
    assert hide_secrets(text) == text


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://tom:secret@proxy:3128", "http://proxy:3128"),
        ("tom:secret@proxy:3128", "proxy:3128"),
        ("https://host/v1?key=secret&x=1#top", "https://host/v1?key=...&x=...#top"),
        ("https://host/v1", "https://host/v1"),
    ],
)
def test_an_address_is_shown_without_its_secrets(url: str, shown: str) -> None:
    assert hide_url_secrets(url) == shown


@pytest.mark.parametrize("name", [KEY, "sk canary", "", "1KEY", "Bearer x"])
def test_a_secret_in_place_of_a_variables_name_is_refused_and_not_quoted(name: str) -> None:
    with pytest.raises(ValueError, match="name of an environment variable") as caught:
        check_variable_name(name)
    assert not name or name not in str(caught.value)


@pytest.mark.parametrize("formatter", [_LineFormatter("%(message)s"), _JsonFormatter()], ids=["text", "json"])
def test_a_log_line_and_its_traceback_hold_no_secret(formatter: logging.Formatter) -> None:
    read_secret(KEY, "a test")
    try:
        raise ValueError(f"Illegal header value b'Bearer {KEY}\\n'")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("roundelay.x", logging.ERROR, "x.py", 1, "it said %s", (KEY,), info)
    record.error, record.nested, record.odd = f"key {KEY}", {"of": [KEY]}, ValueError(KEY)
    line = formatter.format(record)
    assert KEY not in line
    assert "ValueError" in line
    assert "it said" in line


async def test_a_key_that_a_server_repeats_is_in_no_error() -> None:
    for answer in (fake.error(401, f"Incorrect API key provided: {KEY}"), fake.error(500, f"Bearer {KEY}")):
        async with FakeOpenAI([answer]) as server, model_for(server, api_key=KEY) as model:
            with pytest.raises(ModelError) as caught:
                await model.complete(ASK)
        assert KEY not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("written", ["1234567890", "[a, canary-123456]", "{a: canary-123456}", "true"])
def test_a_secret_in_a_file_that_is_read_as_no_text_is_not_quoted(tmp_path: Path, written: str) -> None:
    server = f"{{command: x, env: {{TOKEN: {written}}}}}"
    (tmp_path / "a.yaml").write_text(
        f"id: a\ninstruction: x\nmodel: {{rules: []}}\nmiddleware:\n- mcp: {{servers: {{s: {server}}}}}\n"
    )
    with pytest.raises(ConfigError, match=r"must be text and is read as \w+: put it in quotes") as caught:
        load_agents(tmp_path / "a.yaml")
    assert "a.yaml:5" in str(caught.value)
    assert "canary" not in str(caught.value)
    assert "1234567890" not in str(caught.value)


@pytest.mark.parametrize("key", [KEY, "Bearer sk-canary", "aB3dE5gH7jK9lM1nO3pQ5rS7tU9vW1xY"])
def test_a_key_in_the_place_of_its_variable_is_not_quoted(tmp_path: Path, key: str) -> None:
    model = f"{{openai: {{name: m, base_url: 'https://models.example/v1', api_key_env: '{key}'}}}}"
    (tmp_path / "a.yaml").write_text(f"id: a\ninstruction: x\nmodel: {model}\n")
    with pytest.raises(ConfigError, match="environment variable") as caught:
        build_runner(*load_agents(tmp_path / "a.yaml"))
    assert key not in str(caught.value)
