"""Tests of the model interface: replies survive the journal, usage adds up, IDs are derived, and no provider is
loaded.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from pydantic import ValidationError

from roundelay.agents.models.model import (
    ModelError,
    ModelReply,
    ModelRequest,
    ToolCall,
    Usage,
    UserMessage,
    derive_call_id,
)
from roundelay.agents.recorded import Recorded


def recorded(reply: object) -> ModelReply:
    """Return the reply of turn 1 as it is read back from the journal."""
    run = Recorded()
    run.add("model_reply", {"turn": 1, "agent": "ann", "reply": json.loads(json.dumps(reply))})
    return run.replies[1]


def test_a_reply_comes_back_from_its_record_as_it_was() -> None:
    reply = ModelReply(
        "text ü", (ToolCall("c1", "send", '{"a": 1'), ToolCall("c2", "x", "")), Usage(10, 5, 3, 2), "tool_calls", "gpt"
    )
    assert recorded(reply.to_json()) == reply


def test_a_reply_of_another_shape_is_refused() -> None:
    with pytest.raises(ValidationError):
        recorded({"text": "a", "tool_calls": [{"id": "c1"}]})


def test_usage_adds_every_field() -> None:
    assert Usage(1, 2, 3, 4) + Usage(10, 20, 30, 40) == Usage(11, 22, 33, 44)


def test_derived_call_ids_repeat_for_the_same_request_and_differ_otherwise() -> None:
    request = ModelRequest((UserMessage("hi"),), agent_id="a", reaction="r", turn=1)
    assert derive_call_id(request, 0) == derive_call_id(request, 0)
    others = [
        derive_call_id(request, 1),
        derive_call_id(ModelRequest(request.messages, agent_id="b", reaction="r", turn=1), 0),
        derive_call_id(ModelRequest(request.messages, agent_id="a", reaction="s", turn=1), 0),
        derive_call_id(ModelRequest(request.messages, agent_id="a", reaction="r", turn=2), 0),
        derive_call_id(ModelRequest((*request.messages, UserMessage("x")), agent_id="a", reaction="r", turn=1), 0),
    ]
    assert len({derive_call_id(request, 0), *others}) == 6


@pytest.mark.parametrize(
    ("reason", "retryable"),
    [("rate_limited", True), ("timeout", True), ("server", True), ("unauthorized", False), ("rejected", False)],
)
def test_an_error_says_whether_a_repeat_can_help(reason: str, retryable: bool) -> None:
    assert ModelError("x", reason=reason).retryable is retryable  # type: ignore[arg-type]


def test_the_package_loads_no_provider_until_one_is_named() -> None:
    script = (
        "import sys, roundelay.agents.models as m; m.ModelRequest; m.ScriptedModel; m.RuleSet; assert 'aiohttp' not in sys.modules; "
        "m.OpenAIModel; assert 'aiohttp' in sys.modules; assert not {'openai', 'xllamacpp'} & set(sys.modules); print(len([getattr(m, n) for n in m.__all__]))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 10
