"""The ``middleware`` of an agent's file: one item each, by name with its options, built in order; the first is
outermost.

Part of `team`. An item names exactly one; ``custom`` is ``module:callable``, which is called without arguments and
gives a `Middleware`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self

from pydantic import BaseModel, ConfigDict, model_validator

from roundelay.network.errors import ConfigError

from .features.attachments import AttachmentsOptions, ImagesOptions
from .features.budget import BudgetOptions
from .features.context_engine import ContextOptions
from .features.data_policy import DataPolicyOptions
from .features.evaluations import EvaluationsOptions
from .features.few_shot import FewShotOptions
from .features.forced_tools import ForcedToolsOptions
from .features.fragments import FragmentsOptions
from .features.long_results import LongResultsOptions
from .features.many_results import ManyResultsOptions
from .features.mcp_servers import McpOptions
from .features.postprocessors import PostprocessorsOptions
from .features.prompt_budget import PromptBudgetOptions
from .features.prompts import PromptsOptions
from .features.references import ReferencesOptions
from .features.registry import RegistryOptions
from .features.shown_results import ShownResultsOptions
from .features.structured import StructuredOptions
from .import_path import import_callable
from .middleware import Middleware


class TracingOptions(BaseModel):
    """``content``: prompts, replies, arguments and results are in the spans too."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    content: bool = False

    def build(self) -> Middleware:
        from .features.tracing import Tracing  # only here: it loads OpenTelemetry

        return Tracing(content=self.content)


class MiddlewareChoice(BaseModel):
    """One item."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    custom: str | None = None
    attachments: AttachmentsOptions | None = None
    budget: BudgetOptions | None = None
    context: ContextOptions | None = None
    long_results: LongResultsOptions | None = None
    many_results: ManyResultsOptions | None = None
    prompt_budget: PromptBudgetOptions | None = None
    data_policy: DataPolicyOptions | None = None
    evaluations: EvaluationsOptions | None = None
    few_shot: FewShotOptions | None = None
    forced_tools: ForcedToolsOptions | None = None
    fragments: FragmentsOptions | None = None
    images: ImagesOptions | None = None
    mcp: McpOptions | None = None
    postprocessors: PostprocessorsOptions | None = None
    prompts: PromptsOptions | None = None
    references: ReferencesOptions | None = None
    registry: RegistryOptions | None = None
    shown_results: ShownResultsOptions | None = None
    structured: StructuredOptions | None = None
    tracing: TracingOptions | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.model_fields_set) != 1:
            raise ValueError(f"must be exactly one of {', '.join(type(self).model_fields)}")
        [name] = self.model_fields_set
        if getattr(self, name) is None:
            wanted = "module:callable" if name == "custom" else "{}"
            raise ValueError(f"has no options: write {name}: {wanted}")
        return self

    @property
    def name(self) -> str:
        [name] = self.model_fields_set
        return name


ONCE = frozenset(
    {"budget", "context", "forced_tools", "fragments", "long_results", "many_results", "prompt_budget", "references", "registry"}
    | {"shown_results", "structured", "tracing"}
)  # fmt: skip
"""Of which a second one would do its work on what the first has done already. The others may stand there for different
models, servers or checks."""


def check_place(choice: MiddlewareChoice, before: Sequence[MiddlewareChoice]) -> None:
    """Refuse an item that does not go with those before it. Raises `ConfigError`."""
    names = [it.name for it in before]
    if choice.name in ONCE and choice.name in names:
        raise ConfigError(f"{choice.name} stands in the list already, as item {names.index(choice.name) + 1}: keep one")
    if choice.name == "forced_tools" and "budget" in names:
        raise ConfigError("budget stands before forced_tools, and would reserve one request for several: put it behind")


def build_middleware(choice: MiddlewareChoice, folder: Path) -> Middleware:
    """Make what an item names; ``folder`` is its file's. Raises `ConfigError`."""
    if choice.custom is not None:
        return _load(choice.custom)
    if choice.prompts is not None:
        return choice.prompts.build(folder)
    options: _Options = getattr(choice, choice.name)
    return options.build()


class _Options(Protocol):
    def build(self) -> Middleware: ...


def _load(spec: str) -> Middleware:
    make = import_callable(spec, "middleware")
    try:
        made = make()
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(f"the middleware {spec!r} cannot be made ({type(error).__name__}: {error})") from error
    if not isinstance(made, Middleware):
        raise ConfigError(f"the middleware {spec!r} makes a {type(made).__name__}, no Middleware")
    return made
