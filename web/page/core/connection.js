/**
 * One participant's connection to a hub: roundelay.v1 (docs/protocol.md) over a WebSocket, kept up. It joins, comes
 * back after a loss, sends each message exactly once (under an id of its own, repeated until it is `stored`),
 * repeats calls and records that were not answered, and acknowledges what was taken in, or what it is told was handled. Frames go to
 * `onEvent` as they are, each with `at` (ms).
 *
 * No DOM and no page: a WebSocket, a clock, chance, timers and a storage are given. It is a `source` of
 * `#ui/store.js`: {connect(onEvent), call(op, args), send(message), signal(kind, body, where), retry, discard, wake, close},
 * and the core of the client in clients/typescript, which is built of it.
 */

import { Acks } from "#core/acks.js";
import { readFrame } from "#core/frames.js";
import { makeIds } from "#core/ids.js";
import { LEADER, readAddress, readReason } from "#core/leader.js";
import { Outbox } from "#core/outbox.js";
import { Refused } from "#core/refused.js";

/** @import { Entry, Outgoing, OutboxStore } from "#core/outbox.js" */

const SUBPROTOCOL = "roundelay.v1";
const FIRST_DELAY_MS = 100;
const MAX_DELAY_MS = 10_000;
const STEADY_MS = 2_000; // a session that lived so long is no sign of trouble
const WELCOME_TIMEOUT_MS = 20_000;
const LED_TIMEOUT_MS = 3_000; // of a node that another one has named: from here it may not be reached by that name
const MAX_LED = 3; // so often, until all were tried, a node is believed that names another one
const COME_BACK = 4503;
const AS_OF_MS = 5_000; // so often a node that follows is asked as of when it shows what it has
const QUIET_MS = 25_000; // after so long without a frame the hub is asked whether it is there
const ANSWER_TIMEOUT_MS = 15_000;
const BYE_TIMEOUT_MS = 2_000;
const MAX_LOSSES = 3; // connections that may end at a request before it is given up
const BLAMING_CODES = [1002, 1003, 1007, 1009, 1011, 4400, 4413];
const MAX_READS = 32; // calls under way, if the hub does not say less
const MAX_CALLS = 1000; // that wait
const MAX_OUTBOX = 200;
const MAX_OUTBOX_CHARS = 2 ** 20;
const MAX_FRAME_CHARS = 2 ** 24; // of one frame from the hub
const MAX_REASON_CHARS = 2000; // what the hub keeps of a reason
const ACK_DELAY_MS = 20;
const MAX_BUFFERED = 2 ** 18; // with more on its way signals are dropped
const CHECK = "check the addresses, or connect anew.";
const LATER = ["rate_limited", "overloaded"];

/**
 * What of a WebSocket is used: the browser's, node's own, and that of the package ws have it.
 * @typedef {{
 *   readonly readyState: number, readonly bufferedAmount: number, send(text: string): void, close(): void, terminate?: () => void,
 *   onopen: any, onmessage: any, onclose: any, onerror: any, on?: (name: string, run: (request: any, response: any) => void) => void,
 * }} Socket
 * @typedef {new (url: string, protocol: string) => Socket} SocketConstructor
 * @typedef {{setTimeout(run: () => void, ms: number): any, clearTimeout(timer: any): void}} Timers
 * @typedef {{
 *   url: string, agentId: string, kind?: string, token?: string, newToken?: string, WebSocketCtor?: SocketConstructor, now?: () => number,
 *   random?: () => number, storage?: OutboxStore, timers?: Timers, client?: string, newId?: () => string, maxDelay?: number,
 *   hello?: Record<string, unknown>, resume?: {epoch: string, cursor: number}, staysInPlace?: boolean, handlesAtOnce?: boolean,
 *   maxUnanswered?: number, welcomeTimeout?: number, goesToLeader?: boolean, outbox?: {maxMessages: number, maxChars: number, isKept: boolean},
 * }} ConnectionOptions
 * @typedef {{
 *   id: string, type: string, frame: string, resolve: (value: any) => void, reject: (error: Error) => void, losses: number, isSent: boolean,
 * }} Request
 */

export class Connection {
  /**
   * `url` may be several, with commas between them: nodes of one network, of which one serves. One that gives no welcome is left for the
   * next. `newToken`: `token` is a one-time login, which the hub binds this one by. `storage` (localStorage's methods) keeps
   * what is not yet sent over a restart. `random` gives numbers from 0 to 1, `now` milliseconds. `hello` has further fields of that frame.
   * `resume` is where delivery starts; without it, and without `staysInPlace`, the hub says where, each time that this comes back.
   * `handlesAtOnce`: what `onEvent` has taken is handled; without it `ack` and `nack` say. `maxUnanswered` messages are under way
   * at a time; with more than one, a message that is put off may be overtaken by the next ones. `welcomeTimeout` (ms) is how long the
   * first welcome may take; of several addresses each has its share of that. With `goesToLeader` a node that says that another one leads
   * is believed, also if that is none of the addresses; encrypted as this one is. Without, and with `?read_only=1` in `url`, this reads at a
   * node that follows, and messages wait until that node leads.
   * @param {ConnectionOptions} options
   */
  constructor({
    url, agentId, kind = "human", token, newToken, WebSocketCtor = /** @type {any} */ (globalThis).WebSocket, now = Date.now,
    random = Math.random, storage, timers = globalThis, client = "roundelay-web", newId = makeIds(now),
    maxDelay = MAX_DELAY_MS, hello = {}, resume, staysInPlace = true, handlesAtOnce = true, maxUnanswered = 1,
    welcomeTimeout = WELCOME_TIMEOUT_MS, goesToLeader = false,
    outbox = { maxMessages: MAX_OUTBOX, maxChars: MAX_OUTBOX_CHARS, isKept: false },
  }) {
    this.agentId = agentId;
    this.now = now;
    this.random = random;
    this.newId = newId;
    this.maxDelay = maxDelay;
    /** @type {any} the last one */
    this.welcome = null;
    this.isOver = false;
    this._urls = url.split(",");
    /** How many of them have given no welcome since one did, or since all were tried. */
    this._passed = 0;
    this._goesToLeader = goesToLeader;
    /** Where this is, or tries to be. */
    this._url = "";
    /** Where it goes next, before all others. */
    this._led = "";
    /** Who was named last, or has let it in; tried after the others, until one of those does. */
    this._lastNamed = "";
    /** Whom the node has named that refused this last. */
    this._named = "";
    /** Those that were gone to because they were named, since one gave a welcome, or since all were tried. */
    this._ledTo = new Set();
    /** Where the last session was. */
    this._joinedUrl = "";
    /** Why one was left that gave a welcome, since all were tried. */
    this._left = "";
    /** The next hello is one without the fence, which a hub did not know. */
    this._isUnfenced = false;
    /** @type {Record<string, unknown>} */
    this._hello = { type: "hello", protocol: 1, agent_id: agentId, kind, role: "observer", client, ...hello };
    this._token = token;
    this._newToken = newToken;
    this._fence = /** @type {number | undefined} */ (hello.fence);
    this._resume = resume;
    this._staysInPlace = staysInPlace || resume !== undefined;
    this._handlesAtOnce = handlesAtOnce;
    this._WebSocket = WebSocketCtor;
    this._timers = timers;
    this._outbox = new Outbox(storage, `roundelay.outbox.${agentId}.`, outbox);
    this._maxUnanswered = maxUnanswered;
    this._welcomeTimeout = welcomeTimeout;
    /** @type {Set<string>} messages that wait for their answer */
    this._sent = new Set();
    /** @type {Map<string, number>} connections that ended at a message */
    this._losses = new Map();
    /** @type {Map<string, Request>} calls and records by their ids, in the order of asking */
    this._calls = new Map();
    /** @type {Socket | null} */
    this._socket = null;
    this._isWelcome = false;
    this._joinedAt = 0;
    this._delay = FIRST_DELAY_MS;
    this._acks = new Acks();
    /** @type {Refused | null} what the hub said before its welcome */
    this._error = null;
    /** @type {Refused | null} */
    this._refusal = null;
    /** @type {Map<string, any>} timers by what they are for */
    this._marks = new Map();
    /** @type {(event: any) => void} */
    this._onEvent = () => {};
  }

  /** Begin; every event goes to `onEvent` from now on. What waited in the storage is told first.
   * @param {(event: any) => void} onEvent */
  connect(onEvent) {
    this._onEvent = onEvent;
    for (const entry of this._outbox.entries.values()) this._tell({ type: "outbox", entry });
    this._open();
  }

  /** What was delivered and not handled, in this history. It is another one once the hub has lost or replaced its ledger. */
  get acks() {
    return this._acks;
  }

  /** Call an operation; gives its value. A call that the connection does not survive is repeated under its id.
   * Rejects with `Refused`. @param {string} op @param {Record<string, any>} [args] @param {string} [callId] @returns {Promise<any>} */
  call(op, args = {}, callId = this.newId()) {
    return this._request("call", callId, { type: "call", call_id: callId, op, args });
  }

  /** Keep a turn record; gives its `stored`. Repeated as a call is. @param {string} recordId @param {string} reaction
   * @param {string} kind @param {any} body @returns {Promise<any>} */
  record(recordId, reaction, kind, body) {
    return this._request("record", recordId, { type: "record", record_id: recordId, reaction, kind, body });
  }

  /** Nobody waits for this call or record any more: it is not said again, nor at all if it has not been.
   * @param {"call" | "record"} type @param {string} id */
  abandon(type, id) {
    this._calls.delete(`${type} ${id}`);
    this._pump();
  }

  /** Send a message ({to, content, reply_to?, cause?, requires_response?, metadata?, text_representation?, conversation?,
   * exclude_agent_ids?, message_id?}); gives its id. It goes out in its order, once, also after a restart. Throws `Refused` where too much
   * waits already. @param {Outgoing} message */
  send(message) {
    const order = this.newId();
    const given = message.message_id;
    /** @type {Entry} */
    const entry = { ...message, message_id: given ?? order, ...(given !== undefined && { order }), state: "waiting", at: this.now() };
    if (this._outbox.entries.has(entry.message_id)) return this._sendAgain(entry);
    this._outbox.add(entry);
    this._tell({ type: "outbox", entry });
    this._pump();
    return entry.message_id;
  }

  /** What is on its way already is sent once; another message under its id is none. @param {Entry} entry */
  _sendAgain(entry) {
    if (!this._outbox.isSame(entry)) throw new Refused("id_conflict", "Another message with this id is on its way already.");
    this.retry(entry.message_id);
    return entry.message_id;
  }

  /** Send a refused message again. @param {string} messageId */
  retry(messageId) {
    const entry = this._outbox.entries.get(messageId);
    if (entry?.state === "refused") this._change({ ...entry, state: "waiting", error: undefined });
    this._pump();
  }

  /** Give up a message that was refused, or is not sent yet. False: it is on its way, or not there.
   * @param {string} messageId */
  discard(messageId) {
    if (this._sent.has(messageId) || !this._outbox.entries.has(messageId)) return false;
    this._outbox.remove(messageId);
    this._tell({ type: "outbox", message_id: messageId });
    return true;
  }

  /** Tell who watches; lost while there is no connection. `where`: {to} or {thread_id, trigger?}.
   * @param {string} kind @param {any} body @param {{to?: string, thread_id?: string, trigger?: number}} where */
  signal(kind, body, where) {
    if (!this._isWelcome || this._isAtFollower() || this._socket === null || this._socket.bufferedAmount > MAX_BUFFERED) return;
    const text = JSON.stringify({ type: "signal", kind, body, ...where });
    if (!this._isTooLarge(text)) this._writeText(text);
  }

  /** A delivery is handled. @param {number} seq */
  ack(seq) {
    if (this._acks.handle(seq)) this._acknowledgeSoon();
  }

  /** A delivery has failed: it comes again. @param {number} seq @param {string} reason @param {number} [retryAfterMs] */
  nack(seq, reason, retryAfterMs) {
    this._acknowledge();
    if (!this._acks.drop(seq)) return;
    const frame = { type: "nack", seq, reason: reason.slice(0, MAX_REASON_CHARS), retry_after_ms: retryAfterMs };
    if (this._isWelcome) this._write(frame);
  }

  /** The network may be there again, or somebody looks: try at once, and see whether the connection still lives. */
  wake() {
    if (this.isOver) return;
    if (this._socket === null) this._open();
    else if (this._isWelcome) this._ask();
  }

  /** Say goodbye. What was not answered is rejected; messages stay in the storage. The promise is kept when the connection has closed.
   * @returns {Promise<void>} */
  async close() {
    if (this.isOver) return;
    if (this._isWelcome) {
      this._acknowledge();
      this._write({ type: "bye" });
    }
    const socket = this._socket;
    this._end("offline", new Refused("closed", "This connection was closed."));
    if (socket === null) return;
    await /** @type {Promise<void>} */ (new Promise((resolve) => {
      const late = this._timers.setTimeout(() => {
        hangUp(socket);
        resolve();
      }, BYE_TIMEOUT_MS);
      socket.onclose = () => {
        this._timers.clearTimeout(late);
        resolve();
      };
    }));
  }

  // --- joining and staying

  _open() {
    this._stop("retry");
    this._tellConnection("connecting");
    const first = /** @type {string} */ (this._urls[0]);
    const isLed = this._led !== "";
    [this._url, this._led, this._named] = [this._led || first, "", ""];
    if (isLed) this._ledTo.add(this._url);
    const socket = new this._WebSocket(this._url, SUBPROTOCOL);
    this._socket = socket;
    this._error = null;
    const isMine = () => this._socket === socket;
    socket.onopen = () => isMine() && this._write(this._makeHello());
    socket.onmessage = (/** @type {{data: unknown}} */ { data }) => isMine() && this._read(data);
    socket.onclose = (/** @type {{code: number, reason: string}} */ { code, reason }) => isMine() && this._lose(code, reason);
    socket.onerror = () => {}; // its close follows
    if (this._goesToLeader) {
      socket.on?.("unexpected-response", (_, { headers }) => { // of the package ws; other sockets keep it to themselves
        if (isMine()) this._named = readAddress(headers[LEADER]);
        hangUp(socket);
      });
    }
    const wait = (this.welcome === null ? this._welcomeTimeout : WELCOME_TIMEOUT_MS) / this._urls.length;
    this._after("welcome", isLed ? Math.min(wait, LED_TIMEOUT_MS) : wait, () => this._cut(socket));
  }

  _makeHello() {
    const fence = this._isUnfenced ? undefined : this._fence;
    const hello = { ...this._hello, token: this._token, new_token: this._newToken, fence, resume: this._resume };
    if (this.welcome !== null && this._staysInPlace) {
      hello.resume = { epoch: this.welcome.network.epoch, cursor: this._acks.prefix };
    }
    return hello;
  }

  /** End a connection that no longer answers: its close may come late, or never. @param {Socket} socket */
  _cut(socket) {
    if (this._socket !== socket) return;
    this._lose(1006, "The hub does not answer.");
    hangUp(socket);
  }

  /** @param {number} code @param {string} reason */
  _lose(code, reason) {
    const { _isWelcome: wasWelcome, _error: error } = this;
    this._socket = null;
    this._isWelcome = false;
    for (const name of [...this._marks.keys()]) this._stop(name);
    this._blame(code);
    const refusal = this._finalRefusal(code, reason, wasWelcome ? null : error);
    if (refusal !== null && code === 4403 && !wasWelcome && this._fence !== undefined && !this._isUnfenced) {
      this._isUnfenced = true; // a hub whose ledger was lost or replaced never gave it out; an overtaken one ends with 4409
    } else if (refusal !== null && code === 4401 && !wasWelcome && this._isElsewhere()) {
      // a network knows at each address a token that it has let in at one
      this._left = `${this._url} holds another network than ${this._joinedUrl}, which has let in ${this.agentId}: ${CHECK} (${refusal.message})`;
    } else if (refusal !== null) return this._end("refused", refusal);
    this._heedLeader(code === COME_BACK ? readReason(reason) : this._named);
    if (!wasWelcome && (error === null || code === 4401) && this._goToNext()) return;
    if (wasWelcome && !this._led && !this._urls.includes(this._url)) this._led = this._url;
    this._passed = 0;
    this._ledTo.clear();
    if (wasWelcome && this.now() - this._joinedAt >= STEADY_MS) this._delay = FIRST_DELAY_MS;
    // apart from each other, so that a restarted hub is not met by all at once
    let wait = this._delay * (0.5 + this.random() / 2);
    if (error?.retry_after_ms) wait = Math.max(wait, error.retry_after_ms * (1 + this.random() / 2));
    this._delay = Math.min(this._delay * 2, this.maxDelay);
    this._tellConnection("offline", { code: String(code), message: this._left || (error?.message ?? reason) });
    this._left = "";
    if (!this.isOver) this._after("retry", wait, () => this._open());
  }

  /** Go where another node is said to lead, if that was not tried yet. @param {string} leader */
  _heedLeader(leader) {
    const url = `${this._url.split("://")[0]}://${leader}/`;
    if (!this._goesToLeader || !leader || this._ledTo.has(url) || this._ledTo.size >= MAX_LED) return;
    this._ledTo.add(url);
    this._led = this._lastNamed = url;
  }

  /** Try the next address at once. False: there is none that was not tried. */
  _goToNext() {
    if (this._led) {
      this._open();
      return true;
    }
    this._urls.push(/** @type {string} */ (this._urls.shift()));
    this._passed += 1;
    if (this._passed >= this._urls.length) {
      // the node that was named last took over a moment ago, maybe, and who named it is gone
      if (!this._lastNamed || this._ledTo.has(this._lastNamed)) return false;
      this._led = this._lastNamed;
    }
    this._open();
    return true;
  }

  /** Why no further try helps, or null. @param {number} code @param {string} reason @param {Refused | null} error */
  _finalRefusal(code, reason, error) {
    if (code === 4409) return new Refused("superseded", "Another session has taken this one's place.");
    if (code === 4401 || code === 4403 || code === 4400) {
      const names = { 4400: "invalid_frame", 4401: "not_authenticated", 4403: "forbidden" };
      return new Refused(error?.code ?? names[code], error?.message ?? (reason || "The hub has ended this session."));
    }
    return null;
  }

  /** Give up the request at which connections end again and again: behind it nothing would ever be answered.
   * @param {number} code */
  _blame(code) {
    const why = "The connection ended with this request, again and again; whether the hub took it is unknown.";
    if (BLAMING_CODES.includes(code)) {
      const oldest = [...this._calls.values()].find((it) => it.isSent);
      const [message] = this._sent;
      if (oldest !== undefined) {
        oldest.losses += 1;
        if (oldest.losses >= MAX_LOSSES) this._settle(oldest.type, oldest.id, (it) => it.reject(new Refused("internal", why)));
      } else if (message !== undefined) {
        const losses = (this._losses.get(message) ?? 0) + 1;
        this._losses.set(message, losses);
        if (losses >= MAX_LOSSES) this._refuse(message, { code: "internal", message: why });
      }
    }
    for (const call of this._calls.values()) call.isSent = false;
    const unanswered = [...this._sent];
    this._sent.clear();
    for (const messageId of unanswered) {
      const entry = this._outbox.entries.get(messageId);
      if (entry !== undefined) this._change({ ...entry, state: "waiting" });
    }
  }

  /** @param {string} state @param {Refused} error */
  _end(state, error) {
    this.isOver = true;
    this._refusal = error;
    for (const name of [...this._marks.keys()]) this._stop(name);
    const socket = this._socket;
    this._socket = null;
    this._isWelcome = false;
    socket?.close();
    const calls = [...this._calls.values()];
    this._calls.clear();
    this._tellConnection(state, { code: error.code, message: error.message });
    for (const call of calls) call.reject(error);
  }

  _over() {
    return new Refused("closed", this._refusal?.message ?? "This connection was closed.");
  }

  // --- what arrives

  /** @param {unknown} data */
  _read(data) {
    if (typeof data === "string" && data.length > MAX_FRAME_CHARS) return this._dropAnswer();
    let frame;
    try {
      frame = readFrame(data);
    } catch (error) {
      return this._end("refused", /** @type {Refused} */ (error));
    }
    this._heard();
    if (frame !== null) this._take(frame);
  }

  /** What came is more than one frame may be: it answers one of the calls under way, and would come again. */
  _dropAnswer() {
    const error = new Refused("too_large", "The hub's answer to a call under way is too large; ask for less at a time.");
    for (const call of [...this._calls.values()]) {
      if (call.isSent && call.type === "call") this._settle(call.type, call.id, (it) => it.reject(error));
    }
    const socket = this._socket;
    this._lose(1009, error.message);
    if (socket !== null) hangUp(socket);
  }

  /** @param {any} frame */
  _take(frame) {
    switch (frame.type) {
      case "welcome":
        return this._takeWelcome(frame);
      case "deliver":
        return this._takeDelivery(frame);
      case "stored":
        return this._takeStored(frame);
      case "result":
        if (frame.as_of !== undefined) this._tell({ type: "as_of", as_of: frame.as_of });
        return this._settle("call", frame.call_id, (call) => call.resolve(frame.value));
      case "error":
        return this._takeError(frame);
      case "notice":
        if (frame.kind === "dead_letter" && frame.body?.agent_id === this.agentId) this._acks.drop(frame.body.seq);
        return this._tell(frame);
      default:
        this._tell(frame);
    }
  }

  /** @param {any} frame */
  _takeWelcome(frame) {
    if (this._isElsewhere() && this.welcome.network.epoch !== frame.network.epoch) return this._leave(frame.network.name);
    if (this.welcome !== null && this.welcome.network.epoch !== frame.network.epoch) {
      this._acks.isStale = true;
      this._acks = new Acks(); // another history: its seqs are others
    }
    this.welcome = frame;
    [this._joinedUrl, this._left, this._isUnfenced] = [this._url, "", false];
    this._isWelcome = true;
    this._passed = 0;
    this._ledTo.clear();
    this._lastNamed = this._urls.includes(this._url) ? "" : this._url;
    this._joinedAt = this.now();
    this._acks.beginSession(frame.cursor);
    this._fence = frame.fence;
    this._resume = undefined;
    if (this._newToken !== undefined) [this._token, this._newToken] = [this._newToken, undefined];
    this._stop("welcome");
    this._tell(frame);
    if (this._isAtFollower()) this._askAsOf();
    this._pump();
  }

  /** Whether this is at another address than the last session was. Another history is another network's there, for which nothing here
   * was meant; at the same address a hub has lost its own. */
  _isElsewhere() {
    return this.welcome !== null && new URL(this._url).host !== new URL(this._joinedUrl).host;
  }

  /** Go on with the next address; nothing but the hello was sent here. @param {string} name */
  _leave(name) {
    const socket = this._socket;
    this._isUnfenced = false;
    this._left = `${this._url} holds another network (${name}) than ${this._joinedUrl}: ${CHECK}`;
    this._lose(1006, this._left);
    if (socket !== null) hangUp(socket);
  }

  /** @param {any} frame */
  _takeDelivery(frame) {
    if (!this._acks.take(frame.message.seq)) return this._acknowledgeSoon();
    this._tell(frame);
    if (this._handlesAtOnce) this.ack(frame.message.seq);
  }

  /** @param {any} frame */
  _takeStored(frame) {
    if (frame.record_id !== undefined) return this._settle("record", frame.record_id, (it) => it.resolve(frame));
    this._forget(frame.message_id);
    this._tell(frame);
    this._outbox.remove(frame.message_id);
    this._pump();
  }

  /** @param {any} frame */
  _takeError(frame) {
    const { code, message, retry_after_ms: after } = frame;
    const wait = (after ?? 1000) * (1 + this.random() / 4);
    const [type, id] = frame.call_id !== undefined ? ["call", frame.call_id] : ["record", frame.record_id];
    if (id !== undefined) {
      if (!LATER.includes(code)) return this._settle(type, id, (it) => it.reject(new Refused(code, message, after)));
      return this._after(`${type} ${id}`, wait, () => {
        const call = this._calls.get(`${type} ${id}`);
        if (call !== undefined) call.isSent = false;
        this._pump();
      });
    }
    const entry = this._outbox.entries.get(frame.message_id);
    if (entry === undefined) {
      this._error = new Refused(code, message, after);
    } else if (LATER.includes(code)) {
      this._sent.delete(entry.message_id);
      this._change({ ...entry, state: "waiting" });
      this._after("send", wait, () => this._pump());
    } else {
      this._refuse(entry.message_id, { code, message, ...(after !== undefined && { retry_after_ms: after }) });
      this._pump();
    }
  }

  /** @param {string} messageId @param {{code: string, message: string, retry_after_ms?: number}} error */
  _refuse(messageId, error) {
    this._forget(messageId);
    const entry = this._outbox.entries.get(messageId);
    if (entry !== undefined) this._change({ ...entry, state: "refused", error });
  }

  /** @param {string} messageId */
  _forget(messageId) {
    this._sent.delete(messageId);
    this._losses.delete(messageId);
  }

  /** @param {string} type @param {string} id @param {(call: Request) => void} answer */
  _settle(type, id, answer) {
    const call = this._calls.get(`${type} ${id}`);
    if (call === undefined) return;
    this._calls.delete(`${type} ${id}`);
    answer(call);
    this._pump();
  }

  // --- acknowledging

  _acknowledgeSoon() {
    this._after("ack", ACK_DELAY_MS, () => this._acknowledge(), { isKept: true });
  }

  _acknowledge() {
    this._stop("ack");
    if (!this._isWelcome) return; // the next session delivers it again, and it is answered then
    const { prefix, single } = this._acks.takeDue();
    if (prefix !== null) this._write({ type: "ack", seq: prefix });
    for (const seq of single) this._write({ type: "ack", seq, only: true });
  }

  // --- what goes out

  /** @param {"call" | "record"} type @param {string} id @param {Record<string, unknown>} given @returns {Promise<any>} */
  _request(type, id, given) {
    return new Promise((resolve, reject) => {
      if (this.isOver) return reject(this._over());
      if (this._calls.size >= MAX_CALLS) return reject(new Refused("overloaded", "Too many requests wait for an answer."));
      if (this._calls.has(`${type} ${id}`)) return reject(new Refused("id_conflict", "A request with this id is under way already."));
      const frame = JSON.stringify(given);
      if (this._isTooLarge(frame)) return reject(tooLarge());
      this._calls.set(`${type} ${id}`, { id, type, frame, resolve, reject, losses: 0, isSent: false });
      this._pump();
    });
  }

  _pump() {
    if (!this._isWelcome) return;
    let room = Math.min(MAX_READS, this.welcome.limits.max_reads ?? MAX_READS);
    for (const call of this._calls.values()) {
      if (room <= 0) break;
      if (!call.isSent && this._isTooLarge(call.frame)) {
        this._calls.delete(`${call.type} ${call.id}`);
        call.reject(tooLarge());
        continue;
      }
      if (!call.isSent) this._writeText(call.frame);
      call.isSent = true;
      room -= 1;
    }
    if (this._isAtFollower() && !this._goesToLeader) return;
    for (const entry of this._outbox.entries.values()) {
      // what is put off stays before what was said after it
      if (this._sent.size >= this._maxUnanswered || this._marks.has("send")) return;
      if (entry.state !== "waiting") continue;
      const text = this._outbox.frameOf(entry.message_id);
      if (this._isTooLarge(text)) {
        this._change({ ...entry, state: "refused", error: { code: "too_large", message: tooLarge().message } });
        continue;
      }
      this._sent.add(entry.message_id);
      this._writeText(text); // before it is told: who is told may send more
      this._change({ ...entry, state: "sent" });
    }
  }

  /** @param {string} text */
  _isTooLarge(text) {
    const most = this.welcome?.limits.max_frame_bytes;
    return most !== undefined && text.length * 3 > most && new TextEncoder().encode(text).length > most;
  }

  /** @param {Entry} entry */
  _change(entry) {
    this._outbox.change(entry);
    this._tell({ type: "outbox", entry });
  }

  /** @param {Record<string, unknown>} frame */
  _write(frame) {
    this._writeText(JSON.stringify(frame));
  }

  /** @param {string} text */
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
    if (!this._isWelcome || socket === null || this._marks.has("answer")) return;
    this._write({ type: "call", call_id: this.newId(), op: "network.info", args: {} });
    this._after("answer", ANSWER_TIMEOUT_MS, () => this._cut(socket));
  }

  /** Whether this reads at a node that follows: nothing is stored there. */
  _isAtFollower() {
    return this.welcome?.follows !== undefined;
  }

  _askAsOf() {
    this._after("as_of", AS_OF_MS, () => {
      this._ask();
      this._askAsOf();
    });
  }

  // --- telling and time

  /** @param {Record<string, unknown>} event */
  _tell(event) {
    this._onEvent({ ...event, at: this.now() });
  }

  /** @param {string} state @param {{code: string, message: string}} [error] */
  _tellConnection(state, error) {
    this._tell({ type: "connection", state, error });
  }

  /** @param {string} name @param {number} ms @param {() => void} run */
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

  /** @param {string} name */
  _stop(name) {
    this._timers.clearTimeout(this._marks.get(name));
    this._marks.delete(name);
  }
}

/** End a connection without waiting for the other side, where its constructor can: a program would stay for it.
 * @param {Socket} socket */
function hangUp(socket) {
  if (socket.terminate !== undefined) socket.terminate();
  else socket.close();
}

function tooLarge() {
  return new Refused("too_large", "This is larger than the hub takes at once; send it in parts, or a reference to it.");
}
