"""What a scenario may expect, as strict models: one expectation is exactly one of its keys. `judge` looks whether they hold."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, JsonValue, Tag, model_validator

from roundelay.scenario.values import Count, Id, Pattern, Seconds, Strict, Text, need_one, which_form


class MessageFilter(Strict):
    """Messages that fit all of what is said. ``to`` and ``in`` take a participant, a thread of the scenario or an address."""

    sender: Text | None = Field(None, alias="from")
    to: Text | None = None
    place: Text | None = Field(None, alias="in")
    contains: str | None = None
    regex: Pattern | None = None


class Bound(Strict):
    exactly: Count | None = None
    at_least: Count | None = None
    at_most: Count | None = None


Counted = Annotated[Annotated[Count, Tag("one")] | Annotated[Bound, Tag("many")], Discriminator(which_form)]


class MessageExpectation(MessageFilter):
    """How often; at least once if nothing is said."""

    count: Counted | None = None


class CountExpectation(MessageFilter):
    of: Literal["messages", "reactions", "turns", "tool_calls"] = "messages"
    agent: Id | None = None
    exactly: Count | None = None
    at_least: Count | None = None
    at_most: Count | None = None


class WithinExpectation(Strict):
    """The first message that fits comes at most so long after the first that fits ``after``, or after the beginning."""

    at_most: Seconds
    message: MessageFilter
    after: MessageFilter | None = None


class ThreadExpectation(Strict):
    id: Text
    members: list[Id]


class ToolExpectation(Strict):
    name: Text
    agent: Id | None = None
    arguments: dict[str, JsonValue] | None = Field(None, alias="with")
    result: Text | None = None
    ok: bool | None = None
    count: Counted | None = None


class PromptExpectation(Strict):
    """``when``: only the prompts of reactions to messages that fit."""

    contains: Text
    agent: Id | None = None
    when: MessageFilter | None = None


class NeverInPrompt(Strict):
    """Likewise."""

    text: Text
    agent: Id | None = None
    when: MessageFilter | None = None


class CausedBy(Strict):
    """Every message that fits goes back to a message of ``root`` (a participant, or what that message is like)."""

    message: MessageFilter
    root: Annotated[Annotated[Text, Tag("one")] | Annotated[MessageFilter, Tag("many")], Discriminator(which_form)]


class CostExpectation(Strict):
    agent: Id | None = None
    tokens: Bound | None = None
    model_calls: Bound | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tokens is None and self.model_calls is None:
            raise ValueError("must have tokens or model_calls")
        return self


class ReactionExpectation(Strict):
    agent: Id
    status: Literal["finished", "stopped", "cancelled", "failed"] | None = None
    reason: Text | None = None
    count: Counted | None = None


class ModExpectation(Strict):
    """What a reading operation gives at the end, asked by ``as`` (else by an operator)."""

    op: Text
    asker: Id | None = Field(None, alias="as")
    args: dict[str, JsonValue] = Field({})
    equals: JsonValue = None
    contains: JsonValue = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len({"equals", "contains"} & self.model_fields_set) != 1:
            raise ValueError("must have exactly one of equals, contains")
        return self


class Expectation(Strict):
    """One expectation: exactly one of its keys."""

    message: MessageExpectation | None = None
    never: MessageFilter | None = None
    count: CountExpectation | None = None
    order: list[Text] | None = None
    within: WithinExpectation | None = None
    thread: ThreadExpectation | None = None
    tool: ToolExpectation | None = None
    prompt: PromptExpectation | None = None
    never_in_prompt: NeverInPrompt | None = None
    caused_by: CausedBy | None = None
    cost: CostExpectation | None = None
    hops: Bound | None = None
    reaction: ReactionExpectation | None = None
    mod: ModExpectation | None = None
    no_dead_letters: Literal[True] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        need_one(self, type(self).model_fields)
        for hop in self.order or ():
            if not re.fullmatch(r"\S+ -> \S+(: .+)?", hop):
                raise ValueError(f'has "{hop}"; write "sender -> receiver", and ": text" behind it if that is meant')
        return self
