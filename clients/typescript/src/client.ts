/**
 * `Client`: the session of one participant with a hub, for programs.
 *
 * A client sends messages and waits until they are stored. A client returns deliveries in order, acknowledges handled
 * ones, and reconnects after a lost connection. Unanswered requests are sent again under the same id, so that nothing
 * is lost or duplicated. `core/connection.js`, which the page of a node also uses, implements the protocol.
 */

import { Connection } from "./core/connection.js";
import type { Acks } from "./core/acks.js";
import { makeIds } from "./core/ids.js";
import { Refused } from "./core/refused.js";
import { ConnectError, InvalidArguments, makeError, type RoundelayError } from "./errors.ts";
import type { Json, NoticeFrame, PresenceFrame, SignalOutFrame, WelcomeFrame, WireMessage } from "./protocol.ts";
import type { ArgsOf, CallOptions, Operation, OperationValue } from "./values.ts";

const CONNECT_TIMEOUT_MS = 20_000;
const MAX_DELAY_MS = 5_000;
const OUTBOX = { maxMessages: 4096, maxChars: 16 * 2 ** 20, isKept: true };

export type Kind = "agent" | "human" | "service";

/** A position in the log. All messages up to `cursor` were handled. */
export interface Cursor {
  epoch: string;
  cursor: number;
}

/** A store for messages that the hub has not stored yet: `localStorage`, `fileStore` (in `roundelay-client/node`), or
 * an object with these methods. */
export interface OutboxStore {
  readonly length: number;
  key(place: number): string | null;
  getItem(key: string): string | null;
  /** Store a message before it is sent. If this throws, `send` rejects, and the message is not sent. */
  setItem(key: string, value: string): void;
  removeItem(key: string): void;
}

/** The parts of a WebSocket that the client uses. The WebSockets of browsers, of Node and of the package ws have these
 * members.
 */
export type WebSocketConstructor = new (url: string, protocol: string) => {
  readonly readyState: number;
  readonly bufferedAmount: number;
  send(text: string): void;
  close(): void;
  /** Ends a connection whose other side does not answer. Only the WebSockets of the package ws have this method. */
  terminate?(): void;
};

export interface ConnectOptions {
  /** Address of the hub: `ws://HOST:PORT/` or `wss://HOST:PORT/`. Several addresses, separated by commas, are nodes of
   * one network, of which only one serves. If a node names another leader, the client connects there, with the same
   * encryption. Do not include a secret, because the token is sent in the first frame. */
  url: string;
  agentId: string;
  /** Token of the participant. An agent creates its own token (`makeToken`) and stores it. The token of a person or a
   * service comes from an operator. */
  token?: string;
  /** Token to bind to the participant if `token` is a login code. Store the token before you connect. */
  newToken?: string;
  /** Kind of the participant. The default is the kind of the token. */
  kind?: Kind;
  /** Role of the session. Only the `reactor` session reacts for an agent. */
  role?: "observer" | "reactor";
  /** Fencing token of an earlier reactor session, possibly from another process. */
  fence?: number;
  /** Name of this process, for a reactor. Use the same name after a reconnect. The default is a random text. */
  instance?: string;
  card?: Record<string, unknown>;
  /** Position in the log at which delivery starts. Without `resume`, delivery starts after the last message that the
   * hub knows to be handled. */
  resume?: Cursor;
  /** If false, the hub delivers nothing to this session. Call `network.receive` instead. */
  deliver?: boolean;
  /** Store for messages that the hub has not stored yet. The stored messages survive the end of this process. */
  outbox?: OutboxStore;
  /** Maximum number of messages that wait for an answer at the same time. The default is 1. With more, a later message
   * may overtake a message that the hub delays. */
  maxUnanswered?: number;
  /** Maximum wait for the first welcome, in milliseconds. The default is 20,000. The limit includes the attempts at all
   * addresses in `url`. */
  connectTimeoutMs?: number;
  /** Signal that ends the wait for the first welcome. */
  signal?: AbortSignal;
  /** Constructor of WebSockets. The default is the global one, which browsers have, and Node from version 22 on. */
  WebSocket?: WebSocketConstructor;
}

export interface SendOptions {
  /** Id of the message. If a message is sent again with the same id, the hub stores it only once, even if another
   * process sends it.
   */
  messageId?: string;
  replyTo?: number;
  cause?: number;
  /** Name of a separate thread with the participant. Only for `agent:ID`. */
  conversation?: string;
  excludeAgentIds?: string[];
  requiresResponse?: true | string[];
  metadata?: Record<string, unknown>;
  textRepresentation?: string;
  /** Signal that ends the wait. An unsent message is withdrawn. A message that was already sent may still be stored. */
  signal?: AbortSignal;
}

/** Result of a send: the message or record is stored under `seq`. `duplicate` is true if an earlier send has already
 * stored the message or record.
 */
export interface Stored {
  id: string;
  seq: number;
  duplicate: boolean;
  threadId?: string;
}

/** State of the connection. `ended` is final. The client then has an `error`, or it was closed. */
export interface ConnectionState {
  state: "connecting" | "online" | "offline" | "ended";
  welcome?: WelcomeFrame;
  error?: RoundelayError;
}

export interface Events {
  state: ConnectionState;
  notice: NoticeFrame;
  signal: SignalOutFrame;
  presence: PresenceFrame;
  /** A message was stored. The message may be from the outbox of an earlier process. */
  stored: Stored;
  /** A message was refused, and was removed from the outbox. */
  refused: { id: string; to: string; error: RoundelayError };
}

/** A delivered message. Acknowledge the message with `ack`, or return the message with `nack`. */
export class Delivery {
  readonly message: WireMessage;
  /** Number of this delivery attempt, starting at 1. */
  readonly attempt: number;
  readonly #connection: Connection;
  readonly #acks: Acks;

  constructor(message: WireMessage, attempt: number, connection: Connection) {
    this.message = message;
    this.attempt = attempt;
    this.#connection = connection;
    this.#acks = connection.acks;
  }

  /** Whether this delivery comes from a ledger that was lost or replaced since. For a stale delivery, `ack` and `nack`
   * do nothing. */
  get isStale(): boolean {
    return this.#acks.isStale;
  }

  /** Report that the message is handled, so that it is not delivered again. Messages may be acknowledged in any order.
   */
  ack(): void {
    if (!this.isStale) this.#connection.ack(this.message.seq);
  }

  /** Report that handling the message failed, so that it is delivered again. After the fifth failure, the message
   * becomes a dead letter. */
  nack(reason: string, retryAfterMs?: number): void {
    if (!this.isStale) this.#connection.nack(this.message.seq, reason, retryAfterMs);
  }
}

/** Join a network. Rejects with the hub's refusal, or with `ConnectError` if no hub answers in time. */
export async function connect(options: ConnectOptions): Promise<Client> {
  options.signal?.throwIfAborted();
  if (options.WebSocket === undefined && globalThis.WebSocket === undefined) {
    const instead = "Node has one from version 22 on; before, pass that of the package ws (connect({WebSocket, ...}))";
    throw new InvalidArguments("invalid_arguments", `There is no WebSocket here. ${instead}.`);
  }
  if (typeof options.url !== "string") throw new ConnectError("closed", `${options.url} is no hub URL. Write ws://HOST:PORT/.`);
  const client = new Client(options);
  try {
    await client.joined;
  } catch (error) {
    await client.close();
    throw error;
  }
  return client;
}

/** A session of a participant. `connect` creates the session. */
export class Client {
  readonly agentId: string;
  /** Promise that resolves with the first welcome, or rejects if the client cannot join. */
  readonly joined: Promise<void>;
  readonly #connection: Connection;
  readonly #listeners = new Map<keyof Events, Set<(event: never) => void>>();
  readonly #sends = new Map<string, Set<Waiting<Stored>>>();
  readonly #deliveries: Delivery[] = [];
  readonly #readers = new Set<() => void>();
  #failure: RoundelayError | undefined;
  #isClosed = false;

  constructor(options: ConnectOptions) {
    this.agentId = options.agentId;
    const newId = makeIds(Date.now);
    const isReactor = options.role === "reactor";
    const instance = options.instance ?? (isReactor ? newId() : undefined);
    const { kind, role = "observer", fence, card, deliver } = options;
    this.#connection = new Connection({
      url: expandUrl(options.url),
      agentId: options.agentId,
      ...given("token", options.token),
      ...given("newToken", options.newToken),
      ...given("WebSocketCtor", options.WebSocket as never),
      ...given("storage", options.outbox),
      ...given("resume", options.resume),
      ...given("maxUnanswered", options.maxUnanswered),
      ...given("welcomeTimeout", options.connectTimeoutMs),
      client: "roundelay-typescript",
      hello: { kind, role, fence, card, deliver, instance },
      newId,
      maxDelay: MAX_DELAY_MS,
      goesToLeader: true,
      staysInPlace: false,
      handlesAtOnce: false,
      outbox: OUTBOX,
    });
    this.joined = this.#join(options);
  }

  /** The newest welcome frame of the hub. */
  get welcome(): WelcomeFrame {
    return this.#connection.welcome;
  }

  /** Position up to which all messages were handled. Store this position together with your results, and pass it as
   * `resume` later. */
  get cursor(): Cursor {
    return { epoch: this.welcome.network.epoch, cursor: this.#connection.acks.prefix };
  }

  /** The error that ended this client, or undefined. */
  get failure(): RoundelayError | undefined {
    return this.#failure;
  }

  /** End the session, and wait until the connection is closed. Unanswered requests are rejected. Unsent messages stay
   * in the outbox. */
  async close(): Promise<void> {
    this.#isClosed = true;
    await this.#connection.close();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  /** Add a listener for an event. Return a function that removes the listener. */
  on<Name extends keyof Events>(name: Name, listener: (event: Events[Name]) => void): () => void {
    const listeners = this.#listeners.get(name) ?? new Set();
    this.#listeners.set(name, listeners.add(listener));
    return () => void listeners.delete(listener);
  }

  /** Send any JSON to an address (`agent:ID`, `channel:NAME`, `broadcast`, `mod:ID`). Resolves when the message is
   * stored. Messages keep their order, and wait while there is no connection. */
  send(to: string, content: unknown, options: SendOptions = {}): Promise<Stored> {
    const { signal } = options;
    return wait(signal, (waiting) => {
      if (this.#failure !== undefined) throw this.#failure;
      if (JSON.stringify(content) === undefined) throw new InvalidArguments("invalid_arguments", "The content is not a JSON value.");
      const id = options.messageId ?? this.#connection.newId();
      const waiters = this.#sends.get(id) ?? new Set();
      this.#sends.set(id, waiters.add(waiting));
      try {
        this.#connection.send({ message_id: id, to, content, ...toFields(options) });
      } catch (error) {
        this.#leave(id, waiting);
        throw error;
      }
      return () => this.#leave(id, waiting) && this.#connection.discard(id);
    });
  }

  /** Reply to a message in its thread. */
  reply(message: WireMessage, content: unknown, options: SendOptions = {}): Promise<Stored> {
    return this.send(this.replyAddress(message), content, { replyTo: message.seq, cause: message.seq, ...options });
  }

  /** Return the address to which a reply to this message is sent. */
  replyAddress(message: WireMessage): string {
    if (message.kind === "direct") return message.sender_id === this.agentId ? message.to : `agent:${message.sender_id}`;
    if (message.kind === "mod") return `mod:${message.thread_id.slice("mod:".length).split("~")[0]}`;
    return message.to;
  }

  /** Call an operation of the hub or of a mod, and return its value. The operation runs only once, even if the
   * connection is lost meanwhile. */
  call<Op extends Operation | (string & {})>(op: Op, ...[args, options]: ArgsOf<Op>): Promise<OperationValue<Op>> {
    const { callId = this.#connection.newId(), signal } = (options ?? {}) as CallOptions;
    return wait(signal, (waiting) => {
      if (this.#failure !== undefined) throw this.#failure;
      this.#connection.call(op, args ?? {}, callId).then(waiting.resolve, waiting.reject);
      return () => this.#connection.abandon("call", callId);
    });
  }

  /** Store a turn record. Resolves when the record is stored. */
  record(
    reaction: string, kind: string, body: Record<string, unknown>, options: { recordId: string; signal?: AbortSignal },
  ): Promise<Stored> {
    const { recordId, signal } = options;
    return wait(signal, (waiting) => {
      if (this.#failure !== undefined) throw this.#failure;
      this.#connection.record(recordId, reaction, kind, body).then((frame) => waiting.resolve(toStored(frame)), waiting.reject);
      return () => this.#connection.abandon("record", recordId);
    });
  }

  /** Send a signal. Signals are never stored. A signal is dropped if there is no connection, or if too many bytes are
   * unsent. */
  signal(
    kind: "typing" | "viewing" | "thinking" | "delta" | "tool", body: unknown, where: { to: string } | { threadId: string; trigger?: number },
  ): void {
    const { to, threadId, trigger } = where as { to?: string; threadId?: string; trigger?: number };
    this.#connection.signal(kind, body, { ...given("to", to), ...given("thread_id", threadId), ...given("trigger", trigger) });
  }

  /** Yield deliveries in order. Acknowledge each delivery. The iteration ends when this client is closed, and throws
   * the error that ended the client otherwise. An unacknowledged message is delivered again in a later session of the
   * participant. */
  async *deliveries(options: { signal?: AbortSignal } = {}): AsyncGenerator<Delivery, void, undefined> {
    for (;;) {
      const delivery = await this.#nextDelivery(options.signal);
      if (delivery === undefined) return;
      yield delivery;
    }
  }

  /** Handle one message after the other. A message is acknowledged when `handler` is done, and returned with `nack` if
   * `handler` throws. */
  async handle(handler: (message: WireMessage) => Promise<void> | void, options: { signal?: AbortSignal } = {}): Promise<void> {
    for await (const delivery of this.deliveries(options)) {
      try {
        await handler(delivery.message);
      } catch (error) {
        delivery.nack(String(error));
        continue;
      }
      delivery.ack();
    }
  }

  /** Try to reconnect at once. Call this when the network may be back, for example when a page becomes visible. */
  wake(): void {
    this.#connection.wake();
  }

  // --- events of the connection

  #join({ url, signal, connectTimeoutMs = CONNECT_TIMEOUT_MS }: ConnectOptions): Promise<void> {
    return new Promise((resolve, reject) => {
      let last = "";
      const late = setTimeout(() => {
        const why = last && ` (${last})`;
        end(new ConnectError("closed", `No hub welcomed ${this.agentId} at ${url} within ${connectTimeoutMs / 1000} s${why}.`));
      }, connectTimeoutMs);
      const onAbort = () => end(signal?.reason);
      const end = (error?: unknown) => {
        clearTimeout(late);
        signal?.removeEventListener("abort", onAbort);
        stop();
        if (error === undefined) resolve();
        else reject(error);
      };
      const stop = this.on("state", ({ state, error }) => {
        last = error?.message ?? last;
        if (state === "online") end();
        if (state === "ended") end(error);
      });
      signal?.addEventListener("abort", onAbort);
      try {
        // Check now, because an error in a later attempt would not be caught.
        for (const address of expandUrl(url).split(",")) checkAddress(address);
        this.#connection.connect((event) => this.#take(event));
      } catch (error) {
        end(new ConnectError("closed", `${url} is no hub URL. Write ws://HOST:PORT/ (${error}).`));
      }
    });
  }

  #take(event: any): void {
    switch (event.type) {
      case "welcome":
        return this.#emit("state", { state: "online", welcome: event });
      case "deliver":
        this.#deliveries.push(new Delivery(event.message, event.attempt, this.#connection));
        return this.#wakeReaders();
      case "stored":
        return this.#takeStored(toStored(event));
      case "outbox":
        return event.entry?.state === "refused" ? this.#takeRefused(event.entry) : undefined;
      case "connection":
        return this.#takeState(event.state, event.error);
      case "notice":
      case "signal":
      case "presence":
        return this.#emit(event.type, event);
    }
  }

  #takeState(state: string, told?: { code: string; message: string }): void {
    if (state === "connecting") return this.#emit("state", { state });
    if (!this.#connection.isOver) {
      return this.#emit("state", { state: "offline", error: new ConnectError("closed", told?.message || `The connection was lost (${told?.code}).`) });
    }
    this.#failure = makeError(told ?? { code: "closed", message: "This client was closed." });
    for (const [id, waiters] of [...this.#sends]) {
      this.#sends.delete(id);
      for (const waiting of waiters) waiting.reject(this.#failure);
    }
    this.#emit("state", { state: "ended", error: this.#failure });
    this.#wakeReaders();
  }

  #takeStored(stored: Stored): void {
    const waiters = this.#sends.get(stored.id) ?? [];
    this.#sends.delete(stored.id);
    for (const waiting of waiters) waiting.resolve(stored);
    this.#emit("stored", stored);
  }

  #takeRefused(entry: { message_id: string; to: string; error: { code: string; message: string } }): void {
    const error = makeError(entry.error);
    const waiters = this.#sends.get(entry.message_id) ?? [];
    this.#sends.delete(entry.message_id);
    this.#connection.discard(entry.message_id);
    for (const waiting of waiters) waiting.reject(error);
    this.#emit("refused", { id: entry.message_id, to: entry.to, error });
  }

  /** Stop waiting for a message. Return whether no other call waits for the message. */
  #leave(id: string, waiting: Waiting<Stored>): boolean {
    const waiters = this.#sends.get(id);
    waiters?.delete(waiting);
    if (waiters === undefined || waiters.size) return false;
    return this.#sends.delete(id);
  }

  #emit<Name extends keyof Events>(name: Name, event: Events[Name]): void {
    for (const listener of [...(this.#listeners.get(name) ?? [])]) {
      try {
        listener(event as never);
      } catch (error) {
        queueMicrotask(() => {
          throw error; // report a listener's error without breaking the connection
        });
      }
    }
  }

  // --- readers of deliveries

  async #nextDelivery(signal?: AbortSignal): Promise<Delivery | undefined> {
    for (;;) {
      signal?.throwIfAborted();
      const delivery = this.#deliveries.shift();
      if (delivery !== undefined) return delivery;
      if (this.#isClosed) return undefined;
      if (this.#failure !== undefined) throw this.#failure;
      await new Promise<void>((resolve) => {
        const wake = () => {
          this.#readers.delete(wake);
          signal?.removeEventListener("abort", wake);
          resolve();
        };
        this.#readers.add(wake);
        signal?.addEventListener("abort", wake);
      });
    }
  }

  #wakeReaders(): void {
    for (const wake of [...this.#readers]) wake();
  }
}

/** Expand `roundelay://A,B:8701/` to `ws://A:8700/,ws://B:8701/`, and `roundelays://` to `wss://` addresses. */
function expandUrl(url: string): string {
  const [, s = "", hosts] = /^roundelay(s?):\/\/([^/?#\s]+)\/?$/.exec(url) ?? [];
  if (hosts === undefined) return url;
  return hosts.split(",").map((host) => `ws${s}://${/:\d+$/.test(host) ? host : `${host}:8700`}/`).join(",");
}

/** Throw an error if a WebSocket would refuse the address. */
function checkAddress(url: string): void {
  const { protocol, hash } = new URL(url);
  if (!["ws:", "wss:", "http:", "https:"].includes(protocol) || hash) throw new SyntaxError(`${url} has another scheme, or a fragment`);
}

/** Return a new token: 32 random bytes in base64url. Store the token before you use it. The first use of an agent's id
 * binds the id to this token. */
export function makeToken(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(32));
  return btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

interface Waiting<Value> {
  resolve(value: Value): void;
  reject(error: unknown): void;
}

/** Return a promise that `begin` settles, and that a signal can abort. `begin` returns a function that cleans up after
 * an abort. */
function wait<Value>(signal: AbortSignal | undefined, begin: (waiting: Waiting<Value>) => () => void): Promise<Value> {
  return new Promise((resolve, reject) => {
    let leave = () => {};
    const onAbort = () => {
      leave();
      reject(signal?.reason);
    };
    const end = () => signal?.removeEventListener("abort", onAbort);
    signal?.throwIfAborted();
    signal?.addEventListener("abort", onAbort);
    const refuse = (error: unknown) => {
      end();
      reject(error instanceof Refused ? makeError(error) : error);
    };
    try {
      leave = begin({
        resolve: (value) => {
          end();
          resolve(value);
        },
        reject: refuse,
      });
    } catch (error) {
      refuse(error);
    }
  });
}

function toStored(frame: { message_id?: string; record_id?: string; seq: number; duplicate: boolean; thread_id?: string }): Stored {
  const id = frame.message_id ?? frame.record_id ?? "";
  return { id, seq: frame.seq, duplicate: frame.duplicate, ...given("threadId", frame.thread_id) };
}

function toFields(options: SendOptions) {
  return {
    ...given("reply_to", options.replyTo),
    ...given("cause", options.cause),
    ...given("conversation", options.conversation),
    ...given("exclude_agent_ids", options.excludeAgentIds),
    ...given("requires_response", options.requiresResponse),
    ...given("metadata", options.metadata as Record<string, Json> | undefined),
    ...given("text_representation", options.textRepresentation),
  };
}

/** Return an object with this field. Return an empty object if the value is undefined. */
function given<Name extends string, Value>(name: Name, value: Value | undefined): { [key in Name]?: Value } {
  return (value === undefined ? {} : { [name]: value }) as { [key in Name]?: Value };
}
