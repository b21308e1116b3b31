/** How a node names the leader of several nodes (docs/protocol/nodes.md). Text that is no HOST:PORT names nobody: "". */

/** The header of a 503, as Node's modules spell it. */
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

/** Return the leader that the reason of a 4503 names. @param {string} reason */
export function readReason(reason) {
  return readAddress(/Roundelay-Leader: (\S+)$/.exec(reason)?.[1]);
}
