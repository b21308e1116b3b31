"""Tests of promises P6 and P7 with real processes: an agent's process is killed at every point of its reaction, and
another process continues. docs/promises.md.

The hub is a process with its file, and the agent is one with the `openai` SDK. The test controls their traffic and
the model's server, so that each kill happens at exactly the intended point.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from tests.crash.agent_evidence import Evidence, Point, points_of, tool_result
from tests.crash.agent_lives import Replies, Stage, stage
from tests.crash.agent_process import SUPERSEDED
from tests.support.counts import Note

BEGINNING = points_of("delivery", "started", "model 1", "model_reply 1")
RINGING = points_of("tool_started 1.0", "ring", "tool_result 1.0")
SPEAKING = points_of(
    "model 2", "model_reply 2", "tool_started 2.0", "tool_started 2.1", "tool_started 2.2", "weigh", "send agent:bob", "post",
    "tool_result 2.0", "tool_result 2.1", "tool_result 2.2",
)  # fmt: skip
APART = SPEAKING[:-9]
"""Steps that are not stored together with the end."""
ENDING = points_of("model 3", "model_reply 3", "send agent:mia", "finished")
ERRAND = BEGINNING + RINGING + SPEAKING + ENDING
FIRST = ("model_reply 1", "tool_started 1.0")
SECOND = ("model_reply 2", "tool_started 2.0", "tool_started 2.1", "tool_started 2.2")
LAST = ("tool_result 2.0", "tool_result 2.1", "tool_result 2.2", "model_reply 3", "send agent:mia", "finished")
"""Steps that are stored in one commit, so that a kill affects all of them."""
ASKED_AGAIN = {
    *(Point(f"model {turn}", "before") for turn in (1, 2, 3)),
    *(Point(f"model {turn}", "after") for turn in (1, 2, 3)),
    *(Point(step, "before") for step in (*FIRST, *SECOND, *LAST)),
}
"""Points at which the reply was lost together with the process. At all other points, the ledger has the reply, or it
was not requested.
"""
NOT_RUNG = {*(Point(step, when) for step in FIRST for when in ("unanswered", "after")), Point("ring", "before")}
"""Points at which the call had started but the bell had not rung. Nobody can know this afterwards, so the bell never
rings.
"""
UNKNOWN = {*NOT_RUNG, Point("ring", "after"), Point("tool_result 1.0", "before")}

ASK = points_of("tool_started 1.0", "asking 1.0", "send agent:bob", "waiting 1.0")
ASK_ANSWERED = points_of("reply", "tool_result 1.0", "model_reply 2", "send agent:mia", "finished")


# -- checks


def check(evidence: Evidence) -> None:
    """Check the rules that hold for every kill and any number of kills."""
    word, kinds = evidence.word, evidence.ledgers[-1].count()
    if word.startswith("errand"):
        said = {("agent:bob", f"{word}, bob"), ("channel:dev", f"{word}, dev"), ("agent:mia", f"{word}, done")}
        turns = 3
        assert kinds == {"started": 1, "model_reply": 3, "tool_started": 4, "tool_result": 4, "finished": 1}
        check_once(evidence)
    else:
        said = {("agent:bob", f"{word}?"), ("agent:mia", f'{word}, done: <answer sender="bob">{word}?!</answer>')}
        turns = 2
        assert kinds == {
            "started": 1, "model_reply": 2, "tool_started": 1, "asking": 1, "waiting": 1, "tool_result": 1, "finished": 1,
        }  # fmt: skip
    assert evidence.messages == dict.fromkeys(said, 1)
    known: set[int] = set()
    for life, ledger in enumerate(evidence.ledgers):
        asked = evidence.turns(life)
        assert known.isdisjoint(asked), "a reply that is in the ledger was asked for again"
        assert len(set(asked)) == len(asked)
        known = ledger.turns()
    assert known == set(range(1, turns + 1))
    assert asked_again(evidence) <= evidence.kills
    ends = [it["body"]["status"] for it in evidence.ledgers[-1].records if it["kind"] == "finished"]
    assert ends == ["finished"]


def check_once(evidence: Evidence) -> None:
    """Check that the bell rang at most once, and that the reported result matches the records."""
    is_unknown = any(it.has("tool_started", 1, 0) and not it.has("tool_result", 1, 0) for it in evidence.ledgers)
    for request in evidence.requests(2):
        told = tool_result(request)
        assert "unknown, and it was not repeated" in told if is_unknown else told == "It rang."
    assert evidence.rings <= 1
    assert evidence.rings == 1 or is_unknown


def brief(points: Sequence[Point]) -> list[Point]:
    """Leave out points that are nearly equal to others: the second parallel call, and the moment after an answer."""
    return [
        point
        for point in points
        if point.what[-3:] not in ("2.1", "2.2")
        and not (point.when == "after" and point._replace(when="unanswered") in points)
    ]


def asked_again(evidence: Evidence) -> int:
    """Return the number of requests beyond one for each turn."""
    turns = [turn for life in range(len(evidence.asked)) for turn in evidence.turns(life)]
    return len(turns) - len(set(turns))


def is_unknown(evidence: Evidence) -> bool:
    """Whether a request reported to the model that the result of the ring is unknown."""
    return evidence.word.startswith("errand") and "unknown" in tool_result(evidence.requests(2)[-1])


def check_all(ground: Stage, course: Sequence[Evidence]) -> Counter[str]:
    """Check the rules for all reactions together. Return the counts."""
    said = sum((it.messages for it in course), Counter[tuple[str, str]]())
    rows = [row for row in ground.export() if row["type"] == "message" and row["actor"] == "ann"]
    assert len(rows) == said.total()
    to_mia = {text: count for (to, text), count in said.items() if to != "agent:bob"}
    assert ground.heard.keys() <= to_mia.keys()
    assert set(ground.heard.values()) == {1}
    assert ground.strays == [], "something woke the agent that should not"
    for life in ground.lives:
        assert "Traceback" not in life.told(), life.told()
        assert " ERROR " not in life.told(), life.told()
    return Counter(
        reactions=len(course),
        kills=sum(it.kills for it in course),
        sends=len(said),
        stored=len(rows),
        requests=sum(len(life) for it in course for life in it.asked),
        asked_again=sum(map(asked_again, course)),
        rings=sum(it.rings for it in course),
        told_unknown=sum(map(is_unknown, course)),
        finished=sum(it.ledgers[-1].count()["finished"] for it in course),
    )


# -- every boundary


async def _kill_everywhere(folder: Path, note: Note, points: Sequence[Point], *, rounds: int) -> None:
    course = []
    async with stage(folder) as ground:
        for number in range(rounds):
            for point in points:
                print(f"killed at {point}")
                evidence = await ground.react(f"errand {number} {point.what} {point.when}", [point])
                check(evidence)
                assert evidence.kills == 1
                assert asked_again(evidence) == (point in ASKED_AGAIN)
                assert evidence.rings == (point not in NOT_RUNG)
                assert is_unknown(evidence) == (point in UNKNOWN)
                course.append(evidence)
        course.append(await ground.react("errand undisturbed"))
        check(course[-1])
        note(points=len(points), **check_all(ground, course))


async def test_an_agent_killed_at_any_boundary_of_its_reaction_goes_on_where_it_was(tmp_path: Path, note: Note) -> None:
    await _kill_everywhere(tmp_path, note, brief(ERRAND), rounds=1)


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_an_agent_killed_20_times_at_each_boundary_goes_on_where_it_was(tmp_path: Path, note: Note) -> None:
    await _kill_everywhere(tmp_path, note, ERRAND, rounds=20)


async def _kill_again_and_again(folder: Path, note: Note, *, reactions: int) -> None:
    """Kill each reaction six times, in different parts. The reaction makes progress in between, so no kill is the
    fifth at the same point.
    """
    course = []
    async with stage(folder) as ground:
        for number in range(reactions):
            parts = (BEGINNING[:2], RINGING, APART, ENDING)
            begins, rings, speaks, ends = (part[number % len(part)] for part in parts)
            points = [begins, rings, Point("model 2", "before"), speaks, Point("model 3", "before"), ends]
            print(f"killed at {points}")
            course.append(await ground.react(f"errand {number}", points))
            check(course[-1])
            assert course[-1].kills == len(points)
        note(**check_all(ground, course))


@pytest.mark.full
async def test_a_reaction_that_gets_on_outlives_six_kills(tmp_path: Path, note: Note) -> None:
    await _kill_again_and_again(tmp_path, note, reactions=2)


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_reactions_that_get_on_outlive_six_kills_each_at_all_their_boundaries(tmp_path: Path, note: Note) -> None:
    await _kill_again_and_again(tmp_path, note, reactions=len(SPEAKING))


@pytest.mark.full
async def test_a_reaction_given_up_after_five_kills_goes_on_where_it_was_when_it_is_retried(tmp_path: Path) -> None:
    points = [Point("model 2", "before")] * 5  # progress in between would reset the count
    async with stage(tmp_path) as ground:
        evidence = await ground.react("errand", points, is_given_up=True)
        check(evidence)
        assert evidence.kills == 5
        check_all(ground, [evidence])


# -- anywhere


async def _kill_anywhere(folder: Path, note: Note, *, kills: int) -> None:
    seed, course = kills, list[Evidence]()
    random = Random(seed)
    async with stage(folder) as ground:
        done = 0
        while done < kills:
            if done % 50 == 0:  # prompts grow with the conversation
                course.append(await ground.react(f"errand undisturbed {done}"))
                most = ground.count_bytes()
            # Sometimes the next process is killed too.
            limits = [random.randrange(most) for _ in range(min(kills - done, random.choice((1, 1, 2))))]
            print(f"seed {seed}, kill {done}: after {limits} of {most} bytes")
            # A unique text: a process may finish before its limit, and then no kill counts.
            course.append(await ground.react(f"errand {done} {len(course)}", limits=limits))
            check(course[-1])
            done += course[-1].kills
        note(seed=seed, bytes_of_a_reaction=most, **check_all(ground, course))


@pytest.mark.full
async def test_an_agent_killed_anywhere_in_its_traffic_goes_on_where_it_was(tmp_path: Path, note: Note) -> None:
    await _kill_anywhere(tmp_path, note, kills=6)


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_an_agent_killed_at_200_places_in_its_traffic_goes_on_where_it_was(tmp_path: Path, note: Note) -> None:
    await _kill_anywhere(tmp_path, note, kills=200)


# -- other configurations


@pytest.mark.full
async def test_an_agent_killed_and_started_with_another_configuration_goes_on_and_says_so(tmp_path: Path) -> None:
    course = []
    async with stage(tmp_path) as ground:
        for config in ("plain", "other"):
            evidence = await ground.react(
                f"errand {config}", [Point("model_reply 2", "unanswered")], next_config=config
            )
            course.append(evidence)
            check(evidence)
            [resumed] = [it for it in evidence.lives[1].events() if it["type"] == "resumed"]
            assert resumed["reaction"] == evidence.reaction
            assert resumed["turns"] == 2
            assert resumed["config_changed"] is (config == "other")
            [instruction] = {it["messages"][0]["content"] for it in evidence.asked[1]}
            assert ("with care" in instruction) is (config == "other")
        check_all(ground, course)


# -- kills while the agent waits for another agent


def plan_asking(points: Sequence[Point], answered: Sequence[Point]) -> list[tuple[list[Point], Replies]]:
    """Return the kills of each reaction, and the time of the answer."""
    plans: list[tuple[list[Point], Replies]] = [
        ([point], when) for point in points for when in ("while away", "when back")
    ]
    plans += [([point], "at once") for point in answered]
    begun = Point("tool_started 1.0", "unanswered")
    plans += [([begun, point], "while away") for point in points if point.what == "send agent:bob"]
    return plans


async def _kill_while_it_asks(
    folder: Path, note: Note, plans: Sequence[tuple[list[Point], Replies]], *, rounds: int
) -> None:
    course = []
    async with stage(folder) as ground:
        for number in range(rounds):
            for points, replies in plans:
                print(f"killed at {points}, the reply comes {replies}")
                course.append(await ground.react(f"ask {number} {points} {replies}", points, replies=replies))
                check(course[-1])
                assert course[-1].kills == len(points)
        # Otherwise, reactions to earlier replies would come before this one.
        course.append(await ground.react("ask undisturbed"))
        check(course[-1])
        counts = check_all(ground, course)
    for name in ("rings", "told_unknown"):
        del counts[name]
    note(**counts)


@pytest.mark.full
async def test_an_agent_killed_while_it_asks_another_asks_once_and_finishes_with_the_answer(
    tmp_path: Path, note: Note
) -> None:
    await _kill_while_it_asks(tmp_path, note, plan_asking(brief(ASK)[2:], brief(ASK_ANSWERED)), rounds=1)


@pytest.mark.full
@pytest.mark.timeout(1200)
async def test_an_agent_killed_20_times_wherever_it_asks_asks_once_and_finishes_with_the_answer(
    tmp_path: Path, note: Note
) -> None:
    await _kill_while_it_asks(tmp_path, note, plan_asking(ASK, ASK_ANSWERED), rounds=20)


# -- stopped and superseded processes

STANDSTILLS = {
    "before it sends": (Point("model_reply 2", "unanswered"), False),
    "before it sends, and its connection is lost": (Point("model_reply 2", "unanswered"), True),
    "with its message under way": (Point("send agent:bob", "before"), False),
    "while its model thinks": (Point("model 3", "before"), False),
}


async def test_a_process_that_stood_still_while_another_took_over_writes_nothing(tmp_path: Path, note: Note) -> None:
    course, rows = [], 0
    async with stage(tmp_path) as ground:
        for name, (point, cuts) in STANDSTILLS.items():
            print(f"stopped {name}")
            evidence, frozen = await ground.overtake(f"errand {name}", point, cuts=cuts)
            check(evidence)
            assert asked_again(evidence) == (point.what == "model 3")
            ledger, requests = ground.export(), ground.count_requests()
            assert await ground.let_go_on(frozen) == SUPERSEDED, frozen.told()
            assert ground.export() == ledger
            assert ground.count_requests() == requests
            course.append(evidence)
            rows = len(ledger)
        counts = check_all(ground, course)
    note(stopped=len(course), rows=rows, written_afterwards=0, sends=counts["sends"], stored=counts["stored"])
