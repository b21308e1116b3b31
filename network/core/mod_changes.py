"""Actions of a change that only mods need: cold values, rows of the log, threads and notices. `ChangeSet` inherits from
`ModChanges`. `mod.Change` documents the actions for authors of mods. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec import UNSET, Raw

from roundelay.network.addresses import parse_address
from roundelay.network.errors import Forbidden, InternalError, UnknownMessage
from roundelay.network.frames import SendFrame, encode

from .access import check_right_to_send
from .entries import Effect, Operate, Origin, SendNotice
from .limits import ROW_BYTES
from .mod import Change, Incoming, run_before_hooks
from .revisions import Revision
from .rows import MessageHead, Row, RowType
from .sending import Rules
from .state import State
from .tables import Facts, Table
from .takeovers import check_may_answer, find_place, next_message_head, place_of
from .visibility import may_read, parties, thread_readers


class ModChanges:
    """Actions for mods that do not send a message."""

    if TYPE_CHECKING:
        origin: Origin
        state: State
        facts: Facts
        mod_id: str
        rules: Rules
        effects: list[Effect]
        operate: Operate | None
        _unpaid_bytes: int

        def head(self, seq: int) -> MessageHead: ...
        def lookup_cold(self, table: Table, key: str) -> Any: ...
        def set_value(self, table: Table, key: str, value: Any) -> None: ...
        def write_row(self, type_: RowType, *, key: str = "", label: str = "", data: bytes = b"{}") -> Row: ...

    def items(self, prefix: str) -> list[tuple[str, Any]]:
        own = f"{self.mod_id}/"
        found = [(key, raw) for key, raw in self.state.items("mod") if key.startswith(own + prefix)]
        return [(key.removeprefix(own), msgspec.json.decode(raw)) for key, raw in sorted(found)]

    def cold(self, key: str) -> Any:
        full = f"{self.mod_id}/{key}"
        if self.operate is None or key not in self.operate.needs:
            # A value that was not requested looks absent even if it exists, and the mod would overwrite it.
            raise LookupError(f"The cold value {full!r} was not requested. List it in needs= of the operation.")
        if ("mod_cold", full) in self.facts.damaged:
            raise InternalError(f"The stored value {full!r} is damaged. Tell the hub's operator.")
        raw: Raw | None = self.lookup_cold("mod_cold", full)
        return msgspec.json.decode(raw) if raw is not None else None

    def put_cold(self, key: str, value: object) -> None:
        raw = Raw(encode(value)) if value is not None else None
        if raw is not None:
            self._unpaid_bytes += len(bytes(raw)) + len(key.encode()) + ROW_BYTES
        self.set_value("mod_cold", f"{self.mod_id}/{key}", raw)

    def log(self, event: dict[str, object], *, hides_args: bool = False) -> Row:
        body, key = {"mod": self.mod_id, **event}, ""
        if self.operate is not None and hides_args:
            # Give the row its own key, so that it does not get the key of the call. The key of the call would be stored
            # with a digest of the arguments, from which the arguments could be guessed.
            key = f"h:{self.operate.call_id}"
        elif self.operate is not None:
            body |= {"op": self.operate.op, "args": self.operate.args}
        return self.write_row("mod", key=key, label=self.mod_id, data=encode(body))

    def thread(self, of: str | MessageHead) -> MessageHead:
        head = place_of(of) if isinstance(of, MessageHead) else find_place(self.state, self.facts, of)
        if head is None or not self.reads_now(head):
            name = of.thread_id if isinstance(of, MessageHead) else of[:80]
            raise UnknownMessage(f"There is no thread {name!r} that {self.origin.agent_id} may read.")
        return head

    def check_may_write(self, head: MessageHead) -> None:
        kind, name = parse_address(head.to)
        if head.kind == "direct":  # the recipient is the other party of the thread
            name = next((party for party in parties(head) if party != self.origin.agent_id), name)
        check_right_to_send(self.state, self.origin, kind, name)

    def reads_now(self, head: MessageHead) -> bool:
        is_reader = may_read(self.state, self.origin.agent_id, next_message_head(self.state, head))
        return self.origin.is_operator or is_reader

    def edit(self, seq: int, content: object, *, text: str | None = None, before: object) -> Row:
        head = self._own_message(seq, "edit")
        self.check_may_write(head)
        if not self.reads_now(place_of(head)):
            raise Forbidden(f"{self.origin.agent_id} has left the thread of message {seq}, and may only delete it.")
        if self.origin.kind == "agent":
            check_may_answer(self.state, self.origin, head.thread_id, None)
        body = Raw(encode(content))
        frame = SendFrame(message_id=f"edit-{seq}", to=head.to, content=body)
        # Mods guard messages with this hook, and an edit must not bypass the guard.
        refusal = run_before_hooks(self.rules.before_hooks, Incoming(self.origin, frame))
        if refusal is not None:
            raise refusal
        shown = UNSET if text is None else text
        revision = Revision(seq, content=body, text_representation=shown, before=Raw(encode(before)))
        return self.write_row("edited", data=encode(revision))

    def delete(self, seq: int, edits: Iterable[int]) -> Row:
        head = self._own_message(seq, "delete", for_operators=True)
        for agent_id in thread_readers(self.state, head):
            if seq in self.state.questions_of(agent_id):
                self.set_value("question", f"{agent_id}/{seq}", None)
        row = self.write_row("deleted", data=encode(Revision(head.seq, edits=[*edits])))
        own = self.mod_id
        for mod in self.rules.deleted_hooks:
            self.mod_id = mod.id
            mod.deleted(cast("Change", self), head)
        self.mod_id = own
        return row

    def message_head(self, seq: int) -> MessageHead:
        found = self.facts.heads.get(seq)
        return found if found is not None and self.origin.is_operator else self.head(seq)

    def _own_message(self, seq: int, doing: str, *, for_operators: bool = False) -> MessageHead:
        head = self.message_head(seq)
        if for_operators and self.origin.is_operator:
            return head
        if head.sender_id != self.origin.agent_id:
            raise Forbidden(f"{head.sender_id} sent message {seq}, and only {head.sender_id} may {doing} it.")
        return head

    def update_screens(
        self, head: MessageHead, body: dict[str, object], agent_ids: Iterable[str] | None = None
    ) -> None:
        readers = thread_readers(self.state, next_message_head(self.state, head) if head.seq == 0 else head)
        chosen = readers if agent_ids is None else readers.intersection(agent_ids)
        # Skip agents. They read messages with their tools and would only discard the notices.
        screens = frozenset(name for name in chosen if (found := self.state.present(name)) and found.kind != "agent")
        notice = {"mod": self.mod_id, **body}
        self.effects.append(
            SendNotice(screens, "mod", head.thread_id, notice, to_operators=True, except_session=self.origin.session_id)
        )
