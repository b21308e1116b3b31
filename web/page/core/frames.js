/** Validates frames from the hub. No other module has to validate frames. Additional fields are ignored, and so are
 * unknown kinds of frames, which a newer hub may send. */

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

/** The required fields of each kind of frame and of its parts. A test compares the fields with asyncapi.json. */
export const SHAPES = { ...REQUIRED, "deliver.message": MESSAGE, "welcome.network": NETWORK };

/**
 * Return the frame in a text, or null if its kind is unknown. Throws `Refused` if the text is not a frame of this
 * protocol.
 * @param {unknown} text @returns {any}
 */
export function readFrame(text) {
  if (typeof text !== "string") throw wrong("a binary frame");
  let frame;
  try {
    frame = JSON.parse(text);
  } catch {
    throw wrong("text that is not JSON");
  }
  if (!isKind(frame, "object") || typeof frame.type !== "string") throw wrong("an object that is no frame");
  if (!Object.hasOwn(REQUIRED, frame.type)) return null;
  check(frame, REQUIRED[/** @type {keyof typeof REQUIRED} */ (frame.type)], frame.type);
  if (frame.type === "deliver") check(frame.message, MESSAGE, "deliver.message");
  if (frame.type === "welcome") {
    check(frame.network, NETWORK, "welcome.network");
    if (!Object.values(frame.limits).every((limit) => typeof limit === "number")) throw wrong("a welcome with limits that are no numbers");
  }
  return frame;
}

/** @param {Record<string, unknown>} object @param {Record<string, string>} shape @param {string} where */
function check(object, shape, where) {
  for (const [name, kind] of Object.entries(shape)) {
    if (!Object.hasOwn(object, name) || !isKind(object[name], kind)) throw wrong(`a frame ${where} without a valid ${name}`);
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
  return new Refused("invalid_frame", `The server is no hub of roundelay.v1: it sent ${what}.`);
}
