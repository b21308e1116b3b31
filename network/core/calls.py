"""Step 6 for ``call`` frames of operations that change something, and for the results of a mod's IO.

The result of a call is stored under its ``call_id``. After the result has expired, the key of the call's first row
still identifies a repeated call. Operations that only read are handled by `reads`. Pure.
"""

from __future__ import annotations

from msgspec import Raw

from roundelay.network.addresses import mod_address
from roundelay.network.frames import ResultFrame, encode
from roundelay.network.units import DAY_MS

from .access import check_right
from .change import ChangeSet
from .entries import NOTHING, ModEntry, Operate, Outcome, SessionReply
from .limits import ROW_BYTES
from .sending import Rules, check_session, repeat_error
from .state import State
from .tables import CallResult, Facts

RESULT_TTL_MS = DAY_MS
"""Time in ms for which a repeated ``call_id`` gets the stored result (docs/protocol.md)."""


def apply_operate(rules: Rules, state: State, facts: Facts, entry: Operate) -> Outcome:
    """Return the outcome of calling an operation that changes something. If the call is refused, raise the
    `RoundelayError` of the refusal."""
    origin = entry.origin
    key = f"{origin.agent_id}/{entry.call_id}"
    previous: CallResult | None = state.get("call", key) or facts.cold.get(("call", key))
    # The state contains results of this batch, and `facts` contains results from the ledger.
    if previous is not None and state.stamp - previous.at < RESULT_TTL_MS:
        if previous.digest != entry.digest:
            raise repeat_error("call", entry.call_id, None, is_damaged=False)
        return Outcome(effects=(_result(entry, previous.value),))
    signed = next((facts.stored[row_key] for row_key in call_keys(entry) if row_key in facts.stored), None)
    if signed is not None:  # the result has expired, but the rows of the call are stored
        if signed.is_damaged:
            raise repeat_error("call", entry.call_id, signed.seq, is_damaged=True)
        if signed.digest != entry.digest:
            raise repeat_error("call", entry.call_id, None, is_damaged=False)
        value = {"seq": signed.seq, "duplicate": True, **({"thread_id": signed.stream} if signed.stream else {})}
        return Outcome(effects=(_result(entry, Raw(encode(value))),))
    # The call was executed once, and executing it twice would be worse than this error.
    if ("call", key) in facts.damaged:
        raise repeat_error("call", entry.call_id, None, is_damaged=True)
    operation = rules.operations[entry.op]
    change = ChangeSet(rules, state, facts, origin, mod_id=entry.op.partition(".")[0], call_id=entry.call_id)
    change.operate = entry
    # Check the session only now. A repeated call gets its answer even if a newer session has superseded this one.
    check_session(state, origin)
    check_right(state, origin, "call", entry.op)
    # The operation's IO ran before the batch. Raise the error of this IO only now, because a repeated call must get the
    # answer of the first call.
    if entry.refusal is not None:
        raise entry.refusal
    change.prepared = entry.prepared
    change.count_send()
    result = Raw(encode(operation.call(change, entry.args)))
    change.run_apply_hooks(change.messages())
    # Operators are exempt from the quota for the hub's own operations, because they must be able to repair everything.
    is_bounded = not (origin.is_operator and change.mod_id == "network")
    change.count_stored(len(bytes(result)) + ROW_BYTES, is_bounded=is_bounded)
    # The key of a row outlives the stored result. So even a repeat after 24 hours does not execute the call again.
    change.set_call_key(call_keys(entry), entry.digest)
    change.set_value("call", key, CallResult(entry.digest, state.stamp, result))
    return change.outcome(_result(entry, result))


def call_keys(entry: Operate) -> list[tuple[str, str]]:
    """Return the two possible keys of a call's first row. The first key is for a row written by the caller, the second
    for a row written by the mod that answered.

    Clients' own keys begin with ``m:`` or ``r:``, so they cannot collide with these keys.
    """
    agent_id = entry.origin.agent_id
    return [
        (agent_id, f"c:{entry.call_id}"),
        (mod_address(entry.op.partition(".")[0]), f"c:{agent_id}/{entry.call_id}"),
    ]


def _result(entry: Operate, value: Raw) -> SessionReply:
    return SessionReply(entry.origin.session_id, encode(ResultFrame(call_id=entry.call_id, value=value)))


def apply_mod_entry(rules: Rules, state: State, facts: Facts, entry: ModEntry) -> Outcome:
    """Return the outcome of storing the result of a mod's IO."""
    mod = rules.mods.get(entry.mod)
    if mod is None:
        return NOTHING
    change = ChangeSet(rules, state, facts, entry.origin, mod_id=entry.mod)
    mod.apply_entry(change, entry.payload)
    change.charge_cause(entry.cause)
    return change.outcome()
