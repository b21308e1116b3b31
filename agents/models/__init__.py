"""Models: the interface between a reaction and a model (`model`), and its implementations, one module each.

Names are resolved on first use, so importing this package does not import a provider's package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .local import LocalModel, LocalServer
    from .model import (
        AssistantMessage,
        ChatMessage,
        File,
        Model,
        ModelDelta,
        ModelError,
        ModelReply,
        ModelRequest,
        SystemMessage,
        ToolCall,
        ToolMessage,
        ToolSpec,
        Usage,
        UserMessage,
    )
    from .openai_model import OpenAIModel
    from .prompt_view import PromptView, read_prompt
    from .scripted import RuleSet, ScriptedModel, load_rules, load_script
    from .tape import TapeModel

__all__ = [
    "AssistantMessage",
    "ChatMessage",
    "File",
    "LocalModel",
    "LocalServer",
    "Model",
    "ModelDelta",
    "ModelError",
    "ModelReply",
    "ModelRequest",
    "OpenAIModel",
    "PromptView",
    "RuleSet",
    "ScriptedModel",
    "SystemMessage",
    "TapeModel",
    "ToolCall",
    "ToolMessage",
    "ToolSpec",
    "Usage",
    "UserMessage",
    "load_rules",
    "load_script",
    "read_prompt",
]

_MODULES = {
    "LocalModel": "local",
    "LocalServer": "local",
    "OpenAIModel": "openai_model",
    "PromptView": "prompt_view",
    "RuleSet": "scripted",
    "ScriptedModel": "scripted",
    "TapeModel": "tape",
    "load_rules": "scripted",
    "load_script": "scripted",
    "read_prompt": "prompt_view",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES.get(name, 'model')}", __name__), name)
