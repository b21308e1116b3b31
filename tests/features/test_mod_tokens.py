"""The tokens that each mod adds to requests are those of docs/mods.md."""

from __future__ import annotations

import json
import re
from pathlib import Path

from roundelay import Network, SimpleAgentRunner
from roundelay.agents.models.model import ModelRequest
from roundelay.agents.models.scripted import Answer, ScriptedModel, finish, say
from roundelay.agents.policy import AgentPolicy

PAGE = Path(__file__).parents[2] / "docs/mods.md"
ROW = re.compile(r"^\| `(\w+)` \| (\d+) \| ([\d,]+) \|$", re.MULTILINE)


async def test_tools_of_mods_have_the_documented_tokens() -> None:
    table = {mod: (int(count), int(tokens.replace(",", ""))) for mod, count, tokens in ROW.findall(PAGE.read_text())}
    requests: list[ModelRequest] = []

    def script(request: ModelRequest) -> list[Answer]:
        requests.append(request)
        return [say("ok"), finish()]

    desk = SimpleAgentRunner("desk", instruction="x", model=ScriptedModel(script), policy=AgentPolicy(prompt="full"))
    async with Network.open(mods=list(table)) as network, network.run(desk):
        mia = await network.join("mia", kind="human")
        sent = await mia.send_text("desk", "hello")
        await mia.wait_until_quiet(sent.seq, timeout_s=10)
        owners = {it.op.replace(".", "_"): mod.id for mod in mia.welcome.mods for it in mod.operations}
    sizes: dict[str, list[int]] = {mod: [] for mod in table}
    for tool in requests[0].tools:
        if tool.name in owners:
            function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
            sizes[owners[tool.name]].append(len(json.dumps({"type": "function", "function": function})) // 4)
    assert {mod: len(found) for mod, found in sizes.items()} == {mod: count for mod, (count, _) in table.items()}
    wrong = {mod: sum(found) for mod, found in sizes.items() if not 0.9 < sum(found) / table[mod][1] < 1.1}
    assert wrong == {}
