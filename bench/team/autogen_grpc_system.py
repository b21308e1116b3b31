"""AutoGen's gRPC runtime with a host, one process per agent (one process for all 200 agents), and another process for
the person.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from autogen_core import AgentId, MessageContext, RoutedAgent, message_handler, try_get_known_serializers_for_type
from autogen_ext.runtimes.grpc import GrpcWorkerAgentRuntime, GrpcWorkerAgentRuntimeHost
from autogen_system import answer, make_assistant, make_model
from peer import Ask, Job, read_job, run
from workloads import conversation, target


@dataclass
class Question:
    text: str


@dataclass
class Answer:
    text: str


def make_class(job: Job, name: str) -> Any:
    """Return the class of one agent. The runtime creates an instance for each conversation."""
    model = make_model(job, name)

    class Participant(RoutedAgent):
        def __init__(self) -> None:
            super().__init__(name)
            tools = [self.ask] if job.work == "w2" and name == "ann" else []
            self._agent = make_assistant(job, name, model, tools)

        async def ask(self, agent_ids: list[str], text: str) -> str:
            """Ask other agents."""
            sent = (self.send_message(Question(text), AgentId(it, self.id.key)) for it in agent_ids)
            return "\n".join(reply.text for reply in await asyncio.gather(*sent))

        @message_handler
        async def on_question(self, message: Question, ctx: MessageContext) -> Answer:
            return Answer(await answer(self._agent, message.text))

    return Participant


async def join(address: str) -> GrpcWorkerAgentRuntime:
    runtime = GrpcWorkerAgentRuntime(address)
    await runtime.start()
    for kind in (Question, Answer):
        runtime.add_message_serializer(try_get_known_serializers_for_type(kind))
    return runtime


async def serve(job: Job, address: str, names: list[str]) -> None:
    """Run the host if there are no names, and otherwise run the agents with these names."""
    if not names:
        GrpcWorkerAgentRuntimeHost(address).start()
    else:
        runtime = await join(address)
        for name in names:
            kind = make_class(job, name)
            await kind.register(runtime, name, kind)
    print("ready", flush=True)
    await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def open_system(job: Job) -> AsyncIterator[Ask]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    processes: list[asyncio.subprocess.Process] = []

    async def start(*names: str) -> None:
        command = (sys.executable, __file__, sys.argv[1], address, *names)
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        processes.append(process)
        assert process.stdout is not None
        await process.stdout.readline()

    try:
        await start()
        names = job.workload.agents
        await asyncio.gather(*(start(*some) for some in ([names] if len(names) > 10 else [[name] for name in names])))
        runtime = await join(address)

        async def ask(number: int, text: str) -> str:
            to = AgentId(target(job.work, number), conversation(job.work, number))
            return (await runtime.send_message(Question(text), to)).text

        yield ask
    finally:
        for process in processes:
            process.kill()


if len(sys.argv) > 2:
    asyncio.run(serve(read_job(), sys.argv[2], sys.argv[3:]))
else:
    run(open_system)
