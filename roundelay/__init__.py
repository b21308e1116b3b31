"""Roundelay: a network in which agents, people and programs converse in threads, on one durable ledger.

Each public name is imported at its first use. ``import roundelay`` is therefore fast and loads no model provider.
"""

from __future__ import annotations

from os.path import dirname, isfile, join
from typing import TYPE_CHECKING

from roundelay.lazy import load_when_used

if TYPE_CHECKING:
    from roundelay.agents.policy import AgentPolicy
    from roundelay.agents.simple import SimpleAgentRunner, SimpleOpenAIAgentRunner
    from roundelay.agents.tools import ToolContext, tool
    from roundelay.app import Network, serve
    from roundelay.network.client import NetworkClient
    from roundelay.network.client.exactly_once import HistoryReplaced, handle_exactly_once
    from roundelay.network.config import Limits, NodeConfig
    from roundelay.network.errors import (
        BudgetExhausted,
        ConfigError,
        ConnectError,
        Forbidden,
        GiveUp,
        IdConflict,
        InternalError,
        InvalidArguments,
        InvalidFrame,
        LedgerError,
        LoopStopped,
        ModError,
        NotAuthenticated,
        Overloaded,
        RateLimited,
        RequestError,
        RetryLater,
        RoundelayError,
        Superseded,
        ThreadHeld,
        TooLarge,
        UnknownMessage,
        UnknownOperation,
        UnknownRecipient,
        UnsupportedProtocol,
    )
    from roundelay.network.messages import (
        BaseMessage,
        BroadcastMessage,
        ChannelMessage,
        DirectMessage,
        Message,
        MessageThread,
        ModMessage,
    )

_ERRORS = (
    "BudgetExhausted", "ConfigError", "ConnectError", "Forbidden", "GiveUp", "IdConflict", "InternalError",
    "InvalidArguments", "InvalidFrame", "LedgerError", "LoopStopped", "ModError", "NotAuthenticated", "Overloaded",
    "RateLimited", "RequestError", "RetryLater", "RoundelayError", "Superseded", "ThreadHeld", "TooLarge",
    "UnknownMessage", "UnknownOperation", "UnknownRecipient", "UnsupportedProtocol",
)  # fmt: skip
_MESSAGES = (
    "BaseMessage", "BroadcastMessage", "ChannelMessage", "DirectMessage", "Message", "MessageThread", "ModMessage",
)  # fmt: skip
_HOMES = {
    **dict.fromkeys(_ERRORS, "roundelay.network.errors"),
    **dict.fromkeys(_MESSAGES, "roundelay.network.messages"),
    "AgentPolicy": "roundelay.agents.policy",
    "HistoryReplaced": "roundelay.network.client.exactly_once",
    "Limits": "roundelay.network.config",
    "Network": "roundelay.app",
    "NetworkClient": "roundelay.network.client",
    "NodeConfig": "roundelay.network.config",
    "SimpleAgentRunner": "roundelay.agents.simple",
    "SimpleOpenAIAgentRunner": "roundelay.agents.simple",
    "ToolContext": "roundelay.agents.tools",
    "handle_exactly_once": "roundelay.network.client.exactly_once",
    "serve": "roundelay.app",
    "tool": "roundelay.agents.tools",
}

__all__ = [
    "AgentPolicy", "BaseMessage", "BroadcastMessage", "BudgetExhausted", "ChannelMessage", "ConfigError",
    "ConnectError", "DirectMessage", "Forbidden", "GiveUp", "HistoryReplaced", "IdConflict", "InternalError",
    "InvalidArguments", "InvalidFrame", "LedgerError", "Limits", "LoopStopped", "Message", "MessageThread", "ModError",
    "ModMessage", "Network", "NetworkClient", "NodeConfig", "NotAuthenticated", "Overloaded", "RateLimited",
    "RequestError", "RetryLater", "RoundelayError", "SimpleAgentRunner", "SimpleOpenAIAgentRunner", "Superseded",
    "ThreadHeld", "TooLarge", "ToolContext", "UnknownMessage", "UnknownOperation", "UnknownRecipient",
    "UnsupportedProtocol", "handle_exactly_once", "serve", "tool",
]  # fmt: skip


# A source checkout keeps five of the packages next to this folder, not inside it
# (docs/decisions/one-package-of-five-folders.md).
if not isfile(join(__path__[0], "network", "__init__.py")):
    _beside = dirname(__path__[0])
    if isfile(join(_beside, "network", "__init__.py")):
        __path__.append(_beside)


__getattr__ = load_when_used(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
