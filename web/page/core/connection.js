/**
 * A participant's connection to a hub. The connection uses roundelay.v1 (docs/protocol.md) over a WebSocket, and is
 * restored after a loss.
 *
 * Each message is sent exactly once: the connection repeats it under the same id until the hub has stored it. Calls and
 * records without an answer are repeated too, and handled deliveries are acknowledged. Frames are passed to `onEvent`
 * unchanged, each with its arrival time `at` (ms).
 *
 * The WebSocket, clock, randomness, timers and storage are parameters. This module does not use the DOM. A connection
 * is a `source` of `#ui/store.js`: {connect(onEvent), call(op, args), send(message), signal(kind, body, where), retry,
 * discard, wake, close}. The client in clients/typescript uses this module too.
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
const STEADY_MS = 2_000; // a session of at least this duration resets the reconnect delay
const WELCOME_TIMEOUT_MS = 20_000;
const LED_TIMEOUT_MS = 3_000; // shorter wait for a leader that another node named, because it may be unreachable
const MAX_LED = 3; // maximum number of named leaders to try before the next configured address
const COME_BACK = 4503;
const AS_OF_MS = 5_000; // interval between questions to a read replica about the age of its data
const QUIET_MS = 25_000; // after this time without a frame, check whether the hub is alive
const ANSWER_TIMEOUT_MS = 15_000;
const BYE_TIMEOUT_MS = 2_000;
const MAX_LOSSES = 3; // number of connections that may end at one request before the request fails
const BLAMING_CODES = [1002, 1003, 1007, 1009, 1011, 4400, 4413];
const PING_UNANSWERED = "the last ping was not answered"; // reason of a 1011 after a network failure
const MAX_READS = 32; // maximum number of unanswered calls, unless the hub allows fewer
const MAX_CALLS = 1000; // maximum number of waiting calls
const MAX_OUTBOX = 200;
const MAX_OUTBOX_CHARS = 2 ** 20;
const MAX_FRAME_CHARS = 2 ** 24; // maximum length of one frame from the hub
const MAX_REASON_CHARS = 2000; // maximum length of a reason that the hub stores
const ACK_DELAY_MS = 20;
const MAX_BUFFERED = 2 ** 18; // signals are dropped if more bytes than this are unsent
const CHECK = "check the addresses, or connect again.";
const LATER = ["rate_limited", "overloaded"];

/**
 * The parts of a WebSocket that this module uses. The WebSockets of browsers, of Node and of the package ws have these
 * members.
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
   * Options:
   * - `url` may contain the addresses of several nodes of one network, separated by commas. Only one node serves. If an
   *   address sends no welcome, the next one is tried.
   * - `newToken` is set if `token` is a login code. The hub then binds `newToken` to the participant.
   * - `storage` has the methods of localStorage, and keeps unsent messages across restarts.
   * - `random` returns numbers from 0 to 1, and `now` returns milliseconds.
   * - `hello` contains additional fields for the first frame.
   * - `resume` is the position at which delivery starts. Without `resume` and without `staysInPlace`, the hub chooses
   *   the position at each reconnect.
   * - With `handlesAtOnce`, a delivery counts as handled when `onEvent` returns. Otherwise `ack` and `nack` decide.
   * - `maxUnanswered` limits the messages that wait for an answer. With more than one, a later message may overtake a
   *   message that the hub delays.
   * - `welcomeTimeout` (ms) limits the wait for the first welcome. Several addresses share this time.
   * - With `goesToLeader`, the connection follows a node that names another leader, even to an address that is not in
   *   `url`. The encryption stays the same. Without `goesToLeader`, and with `?read_only=1` in `url`, the connection
   *   stays at a read replica, and messages wait until that node leads.
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
    /** @type {any} the newest welcome */
    this.welcome = null;
    this.isOver = false;
    this._urls = url.split(",");
    /** Number of addresses that sent no welcome since the last welcome, or since all addresses were tried. */
    this._passed = 0;
    this._goesToLeader = goesToLeader;
    /** The address of the current attempt or session. */
    this._url = "";
    /** The address to try next, before all others. Empty if no address has priority. */
    this._led = "";
    /** The leader that was named last, or that welcomed this client. The configured addresses are tried first. */
    this._lastNamed = "";
    /** The leader that the node of the current attempt named when it refused this client. */
    this._named = "";
    /** Addresses of named leaders that were tried since the last welcome, or since all addresses were tried. */
    this._ledTo = new Set();
    /** The address of the last session. */
    this._joinedUrl = "";
    /** Reason for leaving a node after its welcome. The reason is shown after all addresses were tried. */
    this._left = "";
    /** Whether the next hello omits the fencing token, because a hub did not know the token. */
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
    /** @type {Set<string>} ids of sent messages without an answer */
    this._sent = new Set();
    /** @type {Map<string, number>} number of connections that were lost while a message was in flight, by message id */
    this._losses = new Map();
    /** @type {Map<string, Request>} calls and records by id, oldest first */
    this._calls = new Map();
    /** @type {Socket | null} */
    this._socket = null;
    this._isWelcome = false;
    this._joinedAt = 0;
    this._delay = FIRST_DELAY_MS;
    this._acks = new Acks();
    /** @type {Refused | null} an error frame before the welcome */
    this._error = null;
    /** @type {Refused | null} */
    this._refusal = null;
    /** @type {Map<string, any>} timers by name */
    this._timersByName = new Map();
    /** @type {(event: any) => void} */
    this._onEvent = () => {};
  }

  /** Connect, and pass every event to `onEvent` from now on. The first events are the messages in the storage.
   * @param {(event: any) => void} onEvent */
  connect(onEvent) {
    this._onEvent = onEvent;
    for (const entry of this._outbox.entries.values()) this._emit({ type: "outbox", entry });
    this._open();
  }

  /** The open deliveries of the current history. A hub that has lost or replaced its ledger starts a new history. */
  get acks() {
    return this._acks;
  }

  /** Call an operation and return its value. A call that a lost connection interrupts is repeated under its id.
   * Rejects with `Refused`. @param {string} op @param {Record<string, any>} [args] @param {string} [callId] @returns {Promise<any>} */
  call(op, args = {}, callId = this.newId()) {
    return this._request("call", callId, { type: "call", call_id: callId, op, args });
  }

  /** Store a turn record and return its `stored` frame. If the connection is lost, the record is sent again.
   * @param {string} recordId @param {string} reaction @param {string} kind @param {any} body @returns {Promise<any>} */
  record(recordId, reaction, kind, body) {
    return this._request("record", recordId, { type: "record", record_id: recordId, reaction, kind, body });
  }

  /** Give up a call or record, so that it is not sent, or not sent again.
   * @param {"call" | "record"} type @param {string} id */
  abandon(type, id) {
    this._calls.delete(`${type} ${id}`);
    this._sendWaiting();
  }

  /** Send a message ({to, content, reply_to?, cause?, requires_response?, metadata?, text_representation?,
   * conversation?, exclude_agent_ids?, message_id?}), and return its id. Each message is sent once and in order, even
   * after a restart. Throws `Refused` if too many messages are waiting. @param {Outgoing} message */
  send(message) {
    const order = this.newId();
    const givenId = message.message_id;
    /** @type {Entry} */
    const entry = { ...message, message_id: givenId ?? order, ...(givenId !== undefined && { order }), state: "waiting", at: this.now() };
    if (this._outbox.entries.has(entry.message_id)) return this._resend(entry);
    this._outbox.add(entry);
    this._emit({ type: "outbox", entry });
    this._sendWaiting();
    return entry.message_id;
  }

  /** Send a message again that is already in the outbox. Throws `Refused` if its id belongs to a different message.
   * @param {Entry} entry */
  _resend(entry) {
    if (!this._outbox.isSame(entry)) throw new Refused("id_conflict", "Another message with this id is already being sent.");
    this.retry(entry.message_id);
    return entry.message_id;
  }

  /** Send a refused message again. @param {string} messageId */
  retry(messageId) {
    const entry = this._outbox.entries.get(messageId);
    if (entry?.state === "refused") this._updateEntry({ ...entry, state: "waiting", error: undefined });
    this._sendWaiting();
  }

  /** Remove a refused or unsent message from the outbox. Return false if the message is in flight or unknown.
   * @param {string} messageId */
  discard(messageId) {
    if (this._sent.has(messageId) || !this._outbox.entries.has(messageId)) return false;
    this._outbox.remove(messageId);
    this._emit({ type: "outbox", message_id: messageId });
    return true;
  }

  /** Send a signal. Without a connection, the signal is dropped. `where` is {to} or {thread_id, trigger?}.
   * @param {string} kind @param {any} body @param {{to?: string, thread_id?: string, trigger?: number}} where */
  signal(kind, body, where) {
    if (!this._isWelcome || this._isAtFollower() || this._socket === null || this._socket.bufferedAmount > MAX_BUFFERED) return;
    const text = JSON.stringify({ type: "signal", kind, body, ...where });
    if (!this._isTooLarge(text)) this._send(text);
  }

  /** Acknowledge a handled delivery. @param {number} seq */
  ack(seq) {
    if (this._acks.handle(seq)) this._acknowledgeSoon();
  }

  /** Report that handling a delivery failed, so that the hub delivers it again. @param {number} seq @param {string}
   * reason @param {number} [retryAfterMs] */
  nack(seq, reason, retryAfterMs) {
    this._acknowledge();
    if (!this._acks.drop(seq)) return;
    const frame = { type: "nack", seq, reason: reason.slice(0, MAX_REASON_CHARS), retry_after_ms: retryAfterMs };
    if (this._isWelcome) this._sendFrame(frame);
  }

  /** Reconnect at once, or check that the connection is alive. Call this when the network may be back, or when a person
   * opens the page. */
  wake() {
    if (this.isOver) return;
    if (this._socket === null) this._open();
    else if (this._isWelcome) this._ping();
  }

  /** End the session. Unanswered requests are rejected, and unsent messages stay in the storage. Resolves when the
   * connection is closed.
   * @returns {Promise<void>} */
  async close() {
    if (this.isOver) return;
    if (this._isWelcome) {
      this._acknowledge();
      this._sendFrame({ type: "bye" });
    }
    const socket = this._socket;
    this._endForGood("offline", new Refused("closed", "This connection was closed."));
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

  // --- connecting

  _open() {
    this._stopTimer("retry");
    this._emitConnection("connecting");
    const first = /** @type {string} */ (this._urls[0]);
    const isLed = this._led !== "";
    [this._url, this._led, this._named] = [this._led || first, "", ""];
    if (isLed) this._ledTo.add(this._url);
    const socket = new this._WebSocket(this._url, SUBPROTOCOL);
    this._socket = socket;
    this._error = null;
    // Ignore events of a socket that was given up, because they must not change the state of the next socket.
    const isMine = () => this._socket === socket;
    socket.onopen = () => isMine() && this._sendFrame(this._makeHello());
    socket.onmessage = (/** @type {{data: unknown}} */ { data }) => isMine() && this._readFrame(data);
    socket.onclose = (/** @type {{code: number, reason: string}} */ { code, reason }) => isMine() && this._handleClose(code, reason);
    socket.onerror = () => {}; // a close event follows
    if (this._goesToLeader) {
      // Only the package ws shows the response of a refused connection.
      socket.on?.("unexpected-response", (_, { headers }) => {
        if (isMine()) this._named = readAddress(headers[LEADER]);
        hangUp(socket);
      });
    }
    const wait = (this.welcome === null ? this._welcomeTimeout : WELCOME_TIMEOUT_MS) / this._urls.length;
    this._startTimer("welcome", isLed ? Math.min(wait, LED_TIMEOUT_MS) : wait, () => this._dropSocket(socket));
  }

  _makeHello() {
    const fence = this._isUnfenced ? undefined : this._fence;
    const hello = { ...this._hello, token: this._token, new_token: this._newToken, fence, resume: this._resume };
    if (this.welcome !== null && this._staysInPlace) {
      // Resume at the prefix, not at the newest delivery. The hub then delivers open messages again, and `Acks`
      // recognizes the handled ones.
      hello.resume = { epoch: this.welcome.network.epoch, cursor: this._acks.prefix };
    }
    return hello;
  }

  /** End a connection that does not answer. The close event of such a connection may arrive late or never. @param
   * {Socket} socket */
  _dropSocket(socket) {
    if (this._socket !== socket) return;
    this._handleClose(1006, "The hub does not answer.");
    hangUp(socket);
  }

  /** @param {number} code @param {string} reason */
  _handleClose(code, reason) {
    const { _isWelcome: wasWelcome, _error: error } = this;
    this._socket = null;
    this._isWelcome = false;
    for (const name of [...this._timersByName.keys()]) this._stopTimer(name);
    this._giveUpRepeated(code, reason);
    const refusal = this._findFinalRefusal(code, reason, wasWelcome ? null : error);
    if (refusal !== null && code === 4403 && !wasWelcome && this._fence !== undefined && !this._isUnfenced) {

      // The hub has a new ledger, which never issued this token. For a superseded session, the code would be 4409.
      this._isUnfenced = true;
    } else if (refusal !== null && code === 4401 && !wasWelcome && this._isElsewhere()) {
      // All addresses of one network accept the same tokens, so this address belongs to a different network.
      this._left = `${this._url} holds another network than ${this._joinedUrl}, which has let in ${this.agentId}: ${CHECK} (${refusal.message})`;
    } else if (refusal !== null) return this._endForGood("refused", refusal);
    this._followLeader(code === COME_BACK ? readReason(reason) : this._named);
    if (!wasWelcome && (error === null || code === 4401) && this._goToNext()) return;
    if (wasWelcome && !this._led && !this._urls.includes(this._url)) this._led = this._url;
    this._passed = 0;
    this._ledTo.clear();
    if (wasWelcome && this.now() - this._joinedAt >= STEADY_MS) this._delay = FIRST_DELAY_MS;
    // Spread the reconnects. Otherwise all clients of a restarted hub would reconnect at the same moment.
    let wait = this._delay * (0.5 + this.random() / 2);
    // Wait at least as long as the hub requests. Add a random part, because all refused clients got the same time.
    if (error?.retry_after_ms) wait = Math.max(wait, error.retry_after_ms * (1 + this.random() / 2));
    this._delay = Math.min(this._delay * 2, this.maxDelay);
    this._emitConnection("offline", { code: String(code), message: this._left || (error?.message ?? reason) });
    this._left = "";
    if (!this.isOver) this._startTimer("retry", wait, () => this._open());
  }

  /** Connect to the leader that a node named, unless that leader was already tried. @param {string} leader */
  _followLeader(leader) {
    const url = `${this._url.split("://")[0]}://${leader}/`;
    if (!this._goesToLeader || !leader || this._ledTo.has(url) || this._ledTo.size >= MAX_LED) return;
    this._ledTo.add(url);
    this._led = this._lastNamed = url;
  }

  /** Try the next address at once. Return false if all addresses were tried. */
  _goToNext() {
    if (this._led) {
      this._open();
      return true;
    }
    // Rotate the list, so that the next attempt starts at another node, even after a wait.
    this._urls.push(/** @type {string} */ (this._urls.shift()));
    this._passed += 1;
    if (this._passed >= this._urls.length) {
      // Try the leader that was named last. That node may have become the leader only now, after the node that named it
      // has stopped.
      if (!this._lastNamed || this._ledTo.has(this._lastNamed)) return false;
      this._led = this._lastNamed;
    }
    this._open();
    return true;
  }

  /** Return the refusal if no further attempt can succeed, or null. @param {number} code @param {string} reason @param
   * {Refused | null} error */
  _findFinalRefusal(code, reason, error) {
    if (code === 4409) return new Refused("superseded", "Another session has replaced this one.");
    if (code === 4401 || code === 4403 || code === 4400) {
      const names = { 4400: "invalid_frame", 4401: "not_authenticated", 4403: "forbidden" };
      return new Refused(error?.code ?? names[code], error?.message ?? (reason || "The hub has ended this session."));
    }
    return null;
  }

  /** Give up a request that repeatedly ends the connection. Otherwise the request would block all later requests.
   * @param {number} code @param {string} reason */
  _giveUpRepeated(code, reason) {
    const why = "The connection ended repeatedly at this request. Whether the hub accepted it is unknown.";
    if (BLAMING_CODES.includes(code) && reason !== PING_UNANSWERED) {
      const oldest = [...this._calls.values()].find((call) => call.isSent);
      const [message] = this._sent;
      // Blame only the oldest request, which is the most likely cause. If all requests were blamed, harmless ones would
      // fail too.
      if (oldest !== undefined) {
        oldest.losses += 1;
        if (oldest.losses >= MAX_LOSSES) this._settleRequest(oldest.type, oldest.id, (request) => request.reject(new Refused("internal", why)));
      } else if (message !== undefined) {
        const losses = (this._losses.get(message) ?? 0) + 1;
        this._losses.set(message, losses);
        if (losses >= MAX_LOSSES) this._refuse(message, { code: "internal", message: why });
      }
    }
    // Send all requests again under the same ids after the next welcome. The hub recognizes requests that it has
    // already stored.
    for (const call of this._calls.values()) call.isSent = false;
    const unanswered = [...this._sent];
    this._sent.clear();
    for (const messageId of unanswered) {
      const entry = this._outbox.entries.get(messageId);
      if (entry !== undefined) this._updateEntry({ ...entry, state: "waiting" });
    }
  }

  /** @param {string} state @param {Refused} error */
  _endForGood(state, error) {
    this.isOver = true;
    this._refusal = error;
    for (const name of [...this._timersByName.keys()]) this._stopTimer(name);
    const socket = this._socket;
    this._socket = null;
    this._isWelcome = false;
    socket?.close();
    const calls = [...this._calls.values()];
    this._calls.clear();
    this._emitConnection(state, { code: error.code, message: error.message });
    // Reject the calls last. Code that handles a rejection must find the connection closed.
    for (const call of calls) call.reject(error);
  }

  _makeClosedError() {
    return new Refused("closed", this._refusal?.message ?? "This connection was closed.");
  }

  // --- incoming frames

  /** @param {unknown} data */
  _readFrame(data) {
    if (typeof data === "string" && data.length > MAX_FRAME_CHARS) return this._rejectOversized();
    let frame;
    try {
      frame = readFrame(data);
    } catch (error) {
      return this._endForGood("refused", /** @type {Refused} */ (error));
    }
    // Every frame shows that the hub is alive, even a frame of an unknown kind.
    this._restartQuietTimer();
    if (frame !== null) this._handleFrame(frame);
  }

  /** Reject all calls in flight. The answer to one of them exceeds the frame limit, and would be sent again after a
   * reconnect. */
  _rejectOversized() {
    const error = new Refused("too_large", "The hub's answer to a call in flight is too large; ask for less at a time.");
    for (const call of [...this._calls.values()]) {
      if (call.isSent && call.type === "call") this._settleRequest(call.type, call.id, (request) => request.reject(error));
    }
    const socket = this._socket;
    this._handleClose(1009, error.message);
    if (socket !== null) hangUp(socket);
  }

  /** @param {any} frame */
  _handleFrame(frame) {
    switch (frame.type) {
      case "welcome":
        return this._handleWelcome(frame);
      case "deliver":
        return this._handleDelivery(frame);
      case "stored":
        return this._handleStored(frame);
      case "result":
        if (frame.as_of !== undefined) this._emit({ type: "as_of", as_of: frame.as_of });
        return this._settleRequest("call", frame.call_id, (call) => call.resolve(frame.value));
      case "error":
        return this._handleError(frame);
      case "notice":
        if (frame.kind === "dead_letter" && frame.body?.agent_id === this.agentId) this._acks.drop(frame.body.seq);
        return this._emit(frame);
      default:
        this._emit(frame);
    }
  }

  /** @param {any} frame */
  _handleWelcome(frame) {
    if (this._isElsewhere() && this.welcome.network.epoch !== frame.network.epoch) return this._leave(frame.network.name);
    if (this.welcome !== null && this.welcome.network.epoch !== frame.network.epoch) {
      this._acks.isStale = true;
      this._acks = new Acks(); // the seqs of a new history name other messages
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
    // Use `resume` only for the first join. Later joins use the position of the acks.
    this._resume = undefined;
    // The hub has bound the new token, so use it from now on. The login code works only once.
    if (this._newToken !== undefined) [this._token, this._newToken] = [this._newToken, undefined];
    this._stopTimer("welcome");
    this._emit(frame);
    if (this._isAtFollower()) this._pingForAsOf();
    this._sendWaiting();
  }

  /** Return whether the current address differs from the address of the last session. A different epoch at a different
   * address means a different network, which must not get this client's messages. A different epoch at the same address
   * means that the hub has lost its ledger. */
  _isElsewhere() {
    return this.welcome !== null && new URL(this._url).host !== new URL(this._joinedUrl).host;
  }

  /** Leave a different network and try the next address. Only the hello frame was sent to that network. @param {string}
   * name */
  _leave(name) {
    const socket = this._socket;
    this._isUnfenced = false;
    this._left = `${this._url} holds another network (${name}) than ${this._joinedUrl}: ${CHECK}`;
    this._handleClose(1006, this._left);
    if (socket !== null) hangUp(socket);
  }

  /** @param {any} frame */
  _handleDelivery(frame) {
    // Acknowledge a repeated delivery again, because its first ack may have been lost with the connection.
    if (!this._acks.take(frame.message.seq)) return this._acknowledgeSoon();
    this._emit(frame);
    if (this._handlesAtOnce) this.ack(frame.message.seq);
  }

  /** @param {any} frame */
  _handleStored(frame) {
    if (frame.record_id !== undefined) return this._settleRequest("record", frame.record_id, (request) => request.resolve(frame));
    this._forgetMessage(frame.message_id);
    // Emit the event before the entry leaves the outbox. A listener can then replace the entry by the stored message
    // without a gap.
    this._emit(frame);
    this._outbox.remove(frame.message_id);
    this._sendWaiting();
  }

  /** @param {any} frame */
  _handleError(frame) {
    const { code, message, retry_after_ms: after } = frame;
    const wait = (after ?? 1000) * (1 + this.random() / 4);
    const [type, id] = frame.call_id !== undefined ? ["call", frame.call_id] : ["record", frame.record_id];
    if (id !== undefined) {
      if (!LATER.includes(code)) return this._settleRequest(type, id, (request) => request.reject(new Refused(code, message, after)));
      return this._startTimer(`${type} ${id}`, wait, () => {
        const call = this._calls.get(`${type} ${id}`);
        if (call !== undefined) call.isSent = false;
        this._sendWaiting();
      });
    }
    const entry = this._outbox.entries.get(frame.message_id);
    if (entry === undefined) {
      this._error = new Refused(code, message, after);
    } else if (LATER.includes(code)) {
      this._sent.delete(entry.message_id);
      this._updateEntry({ ...entry, state: "waiting" });
      this._startTimer("send", wait, () => this._sendWaiting());
    } else {
      this._refuse(entry.message_id, { code, message, ...(after !== undefined && { retry_after_ms: after }) });
      this._sendWaiting();
    }
  }

  /** @param {string} messageId @param {{code: string, message: string, retry_after_ms?: number}} error */
  _refuse(messageId, error) {
    this._forgetMessage(messageId);
    const entry = this._outbox.entries.get(messageId);
    if (entry !== undefined) this._updateEntry({ ...entry, state: "refused", error });
  }

  /** @param {string} messageId */
  _forgetMessage(messageId) {
    this._sent.delete(messageId);
    this._losses.delete(messageId);
  }

  /** @param {string} type @param {string} id @param {(call: Request) => void} answer */
  _settleRequest(type, id, answer) {
    const call = this._calls.get(`${type} ${id}`);
    if (call === undefined) return;
    this._calls.delete(`${type} ${id}`);
    answer(call);
    this._sendWaiting();
  }

  // --- acknowledging

  _acknowledgeSoon() {
    this._startTimer("ack", ACK_DELAY_MS, () => this._acknowledge(), { isKept: true });
  }

  _acknowledge() {
    this._stopTimer("ack");
    if (!this._isWelcome) return; // the next session delivers the messages again, and acknowledges them
    const { prefix, single } = this._acks.takeDue();
    if (prefix !== null) this._sendFrame({ type: "ack", seq: prefix });
    for (const seq of single) this._sendFrame({ type: "ack", seq, only: true });
  }

  // --- outgoing frames

  /** @param {"call" | "record"} type @param {string} id @param {Record<string, unknown>} request @returns {Promise<any>} */
  _request(type, id, request) {
    return new Promise((resolve, reject) => {
      if (this.isOver) return reject(this._makeClosedError());
      if (this._calls.size >= MAX_CALLS) return reject(new Refused("overloaded", "Too many requests wait for an answer."));
      if (this._calls.has(`${type} ${id}`)) return reject(new Refused("id_conflict", "A request with this id is in flight."));
      const frame = JSON.stringify(request);
      if (this._isTooLarge(frame)) return reject(tooLarge());
      this._calls.set(`${type} ${id}`, { id, type, frame, resolve, reject, losses: 0, isSent: false });
      this._sendWaiting();
    });
  }

  _sendWaiting() {
    if (!this._isWelcome) return;
    // Send at most as many calls as the hub allows. The hub would refuse further calls, and they would be repeated.
    let room = Math.min(MAX_READS, this.welcome.limits.max_reads ?? MAX_READS);
    for (const call of this._calls.values()) {
      if (room <= 0) break;
      if (!call.isSent && this._isTooLarge(call.frame)) {
        this._calls.delete(`${call.type} ${call.id}`);
        call.reject(tooLarge());
        continue;
      }
      if (!call.isSent) this._send(call.frame);
      call.isSent = true;
      room -= 1;
    }
    // A read replica stores nothing, so messages wait until the node leads or until this client is connected to another
    // node.
    if (this._isAtFollower() && !this._goesToLeader) return;
    for (const entry of this._outbox.entries.values()) {
      // Keep the order of the messages: a delayed message blocks the messages after it.
      if (this._sent.size >= this._maxUnanswered || this._timersByName.has("send")) return;
      if (entry.state !== "waiting") continue;
      const text = this._outbox.frameOf(entry.message_id);
      if (this._isTooLarge(text)) {
        this._updateEntry({ ...entry, state: "refused", error: { code: "too_large", message: tooLarge().message } });
        continue;
      }
      this._sent.add(entry.message_id);
      this._send(text); // send before the event, because a listener may send more messages
      this._updateEntry({ ...entry, state: "sent" });
    }
  }

  /** @param {string} text */
  _isTooLarge(text) {
    const most = this.welcome?.limits.max_frame_bytes;
    // A character takes at most three bytes in UTF-8, so a short text need not be encoded.
    return most !== undefined && text.length * 3 > most && new TextEncoder().encode(text).length > most;
  }

  /** @param {Entry} entry */
  _updateEntry(entry) {
    this._outbox.change(entry);
    this._emit({ type: "outbox", entry });
  }

  /** @param {Record<string, unknown>} frame */
  _sendFrame(frame) {
    this._send(JSON.stringify(frame));
  }

  /** @param {string} text */
  _send(text) {
    if (this._socket?.readyState === 1) this._socket.send(text);
  }

  // --- whether the hub is alive

  _restartQuietTimer() {
    this._stopTimer("answer");
    this._startTimer("quiet", QUIET_MS, () => this._ping());
  }

  /** Check that the hub is alive, because a connection may break without an event. */
  _ping() {
    const socket = this._socket;
    // Ask only one question at a time. A second question would postpone the deadline of the first.
    if (!this._isWelcome || socket === null || this._timersByName.has("answer")) return;
    this._sendFrame({ type: "call", call_id: this.newId(), op: "network.info", args: {} });
    this._startTimer("answer", ANSWER_TIMEOUT_MS, () => this._dropSocket(socket));
  }

  /** Return whether this client is connected to a read replica, which stores nothing. */
  _isAtFollower() {
    return this.welcome?.follows !== undefined;
  }

  _pingForAsOf() {
    this._startTimer("as_of", AS_OF_MS, () => {
      this._ping();
      this._pingForAsOf();
    });
  }

  // --- events and timers

  /** @param {Record<string, unknown>} event */
  _emit(event) {
    this._onEvent({ ...event, at: this.now() });
  }

  /** @param {string} state @param {{code: string, message: string}} [error] */
  _emitConnection(state, error) {
    this._emit({ type: "connection", state, error });
  }

  /** @param {string} name @param {number} ms @param {() => void} run */
  _startTimer(name, ms, run, { isKept = false } = {}) {
    if (this._timersByName.has(name)) {
      if (isKept) return;
      this._stopTimer(name);
    }
    const timer = this._timers.setTimeout(() => {
      this._timersByName.delete(name);
      run();
    }, ms);
    this._timersByName.set(name, timer);
  }

  /** @param {string} name */
  _stopTimer(name) {
    this._timers.clearTimeout(this._timersByName.get(name));
    this._timersByName.delete(name);
  }
}

/** End a connection without waiting for the other side, if the socket supports that. Waiting would keep a program
 * alive.
 * @param {Socket} socket */
function hangUp(socket) {
  if (socket.terminate !== undefined) socket.terminate();
  else socket.close();
}

function tooLarge() {
  return new Refused("too_large", "This is larger than the hub accepts; send it in parts, or send a reference to it.");
}
