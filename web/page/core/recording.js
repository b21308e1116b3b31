// A finished run that answers like a hub: the reading operations of docs/protocol.md, over the rows that an exported page
// holds (roundelay/runs/page.py writes them). It refuses every change. The rows never change, so indexes are built once.
// No DOM, no clock.

import { isObject } from "#core/json.js";
import { nameUse } from "#core/pricing.js";
import { fits, listWords, readQuery } from "#core/query.js";
import { Refused } from "#core/refused.js";
import { conversationOf, namePlace, textOf, writeTitle } from "#core/text.js";

const CHARGED = ["finished", "model_reply", "review", "used"];
const STATUSES = ["finished", "stopped", "cancelled", "failed"];
const MAX_LINE = 200;

/**
 * Return a source for ui/store.js that answers from rows in place of a hub.
 * @param {{network: {name: string, epoch: string}, head: number, made_at: number, part: string, viewer: object,
 *   agents: object[], readers: object, messages: object[], records: object[], usd: object}} rows messages and records in
 *   ascending order
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

function indexRows({ messages, records }) {
  const bySeq = new Map(messages.map((message) => [message.seq, message]));
  const threads = groupBy(messages, (message) => message.thread_id);
  const reactions = [...groupBy(records, (record) => JSON.stringify([record.agent_id, record.reaction])).values()].map((group) => {
    const { agent_id, reaction } = group[0];
    const started = group.filter((record) => record.kind === "started" && isObject(record.body));
    const triggers = started.filter((record) => Number.isSafeInteger(record.body.trigger));
    const finished = group.filter((record) => record.kind === "finished").map((record) => record.seq);
    return { agent_id, reaction, records: group, seq: group[0].seq, begun: triggers.map((trigger) => [trigger.body.trigger, trigger.seq]), started, finished };
  });
  const starts = groupBy(reactions.flatMap((reaction) => reaction.begun.map(([trigger, seq]) => ({ trigger, seq, of: reaction }))), (start) => start.trigger);
  const byName = groupBy(reactions, (reaction) => reaction.reaction);
  return { bySeq, threads, reactions, begun: starts, byName, held: null, words: new Map() };
}

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
    "network.why": ({ seq }) => ({ chain: readChain(index, find(seq)), has_more: false }),
    "network.impact": ({ seq }) => followFrom(rows, index, find(seq)),
    "network.message_status": ({ seq }) => ({ seq, recipients: listFates(index, find(seq)), has_more: false }),
    "network.records": ({ reaction, agent_id, after = 0 }) => {
      const matching = (index.byName.get(reaction) ?? []).filter((reaction) => agent_id === undefined || reaction.agent_id === agent_id);
      const records = matching.flatMap((item) => item.records).filter((record) => record.seq > after);
      return { records: records.sort((one, other) => one.seq - other.seq), has_more: false };
    },
    "network.usage": (args) => readUsage(index, args),
    "network.costs": ({ uses }) => ({
      usd: uses.map(({ model, ...usage }) => rows.usd[nameUse({ model, usage })] ?? null),
      has_prices: rows.has_prices ?? false,
    }),
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
  const last = { seq, sender_id, sender_kind, sent_at, text: textOf(messages.at(-1)).slice(0, MAX_LINE) };
  const names = readers[thread_id] ?? [...new Set(messages.map((record) => record.sender_id))].sort();
  const first = index.bySeq.get(Number(thread_id.slice(7))) ?? messages[0];
  const isReply = thread_id.startsWith("thread:");
  const isAbout = isReply || (thread_id.startsWith("direct:") && (conversationOf(thread_id) || messages.some((record) => record.sender_kind === "agent")));
  const title = writeTitle(namePlace(isReply ? messages[0].to : thread_id, viewer.agent_id), isAbout ? textOf(isReply ? first : messages[0]) : "");
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
    if (!index.words.has(message.seq)) index.words.set(message.seq, listWords(textOf(message)));
    if (holds(index.words.get(message.seq))) hits.push(message);
  }
  const has_more = hits.length > limit;
  const messages = hits.slice(0, limit).reverse();
  return { messages, has_more, ...(has_more && { next: messages[0].seq }) };
}

// --- causes

/** Find the reaction that sent a message: the sender's newest open reaction to its cause. */
function findReaction(index, { sender_id, cause, seq }) {
  const starts = (index.begun.get(cause) ?? []).filter((start) => start.of.agent_id === sender_id && start.seq < seq);
  const open = starts.filter((item) => !item.of.finished.some((at) => item.seq < at && at < seq));
  const found = open.sort((one, other) => one.seq - other.seq).at(-1);
  return found && { reaction: found.of.reaction, agent_id: sender_id, trigger: cause, seq: found.seq };
}

function readChain(index, message) {
  const chain = [];
  for (let current = message; current; current = index.bySeq.get(current.cause)) {
    chain.push(current);
    const sentIn = current.cause && findReaction(index, current);
    if (sentIn) chain.push(sentIn);
  }
  return chain;
}

function followFrom({ messages, head }, index, { seq, root }) {
  const follows = new Set([seq]);
  const followers = messages.filter((message) => message.seq > seq && message.root === root && follows.has(message.cause) && follows.add(message.seq));
  const reactions = groupBy(followers.map((reaction) => findReaction(index, reaction)).filter(Boolean), (item) => `${item.agent_id} ${item.reaction}`);
  return { messages: followers, reactions: [...reactions.values()].map((reaction) => reaction[0]), next: head, has_more: false };
}

/** List the agents that had a message in a prompt, with the state of their reactions. A log says nothing of other recipients. */
function listFates(index, { seq }) {
  const first = groupBy((index.begun.get(seq) ?? []).sort((one, other) => one.seq - other.seq), (start) => start.of.agent_id);
  const fates = new Map([...first].map(([agent_id, group]) => [agent_id, group[0].of]));
  const newest = new Map([...first].map(([agent_id, group]) => [agent_id, group.at(-1).of]));
  index.held ??= groupBy(index.reactions.flatMap((reaction) => listManifest(reaction).map((seq) => ({ it: seq, of: reaction }))), (held) => held.it);
  for (const { reaction } of index.held.get(seq) ?? []) if (!fates.has(reaction.agent_id)) fates.set(reaction.agent_id, reaction);
  const describe = ([agent_id, reaction]) => {
    const fate = { agent_id, state: "in_prompt", attempts: 1, reaction: reaction.reaction, reaction_status: tellStatus(reaction) };
    const next = newest.get(agent_id) ?? reaction;
    if (next === reaction || !["open", "cancelled"].includes(fate.reaction_status)) return fate;
    // A person took the thread over, and the agent reacted again afterwards.
    return { ...fate, reaction_status: "cancelled", again: { reaction: next.reaction, reaction_status: tellStatus(next) } };
  };
  return [...fates].sort(([one], [other]) => (one < other ? -1 : 1)).map(describe);
}

const listManifest = (reaction) => reaction.started.flatMap((record) => (Array.isArray(record.body.manifest) ? record.body.manifest : []));

function tellStatus({ records, finished }) {
  const status = records.find((record) => record.kind === "finished" && isObject(record.body))?.body.status;
  return finished.length ? (STATUSES.includes(status) ? status : "finished") : "open";
}

// --- what models used

function readUsage(index, { agent_id: asked, after = 0 }) {
  const ids = [...new Set(index.reactions.map((reaction) => reaction.agent_id))].sort();
  const agent_id = asked ?? ids[0] ?? null;
  const own = index.reactions.filter((reaction) => reaction.agent_id === agent_id);
  const calls = own.flatMap((reaction) => reaction.records.filter((record) => CHARGED.includes(record.kind) && record.seq > after).map((record) => describeCall(reaction, record)));
  const reactions = Object.fromEntries(own.map((reaction) => [reaction.reaction, placeReaction(index, reaction)]).filter(([, value]) => value));
  return { agent_id, calls: calls.sort((one, other) => one.seq - other.seq), reactions, has_more: false, next_agent: ids.find((id) => id > agent_id) ?? null };
}

function placeReaction(index, reaction) {
  const trigger = index.bySeq.get(reaction.begun[0]?.[1] === reaction.seq ? reaction.begun[0][0] : 0);
  if (!trigger) return null;
  const sentIn = trigger.cause && findReaction(index, trigger);
  return { trigger: trigger.seq, thread_id: trigger.thread_id, root: trigger.root, ...(sentIn && { sent_in: sentIn.reaction }) };
}

const cut = (value) => (typeof value === "string" ? value.slice(0, 128) : "");
const orEmpty = (value) => (isObject(value) ? value : {});

function describeCall(reaction, { seq, at, kind, body: data }) {
  const body = orEmpty(data);
  const reply = orEmpty(body.reply);
  const calls = Array.isArray(reply.tool_calls) ? reply.tool_calls.filter(isObject) : [];
  const used = Array.isArray(body.used) ? body.used.filter((use) => isObject(use) && isObject(use.usage)) : [];
  return {
    seq,
    at,
    kind,
    reaction: reaction.reaction,
    path: cut(body.path),
    turn: body.turn ?? null,
    agent: cut(body.agent),
    model: cut(reply.model),
    usage: orEmpty(kind === "model_reply" ? reply.usage : body.usage),
    tools: calls.map((call) => cut(call.name)),
    used: used.map((use) => ({ model: cut(use.model), usage: use.usage })),
  };
}
