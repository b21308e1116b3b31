/**
 * One participant's connection to a hub: roundelay.v1 (docs/protocol.md) over a WebSocket, kept up. It joins, comes
 * back after a loss, sends each message exactly once (under an id of its own, repeated until it is `stored`),
 * repeats calls that were not answered, and acknowledges what was taken in. Frames go to `onEvent` as they are, each with
 * `at` (ms).
 *
 * No DOM and no page: a WebSocket, a clock, chance, timers and a storage are given. It is a `source` of
 * `#ui/store.js`: {connect(onEvent), call(op, args), send(message), signal(kind, body, where), retry, discard, wake, close}.
 */

import { Refused } from "#core/refused.js";
import { makeIds } from "#core/text.js";

const SUBPROTOCOL = "roundelay.v1";
const FIRST_DELAY_MS = 100;
const MAX_DELAY_MS = 10_000;
const STEADY_MS = 2_000; // a session that lived so long is no sign of trouble
const WELCOME_TIMEOUT_MS = 20_000;
const QUIET_MS = 25_000; // after so long without a frame the hub is asked whether it is there
const ANSWER_TIMEOUT_MS = 15_000;
const MAX_LOSSES = 3; // connections that may end at a request before it is given up
const BLAMING_CODES = [1002, 1003, 1007, 1009, 1011, 4400, 4413];
const MAX_READS = 32; // calls under way, if the hub does not say less
const MAX_CALLS = 1000; // that wait
const MAX_OUTBOX = 200;
const MAX_OUTBOX_CHARS = 2 ** 20;
const ACK_DELAY_MS = 20;
const MAX_BUFFERED = 2 ** 18; // with more on its way signals are dropped
const LATER = ["rate_limited", "overloaded"];

export class Connection {
  /**
   * `newToken`: `token` is a one-time login, which the hub binds this one by. `storage` (localStorage's methods) keeps
   * what is not yet sent over a restart. `random` gives numbers from 0 to 1, `now` milliseconds.
   */
  constructor({
    url, agentId, kind = "human", token, newToken, WebSocketCtor = globalThis.WebSocket, now = Date.now,
    random = Math.random, storage, timers = globalThis, client = "roundelay-web", newId = makeIds(now),
    maxDelay = MAX_DELAY_MS,
  }) {
    Object.assign(this, { agentId, now, random, newId, maxDelay });
    this.welcome = null;
    this.isOver = false;
    this._url = url;
    this._hello = { type: "hello", protocol: 1, agent_id: agentId, kind, role: "observer", client };
    this._token = token;
    this._newToken = newToken;
    this._WebSocket = WebSocketCtor;
    this._timers = timers;
    this._outbox = new Outbox(storage, `roundelay.outbox.${agentId}.`);
    this._calls = new Map(); // call_id -> {frame, op, resolve, reject, losses, isSent}, in the order of asking
    this._socket = null;
    this._isWelcome = false;
    this._delay = FIRST_DELAY_MS;
    this._top = 0; // up to here everything was taken in
    this._due = null; // what to acknowledge: {upto, only: [seqs]}
    this._sending = null; // the message that waits for its answer
    this._marks = new Map(); // timers by what they are for
  }

  /** Begin; every event goes to `onEvent` from now on. What waited in the storage is told first. */
  connect(onEvent) {
    this._onEvent = onEvent;
    for (const entry of this._outbox.entries.values()) this._tell({ type: "outbox", entry });
    this._open();
  }

  /** Call an operation; gives its value. A call that the connection does not survive is repeated under its id.
   * Rejects with `Refused`. */
  call(op, args = {}) {
    return new Promise((resolve, reject) => {
      if (this.isOver) return reject(this._over());
      if (this._calls.size >= MAX_CALLS) return reject(new Refused("overloaded", "Too many requests wait for an answer."));
      const id = this.newId();
      const frame = JSON.stringify({ type: "call", call_id: id, op, args });
      if (this._isTooLarge(frame)) return reject(new Refused("too_large", "This is more than the hub takes at once."));
      this._calls.set(id, { id, frame, resolve, reject, losses: 0, isSent: false });
      this._pump();
    });
  }

  /** Send a message ({to, content, reply_to?, cause?, conversation?, requires_response?, metadata?, text_representation?}); gives its
   * id. It goes out in its order, once, also after a restart. Throws `Refused` where too much waits already. */
  send(message) {
    const entry = { ...message, message_id: this.newId(), state: "waiting", at: this.now() };
    this._outbox.add(entry);
    this._tell({ type: "outbox", entry });
    this._pump();
    return entry.message_id;
  }

  /** Send a refused message again. */
  retry(messageId) {
    const entry = this._outbox.entries.get(messageId);
    if (entry?.state === "refused") this._change({ ...entry, state: "waiting", error: undefined });
    this._pump();
  }

  /** Give up a message that was refused, or is not sent yet. */
  discard(messageId) {
    if (this._sending === messageId) return;
    this._outbox.remove(messageId);
    this._tell({ type: "outbox", message_id: messageId });
  }

  /** Tell who watches; lost while there is no connection. `where`: {to} or {thread_id, trigger?}. */
  signal(kind, body, where) {
    if (this._isWelcome && !(this._socket.bufferedAmount > MAX_BUFFERED)) this._write({ type: "signal", kind, body, ...where });
  }

  /** The network may be there again, or somebody looks: try at once, and see whether the connection still lives. */
  wake() {
    if (this.isOver) return;
    if (this._socket === null) this._open();
    else if (this._isWelcome) this._ask();
  }

  /** Say goodbye. What was not answered is rejected; messages stay in the storage. */
  close() {
    if (this.isOver) return;
    if (this._isWelcome) {
      this._acknowledge();
      this._write({ type: "bye" });
    }
    this._end("offline", new Refused("closed", "This connection was closed."));
  }

  // --- joining and staying

  _open() {
    this._stop("retry");
    this._tellConnection("connecting");
    const socket = new this._WebSocket(this._url, SUBPROTOCOL);
    this._socket = socket;
    this._error = null;
    const isMine = () => this._socket === socket;
    socket.onopen = () => isMine() && this._write(this._makeHello());
    socket.onmessage = ({ data }) => isMine() && this._take(JSON.parse(data));
    socket.onclose = ({ code, reason }) => isMine() && this._lose(code, reason);
    socket.onerror = () => {}; // its close follows
    this._after("welcome", WELCOME_TIMEOUT_MS, () => this._cut(socket));
  }

  _makeHello() {
    const hello = { ...this._hello, token: this._token };
    if (this._newToken !== undefined) hello.new_token = this._newToken;
    if (this.welcome !== null) hello.resume = { epoch: this.welcome.network.epoch, cursor: this._top };
    return hello;
  }

  /** End a connection that no longer answers: its close may come late, or never. */
  _cut(socket) {
    if (this._socket !== socket) return;
    this._lose(1006, "The hub does not answer.");
    socket.close();
  }

  _lose(code, reason) {
    const { _isWelcome: wasWelcome, _error: error } = this;
    this._socket = null;
    this._isWelcome = false;
    this._sending = null;
    this._due = null;
    for (const name of ["welcome", "quiet", "answer", "ack", "send"]) this._stop(name);
    this._blame(code);
    const refusal = this._finalRefusal(code, reason, wasWelcome ? null : error);
    if (refusal !== null) return this._end("refused", refusal);
    if (wasWelcome && this.now() - this._joinedAt >= STEADY_MS) this._delay = FIRST_DELAY_MS;
    // apart from each other, so that a restarted hub is not met by all at once
    let wait = this._delay * (0.5 + this.random() / 2);
    if (error?.retry_after_ms) wait = Math.max(wait, error.retry_after_ms * (1 + this.random() / 2));
    this._delay = Math.min(this._delay * 2, this.maxDelay);
    this._tellConnection("offline", { code: String(code), message: error?.message ?? reason });
    this._after("retry", wait, () => this._open());
  }

  /** Why no further try helps, or null. */
  _finalRefusal(code, reason, error) {
    if (code === 4409) return new Refused("superseded", "Another session has taken this one's place.");
    if (code === 4401 || code === 4403 || code === 4400) {
      const names = { 4400: "invalid_frame", 4401: "not_authenticated", 4403: "forbidden" };
      return new Refused(error?.code ?? names[code], error?.message ?? (reason || "The hub has ended this session."));
    }
    return null;
  }

  /** Give up the request at which connections end again and again: behind it nothing would ever be answered. */
  _blame(code) {
    if (BLAMING_CODES.includes(code)) {
      const oldest = [...this._calls.values()].find((it) => it.isSent);
      if (oldest !== undefined && ++oldest.losses >= MAX_LOSSES) {
        this._calls.delete(oldest.id);
        oldest.reject(new Refused("internal", "The connection ended with this request, again and again."));
      }
    }
    for (const call of this._calls.values()) call.isSent = false;
    for (const entry of this._outbox.entries.values()) if (entry.state === "sent") this._change({ ...entry, state: "waiting" });
  }

  _end(state, error) {
    this.isOver = true;
    this._refusal = error;
    for (const name of [...this._marks.keys()]) this._stop(name);
    this._socket?.close();
    this._socket = null;
    this._isWelcome = false;
    const calls = [...this._calls.values()];
    this._calls.clear();
    this._tellConnection(state, { code: error.code, message: error.message });
    for (const call of calls) call.reject(error);
  }

  _over() {
    return new Refused("closed", this._refusal.message);
  }

  // --- what arrives

  _take(frame) {
    this._heard();
    switch (frame.type) {
      case "welcome":
        return this._takeWelcome(frame);
      case "deliver":
        this._tell(frame);
        return this._handle(frame.message.seq, frame.attempt);
      case "stored":
        return this._takeStored(frame);
      case "result":
        return this._settle(frame.call_id, (call) => call.resolve(frame.value));
      case "error":
        return this._takeError(frame);
      default:
        this._tell(frame);
    }
  }

  _takeWelcome(frame) {
    const isSame = this.welcome?.network.epoch === frame.network.epoch && frame.resume !== "limited";
    this.welcome = frame;
    this._isWelcome = true;
    this._joinedAt = this.now();
    this._top = isSame ? Math.max(this._top, frame.cursor) : frame.cursor;
    if (this._newToken !== undefined) [this._token, this._newToken] = [this._newToken, undefined];
    this._stop("welcome");
    this._tell(frame);
    this._pump();
  }

  _takeStored(frame) {
    if (this._sending === frame.message_id) this._sending = null;
    this._tell(frame);
    this._outbox.remove(frame.message_id);
    this._pump();
  }

  _takeError(frame) {
    const { code, message, retry_after_ms: after } = frame;
    if (frame.call_id !== undefined) {
      if (!LATER.includes(code)) return this._settle(frame.call_id, (call) => call.reject(new Refused(code, message, after)));
      return this._after(`call ${frame.call_id}`, (after ?? 1000) * (1 + this.random() / 4), () => {
        const call = this._calls.get(frame.call_id);
        if (call !== undefined) call.isSent = false;
        this._pump();
      });
    }
    const entry = this._outbox.entries.get(frame.message_id);
    if (entry === undefined) {
      this._error = new Refused(code, message, after);
    } else if (LATER.includes(code)) {
      this._change({ ...entry, state: "waiting" });
      this._after("send", (after ?? 1000) * (1 + this.random() / 4), () => {
        this._sending = null;
        this._pump();
      });
    } else {
      this._sending = null;
      this._change({ ...entry, state: "refused", error: { code, message } });
      this._pump();
    }
  }

  _settle(id, answer) {
    const call = this._calls.get(id);
    if (call === undefined) return;
    this._calls.delete(id);
    answer(call);
    this._pump();
  }

  // --- acknowledging: what `onEvent` has taken is handled

  _handle(seq, attempt) {
    this._due ??= { upto: 0, only: [] };
    if (attempt > 1 || seq <= this._top) this._due.only.push(seq);
    else this._due.upto = seq;
    this._top = Math.max(this._top, seq);
    this._after("ack", ACK_DELAY_MS, () => this._acknowledge(), { isKept: true });
    if (this._due.only.length >= 64) this._acknowledge();
  }

  _acknowledge() {
    this._stop("ack");
    const due = this._due;
    this._due = null;
    if (due === null || !this._isWelcome) return;
    if (due.upto) this._write({ type: "ack", seq: due.upto });
    for (const seq of due.only) this._write({ type: "ack", seq, only: true });
  }

  // --- what goes out

  _pump() {
    if (!this._isWelcome) return;
    let room = Math.min(MAX_READS, this.welcome.limits.max_reads ?? MAX_READS);
    for (const call of this._calls.values()) {
      if (room <= 0) break;
      if (!call.isSent) this._writeText(call.frame);
      call.isSent = true;
      room -= 1;
    }
    if (this._sending !== null || this._marks.has("send")) return;
    // one at a time: what is put off stays before what was said after it
    const entry = [...this._outbox.entries.values()].find((it) => it.state === "waiting");
    if (entry === undefined) return;
    const { message_id, to, content, reply_to, cause, conversation, requires_response, metadata, text_representation } = entry;
    const frame = { type: "send", message_id, to, content, reply_to, cause, conversation, requires_response, metadata, text_representation };
    const text = JSON.stringify(frame);
    if (this._isTooLarge(text)) {
      const error = { code: "too_large", message: "This message is larger than the hub takes; send it in parts." };
      this._change({ ...entry, state: "refused", error });
      return this._pump();
    }
    this._sending = message_id;
    this._change({ ...entry, state: "sent" });
    this._writeText(text);
  }

  _isTooLarge(text) {
    const most = this.welcome?.limits.max_frame_bytes;
    return most !== undefined && text.length * 3 > most && new TextEncoder().encode(text).length > most;
  }

  _change(entry) {
    this._outbox.change(entry);
    this._tell({ type: "outbox", entry });
  }

  _write(frame) {
    this._writeText(JSON.stringify(frame));
  }

  _writeText(text) {
    if (this._socket?.readyState === 1) this._socket.send(text);
  }

  // --- whether the hub is there

  _heard() {
    this._stop("answer");
    this._after("quiet", QUIET_MS, () => this._ask());
  }

  /** Ask the hub for a sign: a connection may be gone without a word. */
  _ask() {
    const socket = this._socket;
    if (!this._isWelcome || this._marks.has("answer")) return;
    this._write({ type: "call", call_id: this.newId(), op: "network.info", args: {} });
    this._after("answer", ANSWER_TIMEOUT_MS, () => this._cut(socket));
  }

  // --- telling and time

  _tell(event) {
    this._onEvent({ ...event, at: this.now() });
  }

  _tellConnection(state, error) {
    this._tell({ type: "connection", state, error });
  }

  _after(name, ms, run, { isKept = false } = {}) {
    if (this._marks.has(name)) {
      if (isKept) return;
      this._stop(name);
    }
    const timer = this._timers.setTimeout(() => {
      this._marks.delete(name);
      run();
    }, ms);
    this._marks.set(name, timer);
  }

  _stop(name) {
    this._timers.clearTimeout(this._marks.get(name));
    this._marks.delete(name);
  }
}

/** The messages that are not stored yet, in their order, here and in the storage: each under a key of its own, so that
 * two pages of one person do not write over each other. Bounded. */
class Outbox {
  constructor(storage, prefix) {
    this._storage = storage;
    this._prefix = prefix;
    this.entries = new Map();
    for (const entry of this._load()) this.entries.set(entry.message_id, entry);
  }

  add(entry) {
    const sizes = [...this.entries.values(), entry].map((it) => JSON.stringify(it).length);
    if (sizes.length > MAX_OUTBOX || sizes.reduce((sum, it) => sum + it, 0) > MAX_OUTBOX_CHARS) {
      throw new Refused("overloaded", "Too much waits to be sent already; wait until the hub is there again.");
    }
    this.change(entry);
  }

  change(entry) {
    this.entries.set(entry.message_id, entry);
    try {
      this._storage?.setItem(this._prefix + entry.message_id, JSON.stringify(entry));
    } catch {
      // the storage is full or shut: the message is sent all the same, and lost only with the page
    }
  }

  remove(messageId) {
    this.entries.delete(messageId);
    this._storage?.removeItem(this._prefix + messageId);
  }

  _load() {
    const keys = [];
    for (let place = 0; place < (this._storage?.length ?? 0); place += 1) keys.push(this._storage.key(place));
    const found = keys.filter((it) => it.startsWith(this._prefix)).sort().map((it) => readEntry(this._storage.getItem(it)));
    return found.filter((it) => it !== null).map((it) => (it.state === "sent" ? { ...it, state: "waiting" } : it));
  }
}

function readEntry(text) {
  try {
    const entry = JSON.parse(text);
    return typeof entry.message_id === "string" && typeof entry.to === "string" ? entry : null;
  } catch {
    return null;
  }
}
