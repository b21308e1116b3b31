// A recording of a finished run that answers like a hub. The recording implements the reading operations of
// docs/protocol.md with the rows that an exported page contains (roundelay/runs/page.py writes them), and refuses every
// change. Indexes are built once, because the rows never change. This module uses neither the DOM nor a clock.

import { fits, listWords, readQuery } from "#core/query.js";
import { Refused } from "#core/refused.js";
import { conversationOf, lineOf, namePlace, textOf, writeTitle } from "#core/text.js";

const MAX_DEPTH = 50; // maximum depth of a tree of effects
const FIGURES = ["calls", "prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens", "tools"];
const COST_NAMES = {
  agent: (call) => call.agent_id,
  model: (call) => call.model || "-",
  thread: (call) => call.thread_id ?? "-",
  root: (call) => (typeof call.root !== "number" ? "-" : `#${call.root}`),
  reaction: (call) => call.reaction,
  "asked in": (call) => call.sent_in || "-",
  day: (call) => new Date(call.at).toISOString().slice(0, 10),
};
const COST_HEADS = {
  agent: ["agent", "model"],
  model: ["model"],
  thread: ["thread", "agent", "model"],
  root: ["root", "agent", "model"],
  reaction: ["reaction", "asked in", "agent", "model"],
  day: ["day", "agent", "model"],
};

/**
 * Return a source for ui/store.js that answers from rows instead of a hub.
 * @param {{network: {name: string, epoch: string}, head: number, made_at: number, part: string, viewer: object,
 *   agents: object[], readers: object, messages: object[], explained: object, effects: object, reactions: object[],
 *   calls: object[], has_prices: boolean}} rows as roundelay/runs/page_answers.py describes them
 */
export function openRecording(rows) {
  const index = indexRows(rows);
  const answers = createAnswers(rows, index);
  return {
    is_read_only: true,
    made_at: rows.made_at,
    part: rows.part,
    connect(onEvent) {
      const { agent_id, is_operator } = rows.viewer;
      const me = { agent_id, kind: "service", ...(is_operator && { is_operator }) };
      onEvent({ type: "welcome", ...me, network: rows.network, head: rows.head, session_id: "recording", limits: {}, mods: [], at: rows.made_at });
    },
    close() {},
    /** @param {string} op @param {object} [args] @returns {Promise<any>} */
    async call(op, args = {}) {
      if (!Object.hasOwn(answers, op)) throw new Refused("forbidden", "This is a recording: nothing in it can be changed.");
      return answers[op](args);
    },
  };
}

function indexRows({ messages, reactions }) {
  return {
    bySeq: new Map(messages.map((message) => [message.seq, message])),
    threads: groupBy(messages, (message) => message.thread_id),
    reactions: new Map(reactions.map((reaction) => [nameReaction(reaction), reaction])),
    words: new Map(),
  };
}

const nameReaction = ({ agent_id, reaction }) => `${agent_id} ${reaction}`;

function groupBy(items, name) {
  const groups = new Map();
  for (const item of items) groups.has(name(item)) ? groups.get(name(item)).push(item) : groups.set(name(item), [item]);
  return groups;
}

function createAnswers(rows, index) {
  const find = (seq) => {
    if (!index.bySeq.has(seq)) throw new Refused("unknown_message", `There is no message ${seq} in this recording.`);
    return index.bySeq.get(seq);
  };
  return {
    "network.info": () => ({ ...rows.network, head: rows.head, participants: rows.agents.length, mods: [] }),
    "network.watch": () => ({}),
    "network.inbox": () => ({ items: [], has_more: false }),
    "network.approvals": () => ({ approvals: [], has_more: false }),
    "network.open_reactions": () => ({ reactions: [], has_more: false }),
    "network.dead_letters": () => ({ dead_letters: [], has_more: false }),
    "network.list_agents": ({ after = "", kind }) => ({
      agents: rows.agents.filter((agent) => agent.agent_id > after && (!kind || agent.kind === kind)),
      has_more: false,
    }),
    "network.list_threads": (args) => listThreads(rows, index, args),
    "network.history": (args) => readHistory(index, args),
    "network.search": (args) => search(index, args),
    "network.message_status": ({ seq }) => ({ seq, recipients: listRecipients(rows, find(seq)), has_more: false }),
    "network.explain": ({ seq }) => ({ steps: explain(rows, index, find(seq)), has_prices: rows.has_prices }),
    "network.effects": ({ seq, limit = 200 }) => listEffects(rows, index, find(seq), limit),
    "network.work": (args) => readWork(rows, index, args),
    "network.usage": (args) => listReactions(rows, args),
    "network.cost_report": (args) => addUpCost(rows, args),
  };
}

// --- threads

function listThreads(rows, index, { before = Infinity, limit = 50, threads }) {
  const found = [...index.threads].filter(([thread_id, its]) => its.at(-1).seq < before && (!threads || threads.includes(thread_id)));
  const newest = found.sort(([, one], [, other]) => other.at(-1).seq - one.at(-1).seq);
  return { threads: newest.slice(0, limit).map(([thread_id, group]) => describeThread(rows, index, thread_id, group)), has_more: newest.length > limit };
}

function describeThread({ readers, viewer }, index, thread_id, messages) {
  const { seq, sender_id, sender_kind, sent_at } = messages.at(-1);
  const last = { seq, sender_id, sender_kind, sent_at, text: lineOf(messages.at(-1)) };
  const names = readers[thread_id] ?? [...new Set(messages.map((record) => record.sender_id))].sort();
  const first = index.bySeq.get(Number(thread_id.slice(7))) ?? messages[0];
  const isReply = thread_id.startsWith("thread:");
  const isAbout = isReply || (thread_id.startsWith("direct:") && (conversationOf(thread_id) || messages.some((record) => record.sender_kind === "agent")));
  const title = writeTitle(namePlace(isReply ? messages[0].to : thread_id, viewer.agent_id), isAbout ? lineOf(isReply ? first : messages[0]) : "");
  return { thread_id, title, last_seq: seq, messages: messages.length, readers: names, last, unread: 0 };
}

function readHistory(index, { thread_id, before = Infinity, after = 0, limit = 50 }) {
  const thread = index.threads.get(thread_id);
  if (!thread) throw new Refused("unknown_message", `There is nothing of a thread ${thread_id} in this recording.`);
  const found = thread.filter((record) => record.seq < before && record.seq > after);
  return { messages: after ? found.slice(0, limit) : found.slice(-limit), has_more: found.length > limit };
}

function search(index, { query, thread_id, before = Infinity, limit = 20 }) {
  const { terms, sender_id, said_after = 0, said_before = Infinity } = readQuery(query);
  if (Number.isNaN(said_after) || Number.isNaN(said_before)) throw new Refused("invalid_arguments", "Write a date as 2026-11-27.");
  if (!terms.length) throw new Refused("invalid_arguments", "Search for words: letters or digits.");
  const holds = (words) => terms.every((term) => words.some((word) => fits(word, term)));
  const hits = [];
  for (const message of [...index.bySeq.values()].reverse()) {
    if (hits.length > limit) break;
    if (message.seq >= before || (thread_id && message.thread_id !== thread_id)) continue;
    if (message.sent_at < said_after || message.sent_at >= said_before || (sender_id && message.sender_id !== sender_id)) continue;
    // Split each message into words only once, because a recording never changes and people search while they type.
    if (!index.words.has(message.seq)) index.words.set(message.seq, listWords(textOf(message)));
    if (holds(index.words.get(message.seq))) hits.push(message);
  }
  const has_more = hits.length > limit;
  const messages = hits.slice(0, limit).reverse();
  return { messages, has_more, ...(has_more && { next: messages[0].seq }) };
}

// --- explanations

function explain({ explained }, index, message) {
  const steps = [];
  for (let current = message; current; current = index.bySeq.get(current.cause)) {
    const reaction = explained[current.seq];
    const sentSteps = reaction && !reaction.is_hidden ? index.reactions.get(nameReaction(reaction)).steps : [];
    const messages = (reaction?.manifest ?? []).map((seq) => index.bySeq.get(seq)).filter(Boolean);
    steps.push(reaction ? { message: current, reaction: { ...reaction, steps: sentSteps }, messages } : { message: current });
  }
  return steps;
}

function listEffects({ messages, effects: reactionsTo }, index, { seq, root }, limit) {
  const causes = new Set([seq]);
  const following = messages.filter((message) => message.seq > seq && message.root === root && causes.has(message.cause) && causes.add(message.seq));
  const shown = [index.bySeq.get(seq), ...following.slice(0, limit)];
  const effects = new Map(shown.map((message) => [message.seq, { message, reactions: reactionsTo[message.seq] ?? [], followers: [], count: 0 }]));
  for (const message of shown.slice(1)) effects.get(message.cause).followers.push(effects.get(message.seq));
  // Count from the newest message to the oldest. A message is newer than its cause, so the followers are counted first.
  for (const effect of [...effects.values()].reverse()) effect.count = effect.followers.reduce((sum, follower) => sum + 1 + follower.count, 0);
  return { ...cutDepth(effects.get(seq), 0), has_more: following.length > limit };
}

function cutDepth({ message, reactions, followers, count }, depth) {
  if (depth === MAX_DEPTH && count) return { message, reactions, followers: [], more: count };
  return { message, reactions, followers: followers.map((follower) => cutDepth(follower, depth + 1)) };
}

/** Return the agents whose prompts contained a message. A recording has no data about other recipients. */
function listRecipients({ reactions }, { seq }) {
  const reading = reactions.filter(({ manifest, trigger }) => trigger === seq || manifest.includes(seq));
  const recipients = reading.map(({ agent_id, reaction, status }) => [
    agent_id,
    { agent_id, state: "in_prompt", attempts: 1, reaction, reaction_status: status ?? "open" },
  ]);
  return [...new Map(recipients).values()].sort((one, other) => (one.agent_id < other.agent_id ? -1 : 1));
}

function readWork({ has_prices }, index, args) {
  const found = index.reactions.get(nameReaction(args));
  if (!found) throw new Refused("unknown_message", "There is no such reaction in this recording.");
  const { agent_id, reaction, seq, ...work } = found;
  return { ...work, has_prices };
}

/** Return the reactions of one agent in the form of `network.usage`. The default is the first agent. */
function listReactions({ reactions }, args) {
  const ids = [...new Set(reactions.map((reaction) => reaction.agent_id))].sort();
  const agent_id = args.agent_id ?? ids[0] ?? null;
  const calls = reactions.filter((reaction) => reaction.agent_id === agent_id).map(({ reaction, seq }) => ({ reaction, seq }));
  return { agent_id, calls, reactions: {}, has_more: false, next_agent: ids.find((id) => id > agent_id) ?? null };
}

function addUpCost({ calls, has_prices }, { by = "agent", since = 0, ...wanted }) {
  const chosen = calls.filter((call) => call.at >= since && Object.entries(wanted).every(([name, value]) => call[name] === value));
  const nameGroup = (call) => COST_HEADS[by].map((head) => COST_NAMES[head](call));
  const groups = [...groupBy(chosen, (call) => JSON.stringify(nameGroup(call)))].map(([key, group]) => {
    const names = nameGroup(group[0]).map((name, place) => [COST_HEADS[by][place], name]);
    return { key, value: { ...Object.fromEntries(names), ...addUp(group) } };
  });
  groups.sort((one, other) => other.value.usd - one.value.usd || (one.key < other.key ? -1 : 1));
  return { by, groups: groups.map(({ value }) => value), total: addUp(chosen), has_prices, has_more: false };
}

function addUp(calls) {
  const sum = (name) => calls.reduce((total, call) => total + call[name], 0);
  const figures = Object.fromEntries(FIGURES.map((name) => [name, sum(name)]));
  const usd = Number(sum("usd").toPrecision(12)); // remove the rounding errors of adding fractions
  const unpriced = calls.filter((call) => call.usd === null).map((call) => call.model);
  return { ...figures, usd, unpriced: [...new Set(unpriced)].sort() };
}
