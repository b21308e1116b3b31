// Costs of model calls: the node computes them by the prices that it knows (`network.costs`).

const MAX_USES = 500; // of one question
const MAX_NAME = 256;

/**
 * Return the dollars for each use, null where no price is known, and whether the node has a table of prices.
 * @param {(op: string, args: object) => Promise<any>} call
 * @param {{model: string, usage: object}[]} uses
 * @returns {Promise<{usd: (number | null)[], has_prices: boolean | null}>} `has_prices` is null without an answer
 */
export async function readCosts(call, uses) {
  const asked = new Map(); // the node is asked once for equal uses
  for (const use of uses) if (canAsk(use)) asked.set(nameUse(use), describeUse(use));
  const names = [...asked.keys()];
  const prices = new Map();
  let hasPrices = null;
  for (let start = 0; start < names.length; start += MAX_USES) {
    const part = names.slice(start, start + MAX_USES);
    const answer = await askNode(call, part.map((name) => asked.get(name)));
    if (!answer) break;
    part.forEach((name, place) => prices.set(name, answer.usd[place]));
    hasPrices = answer.has_prices;
  }
  return { usd: uses.map((use) => prices.get(nameUse(use)) ?? null), has_prices: hasPrices };
}

/** Return null where a page of rights, or an older node, leaves this operation out: tokens are shown without it. */
async function askNode(call, uses) {
  try {
    return await call("network.costs", { uses });
  } catch (error) {
    if (["forbidden", "unknown_operation"].includes(error.code)) return null;
    throw error;
  }
}

const describeUse = ({ model, usage }) => ({
  model: model ?? "",
  prompt_tokens: usage.prompt_tokens ?? 0,
  completion_tokens: usage.completion_tokens ?? 0,
  cached_tokens: usage.cached_tokens ?? 0,
});

/** A name for equal uses. */
export const nameUse = (use) => JSON.stringify(Object.values(describeUse(use)));

/** Whether the node takes this use: records of another program may hold anything. */
function canAsk(use) {
  const { model, ...tokens } = describeUse(use);
  return model.length > 0 && model.length <= MAX_NAME && Object.values(tokens).every((token) => Number.isSafeInteger(token) && token >= 0);
}
