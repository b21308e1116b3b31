"""``roundelay docs``: show the documentation that the package contains."""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path

import click

import roundelay
from roundelay.commands.options import debug_option


@click.command(short_help="Show the documentation.")
@click.argument("page", required=False)
@click.option("--path", is_flag=True, help="Print only the path of the page, or of the folder.")
@debug_option
def docs(page: str | None, path: bool) -> None:
    """Show PAGE of the documentation, in a pager at a terminal. Without PAGE, list the pages."""
    folder = find_folder()
    if page is None:
        pages = list_pages(folder)
        width = max(map(len, pages))
        click.echo(folder if path else "\n".join(f"{name:{width}}  {read_title(it)}" for name, it in pages.items()))
        return
    found = find_page(folder, page)
    if path:
        click.echo(found)
    elif sys.stdout.isatty():
        # Remove the comments, which are only for the tests of the documentation. The pager adds the last newline.
        text = re.sub(r"^<!--.*-->\n", "", found.read_text(encoding="utf-8"), flags=re.MULTILINE)
        click.echo_via_pager(text.rstrip("\n"))
    else:
        click.echo(found.read_text(encoding="utf-8"), nl=False)


def find_folder() -> Path:
    """Return the folder of the documentation pages: in the installed package, or in the source checkout."""
    # In a checkout, the package spans several folders, and only one of them contains the pages.
    for place in roundelay.__path__:
        if (folder := Path(place, "docs")).is_dir():
            return folder
    raise click.ClickException("The documents are not installed: install Roundelay again, from a wheel or a clone.")


def list_pages(folder: Path) -> dict[str, Path]:
    """Return the documentation pages by name, such as ``agents``. Pages in subfolders, such as ``decisions/loops``,
    come last."""
    found = (*sorted(folder.glob("*.md")), *sorted(folder.glob("*/*.md")), *sorted(folder.glob("*.json")))
    return {it.relative_to(folder).with_suffix("").as_posix(): it for it in found}


def find_page(folder: Path, written: str) -> Path:
    """Return the page with this name. The name may also be a path from an error message or a link, such as
    ``docs/agents.md``. Raises `UsageError`."""
    pages = list_pages(folder)
    name = written.partition("#")[0].removeprefix("docs/").removesuffix(".md").removesuffix(".json")
    if name in pages:
        return pages[name]
    near = difflib.get_close_matches(name, pages, n=1, cutoff=0.5)
    advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(pages)}."
    raise click.UsageError(f"There is no page {written!r}; {advice}")


def read_title(page: Path) -> str:
    if page.suffix != ".md":
        return "The wire protocol for programs (AsyncAPI)"
    with page.open(encoding="utf-8") as lines:
        return next((line[2:].strip() for line in lines if line.startswith("# ")), "")
