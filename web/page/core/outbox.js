/**
 * Messages that are not stored yet, in order, in memory and in a storage. Each has its own storage key, so that two programs of one
 * participant do not overwrite each other. Bounded. A message is serialized when it is sent: later changes to the caller's object do
 * not change it.
 */

import { Refused } from "#core/refused.js";

const FIELDS = [
  "to", "content", "reply_to", "cause", "conversation", "exclude_agent_ids", "requires_response", "metadata", "text_representation",
];

/**
 * A message to send: the fields of `send`.
 * @typedef {{
 *   to: string, content: any, reply_to?: number, cause?: number, conversation?: string, exclude_agent_ids?: string[],
 *   requires_response?: true | string[], metadata?: Record<string, any>, text_representation?: string, message_id?: string,
 * }} Outgoing
 *
 * @typedef {Outgoing & {
 *   message_id: string, at: number, order?: string, state: "waiting" | "sent" | "refused", error?: {code: string, message: string} | undefined,
 * }} Entry
 *
 * localStorage, or an object with its methods.
 * @typedef {{
 *   readonly length: number, key(place: number): string | null | undefined, getItem(key: string): string | null,
 *   setItem(key: string, value: string): void, removeItem(key: string): void,
 * }} OutboxStore
 */

export class Outbox {
  /**
   * `isKept`: refuse a message that the storage does not accept; without it the message is sent anyway.
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
    /** @type {Map<string, Entry>} in order */
    this.entries = new Map();
    for (const entry of this._load()) {
      this.entries.set(entry.message_id, entry);
      this._write(entry);
    }
  }

  /** Return the frame that sends a message. @param {string} messageId */
  frameOf(messageId) {
    return /** @type {string} */ (this._frames.get(messageId));
  }

  /** Add a message. Throws `Refused` if there is no room. @param {Entry} entry */
  add(entry) {
    this._write(entry);
    // Counted with the new message, which is taken out again: its size is known only once it is written.
    if (this._frames.size > this._maxMessages || this._chars > this._maxChars) {
      this._forget(entry.message_id);
      throw new Refused("overloaded", "Too many messages wait to be sent; try again when the hub is back.");
    }
    this.entries.set(entry.message_id, entry);
    try {
      this._keep(entry);
    } catch (error) {
      if (!this._isKept) return; // the storage is full or blocked: send anyway; closing the page would lose the message
      this.remove(entry.message_id);
      throw error;
    }
  }

  /** @param {Entry} entry */
  change(entry) {
    const was = this.entries.get(entry.message_id)?.state;
    this.entries.set(entry.message_id, entry);
    if (entry.state === "sent" || (was === "sent" && entry.state === "waiting")) return; // the storage has it as waiting
    try {
      this._keep(entry);
    } catch {
      // The stored version goes out again after a restart, under the same id, so nothing is doubled.
    }
  }

  /** @param {string} messageId */
  remove(messageId) {
    this.entries.delete(messageId);
    this._forget(messageId);
    try {
      this._storage?.removeItem(this._prefix + messageId);
    } catch {
      // It goes out once more after a restart, under its id. Later messages must not wait for that.
    }
  }

  /** @param {Entry} entry */
  _keep(entry) {
    this._storage?.setItem(this._prefix + entry.message_id, JSON.stringify(entry));
  }

  /** Whether the outbox holds exactly this message under its id. @param {Entry} entry */
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
    const stored = keys.filter((key) => key.startsWith(this._prefix)).map((key) => readEntry(storage.getItem(key)));
    const entries = stored.filter((item) => item !== null).map((item) => (item.state === "sent" ? { ...item, state: /** @type {const} */ ("waiting") } : item));
    // By order of sending, not by id: a caller may choose its own ids.
    return entries.sort((one, other) => compare(one.order ?? one.message_id, other.order ?? other.message_id));
  }
}

/** @param {Entry} entry */
function writeFrame(entry) {
  /** @type {Record<string, unknown>} */
  const fields = entry;
  return JSON.stringify({ type: "send", message_id: entry.message_id, ...Object.fromEntries(FIELDS.map((field) => [field, fields[field]])) });
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
