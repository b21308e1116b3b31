"""Tests of the example games: each prompt holds exactly what its role may know, by an oracle of the roles, under each
visibility.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples.games import auction, foxes
from roundelay.agents.models.model import ModelRequest
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import Answer, ScriptedModel
from roundelay.network.visibility import VISIBILITIES, Visibility
from tests.support.forks import run_python

GAMES = Path(foxes.__file__).parent


def read_words(request: ModelRequest) -> set[str]:
    """Return the facts of the game in a prompt: names with their roles, words of the night, and words of the day."""
    text = "\n".join(message.content or "" for message in request.messages)
    found = {f"the role of {name}" for name in re.findall(r"You are a \w+\. [\w ]+, (\w+)\.", text)}
    return found | {kind for kind in ("Night", "Day") if re.search(rf"{kind} \d", text)}


def list_known(request: ModelRequest, visibility: Visibility) -> set[str]:
    """Return the facts that the rules and the visibility let this player know in this prompt."""
    view, role, is_fox = read_prompt(request), f"the role of {request.agent_id}", request.agent_id in foxes.FOXES
    before = {"Day"} if "Night 1" not in view.incoming_text else set()
    match view.incoming_text.split()[0], visibility:
        case "You", _:
            return {role}
        case "Day", "all":
            return {role, "Day"} | ({"Night"} if is_fox else set())
        case "Day", _:
            return {"Day"}
        case "Night", "current":
            return {"Night"}
        case "Night", "strict":
            return {"Night"} | before  # the other fox also reads it, but does not know this fox's role
        case _:
            return {"Night", role} | before


@pytest.mark.parametrize("visibility", VISIBILITIES)
async def test_every_prompt_of_the_foxes_game_holds_what_the_role_may_know(visibility: Visibility) -> None:
    asked: list[ModelRequest] = []
    told: list[str] = []

    def play(request: ModelRequest) -> Answer:
        asked.append(request)
        return foxes.play(request)

    end = await foxes.run_game(lambda: ScriptedModel(play), told.append, visibility)
    assert end.endswith("have won")
    assert len(told) > 5
    assert told[0].startswith("bea: I tried the den: unknown_recipient: There is no channel 'den'")
    for request in asked:
        assert read_words(request) == list_known(request, visibility), request.agent_id
        if request.agent_id not in foxes.FOXES:
            assert "Night" not in read_words(request)
    assert {"Night", "Day"} == {word for it in asked for word in read_words(it) if " " not in word}


@pytest.mark.parametrize("visibility", VISIBILITIES)
async def test_every_prompt_of_the_auction_holds_the_bid_of_who_asks(visibility: Visibility) -> None:
    asked: list[ModelRequest] = []
    told: list[str] = []

    def sell(request: ModelRequest) -> Answer:
        asked.append(request)
        return auction.sell(request)

    await auction.run_auction(ScriptedModel(sell), told.append, visibility)
    assert told[-1] == "everybody hears: Sold to cat for 570"
    seen: set[tuple[str, str]] = set()
    for request in asked:
        text = "\n".join(message.content or "" for message in request.messages)
        bids = {name for name, amount in auction.BIDS.items() if f"I bid {amount}" in text}
        seen |= {(read_prompt(request).incoming_sender, name) for name in bids}
    own = {(name, name) for name in auction.BIDS}
    assert seen == own if visibility != "all" else seen > own


@pytest.mark.parametrize(("game", "last"), [("foxes", "have won"), ("auction", "everybody hears: Sold to cat for 570")])
def test_the_games_run(game: str, last: str, tmp_path: Path) -> None:
    done = run_python(GAMES / f"{game}.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].endswith(last)
