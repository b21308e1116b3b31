/**
 * Messages that the hub has not stored yet, in order, in memory and in a storage. Each message has its own storage key,
 * so two programs of one participant do not overwrite each other's messages. The number of messages is limited. A
 * message is serialized when it is added, so later changes to the caller's object have no effect.
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
   * With `isKept`, a message that the storage does not accept is refused. Otherwise the message is sent anyway.
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

  /** Add a message. Throws `Refused` if the outbox is full. @param {Entry} entry */
  add(entry) {
    this._write(entry);
    // Check the limits after serializing the message, because the size of the message is not known before. Remove the
    // message again if it exceeds a limit.
    if (this._frames.size > this._maxMessages || this._chars > this._maxChars) {
      this._forget(entry.message_id);
      throw new Refused("overloaded", "Too many messages wait to be sent; try again when the hub is back.");
    }
    this.entries.set(entry.message_id, entry);
    try {
      this._keep(entry);
    } catch (error) {
      // The storage is full or blocked. Send the message anyway, although closing the page would lose it.
      if (!this._isKept) return;
      this.remove(entry.message_id);
      throw error;
    }
  }

  /** @param {Entry} entry */
  change(entry) {
    const was = this.entries.get(entry.message_id)?.state;
    this.entries.set(entry.message_id, entry);
    if (entry.state === "sent" || (was === "sent" && entry.state === "waiting")) return; // the storage has the message as waiting
    try {
      this._keep(entry);
    } catch {
      // After a restart, the stored version is sent again under the same id, so the message is not stored twice.
    }
  }

  /** @param {string} messageId */
  remove(messageId) {
    this.entries.delete(messageId);
    this._forget(messageId);
    try {
      this._storage?.removeItem(this._prefix + messageId);
    } catch {
      // Later messages must not wait for a working storage. After a restart, the message is sent again under its id.
    }
  }

  /** @param {Entry} entry */
  _keep(entry) {
    this._storage?.setItem(this._prefix + entry.message_id, JSON.stringify(entry));
  }

  /** Return whether the outbox contains exactly this message under its id. @param {Entry} entry */
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
    // Sort by the order of sending instead of the id, because a caller may choose its own ids.
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
