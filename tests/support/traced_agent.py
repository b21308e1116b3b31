"""An agent as a separate process that prints its spans, one JSON object per line: ``python traced_agent.py URL``."""

from __future__ import annotations

import asyncio
import json
import sys

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

from roundelay.agents.features.tracing import Tracing
from roundelay.agents.models.scripted import ScriptedModel
from roundelay.agents.simple import SimpleAgentRunner


def write(span: ReadableSpan) -> str:
    return json.dumps(json.loads(span.to_json())) + "\n"


async def main(url: str) -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(formatter=write)))
    model = ScriptedModel(lambda request: "three")
    bob = SimpleAgentRunner("bob", instruction="", model=model, url=url, middleware=[Tracing(provider=provider)])
    running = asyncio.create_task(bob.run())
    await bob.ready()
    print("ready", flush=True)
    await running


asyncio.run(main(sys.argv[1]))
