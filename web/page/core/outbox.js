/**
 * The messages that are not stored yet, in their order, here and in a storage: each under a key of its own, so that two
 * programs of one participant do not write over each other. Bounded. A message is the text that it was when it was said: what
 * its sender changes afterwards in an object of its own does not make another one of it.
 */

import { Refused } from "#core/refused.js";

const FIELDS = [
  "to", "content", "reply_to", "cause", "conversation", "exclude_agent_ids", "requires_response", "metadata", "text_representation",
];

/**
 * What a program gives to be sent: the fields of `send`.
 * @typedef {{
 *   to: string, content: any, reply_to?: number, cause?: number, conversation?: string, exclude_agent_ids?: string[],
 *   requires_response?: true | string[], metadata?: Record<string, any>, text_representation?: string, message_id?: string,
 * }} Outgoing
 *
 * @typedef {Outgoing & {
 *   message_id: string, at: number, order?: string, state: "waiting" | "sent" | "refused", error?: {code: string, message: string} | undefined,
 * }} Entry
 *
 * localStorage, or what has its methods.
 * @typedef {{
 *   readonly length: number, key(place: number): string | null | undefined, getItem(key: string): string | null,
 *   setItem(key: string, value: string): void, removeItem(key: string): void,
 * }} OutboxStore
 */

export class Outbox {
  /**
   * `isKept`: a message that the storage does not take is refused; without it, it is sent all the same.
   * @param {OutboxStore | undefined} storage @param {string} prefix
   * @param {{maxMessages: number, maxChars: number, isKept: boolean}} bounds
   */
  constructor(storage, prefix, { maxMessages, maxChars, isKept }) {
    this._storage = storage;
    this._prefix = prefix;
    this._maxMessages = maxMessages;
    this._maxChars = maxChars;
    this._isKept = isKept;
    this._chars = 0;
    /** @type {Map<string, string>} */
    this._frames = new Map();
    /** @type {Map<string, Entry>} in their order */
    this.entries = new Map();
    for (const entry of this._load()) {
      this.entries.set(entry.message_id, entry);
      this._write(entry);
    }
  }

  /** The frame that sends this message. @param {string} messageId */
  frameOf(messageId) {
    return /** @type {string} */ (this._frames.get(messageId));
  }

  /** Raises `Refused` where there is no room for it. @param {Entry} entry */
  add(entry) {
    this._write(entry);
    if (this._frames.size > this._maxMessages || this._chars > this._maxChars) {
      this._forget(entry.message_id);
      throw new Refused("overloaded", "Too much waits to be sent already; wait until the hub is there again.");
    }
    this.entries.set(entry.message_id, entry);
    try {
      this._keep(entry);
    } catch (error) {
      if (!this._isKept) return; // the storage is full or shut: the message is sent all the same, and lost only with the page
      this.remove(entry.message_id);
      throw error;
    }
  }

  /** @param {Entry} entry */
  change(entry) {
    const was = this.entries.get(entry.message_id)?.state;
    this.entries.set(entry.message_id, entry);
    if (entry.state === "sent" || (was === "sent" && entry.state === "waiting")) return; // it counts as waiting in the storage
    try {
      this._keep(entry);
    } catch {
      // as it was kept before, it goes out again: under its id, so that nothing is doubled
    }
  }

  /** @param {string} messageId */
  remove(messageId) {
    this.entries.delete(messageId);
    this._forget(messageId);
    try {
      this._storage?.removeItem(this._prefix + messageId);
    } catch {
      // it goes out once more in a later start, under its id; what was said behind it does not wait for that
    }
  }

  /** @param {Entry} entry */
  _keep(entry) {
    this._storage?.setItem(this._prefix + entry.message_id, JSON.stringify(entry));
  }

  /** Whether this is the message that has its id here. @param {Entry} entry */
  isSame(entry) {
    return writeFrame(entry) === this._frames.get(entry.message_id);
  }

  /** @param {Entry} entry */
  _write(entry) {
    const frame = writeFrame(entry);
    this._frames.set(entry.message_id, frame);
    this._chars += frame.length;
  }

  /** @param {string} messageId */
  _forget(messageId) {
    this._chars -= this._frames.get(messageId)?.length ?? 0;
    this._frames.delete(messageId);
  }

  /** @returns {Entry[]} */
  _load() {
    const storage = this._storage;
    if (storage === undefined) return [];
    const keys = Array.from({ length: storage.length }, (_, place) => storage.key(place) ?? "");
    const found = keys.filter((it) => it.startsWith(this._prefix)).map((it) => readEntry(storage.getItem(it)));
    const known = found.filter((it) => it !== null).map((it) => (it.state === "sent" ? { ...it, state: /** @type {const} */ ("waiting") } : it));
    return known.sort((one, other) => compare(one.order ?? one.message_id, other.order ?? other.message_id));
  }
}

/** @param {Entry} entry */
function writeFrame(entry) {
  /** @type {Record<string, unknown>} */
  const given = entry;
  return JSON.stringify({ type: "send", message_id: entry.message_id, ...Object.fromEntries(FIELDS.map((it) => [it, given[it]])) });
}

/** @param {string} one @param {string} other */
function compare(one, other) {
  return one < other ? -1 : Number(one > other);
}

/** @param {string | null} text @returns {Entry | null} */
function readEntry(text) {
  try {
    const entry = JSON.parse(text ?? "");
    return typeof entry.message_id === "string" && typeof entry.to === "string" ? entry : null;
  } catch {
    return null;
  }
}
