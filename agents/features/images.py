"""Images of the incoming message, for a model that takes them: what stands in its content under ``images`` goes into
the prompt.

Middleware. An image is an address (``https:``), or the image itself (``data:image/png;base64,...``), which has to fit
into a frame. Give it only to agents whose model takes images: others refuse the request.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import replace

from pydantic import BaseModel, ConfigDict, Field

from roundelay.agents.history import find_prompt
from roundelay.agents.middleware import Around, Middleware
from roundelay.agents.models.model import ModelReply, ModelRequest, UserMessage

_IMAGE = re.compile(r"https://\S+|data:image/[a-z0-9.+-]+;base64,[A-Za-z0-9+/=]+")


class ImagesOptions(BaseModel):
    """``most`` images of one message; further ones are left out."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    most: int = Field(8, ge=1, le=64)

    def build(self) -> Images:
        return Images(most=self.most)


class Images(Middleware):
    """Shows the incoming message's images to the model, in every turn."""

    def __init__(self, *, most: int = 8) -> None:
        self._most = most

    async def around_model(
        self, around: Around, request: ModelRequest, proceed: Callable[[ModelRequest], Awaitable[ModelReply]]
    ) -> ModelReply:
        images = () if around.path else read_images(around.context.trigger.content)[: self._most]
        messages = list(request.messages)
        place = find_prompt(messages, around.state.history)
        if not images or place is None:
            return await proceed(request)
        prompt = messages[place]
        assert isinstance(prompt, UserMessage)
        messages[place] = replace(prompt, images=images)
        return await proceed(replace(request, messages=tuple(messages)))


def read_images(content: object) -> tuple[str, ...]:
    """Give the images of a message's content: texts, or objects with a ``url``. Anything else is passed over."""
    listed = content.get("images") if isinstance(content, dict) else None
    found = [it.get("url") if isinstance(it, dict) else it for it in listed] if isinstance(listed, list) else []
    return tuple(it for it in found if isinstance(it, str) and _IMAGE.fullmatch(it))
