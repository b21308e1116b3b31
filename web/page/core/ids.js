/** Creates ids for messages, calls and records. */

/**
 * Return a function that creates increasing ids. An id consists of 12 hex digits for the time, 4 for a counter, and 16
 * random ones.
 * @param {() => number} now @param {() => string} [chance] @returns {() => string}
 */
export function makeIds(now, chance = defaultChance) {
  let last = 0;
  let count = 0;
  return () => {
    const at = Math.max(now(), last);
    count = at === last ? count + 1 : 0;
    last = at;
    return `${at.toString(16).padStart(12, "0")}${count.toString(16).padStart(4, "0")}${chance()}`;
  };
}

function defaultChance() {
  return [...globalThis.crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
