"""Call the operations of mods, for the commands of the included mods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from roundelay.commands.options import Function, identity_options, join, json_option, run

if TYPE_CHECKING:
    from collections.abc import Mapping


class ListingGroup(click.Group):
    """A group of commands. Without a subcommand, the group runs ``list``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        is_listing = not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names)
        return super().parse_args(ctx, ["list", *args] if is_listing else args)


def call_options(function: Function) -> Function:
    return json_option(identity_options(function))


def call_mod(op: str, **args: Any) -> Any:
    """Call an operation as the login user or as ``--as``, and return its result. Arguments that are None, False or
    an empty tuple are not sent."""

    async def call() -> Any:
        async with join(as_person=True) as client:
            return await client.call(op, _given(args))

    return run(call())


def list_pages(op: str, name: str, **args: Any) -> list[Any]:
    """Return all entries of a listing operation. ``name`` is the field of a page that holds its entries."""

    async def read() -> list[Any]:
        async with join(as_person=True) as client:
            return [entry async for page in client.pages(op, _given(args)) for entry in page[name]]

    return run(read())


def _given(args: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in args.items() if value not in (None, False, ())}
