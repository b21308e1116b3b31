"""Looks at what a run left behind for what a scenario expects: each expectation holds, or says what was found instead. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from roundelay.agents.models.model import Usage
from roundelay.network.client import AnyMessage
from roundelay.network.config import YamlNode
from roundelay.scenario.expectations import (
    Bound,
    CausedBy,
    CostExpectation,
    CountExpectation,
    MessageFilter,
    NeverInPrompt,
    PromptExpectation,
    ReactionExpectation,
    ThreadExpectation,
    ToolExpectation,
    WithinExpectation,
)
from roundelay.scenario.file import PlacedExpectation
from roundelay.scenario.record import CallRecord, ReactionRecord, RunRecord, describe_message

Render = Callable[[str], str]
"""Fills in the variables of a text."""

MAX_SHOWN = 5


@dataclass(frozen=True)
class Verdict:
    """What became of one expectation. ``found`` says what there was instead, ``seqs`` are the messages that tell why."""

    place: YamlNode
    name: str
    holds: bool
    found: str = ""
    seqs: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Found:
    holds: bool
    text: str = ""
    seqs: tuple[int, ...] = ()


class Judge:
    """Judges the expectations of one scenario by one run. ``threads`` are the names of its own threads."""

    def __init__(self, run: RunRecord, threads: Sequence[str], render: Render) -> None:
        self._run = run
        self._threads = frozenset(threads)
        self._render = render
        self._values = iter(run.values)

    def judge(self, placed: PlacedExpectation) -> Verdict:
        """Say whether an expectation holds. Those of `mod` must come in the scenario's order."""
        it = placed.expectation
        [name] = [name for name in type(it).model_fields if getattr(it, name) is not None]
        value = getattr(it, name)
        try:
            found = self._look(name, value)
        except ValueError as error:  # it names a variable that there is not
            found = _Found(False, str(error))
        return Verdict(placed.place, describe_plain(placed.place), found.holds, found.text, found.seqs)

    def _look(self, name: str, value: Any) -> _Found:
        match name:
            case "message":
                return self._count_messages(value, _bound(value.count))
            case "never":
                return self._count_messages(value, Bound(exactly=0))
            case "count":
                return self._count(value)
            case "order":
                return self._order(value)
            case "within":
                return self._within(value)
            case "thread":
                return self._thread(value)
            case "tool":
                return self._tool(value)
            case "prompt":
                return self._prompt(value)
            case "never_in_prompt":
                return self._never_in_prompt(value)
            case "caused_by":
                return self._caused_by(value)
            case "cost":
                return self._cost(value)
            case "hops":
                return self._hops(value)
            case "reaction":
                return self._reaction(value)
            case "mod":
                return self._mod(value.model_fields_set, value.equals, value.contains)
            case _:
                return self._no_dead_letters()

    # --- messages

    def fits(self, wanted: MessageFilter, message: AnyMessage) -> bool:
        """Whether a message is as it is wanted."""
        if wanted.sender is not None and message.sender_id != self._render(wanted.sender):
            return False
        if wanted.to is not None and not self._is_at(message, self._render(wanted.to)):
            return False
        if wanted.place is not None and not self._is_at(message, self._render(wanted.place)):
            return False
        if wanted.contains is not None and self._render(wanted.contains).casefold() not in message.text.casefold():
            return False
        return wanted.regex is None or re.search(wanted.regex, message.text) is not None

    def _is_at(self, message: AnyMessage, name: str) -> bool:
        if name in self._threads:
            return message.to == f"channel:{name}"
        return name in (message.to, message.to.removeprefix("agent:"), message.thread_id)

    def _matching(self, wanted: MessageFilter) -> list[AnyMessage]:
        return [message for message in self._run.messages if self.fits(wanted, message)]

    def _near(self, wanted: MessageFilter) -> list[AnyMessage]:
        """What comes nearest to a message that is missing: the same sender and place; else the same sender or text."""
        loose = [
            {"contains": None, "regex": None},
            {"to": None, "place": None},
            {"sender": None},
            {"sender": None, "to": None, "place": None},
            {"to": None, "place": None, "contains": None, "regex": None},
        ]
        for left_out in loose:
            relaxed = wanted.model_copy(update=left_out)
            if any(getattr(relaxed, name) is not None for name in ("sender", "to", "place", "contains", "regex")):
                near = self._matching(relaxed)
                if near:
                    return near
        return []

    def _count_messages(self, wanted: MessageFilter, bound: Bound) -> _Found:
        matching = self._matching(wanted)
        if _is_within(len(matching), bound):
            return _Found(True)
        told = f"{_times(len(matching))}, expected {_describe_bound(bound)}"
        shown, label = (matching, "these") if matching else (self._near(wanted), "nearest")
        return _Found(False, _with_messages(told, label, shown), tuple(message.seq for message in shown[:MAX_SHOWN]))

    def _count(self, it: CountExpectation) -> _Found:
        bound = Bound(exactly=it.exactly, at_least=it.at_least, at_most=it.at_most)
        if bound == Bound():
            bound = Bound(at_least=1)
        if it.of == "messages":
            wanted = it if it.agent is None else it.model_copy(update={"sender": it.agent})
            return self._count_messages(wanted, bound)
        reactions = [found for found in self._run.reactions if it.agent in (None, found.agent_id)]
        counts = {
            "reactions": len(reactions),
            "turns": sum(found.turns for found in reactions),
            "tool_calls": sum(len(found.calls) for found in reactions),
        }
        count = counts[it.of]
        return _Found(_is_within(count, bound), f"{count} {it.of}, expected {_describe_bound(bound)}")

    def _order(self, hops: Sequence[str]) -> _Found:
        """Each hop has a message of its own, later than that of the one before; others may lie between."""
        position, last = 0, None
        for number, hop in enumerate(hops, 1):
            sender, _, rest = hop.partition(" -> ")
            to, _, text = rest.partition(": ")
            wanted = MessageFilter.model_validate({"from": sender, "to": to, "contains": text or None})
            for index in range(position, len(self._run.messages)):
                if self.fits(wanted, self._run.messages[index]):
                    position, last = index + 1, self._run.messages[index]
                    break
            else:
                after = f" after {describe_message(last)}" if last is not None else ""
                earlier = [message for message in self._run.messages[:position] if self.fits(wanted, message)]
                told = f'no "{hop}" (number {number}){after}'
                return _Found(False, _with_messages(told, "earlier", earlier), (last.seq,) if last is not None else ())
        return _Found(True)

    def _within(self, it: WithinExpectation) -> _Found:
        start, begin = self._run.began_at, 0
        if it.after is not None:
            after = self._matching(it.after)
            if not after:
                return _Found(False, _with_messages('nothing fits "after"', "nearest", self._near(it.after)))
            start, begin = after[0].sent_at, after[0].seq
        found = [message for message in self._matching(it.message) if message.seq > begin]
        if not found:
            return _Found(False, _with_messages("it never came", "nearest", self._near(it.message)))
        took_s = (found[0].sent_at - start) / 1000
        if took_s <= it.at_most:
            return _Found(True)
        told = f"it took {took_s:.3f} s, more than {it.at_most:g} s: {describe_message(found[0])}"
        return _Found(False, told, (found[0].seq,))

    def _thread(self, it: ThreadExpectation) -> _Found:
        thread_id = f"channel:{it.id}" if it.id in self._threads else self._render(it.id)
        members = sorted(self._run.readers.get(thread_id, ()))
        if members == sorted(it.members):
            return _Found(True)
        extra, missing = sorted(set(members) - set(it.members)), sorted(set(it.members) - set(members))
        parts = [f"{', '.join(ids)} {what}" for ids, what in ((extra, "too much"), (missing, "missing")) if ids]
        return _Found(False, f"in {thread_id} are {', '.join(members) or 'nobody'}: {'; '.join(parts)}")

    def _caused_by(self, it: CausedBy) -> _Found:
        matching = self._matching(it.message)
        if not matching:
            return _Found(False, _with_messages("there is no such message", "nearest", self._near(it.message)))
        for message in matching:
            root = self._run.path_to_root(message)[-1]
            is_root = root.sender_id == self._render(it.root) if isinstance(it.root, str) else self.fits(it.root, root)
            if not is_root:
                return _Found(
                    False, f"{describe_message(message)} goes back to {describe_message(root)}", (message.seq,)
                )
        return _Found(True)

    def _hops(self, bound: Bound) -> _Found:
        deepest = max(self._run.messages, key=lambda message: message.hops, default=None)
        hops = deepest.hops if deepest is not None else 0
        if _is_within(hops, bound):
            return _Found(True)
        told = f"the longest chain has {hops} hops, expected {_describe_bound(bound)}"
        return _Found(False, told, (deepest.seq,) if deepest is not None else ())

    # --- agents

    def _reactions(self, agent_id: str | None) -> list[ReactionRecord]:
        return [found for found in self._run.reactions if agent_id in (None, found.agent_id)]

    def _tool(self, it: ToolExpectation) -> _Found:
        made = [(found, call) for found in self._reactions(it.agent) for call in found.calls.values()]
        named = [(found, call) for found, call in made if call.tool == it.name]
        matching = [call for _, call in named if self._fits_call(it, call)]
        bound = _bound(it.count)
        if _is_within(len(matching), bound):
            return _Found(True)
        told = f"{_times(len(matching))}, expected {_describe_bound(bound)}"
        shown = named or made
        lines = [f"{found.agent_id}: {_describe_call(call)}" for found, call in shown[:MAX_SHOWN]]
        seqs = tuple(found.trigger for found, _ in shown[:1])
        return _Found(False, "\n".join([told, *(f"  nearest: {line}" for line in lines)]), seqs)

    def _fits_call(self, it: ToolExpectation, call: CallRecord) -> bool:
        if it.ok is not None and call.is_ok is not it.ok:
            return False
        if it.result is not None and self._render(it.result) not in (call.result or ""):
            return False
        return it.arguments is None or _contains(call.parsed(), _map_texts(it.arguments, self._render))

    def _readings(self, text: str, agent_id: str | None, when: MessageFilter | None) -> list[tuple[str, AnyMessage]]:
        """Who read a text, and the messages that they reacted to then."""
        triggers = {found.reaction: found.trigger for found in self._run.reactions}
        found = []
        for reader, reaction in self._run.prompts_with(text, agent_id):
            trigger = self._run.find(triggers.get(reaction, 0))
            if trigger is not None and (when is None or self.fits(when, trigger)):
                found.append((reader, trigger))
        return found

    def _prompt(self, it: PromptExpectation) -> _Found:
        text = self._render(it.contains)
        if self._readings(text, it.agent, it.when):
            return _Found(True)
        read = [f"{reader} at {describe_message(trigger)}" for reader, trigger in self._readings(text, None, None)]
        told = "\n  ".join(["no such prompt holds it", *(f"read by {line}" for line in read[:MAX_SHOWN])])
        return _Found(False, told)

    def _never_in_prompt(self, it: NeverInPrompt) -> _Found:
        text = self._render(it.text)
        read = self._readings(text, it.agent, it.when)
        if not read:
            return _Found(True)
        lines = [f"read by {reader} at {describe_message(trigger)}" for reader, trigger in read[:MAX_SHOWN]]
        said = next((found for found in self._run.messages if text in found.text), None)
        told = "\n  ".join([*lines, *([f"said in {describe_message(said)}"] if said is not None else [])])
        return _Found(False, told, tuple(found.seq for found in (said, read[0][1]) if found is not None))

    def _cost(self, it: CostExpectation) -> _Found:
        reactions = self._reactions(it.agent)
        usage = sum((found.usage for found in reactions), Usage())
        tokens, calls = usage.prompt_tokens + usage.completion_tokens, sum(found.model_calls for found in reactions)
        for count, bound, what in ((tokens, it.tokens, "tokens"), (calls, it.model_calls, "model calls")):
            if bound is not None and not _is_within(count, bound):
                most = max(reactions, key=lambda found: found.usage.prompt_tokens, default=None)
                told = f"{count} {what}, expected {_describe_bound(bound)}"
                if most is not None:
                    told += f"; the most in a reaction of {most.agent_id}"
                return _Found(False, told, (most.trigger,) if most is not None else ())
        return _Found(True)

    def _reaction(self, it: ReactionExpectation) -> _Found:
        own = self._reactions(it.agent)
        matching = [
            found
            for found in own
            if it.status in (None, found.status) and (it.reason is None or self._render(it.reason) in found.reason)
        ]
        bound = _bound(it.count)
        if _is_within(len(matching), bound):
            return _Found(True)
        lines = [f"  of #{found.trigger}: {found.status or 'open'} ({found.reason})" for found in own[:MAX_SHOWN]]
        told = f"{_times(len(matching))}, expected {_describe_bound(bound)}"
        return _Found(False, "\n".join([told, *lines]), tuple(found.trigger for found in own[:1]))

    # --- the rest

    def _mod(self, given: set[str], equals: Any, contains: Any) -> _Found:
        value = next(self._values)
        wanted = _map_texts(equals if "equals" in given else contains, self._render)
        holds = value == wanted if "equals" in given else _contains(value, wanted)
        return _Found(holds, f"it gives {json.dumps(value, ensure_ascii=False, default=str)}")

    def _no_dead_letters(self) -> _Found:
        letters = self._run.dead_letters
        if not letters:
            return _Found(True)
        lines = [f"  #{it['seq']} at {it['agent_id']}: {it['reason']}" for it in letters[:MAX_SHOWN]]
        told = "\n".join([f"{len(letters)} dead letters:", *lines])
        return _Found(False, told, tuple(it["seq"] for it in letters[:MAX_SHOWN]))


def describe_plain(node: YamlNode) -> str:
    """An item of the file in one line, as it stands there."""
    return re.sub(r'"([A-Za-z_]\w*)": ', r"\1: ", json.dumps(node.plain(), ensure_ascii=False, default=str))[1:-1]


def _bound(count: int | Bound | None) -> Bound:
    if count is None or count == Bound():
        return Bound(at_least=1)
    return Bound(exactly=count) if isinstance(count, int) else count


def _is_within(count: int, bound: Bound) -> bool:
    return (
        bound.exactly in (None, count)
        and (bound.at_least is None or count >= bound.at_least)
        and (bound.at_most is None or count <= bound.at_most)
    )


def _describe_bound(bound: Bound) -> str:
    names = ((bound.exactly, ""), (bound.at_least, "at least "), (bound.at_most, "at most "))
    return " and ".join(f"{name}{count}" for count, name in names if count is not None)


def _times(count: int) -> str:
    return f"{count} time{'' if count == 1 else 's'}" if count else "not once"


def _with_messages(told: str, label: str, messages: Sequence[AnyMessage]) -> str:
    lines = [f"  {label}: {describe_message(message)}" for message in messages[:MAX_SHOWN]]
    more = [f"  and {len(messages) - MAX_SHOWN} more"] if len(messages) > MAX_SHOWN else []
    return "\n".join([told, *lines, *more])


def _describe_call(call: CallRecord) -> str:
    result = call.result if call.result is not None else "no result"
    return f"{call.tool}({call.arguments}) -> {'' if call.is_ok else 'failed: '}{result[:100]}"


def _contains(value: Any, wanted: Any) -> bool:
    """Whether a JSON value holds what is wanted: of mappings these keys, of lists such an item for each, of texts a part."""
    match wanted, value:
        case Mapping(), Mapping():
            return all(key in value and _contains(value[key], item) for key, item in wanted.items())
        case list(), list():
            return all(any(_contains(found, item) for found in value) for item in wanted)
        case str(), str():
            return wanted in value
        case _:
            return bool(value == wanted)


def _map_texts(value: Any, change: Render) -> Any:
    match value:
        case str():
            return change(value)
        case list():
            return list(map(partial(_map_texts, change=change), value))
        case dict():
            return {key: _map_texts(item, change) for key, item in value.items()}
        case _:
            return value
