"""Screens that explain a run: why a message was sent, what followed from it, and the cost of models.

The texts come from `roundelay.runs`, like the texts of the commands.
"""

from __future__ import annotations

import re
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.content import Content
from textual.widgets import DataTable, Static

from roundelay.display.screen import PLAIN
from roundelay.display.text import fit_start, sanitize
from roundelay.network.errors import RequestError
from roundelay.runs.approvals import find_message
from roundelay.runs.cost import HEADS, By, CallFilter, read_cost
from roundelay.runs.cost_text import FIGURES, describe_cost, list_figures
from roundelay.runs.node_source import LiveSource
from roundelay.runs.why import explain, follow
from roundelay.runs.why_text import describe_effect, describe_steps
from roundelay.tui.desk import Desk
from roundelay.tui.parts import Pane, Rows

MAX_LINE = 1000
"""Maximum number of columns of a line. A long message is shown completely in its thread."""
_NUMBER = re.compile(r"^[\s│├└─]*(?:\d\d:\d\d:\d\d )?#(\d+)\b")


class WhyPane(Pane):
    """Screen that explains why a message was sent, what followed from it, and the cost of its conversation."""

    name_here = "why"
    BINDINGS: ClassVar = [("w", "why", "Why the selected one")]

    def __init__(self, desk: Desk, seq: int) -> None:
        super().__init__(desk)
        self.seq = seq

    def compose(self) -> ComposeResult:
        yield Static(Content(f"Why #{self.seq} was said: reading …"), id="about", markup=False)
        yield Rows()

    def on_mount(self) -> None:
        self.terminal.work(self._read)

    async def _read(self) -> None:
        source = LiveSource(self.desk.client)
        steps = await explain(source, self.seq)
        lines = [*describe_steps(steps), "", "What followed from it:", *describe_effect(await follow(source, self.seq))]
        root = steps[-1].message.root
        try:
            # No message of this conversation precedes its root, so skip the earlier part of the log.
            cost = await read_cost(source, CallFilter(root=root, after=root - 1), "agent")
            lines += [
                "",
                f"What the conversation that began with #{root} used:",
                *describe_cost(cost, paint=PLAIN).split("\n"),
            ]
        except RequestError:  # the person may not see the cost
            pass
        self._lines = lines = [fit_start(line, MAX_LINE) for text in lines for line in text.split("\n")]
        self.query_one("#about", Static).update(Content(f"Why #{self.seq} was said, the newest step first"))
        self.query_one(Rows).show([(str(place), self._write(line)) for place, line in enumerate(lines)])

    def _write(self, line: str) -> Content:
        return Content.styled(line, "bold") if _NUMBER.match(line) else Content(line)

    @property
    def chosen_seq(self) -> int | None:
        chosen = self.query_one(Rows).chosen
        found = _NUMBER.match(self._lines[int(chosen)]) if chosen is not None else None
        return int(found[1]) if found is not None else None

    def on_option_list_option_selected(self) -> None:
        if (seq := self.chosen_seq) is not None:
            self.terminal.work(self._open, seq)

    async def _open(self, seq: int) -> None:
        self.terminal.open_thread((await find_message(self.desk.client, seq)).thread_id, seq)

    def action_why(self) -> None:
        if (seq := self.chosen_seq) is not None:
            self.terminal.open_why(seq)


class CostPane(Pane):
    """Screen with the cost of models by agent, model, thread, conversation or day."""

    name_here = "cost"
    GROUPS: ClassVar[dict[str, By]] = {"1": "agent", "2": "model", "3": "thread", "4": "root", "5": "day"}
    BINDINGS: ClassVar = [(key, f"by('{by}')", "conversation" if by == "root" else by) for key, by in GROUPS.items()]

    def compose(self) -> ComposeResult:
        yield Static(id="about", markup=False)
        table: DataTable[Text] = DataTable(cursor_type="row", zebra_stripes=True)
        yield table

    def on_mount(self) -> None:
        self.action_by("agent")

    def focus_main(self) -> None:
        self.query_one(DataTable).focus()

    def action_by(self, by: By) -> None:
        self.terminal.work(self._read, by)

    async def _read(self, by: By) -> None:
        report = await read_cost(LiveSource(self.desk.client), CallFilter(), by)
        named = "conversation" if by == "root" else by
        about = f"Usage of models by {named}" if report.groups else describe_cost(report, paint=PLAIN)
        if report.total.unpriced:
            about += f". There is no price for {', '.join(sanitize(it) or 'calls without a model name' for it in sorted(report.total.unpriced))}"
        self.query_one("#about", Static).update(Content(about))
        table = self.query_one(DataTable)
        table.clear(columns=True)
        for head in (*HEADS[by], *(it.lower() for it in FIGURES)):
            table.add_column(Text(head), key=head)
        rows = [(*names, *list_figures(total)) for names, total in report.by_cost()]
        if len(rows) > 1:
            rows.append(("all", *("" for _ in HEADS[by][1:]), *list_figures(report.total)))
        for row in rows:
            table.add_row(*(Text(sanitize(str(it)), overflow="ellipsis", no_wrap=True) for it in row))
