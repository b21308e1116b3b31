"""Tests of the pytest plugin as a user has it: in a separate folder and a separate pytest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from roundelay.agents.models.model import ModelRequest
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import Answer, finish, send
from roundelay.network.errors import ConfigError
from roundelay.simulation import SimulationError
from roundelay.testing.networks import NetworkUnderTest, said
from tests.support.forks import run_python

DESK = {"when": {"from": "mia"}, "do": [{"send": {"to": "finance", "text": "{{ text }}"}}, {"finish": "asked"}]}
BACK = {"when": {"from": "finance"}, "do": [{"send": {"to": "mia", "text": "Finance: {{ text }}"}}, {"finish": "done"}]}
FINANCE = {"when": {"from": "desk"}, "do": [{"send": {"to": "desk", "text": "Approved, 40 EUR"}}, {"finish": "done"}]}

FIRST = """\
    def test_a_refund_is_approved(network):
        network.agent("finance", {"when": {"from": "desk"}, "do": [{"send": {"to": "desk", "text": "Approved, 40 EUR"}}]})
        network.agent("desk",
            {"when": {"from": "mia"}, "do": [{"send": {"to": "finance", "text": "{{ text }}"}}]},
            {"when": {"from": "finance"}, "do": [{"send": {"to": "mia", "text": "You get 40 EUR back."}}]})
        mia = network.person("mia")
        mia.send("desk", "Refund order 12 please")
        network.idle()
        assert mia.heard == ["You get 40 EUR back."]
"""


def run_pytest(folder: Path, *arguments: str, finds_plugins: bool = False, **files: str) -> tuple[int, str]:
    """Run a separate pytest. With ``finds_plugins``, it finds the plugin as a user's pytest does. Otherwise, the
    plugin is named, which is faster.
    """
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(dedent(text), encoding="utf-8")
    chosen = ["-p", "no:asyncio", "-p", "no:langsmith_plugin"] if finds_plugins else ["-p", "roundelay.pytest_plugin"]
    command = ["-m", "pytest", "-p", "no:cacheprovider", "--color=no", *chosen, *arguments]
    if finds_plugins:
        done = subprocess.run(
            [sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False, timeout=100
        )
    else:
        done = run_python(*command, cwd=folder, env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    return done.returncode, done.stdout + done.stderr


def test_a_first_test_needs_ten_lines_and_no_configuration(tmp_path: Path) -> None:
    code, out = run_pytest(tmp_path, "--strict-markers", "-W", "error", finds_plugins=True, test_first__py=FIRST)
    assert code == 0, out
    assert "1 passed" in out
    assert len(FIRST.splitlines()) <= 10


def test_what_was_not_said_fails_with_what_was(tmp_path: Path) -> None:
    text = (
        FIRST
        + """\
        from roundelay.testing import said
        assert said("desk", "mia", "45 EUR") in network.messages
    """
    )
    code, out = run_pytest(tmp_path, test_first__py=text)
    assert code == 1
    assert "nobody said: desk -> mia: 45 EUR" in out
    assert re.search(r"nearest: #\d+ desk -> mia: You get 40 EUR back", out)
    assert re.search(r"what was said:\nE +#\d+ mia -> desk: Refund order 12 please", out)


def test_scenario_files_are_tests_and_their_failures_tell_all(tmp_path: Path) -> None:
    good = """\
        scenario: People talk
        people: [mia, bob]
        seed: 4
        steps:
          - {as: mia, to: bob, send: hello}
        expect:
          - message: {from: mia, to: bob, contains: hello}
    """
    desk = "seed: 4\n        agents: {desk: {file: desk.yaml, model: {replay: desk.jsonl}}}"
    code, out = run_pytest(
        tmp_path,
        "--scenario-seeds", "2", "-v", "-rP",
        good__scenario__yaml=good,
        bad__scenario__yaml=good.replace("contains: hello", "contains: goodbye"),
        wrong__scenario__yaml=good.replace("people:", "poeple:"),
        unheard__scenario__yaml=good.replace("seed: 4", desk),
        desk__yaml="id: desk\ninstruction: x\nmodel: {rules: []}\n",
        desk__jsonl='{"text": "Hello"}\n',
    )  # fmt: skip
    assert code != 0
    assert "good.scenario.yaml::seed-4 PASSED" in out
    assert "good.scenario.yaml::seed-5 PASSED" in out
    assert "bad.scenario.yaml::seed-4 FAILED" in out
    assert "bad.scenario.yaml:7: expect message" in out
    assert "Again: roundelay scenario run" in out
    assert 'wrong.scenario.yaml:2: unknown key "poeple"; did you mean "people"?' in out
    assert "wrong.scenario.yaml::read FAILED" in out
    assert "unheard.scenario.yaml::seed-4 PASSED" in out
    assert re.search(r"desk did not ask for all of its tape \S*desk.jsonl; turns left: 1", out)
    assert "Traceback" not in out
    code, out = run_pytest(tmp_path, "-o", "roundelay_scenarios=false")
    assert "no tests ran" in out


def test_marks_choose_seed_and_clock_and_real_models_are_refused(tmp_path: Path) -> None:
    text = """\
        import pytest

        @pytest.mark.roundelay(seed=9, clock="real")
        def test_setting(network):
            assert (network.setting.seed, network.setting.is_virtual) == (9, False)

        def test_real_model(network):
            network.agent("desk", file="desk.yaml")

        @pytest.mark.roundelay(sed=9)
        def test_no_such_setting(network):
            pass

        @pytest.mark.roundelay(9)
        def test_no_name(network):
            pass

        @pytest.mark.roundelay(clock="slow")
        def test_no_such_clock(network):
            pass

        async def test_async(network):
            network.person("mia")
    """
    desk = "id: desk\ninstruction: x\nmodel: {openai: {name: gpt-4o-mini}}\n"
    code, out = run_pytest(tmp_path, "--strict-markers", "-k", "not async", test_it__py=text, desk__yaml=desk)
    assert code == 1
    assert re.search(r"1 failed, 1 passed,.* 3 errors", out)
    assert "the agent desk would ask a real model" in out
    assert "in pytest: the mark roundelay_real_models" in out
    assert "test_no_such_setting: there is no setting 'sed'" in out
    assert "test_no_name: name the setting, as in roundelay(seed=7)" in out
    assert "test_no_such_clock: there is no clock 'slow'" in out


def test_importing_the_plugin_loads_nothing_of_the_package() -> None:
    code = "import roundelay.pytest_plugin, sys; print(*(it for it in sys.modules if it.startswith('roundelay')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"roundelay", "roundelay.lazy", "roundelay.pytest_plugin"}


@pytest.mark.roundelay_processes
def test_real_processes_have_the_same_conversation_and_survive_kills(network: NetworkUnderTest) -> None:
    network.agent("finance", FINANCE)
    network.agent("desk", DESK, BACK)
    mia = network.person("mia")
    mia.send("desk", "Refund order 12")
    network.idle()
    assert mia.heard == ["Finance: Approved, 40 EUR"]
    network.kill("finance")
    mia.send("desk", "Refund order 13")
    network.wait_for(said("desk", "finance", "13"))
    network.restart_hub()
    network.restart("finance")
    network.idle()
    assert mia.heard == ["Finance: Approved, 40 EUR"] * 2
    assert network.why(mia.messages[-1]) == [
        "mia -> desk: Refund order 13",
        "desk -> finance: Refund order 13",
        "finance -> desk: Approved, 40 EUR",
        "desk -> mia: Finance: Approved, 40 EUR",
    ]
    network.expect({"no_dead_letters": True}, {"reaction": {"agent": "finance", "count": 2}})
    with pytest.raises(SimulationError, match="desk is running already"):
        network.agent("desk", DESK)
    with pytest.raises(SimulationError, match="The agent nobody was never started"):
        network.restart("nobody")


@pytest.mark.roundelay_processes
@pytest.mark.full
def test_a_process_that_prints_much_is_not_held_up(network: NetworkUnderTest, tmp_path: Path) -> None:
    (tmp_path / "much.py").write_text("def talk() -> str:\n    print('x' * 2_000_000)\n    return 'said'\n")
    (tmp_path / "loud.yaml").write_text(
        "id: loud\ninstruction: x\ntools: ['much:talk']\n"
        "model: {rules: [{do: [{tool: talk}]}, {when: {turn: 2}, do: [{say: done}]}]}\n"
    )
    network.agent("loud", file=tmp_path / "loud.yaml")
    mia = network.person("mia")
    mia.send("loud", "talk")
    network.wait_for(said("loud", "mia", "done"), at_most_s=20)


def test_agents_are_rules_functions_files_and_runners(network: NetworkUnderTest, tmp_path: Path) -> None:
    def answer(request: ModelRequest) -> Answer:
        view = read_prompt(request)
        return finish() if view.turn > 1 else [send(view.incoming_sender, "by a function"), finish()]

    (tmp_path / "file.yaml").write_text("id: file\ninstruction: x\nmodel: {rules: [{do: [{say: by a file}]}]}\n")
    network.agent("rules", {"do": [{"say": "by rules"}]})
    network.agent("function", script=answer)
    network.agent("file", file=tmp_path / "file.yaml")
    mia = network.person("mia")
    for agent_id in ("rules", "function", "file"):
        mia.send(agent_id, "how?")
        network.idle()
    assert mia.heard == ["by rules", "by a function", "by a file"]
    assert [it.agent_id for it in network.reactions] == ["rules", "function", "file"]
    assert "how?" in network.prompts("rules")[0]
    with pytest.raises(ConfigError, match="did you mean"):
        network.agent("wrong", {"do": [{"say": "x"}]}, visibilty="all")
    for options in ({}, {"script": answer}, {"file": tmp_path / "file.yaml"}):
        with pytest.raises(ConfigError, match="'A B' is not a valid agent id"):
            network.agent("A B", **options)


def test_transcripts_reasons_and_expectations(network: NetworkUnderTest) -> None:
    network.agent("finance", FINANCE)
    network.agent("desk", DESK, BACK)
    mia = network.person("mia")
    mia.send("desk", "Refund order 12")
    network.idle()
    assert network.transcript == [
        "mia -> desk: Refund order 12",
        "desk -> finance: Refund order 12",
        "finance -> desk: Approved, 40 EUR",
        "desk -> mia: Finance: Approved, 40 EUR",
    ]
    assert network.why(mia.messages[0]) == network.transcript
    assert said("desk", "mia") in network.messages
    assert said("boss") not in network.messages
    network.expect({"message": {"from": "desk", "to": "mia"}}, {"hops": {"exactly": 3}})
    with pytest.raises(AssertionError, match=r"(?s)the longest chain has 3 hops.*what was said:"):
        network.expect({"hops": {"at_most": 1}})


def test_faults_and_time_are_the_tests_own(network: NetworkUnderTest) -> None:
    network.agent("finance", FINANCE)
    network.agent("desk", DESK, BACK)
    mia = network.person("mia")
    network.kill("finance")
    mia.send("desk", "Refund order 12")
    network.wait(3600)
    assert mia.heard == []
    network.restart_hub()
    network.disconnect("desk")
    network.restart("finance")
    network.idle()
    assert mia.heard == ["Finance: Approved, 40 EUR"]
    with pytest.raises(SimulationError, match="nobody is not running"):
        network.kill("nobody")
    with pytest.raises(TimeoutError):
        network.wait_for(said("boss"), at_most_s=1)


def test_a_thread_has_its_members(network: NetworkUnderTest) -> None:
    mia, bob, boss = [network.person(it) for it in ("mia", "bob", "boss")]
    mia.send(network.thread("pay", "mia", "boss"), "5%")
    network.idle()
    assert (bob.heard, boss.heard) == ([], ["5%"])
    boss.reply(boss.messages[0], "fine")
    network.idle()
    assert mia.heard == ["fine"]


async def test_an_async_test_is_told_to_be_a_plain_one() -> None:
    with pytest.raises(SimulationError, match='plain "def"'):
        NetworkUnderTest().__enter__()
