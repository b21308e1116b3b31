"""A replay: a recorded run is run again with changed agents, and the first difference is shown. No model is asked.

Run it: python examples/testing/replay.py

It prints:

    You pay back up to 40 EUR. As it was.
    You pay back up to 50 EUR. ann asks its model something else: message 0 (system): line 1 has changed; it is now: "You pay back up to 50 EUR."
"""

import asyncio
import tempfile
from pathlib import Path

from roundelay import Network, SimpleAgentRunner
from roundelay.agents.models import ScriptedModel
from roundelay.network.ledger.log_file import read_log
from roundelay.runs.recording import Recording
from roundelay.runs.replay import replay


def make_ann(instruction: str) -> SimpleAgentRunner:
    model = ScriptedModel(lambda request: "At most 40 EUR.")
    return SimpleAgentRunner("ann", instruction=instruction, model=model)


async def talk(path: Path) -> None:
    async with Network.open(path) as network, network.run(make_ann("You pay back up to 40 EUR.")):
        mia = await network.join("mia", kind="human")
        await mia.send_text("ann", "How much do I get back?")
        async with mia.receive():
            pass


with tempfile.TemporaryDirectory() as folder:
    ledger = Path(folder) / "ledger.db"
    asyncio.run(talk(ledger))
    recording = Recording(*read_log(ledger))
    for instruction in ("You pay back up to 40 EUR.", "You pay back up to 50 EUR."):
        report = replay(recording, [make_ann(instruction)])
        print(instruction, "As it was." if report.is_same else report.differences[0].text)
