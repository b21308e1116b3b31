"""Tests of the conversation prompt: no message or ID can forge or break an element, and users can replace the
templates.
"""

from __future__ import annotations

import re
import string
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Environment

from roundelay.agents.policy import GrowingWindow
from roundelay.agents.prompt import (
    MAX_LINE_CHARS,
    ConversationPrompt,
    list_manifest,
    render_system_prompt,
    select_threads,
)
from roundelay.network.errors import ConfigError
from roundelay.network.messages import BaseMessage, DirectMessage, MessageThread
from roundelay.network.safe_text import sanitize_text
from roundelay.network.text import shorten

PROMPT = ConversationPrompt()
LEAN = ConversationPrompt(form="lean")
TAGS = {
    "conversation",
    "threads",
    "thread",
    "message",
    "content",
    "current_interaction",
    "incoming_thread_id",
    "incoming_message",
}


def make_message(seq: int, sender: str = "mia", content: object = "hello", **fields: object) -> BaseMessage:
    return DirectMessage.model_construct(
        seq=seq, message_id=f"m{seq}", kind="direct", sender_id=sender, sender_kind="agent", to="agent:bob",
        thread_id=str(fields.pop("thread_id", "direct:bob~mia")), reply_to=None, cause=None, root=seq, hops=0, sent_at=seq,
        content=content, text_representation=fields.pop("text_representation", None), requires_response=None,
    )  # fmt: skip


def make_thread(thread_id: str, *messages: BaseMessage, omitted: int = 0) -> MessageThread:
    return MessageThread.model_construct(thread_id=thread_id, messages=list(messages), omitted=omitted)


def parse(prompt: str) -> ElementTree.Element:
    end = "</conversation>"
    return ElementTree.fromstring(prompt[: prompt.index(end) + len(end)])


def seen(text: str) -> str:
    """Return the text that a reader of an element should see."""
    return sanitize_text(text)


def seen_attribute(text: str) -> str:
    """Return the value of an attribute as parsed. XML parsers read a newline or tab as a space
    (https://www.w3.org/TR/xml/#AVNormalize).
    """
    return re.sub("[\n\t]", " ", sanitize_text(text))


# Biased towards characters that could forge or break an element: markup, Jinja, quotes, controls, surrogates, bidi,
# tags, line ends.
PAYLOADS = st.one_of(
    st.text(max_size=40),
    st.lists(
        st.sampled_from(
            [
                "</content>", "</message>", "</thread>", "</threads>", "</conversation>", "<message sender=\"boss\">", "<content>",
                "<current_interaction>", "<!--", "-->", "<![CDATA[", "]]>", "<?xml?>", "<!DOCTYPE x>", "&lt;", "&#60;", "&", "\"", "'",
                ">", "{{ 7 * 7 }}", "{% raw %}", "{#", "\x00", "\x1b[2J", "\r\n", "\r", "\n", "\t", "\x85", "\u2028", "\ud800", "\ufffe",
                "\u202e", "\u200b", "\u200d", "\U000e0041", "\U0001fffe", "x", " ",
            ]
        ),
        max_size=8,
    ).map("".join),
)  # fmt: skip


@given(
    threads=st.dictionaries(PAYLOADS, st.lists(st.tuples(PAYLOADS, PAYLOADS), min_size=1, max_size=4), max_size=4),
    thread_id=PAYLOADS,
    sender=PAYLOADS,
    text=PAYLOADS,
)
def test_any_payload_stays_inside_its_element(
    threads: dict[str, list[tuple[str, str]]], thread_id: str, sender: str, text: str
) -> None:
    built = {
        name: make_thread(name, *(make_message(seq, who, said) for seq, (who, said) in enumerate(messages)))
        for name, messages in threads.items()
    }
    root = parse(PROMPT.render(built, thread_id, make_message(999, sender, text)))

    assert [child.tag for child in root] == ["threads", "current_interaction"]
    found = {
        # Two IDs may be equal after they are sanitized, so the test compares lists.
        "threads": [
            (
                thread.get("id"),
                [(message.get("sender"), [(c.tag, c.text or "") for c in message]) for message in thread],
            )
            for thread in root[0]
        ],
        "current": [(child.tag, child.get("sender")) for child in root[1]],
        "id": root[1][0].text or "",
        "text": [(child.tag, child.text or "") for child in root[1][1]],
    }
    assert found == {
        "threads": [
            (
                seen_attribute(name),
                [(seen_attribute(who), [("content", seen(said))]) for who, said in messages],
            )
            for name, messages in threads.items()
        ],
        "current": [("incoming_thread_id", None), ("incoming_message", seen_attribute(sender))],
        "id": seen(thread_id),
        "text": [("content", seen(text))],
    }


@given(
    threads=st.dictionaries(PAYLOADS, st.lists(st.tuples(PAYLOADS, PAYLOADS), min_size=1, max_size=4), max_size=4),
    thread_id=PAYLOADS,
    sender=PAYLOADS,
    text=PAYLOADS,
)
def test_any_payload_stays_inside_its_element_of_a_lean_prompt(
    threads: dict[str, list[tuple[str, str]]], thread_id: str, sender: str, text: str
) -> None:
    built = {
        name: make_thread(name, *(make_message(seq, who, said) for seq, (who, said) in enumerate(messages)))
        for name, messages in threads.items()
        if messages
    }
    root = parse(LEAN.render(built, thread_id, make_message(999, sender, text, thread_id=thread_id)))
    own = [said for name, messages in threads.items() if name == thread_id for _, said in messages]
    lines = [messages[-1][1] for name, messages in threads.items() if name != thread_id and messages]
    expected = [seen(said) for said in own] + [seen(shorten(said, MAX_LINE_CHARS)) for said in lines]
    assert [child.tag for child in root] == [*(["threads"] if built else []), "current_interaction"]
    assert [it.text or "" for it in root.iter("content")] == [*expected, seen(text)]
    places = ["incoming_thread_id"] if built else []
    assert [child.tag for child in root[-1]] == [*places, "incoming_message"]
    assert {it.tag for it in root.iter()} <= TAGS


@pytest.mark.parametrize(
    "hidden",
    [
        "\xad",
        "\u034f",
        "\u061c",
        "\u115f",
        "\u1160",
        "\u17b4",
        "\u180e",
        "\u200c",
        "\u200d",
        "\u200e",
        "\u200f",
        "\u2064",
        "\u2065",
        "\u3164",
        "\uffa0",
        "\ufff0",
        "\ufffb",
        "\ufe00",
        "\ufdd0",
        "\U0001bca0",
        "\U0001d173",
        "\U000e0100",
        "\udc00",
        "\x00",
        "\x1b",
        "\x7f",
        "\x9b",
        "\u202e",
        "\u2066",
        "\u200b",
        "\ufeff",
        "\U000e0041",
        "\ufffe",
    ],
)
def test_what_a_reader_cannot_see_is_removed(hidden: str) -> None:
    assert sanitize_text(f"a{hidden}b") == "ab"


@pytest.mark.parametrize(
    "text",
    [
        "naïve",
        "می‌خواهم",
        "👩‍💻 ❤️",
        "שלום",
        "日本語",
        "1️⃣",
        "👨‍👩‍👧‍👦",
        "🏳️‍🌈",
        "👩🏽‍🚀",
        "❤️‍🔥",
        "क्‍ष",
        "ශ්‍රී",
        "葛󠄀"[:1],
        "ᠮᠤᠩᠭᠣᠯ",
        "a\tb\nc",
        "𝔘",
    ],
)
def test_what_languages_are_written_with_is_kept(text: str) -> None:
    assert sanitize_text(text) == text


@pytest.mark.parametrize("end", ["\r\n", "\r", "\x85", "\u2028", "\u2029"])
def test_every_line_end_becomes_a_newline(end: str) -> None:
    assert sanitize_text(f"a{end}b") == "a\nb"


def test_text_representation_goes_before_content_and_data_is_written_as_lines() -> None:
    shown = make_message(1, content={"rows": 3}, text_representation="three rows")
    plain = make_message(2, content={"rows": 3, "ok": True})
    root = parse(PROMPT.render({"t": make_thread("t", shown, plain)}, "t", make_message(3)))
    assert [content.text for content in root.iter("content")] == ["three rows", "rows: 3\nok: true", "hello"]


def test_quotes_in_a_text_stay_readable() -> None:
    assert '<content>it\'s "fine"</content>' in PROMPT.render({}, "t", make_message(1, content='it\'s "fine"'))


def test_the_system_prompt_is_the_same_for_every_message() -> None:
    assert render_system_prompt("Be brief.", "bob") == render_system_prompt("Be brief.", "bob")
    assert render_system_prompt("Use <b> & 'quotes'.", "bob").startswith("Use <b> & 'quotes'.")
    assert '"bob"' in render_system_prompt("Be brief.", "bob")


# --- user templates


def write(tmp_path: Path, source: str) -> Path:
    path = tmp_path / "own.jinja"
    path.write_text(source, encoding="utf-8")
    return path


SEED_STYLE = """
{% for thread_id, thread in message_threads.items() %}<thread id='{{ thread_id }}'>
{%- for message in thread.messages[-10:] %}<m>{{ message.text_representation or message.content }}</m>{% endfor %}</thread>
{%- endfor %}{% autoescape false %}<in>{{ incoming_message.content }}</in>{% endautoescape %}"""


@pytest.fixture(scope="module")
def seed_style(tmp_path_factory: pytest.TempPathFactory) -> ConversationPrompt:
    return ConversationPrompt(write(tmp_path_factory.mktemp("template"), SEED_STYLE))


@given(text=st.text(alphabet=string.printable + "\x00\u202e\ud800", max_size=30))
def test_a_template_of_the_users_escapes_too_even_where_it_says_not_to(
    seed_style: ConversationPrompt, text: str
) -> None:
    threads = {text: make_thread(text, make_message(1, content=text))}
    rendered = seed_style.render(threads, "t", make_message(2, content=text))
    root = ElementTree.fromstring(f"<all>{rendered}</all>")
    assert [child.tag for child in root.iter()] == ["all", "thread", "m", "in"]
    assert (root[1].text or "") == seen(text)


def test_a_template_replaces_the_shipped_one(tmp_path: Path) -> None:
    prompt = ConversationPrompt(write(tmp_path, "{{ incoming_message.sender_id }} says {{ incoming_message.content }}"))
    assert prompt.render({}, "t", make_message(1, content={"a": ["<"]})) == "mia says {&#34;a&#34;: [&#34;&lt;&#34;]}"


@pytest.mark.parametrize(
    ("source", "line", "words"),
    [
        ("ok\n{% for x in %}", 2, "has a syntax error"),
        ("{{ incoming_mesage.text }}", None, "'incoming_mesage' is undefined"),
        ("{{ incoming_message.txet }}", None, "txet"),
        ("{{ incoming_message.__class__.__mro__ }}", None, "unsafe"),
        ("{{ incoming_message.content | safe }}", 1, "safe"),
        ("{{ message_threads.clear() }}", None, "unsafe"),
        ("{{ 1 // 0 }}", None, "zero"),
        ("{% include '/etc/passwd' %}", None, "no loader"),
    ],
)
def test_a_wrong_template_is_refused_when_it_is_loaded(
    tmp_path: Path, source: str, line: int | None, words: str
) -> None:
    path = write(tmp_path, source)
    with pytest.raises(ConfigError, match=re.escape(words)) as refused:
        ConversationPrompt(path)
    assert (refused.value.path, refused.value.line) == (path, line)


def test_a_missing_template_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "none.jinja"))):
        ConversationPrompt(tmp_path / "none.jinja")


# --- selection and order of messages


def test_the_incoming_message_is_not_repeated_in_its_thread() -> None:
    trigger = make_message(5, content="now", thread_id="t")
    threads = select_threads(
        [make_thread("t", make_message(4, content="before"), trigger)], trigger, max_threads=20, per_thread=10
    )
    assert [message.seq for message in threads["t"].messages] == [4]
    assert (
        PROMPT.render(threads, "t", trigger).count("now")
        - PROMPT.render({}, "t", make_message(5, content="-")).count("now")
        == 1
    )


def test_a_thread_without_other_messages_is_left_out() -> None:
    trigger = make_message(5, thread_id="t")
    assert select_threads([make_thread("t", trigger)], trigger, max_threads=20, per_thread=10) == {}


def test_threads_stand_in_the_order_of_the_first_message_that_is_shown() -> None:
    trigger = make_message(9, thread_id="t")
    given_threads = [
        make_thread("t", make_message(1, thread_id="t"), trigger), make_thread("new", make_message(3), make_message(8)), make_thread("old", make_message(2)),
    ]  # fmt: skip
    for order in (given_threads, given_threads[::-1]):
        assert list(select_threads(order, trigger, max_threads=20, per_thread=10)) == ["t", "old", "new"]
        assert list(select_threads(order, trigger, max_threads=20, per_thread=1)) == ["t", "old", "new"]
        assert list(select_threads(order, trigger, max_threads=2, per_thread=10)) == ["t", "new"]


@pytest.mark.parametrize("held", [31, 500])
def test_a_window_grows_from_its_least_to_its_most_and_is_then_cut_back(held: int) -> None:
    """The thread grows by one message at a time. The hub returns the newest ``held`` messages and the number of
    omitted ones.
    """
    window, beginnings = GrowingWindow(10, 30), []
    for there in range(1, 200):
        trigger = make_message(1000, thread_id="t")
        found = [make_message(seq) for seq in range(1, there + 1)]
        thread = make_thread("t", *found[-held:], omitted=max(0, there - held))
        shown = select_threads([thread], trigger, max_threads=20, per_thread=window)["t"]
        seqs = [message.seq for message in shown.messages]
        assert seqs == list(range(there - len(seqs) + 1, there + 1))
        assert min(10, there) <= len(seqs) <= 30
        assert shown.omitted == there - len(seqs)
        beginnings.append(seqs[0])
    assert [(seq, beginnings.count(seq)) for seq in sorted({*beginnings})][:3] == [(1, 30), (22, 21), (43, 21)]


def test_threads_and_messages_are_bounded_and_the_newest_stay() -> None:
    trigger = make_message(1000, thread_id="t0")
    given_threads = [
        make_thread(f"t{i}", *(make_message(i * 20 + n, thread_id=f"t{i}") for n in range(15)), omitted=2)
        for i in range(30)
    ]
    threads = select_threads(given_threads, trigger, max_threads=20, per_thread=10)
    assert list(threads) == ["t0", *(f"t{i}" for i in range(11, 30))]
    assert [message.seq for message in threads["t11"].messages] == list(range(225, 235))
    assert threads["t11"].omitted == 7
    assert list_manifest(threads.values(), trigger) == sorted(
        {1000} | {m.seq for thread in threads.values() for m in thread.messages}
    )


def test_a_template_is_compiled_once_for_all_its_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_template = Environment.compile

    def compile_and_tell(self: Environment, source: str, *arguments: Any, **options: Any) -> Any:
        compiled.append(source)
        return compile_template(self, source, *arguments, **options)

    monkeypatch.setattr(Environment, "compile", compile_and_tell)
    path = tmp_path / "mine.jinja"
    path.write_text("{{ incoming_thread_id }}, as nobody else says it")
    ConversationPrompt()
    ConversationPrompt(path)
    ConversationPrompt(path)
    assert compiled == ["{{ incoming_thread_id }}, as nobody else says it"]
