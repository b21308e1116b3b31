// A run that is over, as the page asks a hub for it: the reading operations of docs/protocol.md, answered of the rows that
// an exported page holds (roundelay/runs/page.py writes them). Whatever changes something is refused. No DOM, no clock;
// what is found once is kept, the rows never change.

import { isObject } from "#core/json.js";
import { nameUse } from "#core/pricing.js";
import { fits, listWords, readQuery } from "#core/query.js";
import { Refused } from "#core/refused.js";
import { conversationOf, namePlace, textOf, writeTitle } from "#core/text.js";

const CHARGED = ["finished", "model_reply", "review", "used"];
const STATUSES = ["finished", "stopped", "cancelled", "failed"];
const MAX_LINE = 200;

/**
 * Give what answers for a hub: a source of ui/store.js.
 * @param {{network: {name: string, epoch: string}, head: number, made_at: number, part: string, viewer: object,
 *   agents: object[], readers: object, messages: object[], records: object[], usd: object}} rows messages and records
 *   ascending
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
  const threads = groupBy(messages, (it) => it.thread_id);
  const reactions = [...groupBy(records, (it) => JSON.stringify([it.agent_id, it.reaction])).values()].map((its) => {
    const { agent_id, reaction } = its[0];
    const started = its.filter((it) => it.kind === "started" && isObject(it.body));
    const triggers = started.filter((it) => Number.isSafeInteger(it.body.trigger));
    const finished = its.filter((it) => it.kind === "finished").map((it) => it.seq);
    return { agent_id, reaction, records: its, seq: its[0].seq, begun: triggers.map((it) => [it.body.trigger, it.seq]), started, finished };
  });
  const begun = groupBy(reactions.flatMap((it) => it.begun.map(([trigger, seq]) => ({ trigger, seq, of: it }))), (it) => it.trigger);
  const byName = groupBy(reactions, (it) => it.reaction);
  return { bySeq, threads, reactions, begun, byName, held: null, words: new Map() };
}

function groupBy(items, name) {
  const found = new Map();
  for (const it of items) found.has(name(it)) ? found.get(name(it)).push(it) : found.set(name(it), [it]);
  return found;
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
      agents: rows.agents.filter((it) => it.agent_id > after && (!kind || it.kind === kind)),
      has_more: false,
    }),
    "network.list_threads": (args) => listThreads(rows, index, args),
    "network.history": (args) => readHistory(index, args),
    "network.search": (args) => search(index, args),
    "network.why": ({ seq }) => ({ chain: readChain(index, find(seq)), has_more: false }),
    "network.impact": ({ seq }) => followFrom(rows, index, find(seq)),
    "network.message_status": ({ seq }) => ({ seq, recipients: listFates(index, find(seq)), has_more: false }),
    "network.records": ({ reaction, agent_id, after = 0 }) => {
      const found = (index.byName.get(reaction) ?? []).filter((it) => agent_id === undefined || it.agent_id === agent_id);
      const records = found.flatMap((it) => it.records).filter((it) => it.seq > after);
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
  return { threads: newest.slice(0, limit).map(([thread_id, its]) => describeThread(rows, index, thread_id, its)), has_more: newest.length > limit };
}

function describeThread({ readers, viewer }, index, thread_id, its) {
  const { seq, sender_id, sender_kind, sent_at } = its.at(-1);
  const last = { seq, sender_id, sender_kind, sent_at, text: textOf(its.at(-1)).slice(0, MAX_LINE) };
  const told = readers[thread_id] ?? [...new Set(its.map((it) => it.sender_id))].sort();
  const first = index.bySeq.get(Number(thread_id.slice(7))) ?? its[0];
  const isReply = thread_id.startsWith("thread:");
  const isAbout = isReply || (thread_id.startsWith("direct:") && (conversationOf(thread_id) || its.some((it) => it.sender_kind === "agent")));
  const title = writeTitle(namePlace(isReply ? its[0].to : thread_id, viewer.agent_id), isAbout ? textOf(isReply ? first : its[0]) : "");
  return { thread_id, title, last_seq: seq, messages: its.length, readers: told, last, unread: 0 };
}

function readHistory(index, { thread_id, before = Infinity, after = 0, limit = 50 }) {
  const its = index.threads.get(thread_id);
  if (!its) throw new Refused("unknown_message", `There is nothing of a thread ${thread_id} in this recording.`);
  const found = its.filter((it) => it.seq < before && it.seq > after);
  return { messages: after ? found.slice(0, limit) : found.slice(-limit), has_more: found.length > limit };
}

function search(index, { query, thread_id, before = Infinity, limit = 20 }) {
  const { terms, sender_id, said_after = 0, said_before = Infinity } = readQuery(query);
  if (Number.isNaN(said_after) || Number.isNaN(said_before)) throw new Refused("invalid_arguments", "Write a date as 2026-11-27.");
  if (!terms.length) throw new Refused("invalid_arguments", "Search for words: letters or digits.");
  const holds = (words) => terms.every((term) => words.some((it) => fits(it, term)));
  const found = [];
  for (const message of [...index.bySeq.values()].reverse()) {
    if (found.length > limit) break;
    if (message.seq >= before || (thread_id && message.thread_id !== thread_id)) continue;
    if (message.sent_at < said_after || message.sent_at >= said_before || (sender_id && message.sender_id !== sender_id)) continue;
    if (!index.words.has(message.seq)) index.words.set(message.seq, listWords(textOf(message)));
    if (holds(index.words.get(message.seq))) found.push(message);
  }
  const has_more = found.length > limit;
  const messages = found.slice(0, limit).reverse();
  return { messages, has_more, ...(has_more && { next: messages[0].seq }) };
}

// --- causes

/** The reaction that a message was sent in: of the agent's to its cause, the newest that was open then. */
function findReaction(index, { sender_id, cause, seq }) {
  const begun = (index.begun.get(cause) ?? []).filter((it) => it.of.agent_id === sender_id && it.seq < seq);
  const open = begun.filter((it) => !it.of.finished.some((at) => it.seq < at && at < seq));
  const found = open.sort((one, other) => one.seq - other.seq).at(-1);
  return found && { reaction: found.of.reaction, agent_id: sender_id, trigger: cause, seq: found.seq };
}

function readChain(index, message) {
  const chain = [];
  for (let it = message; it; it = index.bySeq.get(it.cause)) {
    chain.push(it);
    const sentIn = it.cause && findReaction(index, it);
    if (sentIn) chain.push(sentIn);
  }
  return chain;
}

function followFrom({ messages, head }, index, { seq, root }) {
  const follows = new Set([seq]);
  const found = messages.filter((it) => it.seq > seq && it.root === root && follows.has(it.cause) && follows.add(it.seq));
  const reactions = groupBy(found.map((it) => findReaction(index, it)).filter(Boolean), (it) => `${it.agent_id} ${it.reaction}`);
  return { messages: found, reactions: [...reactions.values()].map((it) => it[0]), next: head, has_more: false };
}

/** What became of a message with those agents in whose prompts it came; of others a log does not tell. */
function listFates(index, { seq }) {
  const first = groupBy((index.begun.get(seq) ?? []).sort((one, other) => one.seq - other.seq), (it) => it.of.agent_id);
  const fates = new Map([...first].map(([agent_id, its]) => [agent_id, its[0].of]));
  const newest = new Map([...first].map(([agent_id, its]) => [agent_id, its.at(-1).of]));
  index.held ??= groupBy(index.reactions.flatMap((of) => listManifest(of).map((it) => ({ it, of }))), (held) => held.it);
  for (const { of } of index.held.get(seq) ?? []) if (!fates.has(of.agent_id)) fates.set(of.agent_id, of);
  const describe = ([agent_id, of]) => {
    const told = { agent_id, state: "in_prompt", attempts: 1, reaction: of.reaction, reaction_status: tellStatus(of) };
    const next = newest.get(agent_id) ?? of;
    if (next === of || !["open", "cancelled"].includes(told.reaction_status)) return told;
    // a person had taken the thread over
    return { ...told, reaction_status: "cancelled", again: { reaction: next.reaction, reaction_status: tellStatus(next) } };
  };
  return [...fates].sort(([one], [other]) => (one < other ? -1 : 1)).map(describe);
}

const listManifest = (of) => of.started.flatMap((it) => (Array.isArray(it.body.manifest) ? it.body.manifest : []));

function tellStatus({ records, finished }) {
  const told = records.find((it) => it.kind === "finished" && isObject(it.body))?.body.status;
  return finished.length ? (STATUSES.includes(told) ? told : "finished") : "open";
}

// --- what models used

function readUsage(index, { agent_id: asked, after = 0 }) {
  const ids = [...new Set(index.reactions.map((it) => it.agent_id))].sort();
  const agent_id = asked ?? ids[0] ?? null;
  const own = index.reactions.filter((it) => it.agent_id === agent_id);
  const calls = own.flatMap((of) => of.records.filter((it) => CHARGED.includes(it.kind) && it.seq > after).map((it) => describeCall(of, it)));
  const reactions = Object.fromEntries(own.map((of) => [of.reaction, placeReaction(index, of)]).filter(([, it]) => it));
  return { agent_id, calls: calls.sort((one, other) => one.seq - other.seq), reactions, has_more: false, next_agent: ids.find((it) => it > agent_id) ?? null };
}

function placeReaction(index, of) {
  const trigger = index.bySeq.get(of.begun[0]?.[1] === of.seq ? of.begun[0][0] : 0);
  if (!trigger) return null;
  const sentIn = trigger.cause && findReaction(index, trigger);
  return { trigger: trigger.seq, thread_id: trigger.thread_id, root: trigger.root, ...(sentIn && { sent_in: sentIn.reaction }) };
}

const cut = (it) => (typeof it === "string" ? it.slice(0, 128) : "");
const orEmpty = (it) => (isObject(it) ? it : {});

function describeCall(of, { seq, at, kind, body: given }) {
  const body = orEmpty(given);
  const reply = orEmpty(body.reply);
  const calls = Array.isArray(reply.tool_calls) ? reply.tool_calls.filter(isObject) : [];
  const used = Array.isArray(body.used) ? body.used.filter((it) => isObject(it) && isObject(it.usage)) : [];
  return {
    seq,
    at,
    kind,
    reaction: of.reaction,
    path: cut(body.path),
    turn: body.turn ?? null,
    agent: cut(body.agent),
    model: cut(reply.model),
    usage: orEmpty(kind === "model_reply" ? reply.usage : body.usage),
    tools: calls.map((it) => cut(it.name)),
    used: used.map((it) => ({ model: cut(it.model), usage: it.usage })),
  };
}
