"""Evaluate the expectations of a scenario. A failed expectation reports the actual result. This module performs no
IO.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Literal

from roundelay.agents.models.model import Usage
from roundelay.agents.models.scripted import map_texts
from roundelay.agents.patterns import compile_pattern
from roundelay.network.addresses import channel_address, short_address
from roundelay.network.client import AnyMessage
from roundelay.network.config import YamlNode
from roundelay.runs.reading import RecordedCall, RecordedReaction
from roundelay.testing.file import PlacedExpectation
from roundelay.testing.form import (
    Bound,
    CausedBy,
    CostExpectation,
    CountExpectation,
    MessageExpectation,
    MessagePattern,
    ModExpectation,
    NeverInPrompt,
    PromptExpectation,
    PromptsExpectation,
    ReactionExpectation,
    StateExpectation,
    ThreadExpectation,
    ToolExpectation,
    WithinExpectation,
)
from roundelay.testing.record import RunRecord, describe_message

Render = Callable[[str], str]
"""Function that replaces the variables in a text."""

MAX_SHOWN = 5
MAX_COMPARED = 1000
"""Maximum number of characters of a message that are compared with a missing text."""


@dataclass(frozen=True)
class Verdict:
    """Result of one expectation. ``found`` describes the actual result, and ``seqs`` lists the related messages."""

    place: YamlNode
    name: str
    holds: bool
    found: str = ""
    seqs: tuple[int, ...] = ()


class _Wrong(Exception):
    """Raised for a failed expectation, with the actual result and the related messages."""

    def __init__(self, found: str, *seqs: int) -> None:
        super().__init__(found)
        self.found = found
        self.seqs = seqs


class Matcher:
    """Matches messages against filters. ``threads`` lists the names of the threads that the scenario declares."""

    def __init__(self, threads: Iterable[str] = (), render: Render = str) -> None:
        self.threads = frozenset(threads)
        self.render = render

    def fits(self, pattern: MessagePattern, message: AnyMessage) -> bool:
        if pattern.sender is not None and message.sender_id != self.render(pattern.sender):
            return False
        if any(not self._is_at(message, self.render(name)) for name in (pattern.to, pattern.place) if name is not None):
            return False
        if pattern.contains is not None and self.render(pattern.contains).casefold() not in message.text.casefold():
            return False
        return pattern.regex is None or compile_pattern(pattern.regex).search(message.text) is not None

    def _is_at(self, message: AnyMessage, name: str) -> bool:
        if name in self.threads:
            return message.to == channel_address(name)
        return name in (message.to, short_address(message.to), message.thread_id)


class Judge:
    """Evaluates the expectations of one scenario for one run. Each key of an expectation has a method of the same name,
    after an underscore.
    """

    def __init__(self, run: RunRecord, matcher: Matcher | None = None) -> None:
        self._run = run
        self._matcher = matcher or Matcher()
        self._render = self._matcher.render
        self._values = iter(run.values)

    def judge(self, placed: PlacedExpectation) -> Verdict:
        """Evaluate an expectation. Call this for `mod` expectations in the order of the scenario, because their results
        are stored in that order."""
        expectation = placed.expectation
        [name] = [name for name in type(expectation).model_fields if getattr(expectation, name) is not None]
        described = describe_plain(placed.place)
        try:
            for one in _each_agent(getattr(expectation, name)):
                getattr(self, f"_{name}")(one)
        except _Wrong as wrong:
            return Verdict(placed.place, described, False, wrong.found, wrong.seqs)
        except ValueError as error:  # a text contains an unknown variable
            return Verdict(placed.place, described, False, str(error))
        return Verdict(placed.place, described, True)

    # --- messages

    def _matching(self, pattern: MessagePattern) -> list[AnyMessage]:
        return [message for message in self._run.messages if self._matcher.fits(pattern, message)]

    def _near(self, pattern: MessagePattern) -> list[AnyMessage]:
        """Return the messages that are most similar to a missing message.

        The result has messages with the same sender and recipient, or else with the same sender or text. Messages that
        share the longest part of the missing text come first.
        """
        loose = [
            {"contains": None, "regex": None},
            {"to": None, "place": None},
            {"sender": None},
            {"sender": None, "to": None, "place": None},
            {"to": None, "place": None, "contains": None, "regex": None},
        ]
        for left_out in loose:
            relaxed = pattern.model_copy(update=left_out)
            # Skip a filter without any key, because it would match every message.
            if any(getattr(relaxed, name) is not None for name in ("sender", "to", "place", "contains", "regex")):
                near = self._matching(relaxed)
                if near and pattern.contains is not None:
                    # `autojunk` would ignore frequent letters of a long text, which would distort the similarity.
                    alike = SequenceMatcher(None, "", self._render(pattern.contains).casefold(), autojunk=False)
                    near.sort(key=lambda message: -_count_in_a_row(alike, message.text))
                if near:
                    return near
        return []

    def _need_messages(self, pattern: MessagePattern, bound: Bound) -> None:
        matching = self._matching(pattern)
        if bound.holds(len(matching)):
            return
        shown, label = (matching, "these") if matching else (self._near(pattern), "nearest")
        text = _with_messages(_times(len(matching), bound), label, shown)
        raise _Wrong(text, *(message.seq for message in shown[:MAX_SHOWN]))

    def _message(self, expect: MessageExpectation) -> None:
        self._need_messages(expect, _bound(expect.count))

    def _never(self, pattern: MessagePattern) -> None:
        self._need_messages(pattern, Bound(exactly=0))

    def _count(self, expect: CountExpectation) -> None:
        bound = _bound(Bound(exactly=expect.exactly, at_least=expect.at_least, at_most=expect.at_most))
        if expect.of == "messages":
            self._need_messages(
                expect if expect.agent is None else expect.model_copy(update={"sender": expect.agent}), bound
            )
            return
        reactions = self._reactions(_one(expect.agent))
        count = {
            "reactions": len(reactions),
            "turns": sum(reaction.turns for reaction in reactions),
            "tool_calls": sum(len(reaction.calls) for reaction in reactions),
        }[expect.of]
        if not bound.holds(count):
            raise _Wrong(f"{count} {expect.of}, expected {bound}")

    def _order(self, hops: Sequence[str]) -> None:
        """Check that each hop has its own message, which is later than the message of the previous hop.

        Other messages may come between these messages.
        """
        # All hops share one iterator, so each search continues after the message of the previous hop.
        messages, last = iter(self._run.messages), None
        for number, hop in enumerate(hops, 1):
            sender, _, rest = hop.partition(" -> ")
            to, _, text = rest.partition(": ")
            pattern = MessagePattern.model_validate({"from": sender, "to": to, "contains": text or None})
            match = next((message for message in messages if self._matcher.fits(pattern, message)), None)
            if match is None:
                after = f" after {describe_message(last)}" if last is not None else ""
                # The usual reason is a wrong order, so show the messages that came too early.
                earlier = [it for it in self._matching(pattern) if last is not None and it.seq <= last.seq]
                told = _with_messages(f'no "{hop}" (number {number}){after}', "earlier", earlier)
                raise _Wrong(told, *([last.seq] if last is not None else []))
            last = match

    def _within(self, expect: WithinExpectation) -> None:
        start, begin = self._run.began_at, 0
        if expect.after is not None:
            after = self._matching(expect.after)
            if not after:
                raise _Wrong(_with_messages('nothing fits "after"', "nearest", self._near(expect.after)))
            start, begin = after[0].sent_at, after[0].seq
        match = next((message for message in self._matching(expect.message) if message.seq > begin), None)
        if match is None:
            raise _Wrong(_with_messages("it never came", "nearest", self._near(expect.message)))
        took_s = (match.sent_at - start) / 1000
        if took_s > expect.at_most:
            raise _Wrong(
                f"it took {took_s:.3f} s, more than {expect.at_most:g} s: {describe_message(match)}", match.seq
            )

    def _thread(self, expect: ThreadExpectation) -> None:
        thread_id = channel_address(expect.id) if expect.id in self._matcher.threads else self._render(expect.id)
        members = sorted(self._run.readers.get(thread_id, ()))
        if members != sorted(expect.members):
            extra, missing = sorted(set(members) - set(expect.members)), sorted(set(expect.members) - set(members))
            parts = [f"{', '.join(ids)} {what}" for ids, what in ((extra, "unexpected"), (missing, "missing")) if ids]
            raise _Wrong(f"in {thread_id} are {', '.join(members) or 'nobody'}: {'; '.join(parts)}")

    def _caused_by(self, expect: CausedBy) -> None:
        matching = self._matching(expect.message)
        if not matching:
            raise _Wrong(_with_messages("there is no such message", "nearest", self._near(expect.message)))
        pattern = MessagePattern.model_validate({"from": expect.root}) if isinstance(expect.root, str) else expect.root
        for message in matching:
            root = self._run.path_to_root(message)[-1]
            if not self._matcher.fits(pattern, root):
                raise _Wrong(f"{describe_message(message)} goes back to {describe_message(root)}", message.seq)

    def _hops(self, bound: Bound) -> None:
        deepest = max(self._run.messages, key=lambda message: message.hops, default=None)
        hops, seqs = (deepest.hops, [deepest.seq]) if deepest is not None else (0, [])
        if not bound.holds(hops):
            raise _Wrong(f"the longest chain has {hops} hops, expected {bound}", *seqs)

    # --- agents

    def _reactions(self, agent_id: str | None) -> list[RecordedReaction]:
        return [reaction for reaction in self._run.reactions if agent_id in (None, reaction.agent_id)]

    def _tool(self, expect: ToolExpectation) -> None:
        calls = [(reaction, call) for reaction in self._reactions(_one(expect.agent)) for call in reaction.calls]
        named = [(reaction, call) for reaction, call in calls if call.tool == expect.name]
        count, bound = sum(self._fits_call(expect, call) for _, call in named), _bound(expect.count)
        if not bound.holds(count):
            shown = named or calls
            lines = [f"  nearest: {reaction.agent_id}: {_describe_call(call)}" for reaction, call in shown[:MAX_SHOWN]]
            raise _Wrong("\n".join([_times(count, bound), *lines]), *(reaction.trigger for reaction, _ in shown[:1]))

    def _fits_call(self, expect: ToolExpectation, call: RecordedCall) -> bool:
        if expect.ok is not None and call.is_ok is not expect.ok:
            return False
        if expect.result is not None and self._render(expect.result) not in (call.result or ""):
            return False
        return expect.arguments is None or _contains(call.parsed(), map_texts(expect.arguments, self._render))

    def _readings(self, text: str, agent_id: str | None, when: MessagePattern | None) -> list[tuple[str, AnyMessage]]:
        """Return the agents whose prompts contained a text, each with the trigger of the reaction."""
        triggers = {found.reaction: found.trigger for found in self._run.reactions}
        found = []
        for reader, reaction in self._run.prompts_with(text, agent_id):
            trigger = self._run.find(triggers.get(reaction, 0))
            if trigger is not None and (when is None or self._matcher.fits(when, trigger)):
                found.append((reader, trigger))
        return found

    def _prompt(self, expect: PromptExpectation) -> None:
        text = self._render(expect.contains)
        if not self._readings(text, _one(expect.agent), expect.when):
            lines = _describe_readings(self._readings(text, None, None))
            raise _Wrong("\n  ".join(["no such prompt contains the text", *lines]))

    def _never_in_prompt(self, expect: NeverInPrompt) -> None:
        text = self._render(expect.text)
        readings = self._readings(text, _one(expect.agent), expect.when)
        if readings:
            origin = next((message for message in self._run.messages if text in message.text), None)
            lines = _describe_readings(readings) + (
                [f"said in {describe_message(origin)}"] if origin is not None else []
            )
            raise _Wrong(
                "\n  ".join(lines), *(message.seq for message in (origin, readings[0][1]) if message is not None)
            )

    def _prompts(self, expect: PromptsExpectation) -> None:
        marks = {mark: self._render(mark) for mark in expect.marks}
        lines: list[str] = []
        seqs: list[int] = []
        for agent_id, allowed in expect.hold.items():
            for mark, text in marks.items():
                readings = self._readings(text, agent_id, expect.when)
                if readings and mark not in allowed:
                    lines.append(f"{agent_id} must not hold {text}: {_describe_readings(readings)[0]}")
                    seqs.append(readings[0][1].seq)
                elif not readings and mark in allowed:
                    lines.append(f"{agent_id} does not hold {text}")
        if lines:
            raise _Wrong("\n  ".join(lines[:MAX_SHOWN]), *seqs[:MAX_SHOWN])

    def _cost(self, expect: CostExpectation) -> None:
        reactions = self._reactions(_one(expect.agent))
        usage = sum((reaction.usage for reaction in reactions), Usage())
        tokens, calls = (
            usage.prompt_tokens + usage.completion_tokens,
            sum(len(reaction.replies) for reaction in reactions),
        )
        for count, bound, what in ((tokens, expect.tokens, "tokens"), (calls, expect.model_calls, "model calls")):
            if bound is not None and not bound.holds(count):
                most = max(reactions, key=lambda reaction: reaction.usage.prompt_tokens, default=None)
                whose = f"; the most in a reaction of {most.agent_id}" if most is not None else ""
                seqs = [most.trigger] if most is not None else []
                raise _Wrong(f"{count} {what}, expected {bound}{whose}", *seqs)

    def _reaction(self, expect: ReactionExpectation) -> None:
        own = self._reactions(_one(expect.agent))
        reason = self._render(expect.reason or "")
        count = sum(expect.status in (None, reaction.status) and reason in reaction.reason for reaction in own)
        bound = _bound(expect.count)
        if not bound.holds(count):
            lines = [
                f"  of #{reaction.trigger}: {reaction.status or 'open'} ({reaction.reason})"
                for reaction in own[:MAX_SHOWN]
            ]
            raise _Wrong("\n".join([_times(count, bound), *lines]), *(reaction.trigger for reaction in own[:1]))

    # --- the rest

    def _mod(self, expect: ModExpectation) -> None:
        # The results are in the order of the expectations, because the operations were called in that order.
        self._need_value(next(self._values), expect)

    def _state(self, expect: StateExpectation) -> None:
        if expect.changed is not None:
            changed, expected = set(list_changes(self._run.state_before, self._run.state)), set(expect.changed)
            lines = [f"{path} changed too" for path in sorted(changed - expected)]
            lines += [f"{path} did not change" for path in sorted(expected - changed)]
            if lines:
                raise _Wrong("\n  ".join(lines))
            return
        value = find_in(self._run.state, self._render(expect.path)) if expect.path is not None else self._run.state
        self._need_value(value, expect)

    def _need_value(self, value: Any, expect: ModExpectation | StateExpectation) -> None:
        is_exact = "equals" in expect.model_fields_set
        expected = map_texts(expect.equals if is_exact else expect.contains, self._render)
        if not (value == expected if is_exact else _contains(value, expected)):
            raise _Wrong(f"its value is {json.dumps(value, ensure_ascii=False, default=str)}")

    def _quiet(self, expect: Literal[True] | MessagePattern) -> None:
        messages = self._run.messages if expect is True else self._matching(expect)
        if expect is not True and not messages:
            raise _Wrong("there is no such message")
        still_open = {root: self._run.open_items.get(root, ()) for root in sorted({it.root for it in messages})}
        lines = [f"  {line}" for root in still_open for line in still_open[root]]
        if lines:
            roots = [root for root, open_lines in still_open.items() if open_lines]
            raise _Wrong("\n".join(["still open:", *lines[:MAX_SHOWN]]), *roots[:MAX_SHOWN])

    def _no_dead_letters(self, _: object) -> None:
        letters = self._run.dead_letters
        if letters:
            lines = [
                f"  #{letter['seq']} at {letter['agent_id']}: {letter['reason']}" for letter in letters[:MAX_SHOWN]
            ]
            text = "\n".join([f"{len(letters)} dead letters:", *lines])
            raise _Wrong(text, *(letter["seq"] for letter in letters[:MAX_SHOWN]))


def describe_plain(node: YamlNode) -> str:
    """Format an item of the scenario file on one line."""
    return re.sub(r'"([A-Za-z_]\w*)": ', r"\1: ", json.dumps(node.plain(), ensure_ascii=False, default=str))[1:-1]


def _count_in_a_row(alike: SequenceMatcher[str], text: str) -> int:
    alike.set_seq1(text[:MAX_COMPARED].casefold())
    return alike.find_longest_match().size


def _each_agent(expected: Any) -> Iterator[Any]:
    """Yield a copy of the expectation for each agent that it names."""
    agents = getattr(expected, "agent", None)
    if not isinstance(agents, list):
        yield expected
        return
    for agent_id in agents:
        yield expected.model_copy(update={"agent": agent_id})


def _one(agent: str | list[str] | None) -> str | None:
    """Return the agent of an expectation that names at most one agent."""
    assert not isinstance(agent, list)
    return agent


def find_in(value: Any, path: str) -> Any:
    """Return the value at a path such as ``orders.12.status``, or None if the path does not exist.

    The parts of a path are names and list indexes.
    """
    for name in path.split("."):
        if isinstance(value, Mapping):
            value = value.get(name)
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value


def list_changes(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Yield the paths at which two JSON values differ. Nested values are compared only where both are mappings."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in (*before, *(name for name in after if name not in before)):
            inside = f"{path}.{name}" if path else str(name)
            if name in before and name in after:
                yield from list_changes(before[name], after[name], inside)
            else:
                yield inside
    elif before != after:
        yield path


def _bound(count: int | Bound | None) -> Bound:
    """Return the range for a count. Without a count, the range is at least one."""
    # An expectation without a count means that a matching message exists.
    if count is None or count == Bound():
        return Bound(at_least=1)
    return Bound(exactly=count) if isinstance(count, int) else count


def _times(count: int, bound: Bound) -> str:
    return (f"{count} time{'' if count == 1 else 's'}" if count else "not once") + f", expected {bound}"


def _with_messages(text: str, label: str, messages: Sequence[AnyMessage]) -> str:
    lines = [f"  {label}: {describe_message(message)}" for message in messages[:MAX_SHOWN]]
    more = [f"  and {len(messages) - MAX_SHOWN} more"] if len(messages) > MAX_SHOWN else []
    return "\n".join([text, *lines, *more])


def _describe_readings(readings: Sequence[tuple[str, AnyMessage]]) -> list[str]:
    return [f"read by {reader} at {describe_message(trigger)}" for reader, trigger in readings[:MAX_SHOWN]]


def _describe_call(call: RecordedCall) -> str:
    result = call.result if call.result is not None else "no result"
    return f"{call.tool}({call.arguments}) -> {'' if call.is_ok else 'failed: '}{result[:100]}"


def _contains(value: Any, expected: Any) -> bool:
    """Return whether a JSON value contains another value.

    A mapping must contain all keys, a list must contain a matching item for each item, and a text must contain the
    other text.
    """
    match expected, value:
        case Mapping(), Mapping():
            return all(key in value and _contains(value[key], item) for key, item in expected.items())
        case list(), list():
            return all(any(_contains(found, item) for found in value) for item in expected)
        case str(), str():
            return expected in value
        case _:
            return bool(value == expected)
