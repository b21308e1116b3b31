/**
 * JSON from others, which may have any shape: checks, and text for people. Pure.
 */

/** Whether a value is an object and not an array. @param {unknown} value */
export const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

/** Return the array itself, or an empty one for any other value. @param {unknown} value @returns {any[]} */
export const listOf = (value) => (Array.isArray(value) ? value : []);

/** Parse the arguments of a call; return the text itself if it is not JSON. @param {string} text */
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
