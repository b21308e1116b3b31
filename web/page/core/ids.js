/** Ids for messages, calls and records. */

/**
 * Gives ids that begin with the time, each above the one before: 12 hex digits of it, 4 of a count, 16 of chance.
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
  return [...globalThis.crypto.getRandomValues(new Uint8Array(8))].map((it) => it.toString(16).padStart(2, "0")).join("");
}
