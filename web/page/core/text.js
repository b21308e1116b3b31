/**
 * What is said, as text: the twin of `write_content` in network/messages.py; ids and addresses.
 * No DOM, no clock.
 */

import { isObject } from "#core/json.js";

const MAX_DEPTH = 6;
const MAX_SIZE = 1e15;
const MAX_LINE_CHARS = 200;
const MAX_WORDS_CHARS = 60;
const SPACE = "[\\t-\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]"; // as Python has it
const SPACES = new RegExp(`${SPACE}+`);
const ENDS = new RegExp(`^${SPACE}+|${SPACE}+$`, "g");
const NAMES = ["name", "filename", "title"];
const TYPES = ["media_type", "mime_type", "type"];
const SIZES = ["size", "bytes"];
const PLACES = ["url", "path"];

/** A message as text: its `text_representation`, else what its content says. */
export function textOf(message) {
  return message.text_representation || writeContent(message.content ?? null);
}

/** The words alone, without files and data: what commands and decisions are read from. */
export function saidOf(message) {
  if (message.text_representation === undefined && isObject(message.content)) {
    return typeof message.content.text === "string" ? message.content.text : "";
  }
  return textOf(message);
}

/** Any JSON value as text. The bytes of a file are never in it. */
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
      for (const given of content[key]) parts.push(writeFile(word, given));
      delete rest[key];
    }
  }
  if (Object.keys(rest).length || !parts.length) parts.push(...writeLines(rest, 0));
  return (parts.length > 1 && !parts[0] ? parts.slice(1) : parts).join("\n");
}

function writeFile(word, value) {
  const given = typeof value === "string" ? { url: value } : value;
  if (!isObject(given)) return `[${word} ${writeValue(given)}]`;
  const name = pick(given, NAMES);
  let kind = pick(given, TYPES);
  let place = pick(given, PLACES);
  if (place.startsWith("data:")) {
    kind = kind || place.slice(5).split(";")[0].split(",")[0];
    place = "";
  }
  const size = SIZES.map((key) => given[key]).find((it) => Number.isInteger(it) || typeof it === "boolean");
  const facts = [name, kind, writeSize(size), place].filter(Boolean);
  const below = typeof given.text === "string" && given.text ? `\n${given.text}` : "";
  return `[${strip(`${word} ${facts.join(", ")}`)}]${below}`;
}

function pick(given, keys) {
  return keys.map((key) => given[key]).find((it) => typeof it === "string" && it) ?? "";
}

/** A size of a file in words; nothing for what is none. */
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
  const isPlain = Array.isArray(value) && !value.some((it) => typeof it === "string" || (typeof it === "object" && it));
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

/** A text without the white space around it. */
export const strip = (text) => text.replace(ENDS, "");

/** The first word of a text, in lower case, and the rest. */
export function splitWord(text) {
  const words = strip(text);
  const end = words.search(SPACES);
  return end < 0 ? [words.toLowerCase(), ""] : [words.slice(0, end).toLowerCase(), strip(words.slice(end))];
}

/** A text as one line of at most 200 characters, as lists show it: the twin of `write_line` in
 * network/operations/marking.py. */
export function writeLine(text) {
  const line = [...text.slice(0, 128 * MAX_LINE_CHARS)].slice(0, 64 * MAX_LINE_CHARS).join("").split(SPACES).filter(Boolean).join(" ");
  const characters = [...line];
  return characters.length <= MAX_LINE_CHARS ? line : `${characters.slice(0, MAX_LINE_CHARS - 1).join("")}…`;
}

/** A text as searches compare it: without case and accents. @param {string} text */
export const fold = (text) => text.normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase();

/** A number of things: `1 call`, `2 calls`. @param {number} count @param {string} word */
export const tellCount = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

/** The thread of what two say to each other alone, of one conversation if it is named. */
export const directThread = (one, other, conversation = "") => `direct:${[one, other].sort().join("~")}${conversation && `:${conversation}`}`;

/** The two of a direct thread, or the mod and the participant of a mod's; of others none. */
export const partiesOf = (threadId) => (/^(direct|mod):/.test(threadId) ? threadId.split(":")[1].split("~") : []);

/** Which conversation of two a direct thread is; empty where it has no name. */
export const conversationOf = (threadId) => (threadId.startsWith("direct:") ? (threadId.split(":")[2] ?? "") : "");

/** Whose the address is: `bob` of `agent:bob`. */
export const nameOf = (address) => address.slice(address.indexOf(":") + 1);

/** Where what is said in a direct thread, a channel or the broadcast thread goes; null for a reply thread and a mod's
 * thread, whose messages tell (`replyAddress`). */
export function addressOf(threadId, me) {
  if (threadId === "broadcast" || threadId.startsWith("channel:")) return threadId;
  const [first, second] = partiesOf(threadId);
  if (threadId.startsWith("mod:")) return `mod:${first}`;
  if (!threadId.startsWith("direct:")) return null;
  return `agent:${first === me ? second : first}`;
}

/** What a thread is called: as the hub says (`network.list_threads`), or, of one that it has not listed, by its place. */
export function nameThread(thread, me) {
  const { thread_id: id, title, mark } = thread;
  if (title) return title;
  return writeTitle(namePlace(id, me), conversationOf(id) && !thread.messages ? "New conversation" : "", mark?.title);
}

/** The place of a thread: whom else a direct one is of, `#dev`, "Everybody". The twin of network/titles.py. */
export function namePlace(id, me) {
  if (id.startsWith("channel:")) return `#${nameOf(id)}`;
  if (id === "broadcast") return "Everybody";
  if (id.startsWith("direct:")) return [...new Set(partiesOf(id))].filter((it) => it !== me).join(" and ") || me;
  if (id.startsWith("mod:network~")) return "From the network";
  if (id.startsWith("mod:")) return `From the mod ${partiesOf(id)[0]}`;
  return id.startsWith("thread:") ? `Replies to #${nameOf(id)}` : id;
}

/** A title: the place, and one's own name for the thread or else its first words. The twin of network/titles.py. */
export function writeTitle(place, words, own = "") {
  const about = own || shorten(words);
  if (!about) return place;
  return own && own.toLowerCase().includes(place.toLowerCase()) ? own : `${place} · ${about}`;
}

/** The first words of a text as one line. */
function shorten(text) {
  const line = [...text.slice(0, 8 * MAX_WORDS_CHARS)].slice(0, 4 * MAX_WORDS_CHARS).join("").split(SPACES).filter(Boolean).join(" ");
  const characters = [...line];
  if (characters.length <= MAX_WORDS_CHARS) return line;
  const head = characters.slice(0, MAX_WORDS_CHARS).join("");
  const cut = head.includes(" ") ? head.slice(0, head.lastIndexOf(" ")) : characters.slice(0, MAX_WORDS_CHARS - 1).join("");
  return `${cut.replace(/[ ,;:.]+$/, "")}…`;
}

/** Where a reply to a message goes. */
export function replyAddress(message, me) {
  if (message.kind === "direct") return message.sender_id === me ? message.to : `agent:${message.sender_id}`;
  if (message.kind === "mod") return addressOf(message.thread_id, me);
  return message.to;
}
