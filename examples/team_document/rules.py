"""The rules of the team's scripted models. Real models would read instructions instead."""

import json
import re
from typing import Any

from roundelay.agents.models import ModelRequest, read_prompt
from roundelay.agents.models.scripted import Answer, call, finish, say

SECTIONS = {"ann": "Tools", "bob": "Soil", "cat": "Seeds", "dan": "Water", "eve": "Harvest"}


def lead(request: ModelRequest) -> Answer:
    prompt = read_prompt(request)
    results = [json.loads(it.content) for it in prompt.tool_results]
    if prompt.incoming_text == "Write the guide.":
        if not results:
            note = call("notes_create", name="guide", thread_id="broadcast", text="# Guide\n")
            return [note, *(call("tasks_create", title=it, assignee=name) for name, it in SECTIONS.items())]
        tasks = [it for it in results if "title" in it]
        if len(tasks) == len(SECTIONS):
            numbers = [it["task"] for it in tasks]
            return call("tasks_create", title="Publish", assignee="lead", depends_on=numbers)
        last = tasks[len(SECTIONS)]
        if last["state"] == "waiting":
            return [say("The team has begun."), finish()]
        # All sections are done already, so no message says that the last task is ready.
        return publish(last["task"], results[len(SECTIONS) + 2 :])
    task = re.match(r"Task (\d+) from lead: Publish", prompt.incoming_text)
    return publish(int(task[1]), results) if task is not None else finish()


def publish(task: int, results: list[dict[str, Any]]) -> Answer:
    if not results:
        return call("notes_read", note="broadcast/guide")
    if len(results) == 1:
        return call("files_save", name="guide.md", content=results[0]["text"])
    if len(results) > 2:
        return finish()
    send = call("files_attach", to="agent:zoe", files=[results[1]["file"]], text="The guide.")
    return [send, call("tasks_complete", task=task, references=["guide.md"])]


def write(request: ModelRequest) -> Answer:
    prompt = read_prompt(request)
    task = re.match(r"Task (\d+) from lead: (\w+)", prompt.incoming_text)
    if task is None or prompt.tool_results:
        return finish()
    section = call("notes_append", note="broadcast/guide", text=f"## {task[2]}\nAll about {task[2].lower()}.")
    return [section, call("tasks_complete", task=int(task[1]), references=["broadcast/guide"])]
