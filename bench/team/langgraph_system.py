"""LangGraph with LangChain's agents, in one process. The mode sqlite stores a checkpoint after each step.

A team is an agent with other agents as tools, as the documentation of LangGraph advises. LangGraph has no channels, so
an edge of a graph selects the mentioned agent.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import StructuredTool, tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, MessagesState, StateGraph
from peer import Ask, Job, run
from workloads import WORKERS, add, conversation, has_adder, instruction, model_name, target


@contextlib.asynccontextmanager
async def open_system(job: Job) -> AsyncIterator[Ask]:
    async with contextlib.AsyncExitStack() as stack:
        saver: Any = InMemorySaver()
        if job.mode == "sqlite":
            path = str(job.folder / "checkpoints.db")
            saver = await stack.enter_async_context(AsyncSqliteSaver.from_conn_string(path))

        def make(name: str, tools: Any = (), checkpointer: Any = None) -> Any:
            model = ChatOpenAI(model=model_name(job.work, name), base_url=job.base_url)
            tools = [*tools, *([tool(add)] if has_adder(job.work, name) else [])]
            return create_agent(model, tools, system_prompt=instruction(name), name=name, checkpointer=checkpointer)

        def make_tool(name: str) -> StructuredTool:
            agent = make(name)

            async def call(task: str) -> str:
                return (await agent.ainvoke({"messages": [{"role": "user", "content": task}]}))["messages"][-1].content

            return StructuredTool.from_function(coroutine=call, name=name, description=f"Ask {name}")

        if job.work == "w2":
            team = {"ann": make("ann", map(make_tool, WORKERS), saver)}
        elif job.work == "w3":
            graph = StateGraph(MessagesState)
            for name in job.workload.agents:
                graph.add_node(name, make(name))
                graph.add_edge(name, END)
            names = list(job.workload.agents)
            graph.add_conditional_edges(
                START, lambda state: re.findall(r"@(\w+)", state["messages"][-1].content)[0], names
            )
            team = dict.fromkeys(names, graph.compile(checkpointer=saver))
        else:
            team = {name: make(name, checkpointer=saver) for name in job.workload.agents}

        async def ask(number: int, text: str) -> str:
            config = {"configurable": {"thread_id": conversation(job.work, number)}}
            state = {"messages": [{"role": "user", "content": text}]}
            return (await team[target(job.work, number)].ainvoke(state, config))["messages"][-1].content

        yield ask


run(open_system)
