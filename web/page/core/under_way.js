/**
 * What is under way: who thinks, types or looks, which calls run, what is being written. The twin of
 * roundelay/under_way.py, as a part of the page's state (`state.under_way`), changed through a `Draft`.
 *
 * Signals may be lost, and they are anybody's to send: an agent is known by its own id whatever it claims, what is
 * malformed is passed over, and all that is kept is bounded; where there is too much, whoever has the most of it loses
 * some. No DOM, no clock: the time of an event is given.
 */

import { bound } from "#core/draft.js";
import { isObject } from "#core/json.js";
import { saidOf, splitWord } from "#core/text.js";

const TYPING_SHOWN_MS = 6_000;
const VIEWING_SHOWN_MS = 30_000;
const MAX_WORKS = 256; // reactions under way
const MAX_WRITING = 32; // those of them that write
const MAX_CALLS = 32; // under way, of one reaction
const MAX_DONE = 256;
const MAX_STREAMS = 64;
const MAX_UNDECIDED = 1000;
const MAX_PEOPLE = 256; // that type, or look at a thread
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
 * works: by "agent reaction": {agent_id, reaction, thread_id, is_thinking, is_listed (no signal told of it), calls: {path: {tool, asked}},
 *   streams: [{path, turn, kind, call, tool, text, end}] (the one written last stands last), done: [paths], said}.
 * ended: keys of reactions of which what still comes is too late. undecided: requests by seq that wait for a person.
 * silent: by thread, the agents that have finished without an answer, until something is said there.
 * typing, viewing: by "thread person": the time (ms) at which that is over.
 */
export const createUnderWay = () => ({
  works: {}, ended: [], undecided: {}, decided: {}, refused: {}, typing: {}, viewing: {}, silent: {},
});

// --- what there is

/** The reactions in a thread that are under way. */
export const listWorks = (underWay, threadId) =>
  Object.values(underWay.works).filter((it) => it.thread_id === threadId);

/** Those of them that have texts which grow; what waits for a decision writes nothing more. */
export const listWriting = (underWay, threadId) =>
  listWorks(underWay, threadId).filter((it) => it.streams.length && !isAsking(underWay, it));

/** Whether a reaction waits for a person's decision. */
export const isAsking = (underWay, { agent_id, reaction }) =>
  Object.values(underWay.undecided).some((it) => it.agent_id === agent_id && it.reaction === reaction);

/** The ids of those who think, in a thread or anywhere. */
export function listThinking(underWay, threadId) {
  const works = Object.values(underWay.works);
  const thinking = works.filter((it) => it.is_thinking && (threadId === undefined || it.thread_id === threadId));
  return [...new Set(thinking.map((it) => it.agent_id))].sort();
}

export const listTyping = (underWay, threadId) => listPeople(underWay.typing, threadId);
export const listViewing = (underWay, threadId) => listPeople(underWay.viewing, threadId);

/** Who is at work at a path of a reaction: its agent, and what it called, or asked, on the way there. */
export function who(work, path) {
  return [work.agent_id, ...outerPaths(path).map((it) => nameRun(work, it))];
}

/** The calls under way, [path, call] each, that have no other one inside of them. */
export function listInnermost(work) {
  const calls = Object.entries(work.calls);
  return calls.filter(([path]) => !calls.some(([other]) => other !== path && isInside(other, path)));
}

function nameRun(work, given) {
  let path = given;
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
  Object.keys(people).filter((it) => it.startsWith(`${threadId} `)).map((it) => it.slice(threadId.length + 1)).sort();

// --- what is told

/** Take a signal at a time (ms). */
export function takeSignal(draft, signal, at) {
  const body = isObject(signal.body) ? signal.body : {};
  const { sender_id: sender, thread_id: threadId, kind } = signal;
  if (kind === "typing" || kind === "viewing") {
    const isOver = body.active === false;
    const shown = kind === "typing" ? TYPING_SHOWN_MS : VIEWING_SHOWN_MS;
    const people = draft.own("under_way", kind);
    delete people[`${threadId} ${sender}`];
    if (!isOver) people[`${threadId} ${sender}`] = at + shown;
    bound(people, MAX_PEOPLE);
  } else if (typeof body.reaction === "string" && body.reaction.length <= MAX_ID_CHARS) {
    takeReaction(draft, keyOf(sender, body.reaction), signal, body);
  }
}

/** Let go what is over by now: who typed or looked and did not say so again. */
export function takeTick(draft, at) {
  for (const kind of ["typing", "viewing"]) {
    for (const [key, until] of Object.entries(draft.state.under_way[kind])) {
      if (until <= at) delete draft.own("under_way", kind)[key];
    }
  }
}

/** What its sender was writing is a message now; and it may ask for a person's decision, or be one. */
export function takeSaid(draft, message) {
  if (message.thread_id in draft.state.under_way.silent) delete draft.own("under_way", "silent")[message.thread_id];
  for (const [key, work] of Object.entries(draft.state.under_way.works)) {
    if (work.agent_id === message.sender_id && work.thread_id === message.thread_id) takeTextAway(draft, key);
  }
  const typist = `${message.thread_id} ${message.sender_id}`;
  if (typist in draft.state.under_way.typing) delete draft.own("under_way", "typing")[typist];
  const asks = message.metadata?.approval?.reaction;
  const stillWaits = message.metadata?.still_waits;
  if (typeof asks === "string") {
    const undecided = draft.own("under_way", "undecided");
    const { seq, sender_id, thread_id } = message;
    const named = message.metadata.approval.deciders;
    const deciders = Array.isArray(named) ? { deciders: named.filter((it) => typeof it === "string") } : {};
    undecided[seq] = { seq, agent_id: sender_id, reaction: asks, thread_id, ...deciders };
    bound(undecided, MAX_UNDECIDED);
  } else if (isDecidedElsewhere(message)) {
    const { request } = message.metadata.decided; // another agent may claim anything
    if (draft.state.under_way.undecided[request]?.agent_id === message.sender_id) takeDecision(draft, request, message.seq);
  } else if (message.reply_to !== undefined && isDecision(message)) {
    const deciders = draft.state.under_way.undecided[message.reply_to]?.deciders;
    if (deciders === undefined || deciders.includes(message.sender_id)) takeDecision(draft, message.reply_to, message.seq);
  } else if (message.reply_to !== undefined && Number.isInteger(stillWaits)) {
    waitOn(draft, message.sender_id, message.reply_to);
  }
}

/** Whether an agent says that people decided elsewhere on a request. */
function isDecidedElsewhere({ sender_kind, metadata }) {
  const told = metadata?.decided;
  const isWhole = Number.isInteger(told?.request) && typeof told.is_approved === "boolean" && Number.isInteger(told.seq) && Number.isInteger(told.at);
  return sender_kind === "agent" && isWhole && Array.isArray(told.by) && typeof told.by[0] === "string";
}

/** Whether a message is a person's decision on the request that it answers. */
export function isDecision(message) {
  if (message.sender_kind !== "human") return false;
  const [word, rest] = splitWord(saidOf(message));
  return word === "/approve" || word === "/deny" || (word === "/edit" && rest !== "");
}

/** Requests that the hub has listed and lists no more: nobody waits for a decision on them. @param {number[]} seqs */
export function takeUnlisted(draft, seqs) {
  for (const seq of seqs) {
    if (seq in draft.state.under_way.undecided) delete draft.own("under_way", "undecided")[seq];
  }
}

/** An agent is gone: it is at nothing any more. */
export function takeOffline(draft, agentId) {
  for (const [key, work] of Object.entries(draft.state.under_way.works)) {
    if (work.agent_id === agentId) delete draft.own("under_way", "works")[key];
  }
}

/** The connection is lost, or there again: signals that end what is under way may be lost with it. */
export function takeLoss(draft) {
  const underWay = draft.own("under_way");
  Object.assign(underWay, { works: {}, typing: {}, viewing: {} });
}

/** Take what agents are at, as `network.list_agents` tells it: what was known from there alone and is no longer told is
 * over. (To an operator no signal tells of others' conversations.) */
export function takeWork(draft, agents) {
  const told = new Map();
  for (const agent of agents) {
    for (const it of agent.work ?? []) {
      const isAtWork = it.activity === "works" || it.activity === "stopping";
      if (isAtWork) told.set(keyOf(agent.agent_id, it.reaction), it.thread_id);
    }
  }
  for (const [key, work] of Object.entries(draft.state.under_way.works)) {
    if (work.is_listed && !told.has(key)) delete draft.own("under_way", "works")[key];
  }
  const isOver = ({ activity, work = [], open_reactions: open = 0 }, reaction) =>
    activity !== undefined && open <= work.length && !work.some((it) => it.reaction === reaction);
  const byId = new Map(agents.map((it) => [it.agent_id, it]));
  const ended = Object.values(draft.state.under_way.undecided).filter((it) => isOver(byId.get(it.agent_id) ?? {}, it.reaction));
  takeUnlisted(draft, ended.map((it) => it.seq));
  for (const [key, threadId] of told) {
    if (key in draft.state.under_way.works || draft.state.under_way.ended.includes(key)) continue;
    Object.assign(findWork(draft, key, threadId), { is_thinking: true, is_listed: true });
  }
}

function takeDecision(draft, request, by) {
  const known = draft.state.under_way.undecided[request];
  if (known === undefined || `${known.agent_id} ${by}` in draft.state.under_way.refused) return;
  delete draft.own("under_way", "undecided")[request];
  const decided = draft.own("under_way", "decided");
  decided[by] = known;
  bound(decided, MAX_WORKS);
}

function waitOn(draft, agentId, decision) {
  const refused = draft.own("under_way", "refused");
  refused[`${agentId} ${decision}`] = true;
  bound(refused, MAX_WORKS);
  const known = draft.state.under_way.decided[decision];
  if (known?.agent_id === agentId) {
    delete draft.own("under_way", "decided")[decision];
    draft.own("under_way", "undecided")[known.seq] = known;
  }
}

function takeReaction(draft, key, signal, body) {
  const { ended, undecided } = draft.state.under_way;
  const isEnded = ended.includes(key);
  if (signal.kind === "thinking" && body.active === false) {
    delete draft.own("under_way", "works")[key]; // its message, if there is one, says the rest
    for (const it of Object.values(undecided)) {
      if (keyOf(it.agent_id, it.reaction) === key) delete draft.own("under_way", "undecided")[it.seq];
    }
    if (!isEnded) draft.own("under_way").ended = [...ended, key].slice(-MAX_WORKS);
    if (!isEnded && body.silent === true) takeSilence(draft, signal.sender_id, signal.thread_id);
  } else if (signal.kind === "thinking" && body.active === true) {
    if (isEnded) draft.own("under_way").ended = ended.filter((it) => it !== key); // it is taken up again
    hear(draft, key, signal.thread_id).is_thinking = true;
  } else if (isEnded) {
    return;
  } else if (signal.kind === "tool") {
    const seen = readCall(body);
    if (seen !== null) takeCall(hear(draft, key, signal.thread_id), seen);
  } else if (signal.kind === "delta" && Array.isArray(body.pieces)) {
    const work = hear(draft, key, signal.thread_id);
    if (!work.streams.length) makeRoomToWrite(draft);
    for (const piece of readPieces(body.pieces)) takePiece(work, piece);
  }
}

/** An agent has nothing to say to who waits for it. */
function takeSilence(draft, agentId, threadId) {
  const silent = draft.own("under_way", "silent");
  const named = (silent[threadId] ?? []).filter((it) => it !== agentId);
  delete silent[threadId]; // so that it is the newest
  silent[threadId] = [...named, agentId].slice(-MAX_CALLS);
  bound(silent, MAX_WORKS);
}

/** A work of which a signal tells. */
function hear(draft, key, threadId) {
  const work = findWork(draft, key, threadId);
  work.is_listed = false;
  return work;
}

function findWork(draft, key, threadId) {
  if (!(key in draft.state.under_way.works)) {
    const works = draft.own("under_way", "works");
    if (Object.keys(works).length >= MAX_WORKS) delete works[chooseOne(Object.entries(works))];
    const [agent, reaction] = splitKey(key);
    works[key] = {
      agent_id: agent, reaction, thread_id: threadId, is_thinking: false, is_listed: false, calls: {}, streams: [], done: [], said: 0,
    };
  }
  return draft.own("under_way", "works", key);
}

function makeRoomToWrite(draft) {
  const writing = Object.entries(draft.state.under_way.works).filter(([, it]) => it.streams.length);
  if (writing.length >= MAX_WRITING) draft.own("under_way", "works", chooseOne(writing)).streams = [];
}

/** The oldest of whoever has the most: nobody's flood takes another one's away. */
function chooseOne(works) {
  const counts = new Map();
  for (const [, it] of works) counts.set(it.agent_id, (counts.get(it.agent_id) ?? 0) + 1);
  const most = Math.max(...counts.values());
  return works.find(([, it]) => counts.get(it.agent_id) === most)[0];
}

// --- one reaction (`work` is owned; its lists are replaced, never written to)

function takeCall(work, seen) {
  const path = pathOfCall(seen.path, seen.turn, seen.call);
  if (seen.is_active) {
    if (path in work.calls || Object.keys(work.calls).length < MAX_CALLS) {
      work.calls = { ...work.calls, [path]: { tool: seen.tool, asked: seen.asked } };
    }
    return;
  }
  work.calls = Object.fromEntries(Object.entries(work.calls).filter(([other]) => !isInside(other, path)));
  work.done = [...work.done, path].slice(-MAX_DONE);
  work.streams = work.streams.filter((it) => !isOver(work, it));
}

function takeTextAway(draft, key) {
  const known = draft.state.under_way.works[key];
  const said = known.streams.filter((it) => it.kind === "text" && !it.path);
  if (!said.length) return;
  const work = draft.own("under_way", "works", key);
  work.said = Math.max(work.said, ...said.map((it) => it.turn));
  work.streams = work.streams.filter((it) => !said.includes(it));
}

function takePiece(work, piece) {
  const { path, turn, kind, call } = piece;
  if (isOver(work, piece)) return;
  const isSame = (it) => it.path === path && it.turn === turn && it.kind === kind && it.call === call;
  const known = work.streams.find(isSame);
  let others = work.streams.filter((it) => !isSame(it));
  const made = { path, turn, kind, call, tool: known?.tool ?? piece.tool, text: "", end: 0 };
  if (kind === "progress") {
    made.text = piece.text.slice(0, MAX_REPORT_CHARS);
    work.streams = piece.is_done ? others : [...others, made].slice(-MAX_STREAMS);
    return;
  }
  if (known === undefined) others = others.filter((it) => !isPast(it, piece));
  let text = known?.text ?? "";
  const end = known?.end ?? 0;
  if (piece.at < end) text = ""; // it starts over: the first attempt was given up
  else if (piece.at > end) text += GAP;
  made.text = (text + piece.text).slice(-MAX_CHARS);
  made.end = piece.at + [...piece.text].length; // counted in characters, as its sender does
  work.streams = [...others, made].slice(-MAX_STREAMS);
}

/** Whether the call that a text is of, or one around it, is done; or the text is a message. */
function isOver(work, { path, turn, kind, call }) {
  if (kind === "text" && !path && turn <= work.said) return true;
  const paths = outerPaths(call === null ? path : pathOfCall(path, turn, call));
  return paths.some((it) => work.done.includes(it) || work.done.includes(it.slice(0, it.lastIndexOf("."))));
}

/** Whether a text has come to its end since another one of its run has begun. */
const isPast = (it, begun) =>
  it.path === begun.path &&
  (it.turn < begun.turn || (it.turn === begun.turn && it.kind === "reasoning" && begun.kind === "text"));

// --- what is well formed

function readCall(body) {
  const place = readPlace(body);
  const tool = body.tool === undefined ? "a tool" : body.tool;
  if (place === null || typeof tool !== "string" || typeof body.active !== "boolean") return null;
  const asked = Array.isArray(body.asked) ? body.asked.filter((it) => typeof it === "string").slice(0, MAX_ASKED) : [];
  return { ...place, call: place.call ?? 0, tool: readName(tool), is_active: body.active, asked: asked.map(readName) };
}

function* readPieces(pieces) {
  for (const it of pieces.slice(0, MAX_PIECES)) {
    if (!isObject(it) || !["text", "reasoning", "tool", "progress"].includes(it.kind)) continue;
    const place = readPlace(it);
    if (place === null || !isNumber(it.turn) || !isNumber(it.at) || typeof it.text !== "string") continue;
    yield { ...place, kind: it.kind, at: it.at, text: it.text, tool: readName(it.tool === undefined ? "" : it.tool), is_done: it.is_done === true };
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
const keyOf = (agentId, reaction) => `${agentId} ${reaction}`; // ids hold no spaces
const splitKey = (key) => [key.slice(0, key.indexOf(" ")), key.slice(key.indexOf(" ") + 1)];
const pathOfCall = (outer, turn, call) => (outer ? `${outer}/${turn}.${call}` : `${turn}.${call}`);
const isInside = (path, call) => `${path}/`.startsWith(`${call}/`) || path.startsWith(`${call}.`);

function outerPaths(path) {
  const parts = path ? path.split("/") : [];
  return parts.map((_, place) => parts.slice(0, place + 1).join("/"));
}
