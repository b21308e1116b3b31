/**
 * JSON that others wrote, and which may therefore have any shape: what it is, and how a person reads it. Pure.
 */

/** Whether it is an object that is no list. @param {unknown} value */
export const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

/** The list itself; an empty one for what is none. @param {unknown} value @returns {any[]} */
export const listOf = (value) => (Array.isArray(value) ? value : []);

/** What the arguments of a call say; the text itself where that is no JSON. @param {string} text */
export function readArguments(text) {
  try {
    return JSON.parse(text || "{}");
  } catch {
    return text;
  }
}

/** The arguments of a call as a person reads them. @param {string} text @returns {string} */
export function writeArguments(text) {
  const read = readArguments(text);
  return typeof read === "string" ? text : JSON.stringify(read, null, 2);
}
