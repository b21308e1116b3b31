/** Reads the address of the leading node from a refusal of another node (docs/protocol/nodes.md). The result is "" if
 * the text is not a valid HOST:PORT. */

/** Name of the response header of a 503 that contains the leader's address, in lower case as in Node's modules. */
export const LEADER = "roundelay-leader";
const ADDRESS = /^(?:[A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}$/;

/** @param {unknown} text */
export function readAddress(text) {
  if (typeof text !== "string" || !ADDRESS.test(text)) return "";
  try {
    return new URL(`ws://${text}/`) && text;
  } catch { // an invalid port, for example
    return "";
  }
}

/** Return the leader's address from the reason of a close with code 4503. @param {string} reason */
export function readReason(reason) {
  return readAddress(/Roundelay-Leader: (\S+)$/.exec(reason)?.[1]);
}
