/** What a hub sends, read: the one place where what came over the wire is looked at. What a frame must hold is checked, so
 * that nothing behind has to ask again; further fields, and kinds of frames that a newer hub may have, are passed over. */

import { Refused } from "#core/refused.js";

const REQUIRED = /** @type {const} */ ({
  welcome: {
    protocol: "integer", server: "string", network: "object", agent_id: "string", kind: "string", role: "string", session_id: "string",
    cursor: "integer", head: "integer", resume: "string", mods: "array", limits: "object",
  },
  stored: { seq: "integer", duplicate: "boolean" },
  deliver: { message: "object", attempt: "integer" },
  result: { call_id: "string", value: "any" },
  error: { code: "string", message: "string" },
  signal: { sender_id: "string", thread_id: "string", kind: "string", body: "any" },
  presence: { agent_id: "string", state: "string" },
  notice: { kind: "string", body: "any" },
});
const MESSAGE = {
  seq: "integer", message_id: "string", kind: "string", sender_id: "string", sender_kind: "string", to: "string", thread_id: "string",
  root: "integer", hops: "integer", sent_at: "integer", content: "any",
};
const NETWORK = { name: "string", epoch: "string" };

/** What each kind of frame must hold, and what its parts must. For the test that compares it with asyncapi.json. */
export const SHAPES = { ...REQUIRED, "deliver.message": MESSAGE, "welcome.network": NETWORK };

/**
 * The frame of a text, or null: of a kind that is not known here. Throws `Refused` at what is no frame of this protocol.
 * @param {unknown} text @returns {any}
 */
export function readFrame(text) {
  if (typeof text !== "string") throw wrong("a binary frame");
  let frame;
  try {
    frame = JSON.parse(text);
  } catch {
    throw wrong("what is no JSON");
  }
  if (!isKind(frame, "object") || typeof frame.type !== "string") throw wrong("what is no frame");
  if (!Object.hasOwn(REQUIRED, frame.type)) return null;
  check(frame, REQUIRED[/** @type {keyof typeof REQUIRED} */ (frame.type)], frame.type);
  if (frame.type === "deliver") check(frame.message, MESSAGE, "deliver.message");
  if (frame.type === "welcome") {
    check(frame.network, NETWORK, "welcome.network");
    if (!Object.values(frame.limits).every((it) => typeof it === "number")) throw wrong("a welcome whose limits are no numbers");
  }
  return frame;
}

/** @param {Record<string, unknown>} given @param {Record<string, string>} shape @param {string} where */
function check(given, shape, where) {
  for (const [name, kind] of Object.entries(shape)) {
    if (!Object.hasOwn(given, name) || !isKind(given[name], kind)) throw wrong(`${where} without a right ${name}`);
  }
}

/** @param {any} value @param {string} kind @returns {boolean} */
function isKind(value, kind) {
  if (kind === "any") return true;
  if (kind === "integer") return Number.isSafeInteger(value) && value >= 0;
  if (kind === "array") return Array.isArray(value);
  if (kind === "object") return typeof value === "object" && value !== null && !Array.isArray(value);
  return typeof value === kind;
}

/** @param {string} what */
function wrong(what) {
  return new Refused("invalid_frame", `What answers there is no hub of roundelay.v1: it sent ${what}.`);
}
