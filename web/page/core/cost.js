// What models used and what that cost: the twin of roundelay/runs/cost.py, which gives the JSON of `roundelay cost --json`.
// It asks for the pages of `network.usage` by the `call` that it is given, for their costs, and keeps the sums alone. No
// DOM, no clock.

import { readCosts } from "#core/pricing.js";
import { addUsage, isUsage, noUsage } from "#core/reading.js";

const NAMES = {
  agent: (item) => item.agent_id,
  model: (item) => item.model || "-",
  thread: (item) => item.thread_id ?? "-",
  root: (item) => (item.root === undefined ? "-" : `#${item.root}`),
  reaction: (item) => item.reaction,
  "asked in": (item) => item.sent_in || "-",
  day: (item) => new Date(item.at).toISOString().slice(0, 10),
};

/** What the names of a group are. */
export const HEADS = {
  agent: ["agent", "model"],
  model: ["model"],
  thread: ["thread", "agent", "model"],
  root: ["root", "agent", "model"],
  reaction: ["reaction", "asked in", "agent", "model"],
  day: ["day", "agent", "model"],
};

/**
 * Add up what the wanted calls used, as {by, groups, total, has_prices}, the dearest first, then the largest. `has_prices`
 * says whether the node has a table of prices; null without an answer.
 * @param {(op: string, args: object) => Promise<any>} call
 * @param {{agent_id?: string, thread_id?: string, root?: number, since?: number}} wanted
 * @param {keyof typeof HEADS} by
 */
export async function readCost(call, wanted, by) {
  const groups = new Map();
  const total = createTotal();
  let hasPrices = null;
  const told = new Map(); // of each agent's reaction that is open: what its replies and reviews told
  for await (const page of readUsage(call, wanted.agent_id)) {
    const calls = [...listCalls(page, told)].filter((call) => {
      const isWanted = call.at >= (wanted.since ?? 0) && isOf(wanted.thread_id, call.thread_id) && isOf(wanted.root, call.root);
      return isWanted && (call.kind === "model_reply" || call.tools.length > 0 || !isNothing(call.usage));
    });
    const costs = await readCosts(call, calls.filter(costsSomething));
    hasPrices = costs.has_prices ?? hasPrices;
    let place = 0;
    for (const call of calls) {
      const usd = costsSomething(call) ? costs.usd[place++] : 0;
      const names = HEADS[by].map((head) => NAMES[head](call));
      const key = JSON.stringify(names);
      if (!groups.has(key)) groups.set(key, { ...Object.fromEntries(HEADS[by].map((head, place) => [head, names[place]])), ...createTotal() });
      for (const sum of [groups.get(key), total]) addCall(sum, call, usd);
    }
  }
  const tokens = (item) => item.prompt_tokens + item.completion_tokens;
  const sorted = [...groups.values()].sort((one, other) => other.usd - one.usd || tokens(other) - tokens(one));
  return { by, groups: sorted, total, has_prices: hasPrices };
}

const isOf = (wanted, found) => wanted === undefined || wanted === found;
const isNothing = (usage) => Object.values(usage).every((item) => item === 0);
const costsSomething = ({ usage }) => usage.prompt_tokens > 0 || usage.completion_tokens > 0;
const createTotal = () => ({ calls: 0, ...noUsage(), tools: 0, usd: 0, unpriced: [] });

function addCall(sum, item, usd) {
  sum.calls += item.kind === "model_reply" || item.kind === "used" ? 1 : 0;
  Object.assign(sum, addUsage(sum, item.usage));
  sum.tools += item.tools.length;
  if (usd !== null) sum.usd += usd;
  else if (!sum.unpriced.includes(item.model)) sum.unpriced = [...sum.unpriced, item.model].sort();
}

/** The pages of `network.usage` above a seq: of one agent, or of each that the caller may see, one after the other. */
export async function* readUsage(call, agent_id, after = 0) {
  for (let args = { after, limit: 500, ...(agent_id && { agent_id }) }; args; ) {
    const page = await call("network.usage", args);
    yield page;
    if (page.has_more) args = { ...args, agent_id: page.agent_id, after: page.calls.at(-1)?.seq ?? args.after };
    else args = !agent_id && page.next_agent ? { after, limit: 500, agent_id: page.next_agent } : null;
  }
}

/** The calls of a page, of one agent; of the end of a reaction, only what it tells beyond its replies and reviews. */
function* listCalls(page, told) {
  for (const written of page.calls) {
    if (![written.usage, ...written.used.map((each) => each.usage)].every(isUsage)) continue; // another program's
    const item = { ...written, agent_id: page.agent_id, ...page.reactions[written.reaction] };
    const open = `${item.agent_id} ${item.reaction}`;
    for (const { model, usage } of item.used) yield { ...item, kind: "used", model, usage: addUsage(usage), tools: [] };
    const used = addUsage(...item.used.map((each) => each.usage));
    const rest = subtract(addUsage(item.usage), used);
    if (item.kind !== "finished") {
      told.set(open, addUsage(told.get(open), used, rest));
      yield { ...item, usage: rest };
      continue;
    }
    const more = subtract(rest, told.get(open));
    told.delete(open);
    if (!isNothing(more)) yield { ...item, usage: more };
  }
}

const subtract = (total, told) =>
  Object.fromEntries(Object.entries(total).map(([name, value]) => [name, Math.max(0, value - (told?.[name] ?? 0))]));
