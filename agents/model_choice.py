"""Models in YAML: the model of an agent, and its fallbacks.

`team` reads a `ModelChoice` from an agent's file and builds the model. A provider's package is imported only when its
model is built, so a file can be checked without that package.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, JsonValue, model_validator

from roundelay.network.yaml import show_value

from .models.fallback import FallbackModel
from .models.model import Model
from .models.scripted import RuleSet, ScriptedModel, ScriptRule, load_rules, load_script
from .models.tape import TapeModel
from .options import Count, Strict, Text, VariableName, read_form


class RulesChoice(Strict):
    """Differences between an OpenAI-compatible server and the rules that its address implies
    (`models.endpoint_rules`). ``provider`` names the rules to start from.
    """

    provider: Literal["openai", "azure", "mistral", "deepseek", "kimi", "gemini", "bedrock", "other"] | None = None
    notes: Literal["in_results", "as_user"] | None = None
    call_ids: Literal["own", "safe", "nine"] | None = None
    reasoning: Literal["sealed", "returned", "required", "dropped"] | None = None
    signs_calls: bool | None = None
    declares_used_tools: bool | None = None
    stream_usage: bool | None = None


class OpenAIChoice(Strict):
    """A model on an OpenAI-compatible server. ``settings`` are added to each request unchanged."""

    name: Text
    base_url: Text | None = None
    api_key_env: VariableName = "OPENAI_API_KEY"
    tool_mode: Literal["native", "json_schema"] = "native"
    stream: bool | None = None
    cache_control: bool = False
    settings: dict[str, JsonValue] = Field(default_factory=dict)
    rules: RulesChoice = RulesChoice()


class LocalChoice(Strict):
    """A model that runs on this machine's CPU. ``weights`` is a GGUF file; by default, the small model of the package
    is used. Set ``tools`` if the model is large enough to call tools.
    """

    weights: Path | None = None
    context_tokens: Count = 8192
    tools: bool = False


_BASE_URLS: Mapping[str, str] = {
    "azure": "https://RESOURCE.openai.azure.com/openai/v1/",
    "mistral": "https://api.mistral.ai/v1",
    "deepseek": "https://api.deepseek.com/v1",
    "kimi": "https://api.moonshot.ai/v1",
    "moonshot": "https://api.moonshot.ai/v1",
    "gemini": "https://generativelanguage.googleapis.com/v1beta/openai/",
    "google": "https://generativelanguage.googleapis.com/v1beta/openai/",
    "anthropic": "https://api.anthropic.com/v1/",
    "claude": "https://api.anthropic.com/v1/",
    "bedrock": "http://127.0.0.1:4000/v1",
    "litellm": "http://127.0.0.1:4000/v1",
    "openrouter": "https://openrouter.ai/api/v1",
    "ollama": "http://127.0.0.1:11434/v1",
    "vllm": "http://127.0.0.1:8000/v1",
    "llama": "http://127.0.0.1:8080/v1",
}
"""Base URLs by common server names. The table is in docs/models.md, "Model servers"."""


class ModelChoice(Strict):
    """Model of an agent in YAML. Set exactly one of ``openai``, ``script``, ``rules``, ``local`` and ``replay``.

    ``script`` is a file of rules, or ``module:function``. ``rules`` contains rules of a script inline. ``replay`` is a
    tape with a model's recorded replies.
    """

    openai: OpenAIChoice | None = None
    script: Text | None = None
    rules: list[ScriptRule] | None = None
    local: LocalChoice | None = None
    replay: Path | None = None
    fallback: ModelChoice | None = None
    """Model to use if this model is down, busy or out of credit."""

    @model_validator(mode="before")
    @classmethod
    def _explain_providers(cls, value: object) -> object:
        """Explain where a provider's name belongs, because people write it in place of ``openai``."""
        if isinstance(value, str):
            raise ValueError(f"must be a mapping, not {show_value(value)}. {_explain_servers(value)}")
        for key in value if isinstance(value, dict) else ():
            name = str(key)
            # A name close to a known key is a typo. For a typo, the usual error message, which suggests the known key,
            # helps more than an explanation of providers.
            if name not in cls.model_fields and not get_close_matches(name, cls.model_fields, n=1, cutoff=0.75):
                known = ", ".join(cls.model_fields)
                raise ValueError(f'has the unknown key "{name}"; known here: {known}. {_explain_servers(name)}')
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if sum(choice is not None for choice in (self.openai, self.script, self.rules, self.local, self.replay)) != 1:
            raise ValueError("must be exactly one of openai, script, rules, local, replay")
        return self

    def build(self, folder: Path) -> Model:
        """Build the model with its fallbacks. Paths are relative to ``folder``. Raises `ModelError`, `OSError` and
        `ValueError`.
        """
        models = [choice._build_own(folder) for choice in self._list_choices()]
        return FallbackModel(*models) if len(models) > 1 else models[0]

    def describe(self, folder: Path) -> tuple[str, dict[str, JsonValue]]:
        """Return the name and the settings of the model without building it."""
        choices = self._list_choices()
        settings = self.openai.settings if self.openai is not None and len(choices) == 1 else {}
        return " or ".join(choice._name_own(folder) for choice in choices), settings

    def _list_choices(self) -> list[ModelChoice]:
        """Return the first model, followed by its fallbacks in order."""
        choices = [self]
        while (fallback := choices[-1].fallback) is not None:
            choices.append(fallback)
        return choices

    def _name_own(self, folder: Path) -> str:
        if self.openai is not None:
            return self.openai.name
        if self.local is not None:
            return "local"
        return str(folder / self.replay) if self.replay is not None else self.script or "rules"

    def _build_own(self, folder: Path) -> Model:
        if self.openai is not None:
            from .models.openai_model import OpenAIModel

            return OpenAIModel(**{**read_form(self.openai), "rules": self.openai.rules.model_dump(exclude_none=True)})
        if self.local is not None:
            from .models.local import LocalModel

            weights = folder / self.local.weights if self.local.weights is not None else None
            return LocalModel(weights, context_tokens=self.local.context_tokens, tools=self.local.tools)
        if self.replay is not None:
            return TapeModel(folder / self.replay)
        if self.script is None:
            return ScriptedModel(RuleSet(rules=self.rules or []).answer, name="rules")
        is_file = self.script.endswith((".yaml", ".yml"))
        answer = load_rules(folder / self.script).answer if is_file else load_script(self.script)
        return ScriptedModel(answer, name=f"script {self.script}")


def _explain_servers(written: str) -> str:
    url = next((url for name, url in _BASE_URLS.items() if name in written.lower()), "URL")
    return (
        "Any server with OpenAI's API goes under openai: "
        f"{{name: MODEL, base_url: {url}, api_key_env: VARIABLE}} (docs/models.md, Model servers)"
    )
