/**
 * Live activity: participants who think, type or view a thread, running calls, and texts that are being written. Live
 * activity is a part of the page's state (`state.live_activity`), and changes through a `Draft`.
 * roundelay/live_activity.py follows the same rules in terminals.
 *
 * Signals may be lost, and anybody may send signals. Only the sender id is trusted, because the hub sets this id. A
 * malformed signal is ignored, and everything is bounded. When a limit is reached, an entry of the agent with the most
 * entries is removed. This module uses neither the DOM nor a clock, because each event contains its time.
 */

import { bound } from "#core/draft.js";
import { isObject } from "#core/json.js";
import { saidOf, splitWord } from "#core/text.js";

const TYPING_SHOWN_MS = 6_000;
const VIEWING_SHOWN_MS = 30_000;
const MAX_WORKS = 256; // maximum number of reactions
const MAX_WRITING = 32; // maximum number of reactions that are writing a text
const MAX_CALLS = 32; // maximum number of running calls of one reaction
const MAX_DONE = 256;
const MAX_STREAMS = 64;
const MAX_UNDECIDED = 1000;
const MAX_PEOPLE = 256; // maximum number of people who type or view a thread
const MAX_CHARS = 8000;
const MAX_REPORT_CHARS = 500;
const MAX_ID_CHARS = 128;
const MAX_PATH_CHARS = 80;
const MAX_NAME_CHARS = 64;
const MAX_ASKED = 16;
const MAX_PIECES = 64;
const MAX_NUMBER = 2 ** 31;
const GAP = " … ";
const PATH = /^[0-9]{1,9}\.[0-9]{1,9}(\.[0-9]{1,9})?(\/[0-9]{1,9}\.[0-9]{1,9}(\.[0-9]{1,9})?)*$/;

/**
 * works: by "agent reaction": {agent_id, reaction, thread_id, is_thinking, is_listed (known from the agent list, not from a signal),
 *   calls: {path: {tool, asked}}, streams: [{path, turn, kind, call, tool, text, end}] (last written last), done: [paths], said}.
 * ended: keys of ended reactions; later signals of these are ignored. undecided: requests for approval, by seq.
 * silent: by thread, the agents that finished without an answer since the last message there.
 * typing, viewing: by "thread person": the time (ms) at which the entry expires.
 */
export const createLiveActivity = () => ({
  works: {}, ended: [], undecided: {}, decided: {}, refused: {}, typing: {}, viewing: {}, silent: {},
});

// --- queries

/** Return the running reactions of a thread. */
export const listWorks = (liveActivity, threadId) =>
  Object.values(liveActivity.works).filter((work) => work.thread_id === threadId);

/** Return the reactions that are writing a text in a thread. A reaction that waits for a decision is not writing. */
export const listWriting = (liveActivity, threadId) =>
  listWorks(liveActivity, threadId).filter((work) => work.streams.length && !isAsking(liveActivity, work));

/** Return whether a reaction waits for a person's decision. */
export const isAsking = (liveActivity, { agent_id, reaction }) =>
  Object.values(liveActivity.undecided).some((request) => request.agent_id === agent_id && request.reaction === reaction);

/** Return the ids of the agents that are thinking, in one thread or in any thread. */
export function listThinking(liveActivity, threadId) {
  const works = Object.values(liveActivity.works);
  const thinking = works.filter((work) => work.is_thinking && (threadId === undefined || work.thread_id === threadId));
  return [...new Set(thinking.map((work) => work.agent_id))].sort();
}

export const listTyping = (liveActivity, threadId) => listPeople(liveActivity.typing, threadId);
export const listViewing = (liveActivity, threadId) => listPeople(liveActivity.viewing, threadId);

/** Return the actors at a path of a reaction: its agent, and the tools or agents that were called along the path. */
export function listActors(work, path) {
  return [work.agent_id, ...outerPaths(path).map((path) => nameRun(work, path))];
}

/** Return the innermost running calls as [path, call]. */
export function listInnermost(work) {
  const calls = Object.entries(work.calls);
  return calls.filter(([path]) => !calls.some(([other]) => other !== path && isInside(other, path)));
}

function nameRun(work, runPath) {
  let path = runPath;
  let number = 0;
  if (!(path in work.calls)) {
    const cut = path.lastIndexOf(".");
    number = Number(path.slice(cut + 1));
    path = path.slice(0, cut);
  }
  const call = work.calls[path];
  const names = call === undefined ? [] : call.asked.length ? call.asked : [call.tool];
  return names[number] ?? "…";
}

const listPeople = (people, threadId) =>
  Object.keys(people).filter((key) => key.startsWith(`${threadId} `)).map((key) => key.slice(threadId.length + 1)).sort();

// --- events

/** Apply a signal that arrived at the time `at` (ms). */
export function applySignal(draft, signal, at) {
  const body = isObject(signal.body) ? signal.body : {};
  const { sender_id: sender, thread_id: threadId, kind } = signal;
  if (kind === "typing" || kind === "viewing") {
    const isOver = body.active === false;
    const shown = kind === "typing" ? TYPING_SHOWN_MS : VIEWING_SHOWN_MS;
    const people = draft.own("live_activity", kind);
    // Remove the entry first. A repeated signal then moves to the end of the list, and `bound` removes entries from the
    // start.
    delete people[`${threadId} ${sender}`];
    if (!isOver) people[`${threadId} ${sender}`] = at + shown;
    bound(people, MAX_PEOPLE);
  } else if (typeof body.reaction === "string" && body.reaction.length <= MAX_ID_CHARS) {
    applyReactionSignal(draft, keyOf(sender, body.reaction), signal, body);
  }
}

/** Remove people whose typing or viewing signal was not repeated in time. */
export function expirePeople(draft, at) {
  for (const kind of ["typing", "viewing"]) {
    for (const [key, until] of Object.entries(draft.state.live_activity[kind])) {
      if (until <= at) delete draft.own("live_activity", kind)[key];
    }
  }
}

/** Apply a message. A message ends the text that its sender was writing, and may be a request for approval or a
 * decision.
 */
export function applyMessage(draft, message) {
  if (message.thread_id in draft.state.live_activity.silent) delete draft.own("live_activity", "silent")[message.thread_id];
  for (const [key, work] of Object.entries(draft.state.live_activity.works)) {
    if (work.agent_id === message.sender_id && work.thread_id === message.thread_id) endTexts(draft, key);
  }
  const typist = `${message.thread_id} ${message.sender_id}`;
  if (typist in draft.state.live_activity.typing) delete draft.own("live_activity", "typing")[typist];
  const asks = message.metadata?.approval?.reaction;
  const stillWaits = message.metadata?.still_waits;
  if (typeof asks === "string") {
    const undecided = draft.own("live_activity", "undecided");
    const { seq, sender_id, thread_id } = message;
    const named = message.metadata.approval.deciders;
    const deciders = Array.isArray(named) ? { deciders: named.filter((item) => typeof item === "string") } : {};
    undecided[seq] = { seq, agent_id: sender_id, reaction: asks, thread_id, ...deciders };
    bound(undecided, MAX_UNDECIDED);
  } else if (isDecidedElsewhere(message)) {
    // Accept the report only from the agent that asked, because any agent can write it.
    const { request } = message.metadata.decided;
    if (draft.state.live_activity.undecided[request]?.agent_id === message.sender_id) applyDecision(draft, request, message.seq);
  } else if (message.reply_to !== undefined && isDecision(message)) {
    const deciders = draft.state.live_activity.undecided[message.reply_to]?.deciders;
    if (deciders === undefined || deciders.includes(message.sender_id)) applyDecision(draft, message.reply_to, message.seq);
  } else if (message.reply_to !== undefined && Number.isInteger(stillWaits)) {
    restoreRequest(draft, message.sender_id, message.reply_to);
  }
}

/** Return whether a message reports a decision that people made in another thread. */
function isDecidedElsewhere({ sender_kind, metadata }) {
  const decided = metadata?.decided;
  const isWhole = Number.isInteger(decided?.request) && typeof decided.is_approved === "boolean" && Number.isInteger(decided.seq) && Number.isInteger(decided.at);
  return sender_kind === "agent" && isWhole && Array.isArray(decided.by) && typeof decided.by[0] === "string";
}

/** Return whether a message is a person's decision about the request that it replies to. */
export function isDecision(message) {
  if (message.sender_kind !== "human") return false;
  const [word, rest] = splitWord(saidOf(message));
  return word === "/approve" || word === "/deny" || (word === "/edit" && rest !== "");
}

/** Remove requests that the hub no longer lists, because no agent waits for them. @param {number[]} seqs */
export function removeRequests(draft, seqs) {
  for (const seq of seqs) {
    if (seq in draft.state.live_activity.undecided) delete draft.own("live_activity", "undecided")[seq];
  }
}

/** Remove the work of an agent that went offline. */
export function removeWorkOf(draft, agentId) {
  for (const [key, work] of Object.entries(draft.state.live_activity.works)) {
    if (work.agent_id === agentId) delete draft.own("live_activity", "works")[key];
  }
}

/** Forget all running work. The signals that end the work may be lost with the connection. */
export function clearWork(draft) {
  const liveActivity = draft.own("live_activity");
  Object.assign(liveActivity, { works: {}, typing: {}, viewing: {} });
}

/** Apply the work that `network.list_agents` reports. Work that was known only from this list and is no longer listed
 * has ended. An operator gets no signals from other people's conversations, and therefore needs the list. */
export function applyWork(draft, agents) {
  const listed = new Map();
  for (const agent of agents) {
    for (const work of agent.work ?? []) {
      const isAtWork = work.activity === "works" || work.activity === "stopping";
      if (isAtWork) listed.set(keyOf(agent.agent_id, work.reaction), work.thread_id);
    }
  }
  for (const [key, work] of Object.entries(draft.state.live_activity.works)) {
    if (work.is_listed && !listed.has(key)) delete draft.own("live_activity", "works")[key];
  }
  const isOver = ({ activity, work = [], open_reactions: open = 0 }, reaction) =>
    activity !== undefined && open <= work.length && !work.some((work) => work.reaction === reaction);
  const byId = new Map(agents.map((agent) => [agent.agent_id, agent]));
  const ended = Object.values(draft.state.live_activity.undecided).filter((request) => isOver(byId.get(request.agent_id) ?? {}, request.reaction));
  removeRequests(draft, ended.map((item) => item.seq));
  for (const [key, threadId] of listed) {
    if (key in draft.state.live_activity.works || draft.state.live_activity.ended.includes(key)) continue;
    Object.assign(findWork(draft, key, threadId), { is_thinking: true, is_listed: true });
  }
}

function applyDecision(draft, request, by) {
  const pending = draft.state.live_activity.undecided[request];
  if (pending === undefined || `${pending.agent_id} ${by}` in draft.state.live_activity.refused) return;
  delete draft.own("live_activity", "undecided")[request];
  const decided = draft.own("live_activity", "decided");
  decided[by] = pending;
  bound(decided, MAX_WORKS);
}

function restoreRequest(draft, agentId, decision) {
  const refused = draft.own("live_activity", "refused");
  // Remember the refused decision, because the report may arrive before the decision itself.
  refused[`${agentId} ${decision}`] = true;
  bound(refused, MAX_WORKS);
  const pending = draft.state.live_activity.decided[decision];
  if (pending?.agent_id === agentId) {
    delete draft.own("live_activity", "decided")[decision];
    draft.own("live_activity", "undecided")[pending.seq] = pending;
  }
}

function applyReactionSignal(draft, key, signal, body) {
  const { ended, undecided } = draft.state.live_activity;
  const isEnded = ended.includes(key);
  if (signal.kind === "thinking" && body.active === false) {
    delete draft.own("live_activity", "works")[key]; // the agent's message, if any, replaces the work
    for (const request of Object.values(undecided)) {
      if (keyOf(request.agent_id, request.reaction) === key) delete draft.own("live_activity", "undecided")[request.seq];
    }
    // Remember that the reaction has ended. Signals may arrive in any order, and a late signal would show the work
    // again forever.
    if (!isEnded) draft.own("live_activity").ended = [...ended, key].slice(-MAX_WORKS);
    if (!isEnded && body.silent === true) recordSilence(draft, signal.sender_id, signal.thread_id);
  } else if (signal.kind === "thinking" && body.active === true) {
    if (isEnded) draft.own("live_activity").ended = ended.filter((item) => item !== key); // the reaction is resumed
    findSignaledWork(draft, key, signal.thread_id).is_thinking = true;
  } else if (isEnded) {
    return;
  } else if (signal.kind === "tool") {
    const seen = readCall(body);
    if (seen !== null) applyCall(findSignaledWork(draft, key, signal.thread_id), seen);
  } else if (signal.kind === "delta" && Array.isArray(body.pieces)) {
    const work = findSignaledWork(draft, key, signal.thread_id);
    if (!work.streams.length) makeRoomToWrite(draft);
    for (const piece of readPieces(body.pieces)) appendPiece(work, piece);
  }
}

/** Record that an agent finished without an answer although a person waits for one. */
function recordSilence(draft, agentId, threadId) {
  const silent = draft.own("live_activity", "silent");
  const named = (silent[threadId] ?? []).filter((id) => id !== agentId);
  delete silent[threadId]; // move the entry to the end, where the newest entries are
  silent[threadId] = [...named, agentId].slice(-MAX_CALLS);
  bound(silent, MAX_WORKS);
}

/** Return the work to which a signal belongs. The work is created if it does not exist. */
function findSignaledWork(draft, key, threadId) {
  const work = findWork(draft, key, threadId);
  work.is_listed = false;
  return work;
}

function findWork(draft, key, threadId) {
  if (!(key in draft.state.live_activity.works)) {
    const works = draft.own("live_activity", "works");
    if (Object.keys(works).length >= MAX_WORKS) delete works[chooseToDrop(Object.entries(works))];
    const [agent, reaction] = splitKey(key);
    works[key] = {
      agent_id: agent, reaction, thread_id: threadId, is_thinking: false, is_listed: false, calls: {}, streams: [], done: [], said: 0,
    };
  }
  return draft.own("live_activity", "works", key);
}

function makeRoomToWrite(draft) {
  const writing = Object.entries(draft.state.live_activity.works).filter(([, value]) => value.streams.length);
  if (writing.length >= MAX_WRITING) draft.own("live_activity", "works", chooseToDrop(writing)).streams = [];
}

/** Return the key of the work to remove: the oldest work of the agent with the most work. A flood from one agent then
 * does not remove the work of another. */
function chooseToDrop(works) {
  const counts = new Map();
  for (const [, work] of works) counts.set(work.agent_id, (counts.get(work.agent_id) ?? 0) + 1);
  const most = Math.max(...counts.values());
  return works.find(([, value]) => counts.get(value.agent_id) === most)[0];
}

// --- one reaction (the draft owns `work`; its lists are replaced and never changed)

function applyCall(work, seen) {
  const path = pathOfCall(seen.path, seen.turn, seen.call);
  if (seen.is_active) {
    if (path in work.calls || Object.keys(work.calls).length < MAX_CALLS) {
      work.calls = { ...work.calls, [path]: { tool: seen.tool, asked: seen.asked } };
    }
    return;
  }
  work.calls = Object.fromEntries(Object.entries(work.calls).filter(([other]) => !isInside(other, path)));
  work.done = [...work.done, path].slice(-MAX_DONE);
  work.streams = work.streams.filter((stream) => !isOver(work, stream));
}

function endTexts(draft, key) {
  const current = draft.state.live_activity.works[key];
  const texts = current.streams.filter((stream) => stream.kind === "text" && !stream.path);
  if (!texts.length) return;
  const work = draft.own("live_activity", "works", key);
  work.said = Math.max(work.said, ...texts.map((message) => message.turn));
  work.streams = work.streams.filter((stream) => !texts.includes(stream));
}

function appendPiece(work, piece) {
  const { path, turn, kind, call } = piece;
  if (isOver(work, piece)) return;
  const isSame = (stream) => stream.path === path && stream.turn === turn && stream.kind === kind && stream.call === call;
  const previous = work.streams.find(isSame);
  let others = work.streams.filter((stream) => !isSame(stream));
  const next = { path, turn, kind, call, tool: previous?.tool ?? piece.tool, text: "", end: 0 };
  if (kind === "progress") {
    next.text = piece.text.slice(0, MAX_REPORT_CHARS);
    work.streams = piece.is_done ? others : [...others, next].slice(-MAX_STREAMS);
    return;
  }
  if (previous === undefined) others = others.filter((other) => !isPast(other, piece));
  let text = previous?.text ?? "";
  const end = previous?.end ?? 0;
  if (piece.at < end) text = ""; // the model's first attempt failed, so the text starts again
  else if (piece.at > end) text += GAP; // a piece was lost
  next.text = (text + piece.text).slice(-MAX_CHARS);
  next.end = piece.at + [...piece.text].length; // counted in characters, as the sender counts
  work.streams = [...others, next].slice(-MAX_STREAMS);
}

/** Return whether a stream has ended. A stream ends when its call or an outer call is done, or when its text arrives as
 * a message. */
function isOver(work, { path, turn, kind, call }) {
  if (kind === "text" && !path && turn <= work.said) return true;
  const paths = outerPaths(call === null ? path : pathOfCall(path, turn, call));
  return paths.some((path) => work.done.includes(path) || work.done.includes(path.slice(0, path.lastIndexOf("."))));
}

/** Return whether a stream ends because a newer stream of the same run has begun. */
const isPast = (stream, newer) =>
  stream.path === newer.path &&
  (stream.turn < newer.turn || (stream.turn === newer.turn && stream.kind === "reasoning" && newer.kind === "text"));

// --- validation

function readCall(body) {
  const place = readPlace(body);
  const tool = body.tool === undefined ? "a tool" : body.tool;
  if (place === null || typeof tool !== "string" || typeof body.active !== "boolean") return null;
  const asked = Array.isArray(body.asked) ? body.asked.filter((id) => typeof id === "string").slice(0, MAX_ASKED) : [];
  return { ...place, call: place.call ?? 0, tool: readName(tool), is_active: body.active, asked: asked.map(readName) };
}

function* readPieces(pieces) {
  for (const piece of pieces.slice(0, MAX_PIECES)) {
    if (!isObject(piece) || !["text", "reasoning", "tool", "progress"].includes(piece.kind)) continue;
    const place = readPlace(piece);
    if (place === null || !isNumber(piece.turn) || !isNumber(piece.at) || typeof piece.text !== "string") continue;
    yield { ...place, kind: piece.kind, at: piece.at, text: piece.text, tool: readName(piece.tool === undefined ? "" : piece.tool), is_done: piece.is_done === true };
  }
}

function readPlace(body) {
  const path = body.path || "";
  const turn = body.turn || 0;
  const call = body.call ?? null;
  if (typeof path !== "string" || !isNumber(turn) || !(call === null || isNumber(call))) return null;
  const whole = pathOfCall(path, turn, call ?? 0);
  return whole.length <= MAX_PATH_CHARS && PATH.test(whole) ? { path, turn, call } : null;
}

const isNumber = (value) => Number.isInteger(value) && value >= 0 && value <= MAX_NUMBER;
const readName = (value) => (typeof value === "string" ? value.slice(0, MAX_NAME_CHARS) : "…");
const keyOf = (agentId, reaction) => `${agentId} ${reaction}`; // ids cannot contain spaces
const splitKey = (key) => [key.slice(0, key.indexOf(" ")), key.slice(key.indexOf(" ") + 1)];
const pathOfCall = (outer, turn, call) => (outer ? `${outer}/${turn}.${call}` : `${turn}.${call}`);
const isInside = (path, call) => `${path}/`.startsWith(`${call}/`) || path.startsWith(`${call}.`);

function outerPaths(path) {
  const parts = path ? path.split("/") : [];
  return parts.map((_, place) => parts.slice(0, place + 1).join("/"));
}
