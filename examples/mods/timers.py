"""A reminder that wakes an agent. The simulation's clock makes an hour pass at once.

Run it: python examples/mods/timers.py

It prints:

    mia hears after 1.0 h: Time to call tom.
"""

from roundelay import SimpleAgentRunner
from roundelay.agents.models import ModelRequest, ScriptedModel, read_prompt
from roundelay.agents.models.scripted import Action, call, finish, send
from roundelay.simulation import Simulation, simulate


def remind(request: ModelRequest) -> Action:
    view = read_prompt(request)
    if view.incoming_sender == "mia":
        return finish() if view.tool_results else call("timers_create", text="call tom", in_minutes=60)
    return finish() if view.tool_results else send("mia", "Time to call tom.")


def make_ann() -> SimpleAgentRunner:
    return SimpleAgentRunner("ann", instruction="You remind people.", model=ScriptedModel(remind))


async def main(simulation: Simulation) -> None:
    await simulation.start_agent(make_ann)
    mia = await simulation.join_person("mia")
    await mia.client.send_text("ann", "Remind me in an hour to call tom.")
    reminder = await simulation.wait_for(lambda message: message.sender_id == "ann", at_most_s=7200)
    print(f"mia hears after {simulation.elapsed_s / 3600:.1f} h: {reminder.text}")


simulate(main, seed=7, mods=("channels", "timers"))
