"""Tests of the strict parsing of scenario files: an error names the line, and suggests what was probably meant."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from roundelay.network.errors import ConfigError
from roundelay.testing import load_scenario
from roundelay.testing.form import WaitStep

GOOD = """\
scenario: Good
agents:
  desk:
    script:
      - when: {from: mia}
        do: [{finish: done}]
people: [mia, boss]
threads:
  pay: {members: [boss, desk]}
steps:
  - {as: mia, to: desk, send: hello}
  - wait: {until: idle, at_most: 90s}
expect:
  - message: {from: mia, to: desk}
"""


def read(tmp_path: Path, text: str) -> str:
    """Return the error for a file without its folder, or an empty string."""
    path = tmp_path / "it.scenario.yaml"
    path.write_text(dedent(text), encoding="utf-8")
    try:
        load_scenario(path)
    except ConfigError as error:
        return str(error).replace(f"{tmp_path}/", "")
    return ""


def test_a_good_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "it.scenario.yaml"
    path.write_text(GOOD, encoding="utf-8")
    scenario = load_scenario(path)
    assert (scenario.name, scenario.head.seed, scenario.head.people) == ("Good", 0, ("mia", "boss"))
    assert [placed.place.line for placed in scenario.steps] == [11, 12]
    wait = scenario.steps[1].step.wait
    assert isinstance(wait, WaitStep)
    assert wait.at_most == 90


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("people:", "poeple:", 7, 'unknown key "poeple"; did you mean "people"?'),
        ("steps:", "stpes:", 10, 'unknown key "stpes"; did you mean "steps"?'),
        ("send: hello", "sned: hello", 11, 'unknown key "sned"; did you mean "send"?'),
        ("at_most: 90s", "atmost: 90s", 12, 'unknown key "atmost"; did you mean "at_most"?'),
        ("at_most: 90s", "at_most: soon", 12, 'a time like "500ms"'),
        ("until: idle", "until: silent", 12, "idle"),
        ("wait: {until: idle, at_most: 90s}", "wait: soon", 12, 'a time like "500ms"'),
        ("wait: {until: idle, at_most: 90s}", "wait: -5", 12, "a time from 0 to 366 days, not -5"),
        ("wait: {until: idle, at_most: 90s}", "wait: 400d", 12, "a time from 0 to 366 days, not 400d"),
        ("{as: mia, to: desk, send: hello}", "{join: {who: mia, thred: pay}}", 11, 'did you mean "thread"?'),
        ("{from: mia, to: desk}", "{from: mia, count: {atleast: 2}}", 14, 'did you mean "at_least"?'),
        ("message: {from: mia", "message: {form: mia", 14, 'unknown key "form"'),
        ("- message: {from: mia, to: desk}", "- mesage: {}", 14, 'unknown key "mesage"; did you mean "message"?'),
        ("to: desk, send", "to: deks, send", 11, 'no participant or thread "deks" in this scenario; did you mean desk?'),
        ("{as: mia,", "{as: mai,", 11, 'no participant "mai" in this scenario; did you mean mia?'),
        ("{as: mia, to: desk, send: hello}", "{to: desk, send: hello}", 11, 'has no "as"'),
        ("{as: mia, to: desk, send: hello}", "{as: mia, send: hello}", 11, 'exactly one of "to", "in"'),
        ("{as: mia, to: desk, send: hello}", "{kill: mia}", 11, 'no agent "mia"'),
        ("{as: mia, to: desk, send: hello}", "{kill: desk, as: mia}", 11, "has as, which does not belong to kill"),
        ("{as: mia, to: desk, send: hello}", "{send: hello, wait: idle}", 11, "must be exactly one of send, wait"),
        ("{as: mia, to: desk, send: hello}", "{repeat: {times: 2}}", 11, '"repeat" needs "steps"'),
        ("{as: mia, to: desk, send: hello}", "{repeat: {steps: [{wait: 1s}]}}", 11, "exactly one of times, each"),
        ("{as: mia, to: desk, send: hello}", "{parallel: [{wait: 1s}, {wiat: 1s}]}", 11, 'unknown key "wiat"'),
        ("{from: mia, to: desk}", "{from: mia, to: nobody}", 14, 'no participant or thread "nobody"'),
        ("{from: mia, to: desk}", "{from: mia, regex: '('}", 14, "not a valid regular expression"),
        ("- message: {from: mia, to: desk}", "- order: [mia to desk]", 14, 'write "sender -> receiver"'),
        ("- message: {from: mia, to: desk}", "- {no_dead_letters: false}", 14, "no_dead_letters"),
        ("- message: {from: mia, to: desk}", "- cost: {agent: desk}", 14, "must have tokens or model_calls"),
        ("- message: {from: mia, to: desk}", "- mod: {op: channels.list}", 14, "exactly one of equals, contains"),
        ("members: [boss, desk]", "members: [boss, dusk]", 9, 'no participant "dusk"'),
        ("- message: {from: mia, to: desk}", "- thread: {id: pey, members: []}", 14, 'no thread "pey" in this scenario; did you mean pay?'),
        ("      - when: {from: mia}", "      - whne: {from: mia}", 5, 'unknown key "whne"'),
        ("    script:", "    file: no.yaml\n    script:", 3, "exactly one of file, script"),
        ("  desk:", "  hub:", 3, '"hub" means the hub itself'),
        ("people: [mia, boss]", "people: [mia, boss, desk]", 3, "an agent and one of the people"),
        ("    script:\n      - when: {from: mia}\n        do: [{finish: done}]", "    visibility: strict", 3, "exactly one of file, script"),
        ("people: [mia, boss]", "people: [mia, boss]\nservices: [crm, boss]", 1, '"boss" is listed twice'),
        ("people: [mia, boss]", "people: [mia, boss]\nservices: [desk]", 3, "an agent and one of the services"),
        ("people: [mia, boss]", "people: [mia, boss]\noperators: [bos]", 1, 'the operator "bos" is not listed under people or services'),
        ("people: [mia, boss]", "people: [mia, boss]\nnode: no.yaml", 8, "it.scenario.yaml:8: the node's file no.yaml does not exist"),
        ("people: [mia, boss]", "people: [mia, boss]\nnode: no.yaml\nvisibility: all", 1, "has visibility, which belongs in the node's file"),
        ("{as: mia, to: desk, send: hello}", "{as: mia, to: [desk, boos], send: hello}", 11, 'no participant or thread "boos" in this scenario; did you mean boss?'),
        ("{as: mia, to: desk, send: hello}", "{as: mia, to: broadcast, exclude: [boos], send: hello}", 11, "did you mean boss?"),
        ("{as: mia, to: desk, send: hello}", "{as: mia, to: desk, requires_response: [dusk], send: hello}", 11, "did you mean desk?"),
        ("{as: mia, to: desk, send: hello}", "{wait: idle, save: it}", 11, "has save, and waits for no message"),
        ("{as: mia, to: desk, send: hello}", "{if: n > 3}", 11, '"if" has "then"'),
        ("{as: mia, to: desk, send: hello}", "{if: n = 1, then: [{wait: 1s}]}", 11, "write an expression, such as n == 1, or an expectation"),
        ("{as: mia, to: desk, send: hello}", "{if: '{{ n }}', then: [{wait: 1s}]}", 11, "write it without braces"),
        ("{as: mia, to: desk, send: hello}", "{if: {message: {form: mia}}, then: [{wait: 1s}]}", 11, 'unknown key "form"'),
        ("{as: mia, to: desk, send: hello}", "{if: n, then: [{wait: 1s}], else: [{wiat: 1s}]}", 11, 'unknown key "wiat"'),
        ("{as: mia, to: desk, send: hello}", "{repeat: {each: [1], until: n, steps: [{wait: 1s}]}}", 11, "has until, and so needs times"),
        ("{as: mia, to: desk, send: hello}", "{repeat: {times: 2, until: {never: {from: mai}}, steps: [{wait: 1s}]}}", 11, "did you mean mia?"),
        ("{as: mia, to: desk, send: hello}", "{as: boss, decide: {agent: desk}}", 11, "must have exactly one of approve, deny, edit"),
        ("{as: mia, to: desk, send: hello}", "{as: boss, decide: {approve: ever}}", 11, "always"),
        ("{as: mia, to: desk, send: hello}", "{as: mia, take: dsk}", 11, "did you mean desk?"),
        ("{as: mia, to: desk, send: hello}", "{give: desk}", 11, 'has no "as": who gives it?'),
        ("{as: mia, to: desk, send: hello}", "{decide: approve}", 11, 'has no "as": who decides it?'),
        ("- message: {from: mia, to: desk}", "- never_in_prompt: {agent: [desk, dusk], text: x}", 14, "did you mean desk?"),
        ("- message: {from: mia, to: desk}", "- prompts: {marks: [A], hold: {desk: [B]}}", 14, 'lets desk hold "B", which is none of the marks'),
        ("- message: {from: mia, to: desk}", "- prompts: {marks: [A], hold: {dusk: [A]}}", 14, "did you mean desk?"),
        ("- message: {from: mia, to: desk}", "- state: {path: x}", 14, "must have exactly one of equals, contains, changed"),
        ("expect:\n  - message: {from: mia, to: desk}", "", 1, 'a scenario has "expect"'),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, old: str, new: str, line: int, said: str) -> None:
    assert old in GOOD
    error = read(tmp_path, GOOD.replace(old, new))
    assert error.startswith(f"it.scenario.yaml:{line}: ")
    assert said in error


def test_a_file_without_anything_says_what_a_scenario_is(tmp_path: Path) -> None:
    assert "a scenario is a mapping" in read(tmp_path, "")
