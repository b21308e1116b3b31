/** Checks and formats JSON from other participants, which may have any form. This module performs no IO. */

/** Return whether a value is an object and not an array. @param {unknown} value */
export const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

/** Return the array itself, or an empty array for any other value. @param {unknown} value @returns {any[]} */
export const listOf = (value) => (Array.isArray(value) ? value : []);

/** Parse the arguments of a call. Return the text itself if it is not valid JSON. @param {string} text */
export function readArguments(text) {
  try {
    return JSON.parse(text || "{}");
  } catch {
    return text;
  }
}

/** Format the arguments of a call for a person. @param {string} text @returns {string} */
export function writeArguments(text) {
  const read = readArguments(text);
  return typeof read === "string" ? text : JSON.stringify(read, null, 2);
}
