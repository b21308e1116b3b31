"""`gather`: ask several agents the same question and collect answers that match a JSON schema, until a quorum or a
deadline.

The question is an ordinary message to each agent, and requires a response. The schema is part of the question's text,
so any agent can answer. The first reply whose JSON matches the schema counts as the agent's answer. `agents.lead_tools`
offers the same function as a tool.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from roundelay.network.errors import InvalidArguments, RequestError
from roundelay.network.text import shorten

if TYPE_CHECKING:
    from .client import NetworkClient

MAX_AGENTS = 64
MAX_SCHEMA_BYTES = 8192
MAX_PROBLEM_CHARS = 200
FIRST_LOOK_S, MAX_LOOK_S = 2.0, 60.0
"""First and maximum delay between checks whether the missing agents still work on the question, in seconds. Each delay
is twice the previous delay."""
_REFUSED = frozenset({"pattern", "patternProperties", "$ref", "$dynamicRef", "$recursiveRef"})
"""Keywords that a schema may not use. Matching a pattern may take forever, and a reference may name any address."""


class Gathered(Struct, frozen=True):
    """Outcome of `gather`. ``answers`` maps agents to their answers. ``missing`` maps every other agent to the reason
    why the agent has no answer."""

    asked: tuple[str, ...]
    answers: dict[str, Any]
    missing: dict[str, str]

    @property
    def summary(self) -> str:
        """The outcome as one line: ``11 of 12 answered; missing: bob (no answer within 300 s)``."""
        listed = ", ".join(f"{agent_id} ({why})" for agent_id, why in self.missing.items())
        return f"{len(self.answers)} of {len(self.asked)} answered" + (f"; missing: {listed}" if listed else "")


class SchemaForm:
    """A JSON schema for answers, with a method that checks an answer. Raises `InvalidArguments` for an unusable
    schema."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import SchemaError
        from referencing import Registry

        self.text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
        if len(self.text.encode()) > MAX_SCHEMA_BYTES:
            raise InvalidArguments(
                f"The schema has {len(self.text)} characters. At most {MAX_SCHEMA_BYTES} bytes are allowed."
            )
        if refused := sorted(_list_keywords(schema) & _REFUSED):
            raise InvalidArguments(f"The schema may not use {', '.join(refused)}. Describe the values without them.")
        try:
            Draft202012Validator.check_schema(schema)
        except SchemaError as error:
            raise InvalidArguments(f"The schema is invalid: {shorten(error.message, MAX_PROBLEM_CHARS)}.") from error
        self._validator = Draft202012Validator(schema, registry=Registry())

    def compose(self, text: str) -> str:
        """Return the question with the instruction to answer in JSON."""
        return f"{text}\n\nAnswer with JSON only, without other text. It must match this JSON schema: {self.text}"

    def read(self, text: str, metadata: Mapping[str, Any] | None) -> tuple[Any, str]:
        """Return the value of an answer, and a description of its problem, which is empty if the value matches the
        schema."""
        value = (metadata or {}).get("structured")
        if value is None:
            try:
                value = json.loads(_strip_fence(text))
            except (ValueError, RecursionError):
                return None, f"its answer is not JSON: {shorten(text.strip(), 80)!r}"
        try:
            problem = next(self._validator.iter_errors(value), None)
        except RecursionError:
            return None, "its answer is nested too deeply"
        if problem is None:
            return value, ""
        place = ".".join(map(str, problem.absolute_path))
        return None, shorten(
            f"its answer does not match: {place + ': ' if place else ''}{problem.message}", MAX_PROBLEM_CHARS
        )


def _list_keywords(schema: object) -> set[str]:
    """Return the keys of all objects in a schema. Names of properties are included, so some valid schemas are refused
    too."""
    match schema:
        case dict():
            return set(schema).union(*map(_list_keywords, schema.values()))
        case list():
            return set[str]().union(*map(_list_keywords, schema))
        case _:
            return set()


def _strip_fence(text: str) -> str:
    """Return the text inside a code fence, or the text itself."""
    lines = text.strip().splitlines()
    return "\n".join(lines[1:-1]) if len(lines) > 2 and lines[0].startswith("```") and lines[-1] == "```" else text


def check_request(agent_ids: Sequence[str], quorum: int | None) -> tuple[list[str], int]:
    """Return the agents without duplicates, and the number of answers that are enough. Raises `InvalidArguments`."""
    asked = list(dict.fromkeys(agent_ids))
    if not 0 < len(asked) <= MAX_AGENTS:
        raise InvalidArguments(f"{len(asked)} agents are named, but gather can ask 1 to {MAX_AGENTS} agents.")
    enough = len(asked) if quorum is None else quorum
    if not 0 < enough <= len(asked):
        raise InvalidArguments(f"The quorum is {quorum}. With {len(asked)} agents, it must be from 1 to {len(asked)}.")
    return asked, enough


async def gather(
    client: NetworkClient,
    agent_ids: Sequence[str],
    text: str,
    schema: Mapping[str, Any],
    *,
    quorum: int | None = None,
    timeout_s: float = 300.0,
    gather_id: str,
) -> Gathered:
    """Ask agents for answers that match a JSON schema. Returns when ``quorum`` agents (default: all) have answered,
    when no other agent will answer, or after ``timeout_s`` seconds.

    A repeated call with the same ``gather_id``, also by another process, asks no agent twice and finds earlier answers.
    The answers also arrive as ordinary deliveries.
    """
    form = SchemaForm(schema)
    asked, enough = check_request(agent_ids, quorum)
    loop = asyncio.get_running_loop()
    until, look_s = loop.time() + timeout_s, FIRST_LOOK_S
    questions: dict[int, str] = {}
    answers: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for number, agent_id in enumerate(asked):
        try:
            stored = await client.send_text(
                agent_id, form.compose(text), requires_response=[agent_id], message_id=f"{gather_id}-{number}"
            )
        except RequestError as error:
            missing[agent_id] = f"was not asked: {error}"
        else:
            questions[stored.seq] = agent_id
    position = min(questions, default=0)
    while len(answers) < enough and len(answers) + len(missing) < len(asked):
        left_s = until - loop.time()
        silent = await _find_silent(client, questions, answers, missing)
        async for message in client.follow(after=position, timeout_s=0.0 if silent else max(0.0, min(look_s, left_s))):
            position = max(position, message.seq)
            agent_id = questions.get(message.reply_to or 0, "")
            if agent_id != message.sender_id or agent_id in answers:
                continue
            value, problem = form.read(message.text, message.metadata)
            if problem:
                missing[agent_id] = problem
            else:
                missing.pop(agent_id, None)
                answers[agent_id] = value
            if len(answers) >= enough:
                break
        # Mark silent agents only after reading. A reply is stored before its conversation becomes quiet, so the loop
        # above has read every reply of these agents.
        missing |= {
            agent_id: "it finished without an answer" for agent_id in silent if agent_id not in answers | missing
        }
        if left_s <= 0:
            break
        look_s = min(2 * look_s, MAX_LOOK_S)
    reason = "not needed any more" if len(answers) >= enough else f"no answer within {timeout_s:g} s"
    missing = {agent_id: missing.get(agent_id, reason) for agent_id in asked if agent_id not in answers}
    return Gathered(tuple(asked), {agent_id: answers[agent_id] for agent_id in asked if agent_id in answers}, missing)


async def _find_silent(
    client: NetworkClient, questions: Mapping[int, str], answers: Mapping[str, Any], missing: Mapping[str, str]
) -> list[str]:
    """Return the agents that will not answer, because the conversation of their question is quiet."""
    return [
        agent_id
        for seq, agent_id in questions.items()
        if agent_id not in answers and agent_id not in missing and (await client.open_items(seq, limit=1)).is_quiet
    ]
