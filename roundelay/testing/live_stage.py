"""Stage on a live network. People join over WebSocket, and an operator's connection reads the ledger.

Agents that are already online are used without changes. The stage starts the other agents. The stage refuses steps that
need a simulation: killing the hub, killing an agent that runs elsewhere, and cutting a connection. Only messages since
the start of the run are considered. Expectations about prompts use manifests, which list the messages in a prompt,
because the prompts themselves are unknown.

The stage follows the hub's log with `network.log`, which waits for new messages. Acks are not in the log. Therefore the
stage also asks the hub several times per second whether all messages have been handled.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from roundelay.agents.recorded import fetch_fates
from roundelay.network.addresses import reply_thread
from roundelay.network.client import AnyMessage, NetworkClient
from roundelay.network.clock import system_clock
from roundelay.network.core.joining import hash_token
from roundelay.network.errors import Forbidden, UnknownMessage
from roundelay.network.frames import Kind
from roundelay.network.home import find_token
from roundelay.runs.lists import list_dead_letters, list_participants, list_threads, list_tokens
from roundelay.runs.node_source import HubLog, LiveSource
from roundelay.runs.reading import RecordedReaction
from roundelay.simulation.network import SimulationError
from roundelay.simulation.participants import Person, RunningAgent
from roundelay.testing.agents import AgentPlan
from roundelay.testing.record import RunRecord
from roundelay.testing.stage import READER_ID

WAIT_MS = 250
"""Maximum time that the hub waits for new rows before it answers a read of the log, in milliseconds."""
_DONE = ("handled", "in_prompt", "dead")


class LiveStage:
    """Network at ``url``, read from the current end of its log.

    ``token`` is the owner's token. The default is the token of this machine's owner. All other participants join with
    tokens that are derived from the owner's token. Participants in ``operators`` join as operators.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        plans: Mapping[str, AgentPlan] | None = None,
        operators: Sequence[str] = (),
    ) -> None:
        self.url = url
        self.token = token
        self.plans = dict(plans or {})
        self.operators = tuple(operators)
        self.state: dict[str, Any] = {}
        self.people: dict[str, Person] = {}
        self.members: dict[str, RunningAgent] = {}
        self.messages: list[AnyMessage] = []
        self._settled: set[int] = set()
        self._moved = asyncio.Condition()

    async def __aenter__(self) -> Self:
        self._client = NetworkClient(READER_ID, self.url, kind="service", token=self.token)
        await self._client.connect()
        try:
            self._source, self._log = LiveSource(self._client), HubLog(self._client, await self._read_head())
            # Read once now, so that missing rights end the start. Otherwise they would end a task in the background.
            await self._follow_once(0)
        except BaseException as error:
            await self._client.close()
            if isinstance(error, Forbidden):
                raise Forbidden(f"Only an operator may follow the log. Pass an operator's token. ({error})") from error
            raise
        self._following = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        for name in (*self.members, *self.people):
            await self.leave(name)
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)
        await self._client.close()

    def clock(self) -> int:
        return system_clock()

    async def reader(self) -> NetworkClient:
        return self._client

    # --- joining and leaving

    async def join(self, participant: str, kind: Kind = "human") -> None:
        if participant in self.plans:
            # Do not start a second runner: it would take over from the runner that serves the network.
            if not await self._is_online(participant):
                await self._start(participant)
            return
        if participant in self.people:
            raise SimulationError(f"{participant} has joined already.")
        client = NetworkClient(participant, self.url, kind=kind, token=await self._make_token(participant, kind))
        await client.connect()
        self.people[participant] = Person(client)

    async def _make_token(self, participant: str, kind: Kind) -> str:
        """Return a separate token for a participant, so that the participant joins with its own rights.

        The token is the same in every run, because random tokens would accumulate on the hub.
        """
        is_operator = participant in self.operators
        owner = self.token or find_token(self.url, "service") or ""
        token = hmac.new(owner.encode(), f"scenario/{participant}/{kind}/{is_operator}".encode(), "sha256").hexdigest()
        args = {"agent_id": participant, "kind": kind, "token_hash": hash_token(token), "operator": is_operator}
        listed = await list_tokens(self._client)
        # The hub lists only the beginning of each hash.
        if not any(entry["hash"] == hash_token(token)[:12] for entry in listed):
            await self._client.call("network.create_token", args)
        return token

    async def leave(self, participant: str) -> None:
        if participant in self.people:
            await self.people.pop(participant).leave()
        elif participant in self.members:
            await self.members.pop(participant).stop()
        else:
            raise SimulationError(f"{participant} has not been joined by this scenario.")

    async def kill(self, name: str) -> None:
        if name not in self.members:
            raise SimulationError(
                f"This scenario did not start {name}. The hub and the agents of a running network are not killed."
            )
        await self.members.pop(name).kill()

    async def restart(self, name: str) -> None:
        if name in self.members:
            await self.kill(name)
        elif name not in self.plans or await self._is_online(name):
            raise SimulationError(f"{name} runs elsewhere; a running network's hub and agents are not restarted.")
        await self._start(name)

    async def disconnect(self, participant: str) -> None:
        raise SimulationError("Connections are cut in a simulation only; run it without --live.")

    async def _is_online(self, agent_id: str) -> bool:
        return any(
            participant["agent_id"] == agent_id for participant in await list_participants(self._client, online=True)
        )

    async def _start(self, agent_id: str) -> None:
        runner = self.plans[agent_id].make()
        client = NetworkClient(agent_id, self.url, role="reactor", card=runner.describe_card())
        self.members[agent_id] = await RunningAgent.start(runner, client)
        await runner.ready()

    # --- waiting

    async def idle(self, at_most_s: float) -> None:
        async with asyncio.timeout(at_most_s):
            while not await self._is_idle():
                async with self._moved:
                    await self._moved.wait()

    async def wait_for(self, is_wanted: Callable[[AnyMessage], bool], at_most_s: float) -> AnyMessage:
        async with asyncio.timeout(at_most_s), self._moved:
            while True:
                for message in filter(is_wanted, self.messages):
                    return message
                await self._moved.wait()

    async def _follow(self) -> None:
        while True:
            await self._follow_once(WAIT_MS)

    async def _follow_once(self, wait_ms: int) -> None:
        found = await self._log.read(wait_ms)
        async with self._moved:
            self.messages += found
            self._moved.notify_all()  # notify even without new messages, because acks are not in the log

    async def _is_idle(self) -> bool:
        head = await self._read_head()
        # An unread message may have recipients that have not handled it yet.
        if self._log.position < head:
            return False
        for message in list(self.messages):
            if message.seq in self._settled:
                continue
            fates = await fetch_fates(self._client.call, message.seq)
            # Ignore other participants of this network: they may take hours, and the scenario does not depend on them.
            ours = [fate for fate in fates if fate["agent_id"] in self.plans or fate["agent_id"] in self.people]
            if all([await self._is_done(fate) for fate in ours]):
                # A handled message stays handled, so do not ask for it again.
                self._settled.add(message.seq)
            elif not await self._is_held(message):
                return False
        return await self._read_head() == head  # if the end of the log moved, a row was stored during the check

    async def _is_held(self, message: AnyMessage) -> bool:
        """Return whether a person has taken over the thread in which the message would be answered.

        Such a message waits until the takeover ends.
        """
        for thread_id in (message.thread_id, reply_thread(message.seq)):
            try:
                if "held" in await self._client.call("network.history", {"thread_id": thread_id, "limit": 1}):
                    return True
            except UnknownMessage:
                continue  # no reply exists yet
        return False

    async def _read_head(self) -> int:
        head: int = (await self._client.call("network.info"))["head"]
        return head

    async def _is_done(self, recipient: Mapping[str, Any]) -> bool:
        if recipient["state"] not in _DONE:
            return False
        reaction = recipient.get("reaction")
        if reaction is None:
            return True
        found = await self._source.reaction(recipient["agent_id"], reaction)
        # Count a waiting reaction as done: otherwise the step that answers it could never run.
        return not found.is_open or found.is_waiting

    # --- results

    async def read_record(self) -> RunRecord:
        reactions: dict[str, RecordedReaction] = {}
        for message in self.messages:
            for recipient in await fetch_fates(self._client.call, message.seq):
                reaction = recipient.get("reaction")
                if reaction is not None and reaction not in reactions:
                    reactions[reaction] = await self._source.reaction(recipient["agent_id"], reaction)
        first = self.messages[0].seq if self.messages else 0
        # Skip dead letters from before the start of the run.
        letters = [letter for letter in await list_dead_letters(self._client) if letter["seq"] >= first > 0]
        readers = {thread["thread_id"]: thread["readers"] for thread in await list_threads(self._client)}
        return RunRecord(list(self.messages), list(reactions.values()), (), letters, readers, ended_at=system_clock())

    def problems(self) -> list[str]:
        return [
            f"the agent {agent_id} crashed: {member.work.exception()!r}"
            for agent_id, member in self.members.items()
            if member.work.done() and not member.work.cancelled() and member.work.exception() is not None
        ]
