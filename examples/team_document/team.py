"""A team of six writes a document, although its lead is killed twice.

Run it: python examples/team_document/team.py

The lead runs in its own process. It creates a shared note, and a task for each of five writers, who add their sections.
A sixth task waits for theirs: the lead saves the text of the note as a file and sends it. The first process of the lead
is killed when the tasks exist, the second one when the file is saved. The guide is sent once.
"""

import asyncio
import re
import sys
import tempfile
from pathlib import Path

from rules import SECTIONS, lead, write

from roundelay import NetworkClient, SimpleAgentRunner
from roundelay.agents.models import ModelRequest, ScriptedModel, read_prompt
from roundelay.agents.models.scripted import Answer
from roundelay.app import serve
from roundelay.network.client.files import download_file
from roundelay.network.config import NodeConfig

MODS = ["channels", "discovery", "tasks", "notes", "files"]


async def run(name: str, url: str, hangs_after: str = "none") -> None:
    async def think(request: ModelRequest) -> Answer:
        results = read_prompt(request).tool_results
        if results and hangs_after in results[-1].content:
            print("hangs", flush=True)
            await asyncio.sleep(3600)
        return (lead if name == "lead" else write)(request)

    agent = SimpleAgentRunner(name, instruction="You know gardens.", model=ScriptedModel(think), url=url)
    running = asyncio.create_task(agent.run())
    await agent.ready()
    if name == "lead":
        print("ready", flush=True)
    await running


async def start_lead(url: str, hangs_after: str) -> asyncio.subprocess.Process:
    command = (sys.executable, __file__, "lead", url, hangs_after)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    await process.stdout.readline()
    return process


async def main(folder: Path) -> None:
    config = NodeConfig(port=0, db=folder / "node.db", mods=MODS)
    async with serve(config) as node, NetworkClient("zoe", node.url, kind="human", token=node.owner_token) as zoe:
        writers = [asyncio.create_task(run(name, node.url)) for name in SECTIONS]
        process = await start_lead(node.url, "Publish")
        root = (await zoe.send_text("lead", "Write the guide.")).seq
        for hangs_after in ("guide.md", "none"):
            await process.stdout.readline()
            process.kill()
            await process.wait()
            print("The lead was killed.")
            process = await start_lead(node.url, hangs_after)
        await zoe.wait_until_quiet(root)
        process.terminate()
        for writer in writers:
            writer.cancel()
        for task in (await zoe.call("tasks.list", {"state": "done"}))["tasks"]:
            print(f"{task['title']}: {task['state']} by {task['assignee']}")
        [file] = (await zoe.call("files.list"))["files"]
        text = (await download_file(zoe, file["file"])).decode()
        print(f"{file['name']}: {', '.join(sorted(re.findall('## (.*)', text)))}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(*sys.argv[1:]) if len(sys.argv) > 1 else main(Path(folder)))
