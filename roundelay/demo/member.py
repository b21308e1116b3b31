"""One agent of the demo in a process of its own: ``python -m roundelay.demo.member AGENT --url URL``.

It is run as `roundelay agent run` runs any agent, but tells its parent on standard output what happens in it, one JSON
object a line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from functools import cache, partial
from pathlib import Path

from roundelay.agents.events import Event, Finished, Resumed, ToolCallEnd, ToolCallStart, TurnStart, event_to_json
from roundelay.agents.isolation import first_error
from roundelay.agents.models.model import Model
from roundelay.agents.team import AgentSpec, build_runner, load_agents
from roundelay.garbage import collect_seldom
from roundelay.network.client import Delivery, NetworkClient
from roundelay.network.errors import RoundelayError
from roundelay.nodes.run_agents import run_agents

LOCAL = "local"
"""As the name of a model: the small one on this machine, if no server is named."""

Report = dict[str, object]
"""What such a process tells: ``type`` is ``ready``, ``delivered`` or that of an agent's event."""


@cache
def load_team() -> dict[str, AgentSpec]:
    """The demo's agents, by their ids."""
    return {spec.id: spec for spec in load_agents(Path(__file__).with_name("team.yaml"))}


def report(what: Report) -> None:
    """Tell the parent process; a line at a time, at once."""
    print(json.dumps(what), flush=True)  # its parent reads it


def report_event(event: Event) -> None:
    """Tell the parent process of the events that the demo shows or waits for."""
    if isinstance(event, Resumed | TurnStart | ToolCallStart | ToolCallEnd | Finished):
        report(event_to_json(event))


class ReportingClient(NetworkClient):
    """Tells that it is there, and how long each message took from the hub's stamp; not of what waited for it to
    come."""

    async def deliveries(self) -> AsyncIterator[Delivery]:
        head = self.welcome.head
        report({"type": "ready", "open_reactions": len(self.welcome.open_reactions)})
        async for delivery in super().deliveries():
            if delivery.message.seq > head and delivery.attempt == 1:
                report({"type": "delivered", "after_ms": time.time() * 1000 - delivery.message.sent_at})
            yield delivery


def main() -> int:
    """Run one agent until its input ends; 1 when it cannot start or loses its hub, with the reason on standard
    error."""
    collect_seldom()
    parser = argparse.ArgumentParser(prog="python -m roundelay.demo.member")
    parser.add_argument("agent", choices=sorted(load_team()))
    parser.add_argument("--url", required=True)
    parser.add_argument("--model")
    parser.add_argument("--base-url")
    args = parser.parse_args()
    write = partial(print, file=sys.stderr)
    try:
        model: Model | None = None
        spec = load_team()[args.agent]
        if args.model == LOCAL and args.base_url is None:
            from roundelay.agents.models.local import LocalModel

            model = LocalModel()
            spec = spec.model_copy(update={"instruction": f"You are {args.agent}, a friendly assistant."})
        elif args.model is not None:
            from roundelay.agents.models.openai_model import OpenAIModel

            model = OpenAIModel(args.model, base_url=args.base_url)
        runner = build_runner(spec, model=model, on_event=report_event)
        run = run_agents(
            [runner],
            url=args.url,
            token=None,
            until_input_ends=True,
            say=write,
            note=write,
            make_client=ReportingClient,
        )
        asyncio.run(run)
    except (RoundelayError, BaseExceptionGroup) as failure:
        error = first_error(failure) if isinstance(failure, BaseExceptionGroup) else failure
        if not isinstance(error, RoundelayError):
            raise
        write(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
