"""Step 6 for what mods and the hub's own operations change: a `call`, and the outcome of a mod's IO. Pure.

The result of a call that changed something is kept for its ``call_id``; when that is forgotten, the key of its first
row still tells a repeat. Reads are no entries: `reads` answers them.
"""

from __future__ import annotations

from msgspec import Raw

from roundelay.network.addresses import mod_address
from roundelay.network.frames import ResultFrame, encode

from .access import check_right
from .change import ChangeSet
from .entries import NOTHING, ModEntry, Operate, Outcome, SessionReply
from .limits import ROW_BYTES
from .sending import Rules, check_session, repeat_error
from .state import State
from .tables import CallResult, Facts

CALL_KEPT_MS = 24 * 3600 * 1000
"""How long the result of a call that changed something is repeated for its ``call_id`` (docs/protocol.md)."""


def apply_operate(rules: Rules, state: State, facts: Facts, entry: Operate) -> Outcome:
    """What a call of an operation that changes something comes to. Raises the `RoundelayError` that refuses it."""
    origin = entry.origin
    key = f"{origin.agent_id}/{entry.call_id}"
    known: CallResult | None = state.get("call", key) or facts.cold.get(("call", key))
    if known is not None and state.stamp - known.at < CALL_KEPT_MS:
        if known.digest != entry.digest:
            raise repeat_error("call", entry.call_id, None, is_damaged=False)
        return Outcome(effects=(_result(entry, known.value),))
    signed = next((facts.stored[it] for it in call_keys(entry) if it in facts.stored), None)
    if signed is not None:  # its result is forgotten, what it stored is not
        if signed.is_damaged:
            raise repeat_error("call", entry.call_id, signed.seq, is_damaged=True)
        if signed.digest != entry.digest:
            raise repeat_error("call", entry.call_id, None, is_damaged=False)
        value = {"seq": signed.seq, "duplicate": True, **({"thread_id": signed.stream} if signed.stream else {})}
        return Outcome(effects=(_result(entry, Raw(encode(value))),))
    if ("call", key) in facts.damaged:  # it was done; to do it again is worse than to say so
        raise repeat_error("call", entry.call_id, None, is_damaged=True)
    operation = rules.operations[entry.op]
    change = ChangeSet(rules, state, facts, origin, mod_id=entry.op.partition(".")[0], call_id=entry.call_id)
    check_session(state, origin)
    check_right(state, origin, "call", entry.op)
    change.count_send()
    result = Raw(encode(operation.call(change, entry.args)))
    change.run_apply_hooks(change.messages())
    # an operator mends what others cannot, also a spent quota's doings
    is_bounded = not (origin.is_operator and change.mod_id == "network")
    change.count_stored(len(bytes(result)) + ROW_BYTES, is_bounded=is_bounded)
    change.set_call_key(call_keys(entry), entry.digest)
    change.set_value("call", key, CallResult(entry.digest, state.stamp, result))
    return change.outcome(_result(entry, result))


def call_keys(entry: Operate) -> list[tuple[str, str]]:
    """Under what a call's first row is known when its result is forgotten: a row of the caller's, or of the mod that
    answered.

    No client's key is like these: theirs begin with ``m:`` and ``r:``.
    """
    agent_id = entry.origin.agent_id
    return [
        (agent_id, f"c:{entry.call_id}"),
        (mod_address(entry.op.partition(".")[0]), f"c:{agent_id}/{entry.call_id}"),
    ]


def _result(entry: Operate, value: Raw) -> SessionReply:
    return SessionReply(entry.origin.session_id, encode(ResultFrame(call_id=entry.call_id, value=value)))


def apply_mod_entry(rules: Rules, state: State, facts: Facts, entry: ModEntry) -> Outcome:
    mod = rules.mods.get(entry.mod)
    if mod is None:
        return NOTHING
    change = ChangeSet(rules, state, facts, entry.origin, mod_id=entry.mod)
    mod.apply_entry(change, entry.payload)
    cause = facts.heads.get(entry.cause)
    if cause is not None and state.participant(cause.sender_id) is not None:
        # counted, and never refused: what it is for was taken, and nobody is there who could be told
        change.payer = cause.sender_id
        change.count_stored(is_bounded=False)
    return change.outcome()
