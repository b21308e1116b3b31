"""Foxes among the hens: a game of hidden roles, played by agents. Run it: python examples/games/foxes.py

The keeper, a program, deals the roles in private. At night the foxes meet in a closed channel, which hens cannot see.
By day all players vote in the yard, and the player with most votes is out. The models are scripted; replace
`ScriptedModel(play)` by `OpenAIModel(...)` for real ones.

`visibility: strict` makes the game fair for any model. A prompt for the yard contains only what everybody in the yard
may read, including agents. So by day a fox's model does not have the messages of the night.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable

from roundelay import AgentPolicy, Network, SimpleAgentRunner
from roundelay.agents.models import Model, ModelRequest, ScriptedModel, read_prompt
from roundelay.agents.models.scripted import Answer, call, finish
from roundelay.network.client import AnyMessage, NetworkClient
from roundelay.network.visibility import Visibility

PLAYERS = ("ada", "bea", "cyd", "dot", "eli", "fay", "gil")
FOXES = ("cyd", "fay")
ROUNDS = 3


def play(request: ModelRequest) -> Answer:
    """Decide a player's move by the incoming message alone."""
    view = read_prompt(request)
    text, results = view.incoming_text, view.tool_results
    if results:
        return f"I tried the den: {results[-1].content}"
    if "You are a fox" in text or ("You are a hen" in text and request.agent_id == "bea"):
        return call("channels_join", name="den")  # bea is a hen, and curious
    if "Choose from:" not in text:
        return finish("I know my part")
    names = text.partition("Choose from:")[2].split()
    others = [name for name in names if name != request.agent_id]
    return f"I choose {others[len(request.agent_id + text) % len(others)]}"


def make_player(agent_id: str, model: Model, visibility: Visibility = "strict") -> SimpleAgentRunner:
    # A player remembers the den and the yard: its prompt shows all threads.
    policy = AgentPolicy(prompt="full")
    return SimpleAgentRunner(
        agent_id, instruction="You play a game of foxes and hens.", model=model, visibility=visibility, policy=policy
    )


class Keeper:
    """Deals roles, collects votes and counts them."""

    def __init__(self, client: NetworkClient, say: Callable[[str], None]) -> None:
        self._client = client
        self._heard: list[AnyMessage] = []
        self._say = say
        self.inside = list(PLAYERS)
        """Players that are still in the game."""

    async def open(self, onlooker: NetworkClient) -> None:
        await self._client.call("channels.create", {"name": "den", "access": "closed"})
        await self._client.call("channels.create", {"name": "yard", "access": "invite"})
        await self._client.call("channels.invite", {"name": "yard", "agent_id": onlooker.agent_id})
        await onlooker.call("channels.join", {"name": "yard"})
        for name in PLAYERS:
            await self._client.call("channels.invite", {"name": "yard", "agent_id": name})
        for name in FOXES:
            await self._client.call("channels.invite", {"name": "den", "agent_id": name})

    async def deal(self) -> None:
        for name in PLAYERS:
            role = "a fox. The den is yours" if name in FOXES else "a hen. Beware of the foxes"
            await self._client.send_text(name, f"You are {role}, {name}.")
        for name in ("bea", *FOXES):
            answer = await self._hear(lambda it, name=name: it.sender_id == name)
            self._say(f"{name}: {answer.text}")

    async def play(self) -> str:
        """Nights and days, until one side has won."""
        for number in range(1, ROUNDS + 1):
            foxes = [name for name in self.inside if name in FOXES]
            hens = [name for name in self.inside if name not in FOXES]
            await self._send_out(
                await self._poll("den", foxes, f"Night {number}. Whom do you take?", hens), "was taken"
            )
            await self._send_out(
                await self._poll("yard", self.inside, f"Day {number}. Who is a fox?", self.inside), "was voted out"
            )
            left = sum(name in FOXES for name in self.inside)
            if not left or left * 2 >= len(self.inside):
                return "the hens have won" if not left else "the foxes have won"
        return "nobody has won"

    async def _poll(self, channel: str, voters: Iterable[str], question: str, names: list[str]) -> str:
        """Ask in a channel, and give who was chosen most often, of several the first by name."""
        asked = await self._client.post(channel, f"{question} Choose from: {' '.join(names)}")
        votes = Counter[str]()
        for voter in sorted(voters):
            answer = await self._hear(lambda it, voter=voter: it.sender_id == voter and it.reply_to == asked.seq)
            votes[answer.text.rpartition(" ")[2]] += 1
        return min(votes, key=lambda name: (-votes[name], name))

    async def _send_out(self, name: str, how: str) -> None:
        self.inside.remove(name)
        self._say(f"{name}, {'a fox' if name in FOXES else 'a hen'}, {how}")
        for channel in ("yard", "den") if name in FOXES else ("yard",):
            await self._client.call("channels.remove", {"name": channel, "agent_id": name})

    async def _hear(self, wanted: Callable[[AnyMessage], bool]) -> AnyMessage:
        while not (found := [it for it in self._heard if wanted(it)]):
            async with self._client.receive() as message:
                self._heard.append(message)
        return found[0]


async def run_game(
    make_model: Callable[[], Model], say: Callable[[str], None], visibility: Visibility = "strict"
) -> str:
    """One game, in this process; gives who has won."""
    async with Network.open(visibility=visibility) as network:
        keeper = Keeper(await network.join("keeper", kind="human"), say)
        players = [make_player(name, make_model(), visibility) for name in PLAYERS]
        async with network.run(*players):
            await keeper.open(await network.join("onlooker", kind="human"))
            for player in players:
                await player.client.call("channels.join", {"name": "yard"})
            await keeper.deal()
            return await keeper.play()


if __name__ == "__main__":
    print(asyncio.run(run_game(lambda: ScriptedModel(play), print)))
