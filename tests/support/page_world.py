"""The network in which the console blocks of a page run: a node, people, two agents, a gateway, and files.

`NEEDS` prepares single commands, just before they run: with a request for approval, an open reaction, dead letters.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

from roundelay.agents.runner import AgentRunner
from roundelay.agents.team import build_runner, load_agents
from roundelay.app import serve
from roundelay.interop.gateway import serve_gateway
from roundelay.network.config import Limits, NodeConfig
from roundelay.network.home import announce_node
from tests.support.certificates import make_certificate
from tests.support.command import invoke
from tests.support.consoles import HUB, Console
from tests.support.fake_openai import FakeOpenAI, calls, text
from tests.support.node import Node
from tests.support.webhook_receiver import Receiver
from tests.support.wire import WireSession

MODS = ("channels", "discovery", "files", "messages", "notes", "polls", "tasks", "timers")
TOOLS = '''\
import asyncio

from roundelay import tool


@tool(needs_approval=True)
def pay(to: str, amount: int) -> str:
    """Pay."""
    return f"{amount} paid to {to}"


@tool
async def wait() -> str:
    """Wait for ever."""
    await asyncio.Event().wait()
    return ""
'''
AGENT = """\
id: NAME
instruction: You work.
tools: ['worktools:pay', 'worktools:wait']
model:
  rules:
    - when: {contains: Pay}
      do: [{tool: pay, args: {to: ann, amount: 5}}]
    - when: {after: pay}
      do: [{finish: paid}]
    - when: {contains: Wait}
      do: [{tool: wait}]
    - do: [{say: 'I read: {{ text }}'}]
"""


HOOK = "https://example.org/hook"
AGENTS = ("echo", "desk")
NOBODY_ELSE = ("mia",)
NODE = f"mods: [{', '.join(MODS)}]\nagents: [agents/echo.yaml, agents/desk.yaml]\n"


def write_files(folder: Path) -> None:
    (folder / "plan.md").write_text("# Plan\n\n## Risks\nNone.\n", encoding="utf-8")
    (folder / "worktools.py").write_text(TOOLS, encoding="utf-8")
    for name in ("agents", "backups"):
        (folder / name).mkdir()
    for file, name in (("agents/echo.yaml", "echo"), ("agents/desk.yaml", "desk"), ("ann.yaml", "ann")):
        (folder / file).write_text(AGENT.replace("NAME", name), encoding="utf-8")
    (folder / "team.yaml").write_text("name: team\n", encoding="utf-8")


class World:
    """A page's network, and the console in which a reader types."""

    def __init__(self, console: Console, stack: AsyncExitStack) -> None:
        self.console = console
        self.folder = console.folder
        self.node = Node("", "")
        self.people: dict[str, WireSession] = {}
        self.stack = stack
        self._count = 0

    @property
    def mia(self) -> WireSession:
        return self.people["mia"]

    async def start(self, limits: Limits, people: tuple[str, ...]) -> None:
        """Start the node in this process and let the people join. Agents start too, unless mia is alone."""
        (self.folder / "roundelay.yaml").write_text(NODE, encoding="utf-8")
        config = NodeConfig(
            port=0, db=self.folder / "roundelay.db", durability="normal", mods=list(MODS), limits=limits
        )
        served = await self.stack.enter_async_context(serve(config))
        self.node = Node(served.url, served.owner_token)
        self.stack.push_async_callback(self.node.close_sessions)
        self.console.replaced |= {HUB: served.url, "ws://127.0.0.1:8700/": served.url}
        self.stack.callback(announce_node(served.url, self.folder / "roundelay.db.owner").unlink)
        await self._join(people)
        if people != NOBODY_ELSE:
            await self._run_agents()
            await self._talk()

    async def _join(self, people: tuple[str, ...]) -> None:
        self.people = {name: await self.node.person(name) for name in people}
        for channel in ("dev", "launch"):
            await self.mia.call("channels.create", {"name": channel})
            for session in [*self.people.values()][1:]:
                await session.call("channels.join", {"name": channel})
        await self.mia.send("broadcast", "Good morning")

    async def _run_agents(self) -> None:
        with contextlib.chdir(self.folder):
            specs = [spec for name in AGENTS for spec in load_agents(Path(f"agents/{name}.yaml"))]
            runners = [build_runner(spec, url=self.node.url) for spec in specs]
        for runner in runners:
            running = asyncio.create_task(runner.run())
            self.stack.push_async_callback(_stop, runner, running)
            await runner.ready()

    async def _talk(self) -> None:
        for agent in AGENTS:
            asked = await self.mia.send(f"agent:{agent}", "What is new?")
            self.console.names |= dict.fromkeys(("12", "17"), str(asked["seq"]))
            await self.mia.contents_until("I read: What is new?")
        for _ in range(10):
            await self.mia.send("channel:dev", "The invoice 4711 is here.")

    async def back_up(self) -> None:
        if not (self.folder / "backups" / "monday.db").exists():
            await invoke("backup", "backups/monday.db", cwd=self.folder)

    async def serve_gateway(self) -> None:
        if HOOK not in self.console.replaced:
            receiver = Receiver(judge=lambda *_: None)
            await self.stack.enter_async_context(receiver.listening())
            serving = serve_gateway(self.node.url, webhooks_file=self.folder / "hooks", webhook_hosts=["127.0.0.1"])
            gateway = await self.stack.enter_async_context(serving)
            announce_node(self.node.url, self.folder / "roundelay.db.owner", gateway=gateway)
            self.console.replaced |= {HOOK: receiver.url, "http://127.0.0.1:8701": gateway}

    async def join_form(self) -> None:
        """Register the service form, and send it a message."""
        await self.serve_gateway()
        form = await self.node.invite(self.mia, "form", kind="service")
        self.console.names["ZXKMueT97o9AXkYIPRpumqwLOaOrV7PlxNvFoqJNZ9c"] = self.node.tokens["form"]
        self.console.names["8"] = str((await self.mia.send("agent:form", "40"))["seq"])
        await form.bye()

    async def ask_approval(self) -> None:
        """Let desk ask for a new approval. The page calls this request 17."""
        self._count += 1
        await self.mia.send("agent:desk", "Pay", conversation=f"bill-{self._count}")
        while True:
            message = (await self.mia.delivery())["message"]
            if message["sender_id"] == "desk":
                self.console.names["17"] = str(message["seq"])
                return

    async def open_reaction(self) -> None:
        await self.mia.send("agent:desk", "Wait", conversation="long")
        while not (found := (await self.mia.call("network.open_reactions", {"agent_id": "desk"}))["reactions"]):
            pass
        self.console.names["1d4fe1fa5353facad985c0b4eb5b82a4"] = found[0]["reaction"]

    async def make_dead_letters(self) -> None:
        for number in ("17", "23"):
            seq = (await self.mia.send("agent:bob", f"poison {number}"))["seq"]
            for _ in range(5):
                while (await self.people["bob"].delivery())["message"]["seq"] != seq:
                    pass
                await self.people["bob"].nack(seq)
            await self.people["bob"].expect("notice", kind="dead_letter")
            self.console.names[number] = str(seq)

    async def make_token(self) -> None:
        await invoke("token", "create", "mia", "--kind", "human", cwd=self.folder)
        tokens = json.loads((await invoke("token", "list", "--json", cwd=self.folder)).out)["tokens"]
        self.console.names["4c1fe2b70a93"] = [it["hash"] for it in tokens if it["agent_id"] == "mia"][-1]

    async def add_webhook(self) -> None:
        await self.serve_gateway()
        await invoke("webhook", "add", self.console.replaced[HOOK], "--as", "form", cwd=self.folder)

    async def write_rights(self) -> None:
        rights = (self.folder / "rights.yaml").read_text(encoding="utf-8")
        (self.folder / "roundelay.yaml").write_text(rights, encoding="utf-8")

    async def start_empty_node(self) -> None:
        (self.folder / "empty").mkdir()
        config = NodeConfig(port=0, db=self.folder / "empty" / "roundelay.db", durability="memory", mods=list(MODS))
        served = await self.stack.enter_async_context(serve(config))
        self.console.replaced["ws://127.0.0.1:8700/"] = served.url
        self.stack.callback(announce_node(served.url, config.db.with_name("roundelay.db.owner")).unlink)

    async def fill_logs(self) -> None:
        """Write a message to the shared log of the page, and another to the database lab.db."""
        if (self.folder / "a.db").exists() or self.node.url == "":
            return
        log = f"nats://127.0.0.1:{self.console.names['4222']}/lab"
        for config in (
            NodeConfig(port=0, db=self.folder / "a.db", log=log),
            NodeConfig(port=0, db=self.folder / "lab.db"),
        ):
            async with serve(config) as served:
                node = Node(served.url, served.owner_token)
                await (await node.person("mia")).send("broadcast", "Good morning")
                await node.close_sessions()

    async def stop_conversations(self) -> None:
        """Let bob answer in a conversation, and desk write without a cause, until the limits stop both."""
        bob, desk = await self.node.agent("bob"), await self.node.agent("desk")
        root = (await self.mia.send("agent:bob", "Please count."))["seq"]
        self.console.names["17"] = str(root)
        while (await bob.submit("agent:desk", "One more.", cause=root))["type"] != "error":
            pass
        turn = 0
        while (await (desk, bob)[turn % 2].submit(f"agent:{('bob', 'desk')[turn % 2]}", "And you?"))["type"] != "error":
            turn += 1

    async def serve_model(self) -> None:
        model = await self.stack.enter_async_context(
            FakeOpenAI([calls([("confirm", {"word": "roundelay"})]), text("4711")])
        )
        self.console.environment |= {"OPENAI_BASE_URL": model.base_url, "OPENAI_API_KEY": "unused"}

    async def make_certificate(self) -> None:
        certificate, key = make_certificate(self.folder)
        certificate.rename(self.folder / "cert.pem")
        key.rename(self.folder / "key.pem")


NEEDS: dict[str, Callable[[World], Awaitable[None]]] = {
    r"roundelay approvals (show|approve|deny|edit) ": World.ask_approval,
    r"roundelay reactions (show|cancel) ": World.open_reaction,
    r"roundelay dead-letters (retry|drop) ": World.make_dead_letters,
    r"roundelay token revoke mia": World.make_token,
    r"roundelay webhook add": World.serve_gateway,
    r"^export CALLER=": World.join_form,
    r"backups/monday.db": World.back_up,
    r"roundelay webhook (list|remove|test|resume)": World.add_webhook,
    r"roundelay doctor --model": World.serve_model,
    r"roundelay rights (check|show)": World.write_rights,
    r"roundelay scenario run .* --live": World.start_empty_node,
    r"roundelay cluster (status|verify|rebuild|migrate)": World.fill_logs,
    r"roundelay status$": World.stop_conversations,
    r" --tls-cert cert.pem": World.make_certificate,
}


async def _stop(runner: AgentRunner, running: asyncio.Task[None]) -> None:
    await runner.stop()
    await running
