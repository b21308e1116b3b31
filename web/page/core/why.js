// Why a message was said, step by step up to its root, and what followed from one: the twin of roundelay/runs/why.py,
// which gives the same JSON as `roundelay why --json` and `roundelay impact --json`. It asks by the `call` that it is
// given, of a hub or of a recording; no DOM, nothing kept.

import { chooseEarlier, listMessages, readReaction, tellExchange, tellWork, traceMessage } from "#core/reading.js";
import { formatCount } from "#core/text.js";

/** @typedef {(op: string, args: object) => Promise<any>} Call */

const MAX_DEPTH = 50; // of a tree of effects: `more` counts what follows below
const READS_AT_ONCE = 16;
const PAGE = 500;

/** Give the steps from a message up to its root, as far as they may be seen. @param {Call} call @param {number} seq */
export async function explain(call, seq) {
  const entries = await readChain(call, seq);
  const steps = [];
  for (const [place, message] of entries.entries()) {
    if (!("message_id" in message)) continue;
    const following = entries[place + 1] ?? {};
    const isSentIn = "reaction" in following && following.agent_id === message.sender_id;
    steps.push(isSentIn ? await explainOne(call, message, following) : { message });
  }
  return steps;
}

async function explainOne(call, message, { reaction: name, trigger }) {
  const reaction = readReaction(name, message.sender_id, await readRecords(call, name, message.sender_id));
  const told = { reaction: name, agent_id: message.sender_id, trigger, is_hidden: !reaction.is_readable };
  if (told.is_hidden) return { message, reaction: { ...told, status: "", manifest: [], sent: null, work: [] }, messages: {} };
  const sent = traceMessage(reaction, message.message_id);
  const isOfSent = (step) => step.type === "call" && step.path === sent.path && step.turn === sent.turn && step.call === sent.call;
  const sending = sent && reaction.work.find(isOfSent);
  const work = sent
    ? chooseEarlier(reaction.work, sent.path, sent.turn + (sent.tool_call === null), sent.call)
    : reaction.work.filter((work) => work.seq < message.seq);
  const seqs = listMessages(sending ? [...work, sending] : work);
  const messages = await readMessages(call, [...reaction.manifest, ...seqs]);
  return {
    message,
    reaction: {
      ...told,
      status: reaction.status ?? "open",
      manifest: reaction.manifest,
      sent: sent && { ...sent, ...(sending && tellExchange(sending, messages)) },
      work: work.map((work) => tellWork(work, messages)),
    },
    messages,
    steps: reaction.steps,
  };
}

/** Give what followed from a message as a tree of reactions and messages. @param {Call} call @param {number} seq */
export async function follow(call, seq) {
  const start = (await call("network.why", { seq })).chain[0];
  const found = await readPages(call, "network.impact", { seq, limit: PAGE }, "messages", (page) => ({ after: page.next }));
  const effects = new Map([start, ...found].map((message) => [message.seq, { message, reactions: [], followers: [], followed: 0 }]));
  // what followed from something hidden stands with the first
  for (const item of found) effects.get(effects.has(item.cause) ? item.cause : seq).followers.push(effects.get(item.seq));
  await inTurns([...effects.values()], async (effect) => (effect.reactions = await readReactionsTo(call, effect.message)));
  for (const effect of [...effects.values()].sort((one, other) => other.message.seq - one.message.seq)) {
    effect.followed = effect.followers.reduce((sum, item) => sum + 1 + item.followed, 0);
  }
  return cutDepth(effects.get(seq), 0);
}

function cutDepth({ message, reactions, followers, followed }, depth) {
  if (depth === MAX_DEPTH && followed) return { message, reactions, followers: [], more: followed };
  return { message, reactions, followers: followers.map((follower) => cutDepth(follower, depth + 1)) };
}

/** The first reaction of each agent that a message began, and the one that took its place since a person took the thread over. */
async function readReactionsTo(call, message) {
  const fates = await readPages(call, "network.message_status", { seq: message.seq }, "recipients", (page) => ({ after: page.recipients.at(-1).agent_id }));
  const read = async ({ agent_id, reaction: name }) => {
    const records = await readRecords(call, name, agent_id);
    const reaction = readReaction(name, agent_id, records);
    const triggers = records.filter((record) => record.kind === "started").map((record) => record.body?.trigger);
    // a prompt may hold it without being made for it
    if (records.length && !triggers.includes(message.seq)) return null;
    if (!reaction.is_readable) return { agent_id, reaction: name, status: "", work: [] };
    const messages = await readMessages(call, listMessages(reaction.work));
    return { agent_id, reaction: name, status: tellStatus(reaction), work: reaction.work.map((work) => tellWork(work, messages)) };
  };
  const begun = fates.flatMap(({ agent_id, reaction, again }) => [reaction, again?.reaction].filter(Boolean).map((value) => ({ agent_id, reaction: value })));
  return (await inTurns(begun, read)).filter(Boolean);
}

function tellStatus({ status, runs, turns }) {
  const shown = status === null ? turns : (runs.get("").finished.turns ?? 0);
  return `${status ?? "open"} after ${formatCount(shown, "turn")}`;
}

/** Give all records of an agent's reaction that may be seen, oldest first. @param {Call} call */
export const readRecords = (call, reaction, agent_id) =>
  readPages(call, "network.records", { reaction, agent_id, after: 0 }, "records", (page) => ({ after: page.records.at(-1).seq }));

/** Give messages by their seqs, those that may be seen. @param {Call} call @param {number[]} seqs */
async function readMessages(call, seqs) {
  const read = (seq) => call("network.why", { seq }).then((result) => [seq, result.chain[0]], passUnknown(null));
  return Object.fromEntries((await inTurns([...new Set(seqs)], read)).filter(Boolean));
}

async function readChain(call, seq) {
  const chain = [];
  for (let at = seq; at; ) {
    const page = await call("network.why", { seq: at }).catch(chain.length ? passUnknown(null) : (error) => { throw error; });
    if (page === null) break; // the next one may not be seen
    chain.push(...page.chain);
    const last = page.chain.findLast((step) => "message_id" in step || "reaction" in step);
    at = page.has_more ? last.trigger ?? last.cause : null; // it was cut after a message, or after a reaction
  }
  return chain;
}

async function readPages(call, op, args, listed, next) {
  const found = [];
  for (let more = {}; more; ) {
    const page = await call(op, { ...args, ...more });
    found.push(...page[listed]);
    more = page.has_more ? next(page) : null;
  }
  return found;
}

const passUnknown = (instead) => (error) => {
  if (error.code !== "unknown_message") throw error;
  return instead;
};

/** Do this for all items, as many at a time as a hub takes from one session. */
async function inTurns(items, work) {
  const [found, waiting] = [[], [...items.entries()]];
  const take = async () => {
    for (let next = waiting.shift(); next; next = waiting.shift()) found[next[0]] = await work(next[1]);
  };
  await Promise.all(Array.from({ length: READS_AT_ONCE }, take));
  return found;
}
