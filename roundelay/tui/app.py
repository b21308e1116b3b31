"""App of the full-screen terminal: the current screen, the lines above and below it, and background work.

`RoundelayTerminal` shows views of the data in one `Desk`, and notifies the views when a part of the data changes. It
also performs actions that need a dialog or another view. It contains no rules about the conversation.
"""

from __future__ import annotations

import codecs
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Container, Horizontal
from textual.content import Content
from textual.css.query import NoMatches
from textual.drivers import linux_driver
from textual.widgets import Static
from textual.worker import Worker

from roundelay.display.text import display_width, fit_start, sanitize
from roundelay.network.client import AnyMessage, NetworkClient
from roundelay.network.errors import RoundelayError
from roundelay.network.platforms import handle_signals
from roundelay.runs.approvals import find_message
from roundelay.terminal.actions import check_place, enter_place
from roundelay.terminal.activity_lines import describe_active
from roundelay.tui.actions import PersonActions
from roundelay.tui.desk import Desk, Part, Revised, tell_here
from roundelay.tui.dialogs import Choose, GoTo, Help
from roundelay.tui.explanations import CostPane, WhyPane
from roundelay.tui.mod_screens import ModPane
from roundelay.tui.parts import KeyLine, Pane
from roundelay.tui.thread import ThreadPane
from roundelay.tui.views import AgentsPane, InboxPane, SearchPane, ThreadsPane

ENDED_BY_SIGTERM = 143
"""Exit code after a signal, in the format of shells: 128 plus the signal's number."""
MAX_STACK = 12
"""Maximum number of views to which Esc can return."""
DRAW_EVERY_S = 0.05
"""Minimum time between two redraws of other participants' activity, in seconds."""
VIEWS: dict[str, type[Pane]] = {
    "inbox": InboxPane,
    "threads": ThreadsPane,
    "agents": AgentsPane,
    "cost": CostPane,
    "search": SearchPane,
}


async def run_terminal(client: NetworkClient, to: str | None = None) -> int:
    """Run the full-screen terminal until the person leaves or SIGTERM arrives. Return the exit code.

    Raises the error that ends the connection.
    """
    app = RoundelayTerminal(client, to)
    # Textual decodes keys strictly. The first byte that is not UTF-8 would end Textual's input thread, and with it the
    # screen.
    linux_driver.getincrementaldecoder = _decode_whatever_comes  # type: ignore[attr-defined, assignment]  # Textual has no setting for it
    with handle_signals([signal.SIGTERM], lambda: app.exit(return_code=ENDED_BY_SIGTERM)):
        await app.run_async()
    if app.failure is not None:
        raise app.failure
    return app.return_code or 0


def _decode_whatever_comes(encoding: str) -> Callable[[], codecs.IncrementalDecoder]:
    return partial(codecs.getincrementaldecoder(encoding), "replace")


class Tab(Static):
    """Name of a screen in the top line. A click on the name opens the screen."""

    def __init__(self, place: str) -> None:
        super().__init__(markup=False, id=f"tab-{place}")
        self.place = place

    async def on_click(self) -> None:
        if isinstance(self.app, RoundelayTerminal):
            await self.app.action_show(self.place)


class RoundelayTerminal(App[None]):
    """Full-screen terminal of a person. Opens the address ``to``, or the list of threads."""

    CSS_PATH = "style.tcss"
    TITLE = "Roundelay"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar = [
        Binding("g", "go", "Go to"),
        Binding("slash", "show('search')", "Search"),
        Binding("n", "new", "New"),
        Binding("escape", "back", "Back"),
        Binding("question_mark", "help", "Help"),
        Binding("ctrl+q", "quit", "Quit", priority=True),
    ]

    def __init__(self, client: NetworkClient, to: str | None = None) -> None:
        super().__init__()
        self.desk = Desk(client)
        self.failure: BaseException | None = None
        """Error that ended the connection permanently, or None."""
        self.stack: list[Pane] = []
        """Views to which Esc can return; the visible view is last."""
        self._to = to
        self._stale: set[Part] = set()
        self._is_due = False
        self.actions = PersonActions(self, self.desk)

    # --- output

    def compose(self) -> ComposeResult:
        with Horizontal(id="top"):
            yield Static(id="who", markup=False)
            for place in VIEWS:
                yield Tab(place)
        yield Container(id="body")
        yield Static(id="told", markup=False)
        yield Static(id="busy", markup=False)
        yield KeyLine(show_command_palette=False)

    async def on_mount(self) -> None:
        self.desk.on_change, self.desk.on_message = self._change, self._take_message
        await self.show(ThreadsPane(self.desk))
        self._draw()
        _: Worker[None] = self.run_worker(self._begin, name="begin")

    async def _begin(self) -> None:
        desk = self.desk
        try:
            await desk.start()
            for following in (desk.follow_messages, desk.follow_events, desk.refresh_forever):
                _: Worker[None] = self.run_worker(partial(self._follow, following), name=following.__name__)
            if self._to is not None:
                await self.go_to(self._to)
        except RoundelayError as error:
            self._leave(error)
        except NoMatches:
            pass  # the person left before the first screen was loaded

    async def _follow(self, following: Callable[[], Awaitable[None]]) -> None:
        try:
            await following()
        except RoundelayError as error:
            self._leave(error)

    def _leave(self, error: RoundelayError) -> None:
        # Report the first error, because the other errors follow from it.
        self.failure = self.failure or error
        self.exit()

    @property
    def pane(self) -> Pane:
        return self.stack[-1]

    async def show(self, view: Pane) -> None:
        """Show a view. Esc returns to the previous view."""
        if self.stack:
            self.pane.display = False
        self.stack.append(view)
        # Remove the oldest views: each view keeps its widgets, and a long session would open hundreds.
        while len(self.stack) > MAX_STACK:
            await self.stack.pop(0).remove()
        await self.query_one("#body").mount(view)
        self._uncover()

    def _uncover(self) -> None:
        self.desk.hint = ""
        self.pane.display = True
        self.pane.focus_main()
        # A hidden view receives no changes, so update all parts when it becomes visible.
        for part in ("inbox", "threads", "agents", "live", "connection"):
            self.pane.handle_change(part)
        self._draw()

    def _change(self, part: Part) -> None:
        """Record that a part of the data has changed. One later redraw handles all changes that were recorded before
        it.
        """
        self._stale.add(part)
        if not self._is_due and self.is_running:
            self._is_due = True
            self.set_timer(DRAW_EVERY_S, self._draw)

    def _draw(self) -> None:
        self._is_due = False
        # Clear the set first: drawing may change the data again, and that change must not be lost.
        stale, self._stale = self._stale, set()
        if not self.stack or not self.is_running:
            return
        for part in sorted(stale):
            self.pane.handle_change(part)
        desk, width = self.desk, max(self.size.width, 40)
        self._draw_top(width)
        told = desk.hint or (desk.told[-1] if desk.told else "")
        self.query_one("#told", Static).update(Content(fit_start(told, 2 * width - 8)))
        self.query_one("#busy", Static).update(Content(fit_start(describe_active(desk.activity, desk.me), width - 2)))

    def _draw_top(self, width: int) -> None:
        """Draw the person's id and the names of the screens. On a narrow terminal, inactive names are shortened to one
        letter.
        """
        desk, is_lost = self.desk, bool(self.desk.lost)
        short = " ○ not connected" if is_lost else f" ● {desk.me}"
        whole = f"{short}; trying again" if is_lost else f"{short} in {sanitize(desk.client.welcome.network.name)} "
        counts = {"inbox": len(desk.inbox), "threads": desk.count_unread()}
        tabs = list(self.query(Tab))
        for most in (None, 1):
            room = width
            for tab in tabs:
                is_here = tab.place in (self.pane.name_here, self.pane.tab)
                number = f" {counts[tab.place]}" if counts.get(tab.place) else ""
                text = f" {tab.place.title()[: None if is_here else most]}{number} "
                tab.update(Content(text))
                tab.set_class(is_here, "-here")
                room -= len(text)
            if display_width(short) < room:
                break
        self.query_one("#who", Static).update(
            Content(whole if display_width(whole) <= room else fit_start(short, room))
        )
        self.query_one("#top").set_class(is_lost, "-lost")

    def _take_message(self, message: AnyMessage | Revised) -> None:
        for view in self.stack:
            # Update hidden views too, because Esc may show them again.
            if isinstance(view, ThreadPane) and view.thread_id == message.thread_id:
                if isinstance(message, Revised):
                    self.work(view.window.replace, message.seq)
                else:
                    self.work(view.handle_message, message)

    # --- navigation

    def work(self, do: Callable[..., Awaitable[object]], *args: object) -> None:
        """Call the hub in the background. If the hub refuses the call, show the refusal as a line."""

        _: Worker[None] = self.run_worker(partial(self._work, do, *args))

    async def _work(self, do: Callable[..., Awaitable[object]], *args: object) -> None:
        try:
            await do(*args)
        except RoundelayError as error:
            self.desk.show_line(tell_here(str(error)))
        except NoMatches:
            pass  # the pane was closed meanwhile

    async def action_show(self, place: str) -> None:
        if self.pane.name_here != place:
            await self.show(VIEWS[place](self.desk))

    async def action_back(self) -> None:
        # Never close the last view: without a view, the screen would be empty and keys would have no effect.
        if len(self.stack) > 1:
            await self.stack.pop().remove()
            self._uncover()

    def action_go(self) -> None:
        async def show(place: str | None) -> None:
            if place == "mods":
                self.work(self._choose_mod_screen)
            elif place is not None:
                await self.action_show(place)

        self.push_screen(GoTo(), show)

    async def _choose_mod_screen(self) -> None:
        listed = (await self.desk.client.call("network.screens", {}))["screens"]
        if not listed:
            self.desk.show_hint("This network has no screens of mods.")
            return
        by_id = {f"{it['mod']}.{it['id']}": it for it in listed}

        def go(chosen: str | None) -> None:
            if chosen in by_id:
                self.call_later(self._open, ModPane(self.desk, by_id[chosen]))

        choices = [(name, Content(sanitize(str(it["title"])))) for name, it in by_id.items()]
        self.push_screen(Choose("Which screen?", choices), go)

    def action_help(self) -> None:
        self.push_screen(Help())

    def action_new(self) -> None:
        def go(to: str | None) -> None:
            if to is not None and to.strip():
                self.work(self.go_to, to.strip())

        self.push_screen(
            Choose("Who do you want to talk to?  An agent, a person, channel:NAME, thread:SEQ", self._list_places()), go
        )

    def _list_places(self) -> list[tuple[str, Content]]:
        """Return the destinations that can be opened: agents (online agents first), people, channels and the
        broadcast.
        """
        listed = [it for it in self.desk.agents if it["agent_id"] != self.desk.me]
        listed.sort(key=lambda it: (it["kind"] != "agent", it["state"] != "online", it["agent_id"]))
        found = []
        for it in listed:
            card = it.get("card") or {}
            about = str(card.get("description") or it["kind"])
            is_there = "available" if it["state"] == "online" else "offline"
            told = fit_start(sanitize(f"{is_there} · {about}"), 60)
            found.append((str(it["agent_id"]), Content.assemble((sanitize(it["agent_id"]), "bold"), f"  {told}")))
        channels = sorted(it for it in self.desk.threads if it.startswith("channel:"))
        found += [(it, Content(sanitize(f"{it}  {self.desk.name_thread(it)}"))) for it in channels]
        return [*found, ("broadcast", Content("broadcast  Everybody"))]

    async def go_to(self, to: str) -> None:
        """Open the thread of an address, a participant or a thread id. A channel is joined first. Raises
        `RoundelayError`."""
        await check_place(self.desk.client, to, self.desk.agents)
        place, told = await enter_place(self.desk.client, to)
        if told:
            self.desk.show_line(told)
        await self._open(ThreadPane(self.desk, place.thread_id))

    def open_thread(self, thread_id: str, at: int | None = None) -> None:
        self.call_later(self._open, ThreadPane(self.desk, thread_id, at))

    def open_why(self, seq: int) -> None:
        self.call_later(self._open, WhyPane(self.desk, seq))

    async def _open(self, view: Pane) -> None:
        await self.show(view)

    # --- called by views

    async def show_sent(self, seq: int) -> None:
        """Show a message that this client has sent, in its thread and in the list of threads. Raises
        `RoundelayError`."""
        message = await find_message(self.desk.client, seq)
        self.desk.handle_message(message)
        self._take_message(message)
