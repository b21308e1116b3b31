// Explains why a message was sent, step by step up to its root, and what followed from the message. The node reads the
// records and explains them (docs/protocol/operations-explain.md). The data is read with a `call` function of a hub or
// a recording. This module does not use the DOM.

/** @typedef {(op: string, args: object) => Promise<any>} Call */

const MAX_EFFECTS = 500; // maximum number of effects in one answer of the node

/**
 * Return the steps from a message up to its root, as far as the caller may see them.
 * @param {Call} call
 * @param {number} seq
 * @returns {Promise<{steps: {message: any, reaction?: any, messages: Record<number, any>}[], has_prices: boolean}>}
 */
export async function explain(call, seq) {
  const steps = [];
  let page;
  for (let next = seq; next; next = page.next) {
    page = await call("network.explain", { seq: next });
    for (const step of page.steps) {
      steps.push({ ...step, messages: Object.fromEntries((step.messages ?? []).map((message) => [message.seq, message])) });
    }
  }
  return { steps, has_prices: page.has_prices };
}

/** Return what followed from a message, as a tree of reactions and messages. @param {Call} call @param {number} seq */
export const follow = (call, seq) => call("network.effects", { seq, limit: MAX_EFFECTS });
