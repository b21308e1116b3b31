/**
 * Formats the texts of messages, and reads the ids and addresses of threads. `writeContent` follows `write_content` in
 * network/messages.py. This module uses neither the DOM nor a clock.
 */

import { isObject } from "#core/json.js";

const MAX_DEPTH = 6;
const MAX_SIZE = 1e15;
const MAX_LINE_CHARS = 200;
const MAX_WORDS_CHARS = 60;
// The same white space as in Python.
const SPACE = "[\\t-\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]";
const SPACES = new RegExp(`${SPACE}+`);
const ENDS = new RegExp(`^${SPACE}+|${SPACE}+$`, "g");
const NAMES = ["name", "filename", "title"];
const TYPES = ["media_type", "mime_type", "type"];
const SIZES = ["size", "bytes"];
const PLACES = ["url", "path"];

/** Return a message as text: its `text_representation`, or else the text of its content. */
export function textOf(message) {
  return message.text_representation || writeContent(message.content ?? null);
}

/** Return a message as one line for a list. A request for approval is described by the name of its tool. Follows
 * `describe_thread_message` in network/operations/read_state.py. */
export function lineOf(message) {
  const tool = message.metadata?.approval?.tool;
  const isRequest = typeof tool === "string" && tool && message.sender_kind === "agent";
  return writeLine(isRequest ? `Approval request: ${tool}` : textOf(message));
}

/** Return the words of a message, without files and data. Commands and decisions are read from these words. */
export function saidOf(message) {
  if (message.text_representation === undefined && isObject(message.content)) {
    return typeof message.content.text === "string" ? message.content.text : "";
  }
  return textOf(message);
}

/** Return any JSON value as text. The bytes of files are left out. */
export function writeContent(content) {
  if (typeof content === "string") return content;
  if (!isObject(content)) return [...writeLines(content, 0)].join("\n");
  const rest = { ...content };
  const parts = [];
  if (typeof content.text === "string") {
    parts.push(content.text);
    delete rest.text;
  }
  for (const [key, word] of [["files", "file"], ["images", "image"]]) {
    if (Array.isArray(content[key])) {
      for (const file of content[key]) parts.push(writeFile(word, file));
      delete rest[key];
    }
  }
  if (Object.keys(rest).length || !parts.length) parts.push(...writeLines(rest, 0));
  return (parts.length > 1 && !parts[0] ? parts.slice(1) : parts).join("\n");
}

function writeFile(word, value) {
  const file = typeof value === "string" ? { url: value } : value;
  if (!isObject(file)) return `[${word} ${writeValue(file)}]`;
  const name = pick(file, NAMES);
  let kind = pick(file, TYPES);
  let place = pick(file, PLACES);
  if (place.startsWith("data:")) {
    kind = kind || place.slice(5).split(";")[0].split(",")[0];
    place = "";
  }
  const size = SIZES.map((key) => file[key]).find((value) => Number.isInteger(value) || typeof value === "boolean");
  const facts = [name, kind, writeSize(size), place, isStored(file) ? file.file : ""].filter(Boolean);
  const below = typeof file.text === "string" && file.text ? `\n${file.text}` : "";
  return `[${strip(`${word} ${facts.join(", ")}`)}]${below}`;
}

/** Return whether an attachment of a message is a file that the hub stores. */
export function isStored(value) {
  return isObject(value) && typeof value.file === "string" && /^f-[0-9a-f]{11}-[0-9a-f]{8}$/.test(value.file);
}

function pick(object, keys) {
  return keys.map((key) => object[key]).find((value) => typeof value === "string" && value) ?? "";
}

/** Format the size of a file. Return "" for a value that is not a size. */
export function writeSize(size) {
  if (!Number.isInteger(size) || size < 0 || size >= MAX_SIZE) return "";
  if (size >= 1e6) return `${(size / 1e6).toFixed(1)} MB`;
  return size >= 1000 ? `${(size / 1000).toFixed(1)} kB` : `${size} bytes`;
}

function* writeLines(value, depth) {
  const pad = "  ".repeat(depth);
  if (isObject(value) && Object.keys(value).length && depth < MAX_DEPTH) {
    for (const [name, inner] of Object.entries(value)) yield* writeEntry(`${pad}${name}:`, inner, depth);
  } else if (Array.isArray(value) && value.length && depth < MAX_DEPTH) {
    for (const inner of value) yield* writeEntry(`${pad}-`, inner, depth);
  } else {
    yield `${pad}${writeValue(value)}`;
  }
}

function* writeEntry(head, value, depth) {
  const pad = "  ".repeat(depth + 1);
  const isPlain = Array.isArray(value) && !value.some((element) => typeof element === "string" || (typeof element === "object" && element));
  const isFilled = Array.isArray(value) ? value.length > 0 : isObject(value) && Object.keys(value).length > 0;
  if (isFilled && !isPlain && depth + 1 < MAX_DEPTH) {
    yield head;
    yield* writeLines(value, depth + 1);
  } else if (typeof value === "string" && value.includes("\n")) {
    yield head;
    for (const line of value.split("\n")) yield `${pad}${line}`;
  } else {
    yield `${head} ${writeValue(value)}`;
  }
}

function writeValue(value) {
  if (typeof value !== "string") return JSON.stringify(value);
  const isData = value.startsWith("data:") && [...value].length > 200;
  return isData ? `(${[...value].length} characters of data)` : value;
}

/** Remove white space around a text. */
export const strip = (text) => text.replace(ENDS, "");

/** Return the first word of a text in lower case, and the rest of the text. */
export function splitWord(text) {
  const words = strip(text);
  const end = words.search(SPACES);
  return end < 0 ? [words.toLowerCase(), ""] : [words.slice(0, end).toLowerCase(), strip(words.slice(end))];
}

/** Return a text as one line of at most 200 characters, for lists. Follows `format_line` in
 * network/operations/read_state.py. */
export function writeLine(text) {
  // Cut the text before splitting it, because a message may have megabytes. Cut by characters: a cut inside of a
  // surrogate pair would show a broken character.
  const line = [...text.slice(0, 128 * MAX_LINE_CHARS)].slice(0, 64 * MAX_LINE_CHARS).join("").split(SPACES).filter(Boolean).join(" ");
  const characters = [...line];
  return characters.length <= MAX_LINE_CHARS ? line : `${characters.slice(0, MAX_LINE_CHARS - 1).join("")}…`;
}

/** Return a text in lower case and without accents, for comparison in searches. @param {string} text */
export const fold = (text) => text.normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase();

/** Format a count with its noun: `1 call`, `2 calls`. @param {number} count @param {string} word */
export const formatCount = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

/** Return the id of the direct thread of two participants, or of one of their conversations. */
export const directThread = (one, other, conversation = "") => `direct:${[one, other].sort().join("~")}${conversation && `:${conversation}`}`;

/** Return the two participants of a direct thread, or the mod and the participant of a mod's thread. Return an empty
 * array for other threads. */
export const partiesOf = (threadId) => (/^(direct|mod):/.test(threadId) ? threadId.split(":")[1].split("~") : []);

/** Return the conversation name of a direct thread, or "" if it has none. */
export const conversationOf = (threadId) => (threadId.startsWith("direct:") ? (threadId.split(":")[2] ?? "") : "");

/** Return the id in an address: `bob` for `agent:bob`. */
export const nameOf = (address) => address.slice(address.indexOf(":") + 1);

/** Return the address to which messages in a thread are sent. The result is null for a reply thread, because only its
 * messages contain the address (`replyAddress`). */
export function addressOf(threadId, me) {
  if (threadId === "broadcast" || threadId.startsWith("channel:")) return threadId;
  const [first, second] = partiesOf(threadId);
  if (threadId.startsWith("mod:")) return `mod:${first}`;
  if (!threadId.startsWith("direct:")) return null;
  return `agent:${first === me ? second : first}`;
}

/** Return the title of a thread. The hub sets the title (`network.list_threads`). If the hub has not listed the thread,
 * the title is derived from its id. */
export function nameThread(thread, me) {
  const { thread_id: id, title, mark } = thread;
  if (title) return title;
  return writeTitle(namePlace(id, me), conversationOf(id) && !thread.messages ? "New conversation" : "", mark?.title);
}

/** Return a name for a thread: the other participant, `#dev`, or "Everybody". Follows network/titles.py. */
export function namePlace(id, me) {
  if (id.startsWith("channel:")) return `#${nameOf(id)}`;
  if (id === "broadcast") return "Everybody";
  if (id.startsWith("direct:")) return [...new Set(partiesOf(id))].filter((party) => party !== me).join(" and ") || me;
  if (id.startsWith("mod:network~")) return "From the network";
  if (id.startsWith("mod:")) return `From the mod ${partiesOf(id)[0]}`;
  return id.startsWith("thread:") ? `Replies to #${nameOf(id)}` : id;
}

/** Return the title of a thread: its name, followed by the person's own title or the first words of the thread. Follows
 * network/titles.py. */
export function writeTitle(place, words, own = "") {
  const about = own || shorten(words);
  if (!about) return place;
  return own && own.toLowerCase().includes(place.toLowerCase()) ? own : `${place} · ${about}`;
}

/** Return the first words of a text as one line. */
function shorten(text) {
  const line = [...text.slice(0, 8 * MAX_WORDS_CHARS)].slice(0, 4 * MAX_WORDS_CHARS).join("").split(SPACES).filter(Boolean).join(" ");
  const characters = [...line];
  if (characters.length <= MAX_WORDS_CHARS) return line;
  const head = characters.slice(0, MAX_WORDS_CHARS).join("");
  const cut = head.includes(" ") ? head.slice(0, head.lastIndexOf(" ")) : characters.slice(0, MAX_WORDS_CHARS - 1).join("");
  return `${cut.replace(/[ ,;:.]+$/, "")}…`;
}

/** Return the address of a reply to a message. */
export function replyAddress(message, me) {
  if (message.kind === "direct") return message.sender_id === me ? message.to : `agent:${message.sender_id}`;
  if (message.kind === "mod") return addressOf(message.thread_id, me);
  return message.to;
}
