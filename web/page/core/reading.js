// One reaction as its records tell it, and what was done in it: the twin of roundelay/runs/reading.py and work.py, which
// a test holds to the same facts. Another program may write what it likes under these kinds: what is not of the shape
// of agents/journal.py is passed over, and `is_readable` is false. No DOM, no calls to the hub, no clock. Pure.

import { derivedId } from "#core/hash.js";
import { isObject, readArguments } from "#core/json.js";
import { textOf } from "#core/text.js";

/** @typedef {{seq: number, agent_id: string, record_id: string, kind: string, body: any, at: number}} WireRecord */

// --- the shapes of records

const isText = (item) => typeof item === "string";
const isNumber = Number.isSafeInteger;
const isFlag = (item) => typeof item === "boolean";
const every = (check) => (item) => Array.isArray(item) && item.every(check);
const values = (check) => (item) => isObject(item) && Object.values(item).every(check);
const orNull = (check) => (item) => item === null || check(item);
const maybe = (check) => (item) => item === undefined || check(item);
const oneOf = (...words) => (item) => words.includes(item);
const shape = (fields) => (item) =>
  isObject(item) && Object.entries(fields).every(([name, check]) => check(Object.hasOwn(item, name) ? item[name] : undefined));

const TOKENS = ["prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens"];
const STATUSES = ["finished", "stopped", "cancelled", "failed"];
/** Whether this counts tokens: another program may write anything in its place. */
export const isUsage = shape(Object.fromEntries(TOKENS.map((name) => [name, maybe(isNumber)])));
const USES = every(shape({ model: isText, usage: isUsage }));
const CALLS = every(shape({ id: isText, name: isText, arguments: isText }));
const REPLY = { text: orNull(isText), tool_calls: maybe(CALLS), usage: maybe(isUsage), finish_reason: maybe(isText), model: maybe(isText) };
const OF_TURN = { turn: isNumber, call: maybe(isNumber), send: maybe(isNumber) };
const OF_CALL = { ...OF_TURN, call: isNumber };
const SHAPES = {
  started: { trigger: isNumber, thread_id: isText, as_of: isNumber, manifest: every(isNumber), config_hash: isText },
  finished: { status: oneOf(...STATUSES), reason: isText, turns: maybe(isNumber), tool_calls: maybe(isNumber), usage: maybe(isUsage), used: maybe(USES) },
  new_messages: { ...OF_TURN, text: isText, seqs: every(isNumber), answers: isFlag },
  model_reply: { ...OF_TURN, reply: shape(REPLY), is_last: maybe(isFlag) },
  model_failed: { ...OF_TURN, reason: isText, failure: maybe(isText) },
  asking: { ...OF_CALL, messages: values(isText) },
  waiting: { ...OF_CALL, questions: values(isNumber), until: isNumber, is_approval: maybe(isFlag) },
  approval: { ...OF_CALL, is_approved: isFlag, by: isText, seq: isNumber, at: isNumber, arguments: maybe(orNull(isText)), reason: maybe(isText), said: maybe(isText), votes: maybe(every(shape({ by: isText, seq: isNumber, at: isNumber, said: isText }))) },
  tool_started: { ...OF_CALL, once: maybe(isFlag) },
  tool_result: { ...OF_CALL, content: isText, ok: isFlag, replies: maybe(every(isNumber)) },
  note: { ...OF_TURN, name: isText, value: (item) => item !== undefined },
  review: { ...OF_TURN, answer: isText, correction: maybe(orNull(isText)), notes: maybe(every(isText)), usage: maybe(isUsage) },
  used: { ...OF_CALL, used: USES },
  thinking: { ...OF_TURN, text: isText },
  prompt: { ...OF_TURN, parts: every(isObject), tools: every(isText) },
  progress: { ...OF_CALL, steps: every(isText) },
};
const CHECKS = Object.fromEntries(Object.entries(SHAPES).map(([kind, fields]) => [kind, shape(fields)]));

function canRead(record) {
  const path = isObject(record.body) ? record.body.path : undefined;
  return (path === undefined || isText(path)) && (!Object.hasOwn(CHECKS, record.kind) || CHECKS[record.kind](record.body));
}

const pathOf = (record) => (isObject(record.body) && record.body.path) || "";

// --- tokens

export const noUsage = () => Object.fromEntries(TOKENS.map((name) => [name, 0]));

/** Give the sum of these usages, each of which may lack figures. */
export function addUsage(...usages) {
  return Object.fromEntries(TOKENS.map((name) => [name, usages.reduce((sum, item) => sum + (item?.[name] ?? 0), 0)]));
}

// --- a reaction

/**
 * Give what the records of one agent's reaction tell. `work` is what was done in it (calls, reviews, handoffs) in the
 * order in which that began, runs inside of calls included (`path`); `steps` is the same with the model's replies, as
 * spans of time.
 * @param {string} reaction @param {string} agent_id @param {WireRecord[]} records oldest first
 */
export function readReaction(reaction, agent_id, records) {
  const readable = records.filter(canRead);
  const runs = readRuns(readable);
  const own = runs.get("");
  const bodies = (kind) => records.filter((record) => record.kind === kind && isObject(record.body)).map((record) => record.body);
  const ends = bodies("finished").map((item) => item.status);
  const hasEnded = records.some((record) => record.kind === "finished");
  const status = own.finished?.status ?? ends.find((end) => STATUSES.includes(end)) ?? (hasEnded ? "finished" : null);
  const is_waiting = status === null && [...runs.values()].some(isWaiting);
  const replies = [...runs.values()].flatMap((run) => [...run.replies.values()]);
  return {
    reaction,
    agent_id,
    trigger: bodies("started").map((item) => item.trigger).findLast(isNumber) ?? 0,
    thread_id: String(bodies("started")[0]?.thread_id ?? ""),
    is_readable: readable.length === records.length && own.started !== null,
    state: status ?? (is_waiting ? "waiting" : "open"),
    status,
    is_open: status === null,
    is_waiting,
    reason: own.finished?.reason ?? "",
    manifest: own.started?.manifest ?? [],
    turns: own.replies.size,
    usage: addUsage(...replies.map((reply) => reply.reply.usage)),
    started_at: records[0]?.at ?? 0,
    ended_at: records.find((record) => record.kind === "finished")?.at ?? null,
    work: readWork(readable, runs),
    steps: readSteps(readable, runs, agent_id),
    runs,
  };
}

const isWaiting = (run) =>
  [...run.waits.keys()].some((place) => !run.results.has(place)) ||
  [...run.approval_waits.keys()].some((place) => !run.approvals.has(place) && !run.results.has(place));

/** What each run inside of a reaction has recorded, by its path ("" is the reaction's own); calls by "turn.call". */
function readRuns(records) {
  const runs = new Map([["", createRun()]]);
  for (const { kind, body } of records) {
    if (!isObject(body)) continue;
    if (!runs.has(body.path ?? "")) runs.set(body.path ?? "", createRun());
    takeRecord(runs.get(body.path ?? ""), kind, body);
  }
  return runs;
}

const createRun = () => ({
  started: null,
  finished: null,
  replies: new Map(),
  results: new Map(),
  begun: new Set(),
  waits: new Map(),
  approval_waits: new Map(),
  approvals: new Map(),
  reviews: new Map(),
  thinking: new Map(),
  prompts: new Map(),
});

function takeRecord(run, kind, body) {
  const place = `${body.turn}.${body.call ?? 0}`;
  if (kind === "started" || kind === "finished") run[kind] = body;
  else if (kind === "model_reply") run.replies.set(body.turn, body);
  else if (kind === "thinking") run.thinking.set(body.turn, body.text);
  else if (kind === "prompt") run.prompts.set(body.turn, body);
  else if (kind === "waiting") (body.is_approval ? run.approval_waits : run.waits).set(place, body);
  else if (kind === "approval") run.approvals.set(place, body);
  else if (kind === "tool_started") run.begun.add(place);
  else if (kind === "tool_result") run.results.set(place, body);
  else if (kind === "review") run.reviews.set(body.send ? `${place}.${body.send}` : body.turn, body);
}

const OF_CALLS = ["asking", "waiting", "approval", "tool_started", "tool_result"];

function readWork(records, runs) {
  const found = new Map();
  const speakers = new Map(); // who replied last in each run, and in which turn
  for (const record of records) {
    const { kind, body } = record;
    const path = pathOf(record);
    if (OF_CALLS.includes(kind)) {
      const name = JSON.stringify([path, body.turn, body.call]);
      if (!found.has(name)) found.set(name, []);
      found.get(name).push(record);
    } else if (kind === "review") {
      const name = JSON.stringify([path, "review", body.turn, body.call ?? 0, body.send ?? 0]);
      found.set(name, readReview(record, runs.get(path)));
    } else if (kind === "model_reply") {
      const agent = String(body.agent ?? "");
      const before = speakers.get(path) ?? { turn: body.turn, agent };
      if (agent !== before.agent) {
        found.set(JSON.stringify([path, "handoff", before.turn]), readHandoff(record, before, runs.get(path)));
      }
      speakers.set(path, { turn: body.turn, agent });
    }
  }
  return [...found.values()].map((item) => (Array.isArray(item) ? readCall(item, runs) : item));
}

function readCall(records, runs) {
  const [path, bodies] = [pathOf(records[0]), records.map((record) => record.body)];
  const { turn, call } = bodies[0];
  const [run, place] = [runs.get(path), `${turn}.${call}`];
  const planned = run.replies.get(turn)?.reply.tool_calls?.[call];
  const result = run.results.get(place);
  const [wait, request, approval] = [run.waits, run.approval_waits, run.approvals].map((value) => value.get(place));
  return {
    type: "call",
    seq: records[0].seq,
    path,
    turn,
    call,
    tool: String(bodies.find((body) => "tool" in body)?.tool ?? planned?.name ?? ""),
    arguments: String(bodies.find((body) => "args" in body)?.args ?? planned?.arguments ?? ""),
    result: result?.content ?? null,
    is_ok: result?.ok ?? false,
    is_begun: run.begun.has(place) || result !== undefined,
    questions: wait?.questions ?? {},
    replies: bodies.flatMap((body) => body.replies ?? []).filter((seq) => seq !== approval?.seq),
    request: (request && Object.values(request.questions)[0]) ?? null,
    approval: approval ?? null,
  };
}

function readReview(record, run) {
  const { turn, call = 0, send = 0 } = record.body;
  const made = run.reviews.get(send ? `${turn}.${call}.${send}` : turn);
  return {
    type: "review",
    seq: record.seq,
    path: pathOf(record),
    turn,
    call: send ? call : null,
    answer: made.answer,
    is_accepted: made.is_accepted ?? false,
    is_blocked: made.is_blocked ?? false,
    correction: made.correction ?? null,
    notes: made.notes ?? [],
  };
}

function readHandoff(record, { turn, agent }, run) {
  const to = String(record.body.agent ?? "");
  const name = `hand_over_to_${to}`.replace(/[^a-zA-Z0-9_-]/gu, "_").slice(0, 64);
  const call = run.replies.get(turn)?.reply.tool_calls?.find((call) => call.name === name);
  const note = call ? readArguments(call.arguments)?.note : "";
  const is_return = call === undefined;
  return { type: "handoff", seq: record.seq, path: pathOf(record), turn, from: agent, to, note: isText(note) ? note : "", is_return };
}

// --- the same as spans of time

/**
 * Give what took time in a reaction, in the order in which it was recorded to begin: `kind` is "model", "tool",
 * "approval", "wait", "review", "handoff" or "failed". `ended_at` is null for what has not ended. A model is asked when
 * what its run did before was over: no record says so by itself.
 */
function readSteps(records, runs, agent_id) {
  const steps = [];
  const open = new Map(); // by kind and place: what has not ended yet
  const last = new Map(); // when each run had done the last thing, by its path
  const begin = (record, kind, more) => {
    const { turn, call } = record.body;
    const step = { kind, seq: record.seq, path: pathOf(record), turn, ...(call !== undefined && { call }) };
    steps.push(Object.assign(step, { started_at: record.at, ended_at: null }, more));
    return steps.at(-1);
  };
  const at = (record, kind) => JSON.stringify([kind, pathOf(record), record.body.turn, record.body.call]);
  const end = (record, kind, more) => {
    Object.assign(open.get(at(record, kind)) ?? {}, { ended_at: record.at }, more);
    open.delete(at(record, kind));
  };
  for (const record of records) {
    const { kind, body } = record;
    const path = pathOf(record);
    const before = last.get(path) ?? (path ? open.get(JSON.stringify(["tool", ...placeOf(path)]))?.started_at : null) ?? record.at;
    if (kind === "model_reply") {
      const { reply } = body;
      const told = { agent: String(body.agent || agent_id), model: reply.model ?? "", usage: addUsage(reply.usage) };
      const said = { text: reply.text, calls: (reply.tool_calls ?? []).map((call) => call.name) };
      begin(record, "model", { ...told, ...said, thinking: runs.get(path).thinking.get(body.turn) ?? "", prompt: runs.get(path).prompts.get(body.turn) ?? null, started_at: before, ended_at: record.at });
    } else if (kind === "model_failed") {
      begin(record, "failed", { failure: body.failure ?? "server", reason: body.reason, started_at: before, ended_at: record.at });
    } else if (kind === "tool_started") {
      open.set(at(record, "tool"), begin(record, "tool", { tool: String(body.tool ?? ""), arguments: String(body.args ?? ""), result: null, is_ok: false }));
    } else if (kind === "tool_result") {
      const result = { result: body.content, is_ok: body.ok };
      if (!open.has(at(record, "tool"))) begin(record, "tool", { tool: String(body.tool ?? ""), arguments: "", started_at: before, ended_at: record.at, ...result });
      for (const of of ["wait", "approval"]) end(record, of);
      end(record, "tool", result);
    } else if (kind === "waiting") {
      const of = body.is_approval ? "approval" : "wait";
      const known = of === "approval" && open.get(at(record, of)); // one of two people has approved, or others are asked
      if (known) Object.assign(known, { asked: Object.keys(body.questions), questions: Object.values(body.questions) });
      else open.set(at(record, of), begin(record, of, { asked: Object.keys(body.questions), questions: Object.values(body.questions) }));
    } else if (kind === "approval") {
      end(record, "approval", { is_approved: body.is_approved, by: listPeople(body).join(" and "), decision: body.seq, said: listSaid(body) });
    } else if (kind === "review") {
      begin(record, "review", { is_accepted: body.is_accepted ?? false, notes: body.notes ?? [], started_at: before, ended_at: record.at });
    }
    last.set(path, record.at);
  }
  return steps;
}

/** The path, turn and call of the call that a run is inside of: of "1.0/2.1" it is the call 2.1 of the run "1.0". */
function placeOf(path) {
  const parts = path.split("/");
  const [turn, call] = parts.pop().split(".").map(Number);
  return [parts.join("/"), turn, call];
}

// --- what was done in it, told

/** Give what was over before the model of the run at `path` wrote in this turn; and the reviews of what `call` sends. */
export function chooseEarlier(work, path, turn, call = null) {
  const at = listPlaces(path, turn);
  const isOfCall = (item) => item.type === "review" && call !== null && item.path === path && item.turn === turn && item.call === call;
  return work.filter((work) => isOfCall(work) || isBefore(listPlaces(work.path, work.turn), at));
}

const PATH = /^\d{1,9}\.\d{1,9}(\.\d{1,9})?(\/\d{1,9}\.\d{1,9}(\.\d{1,9})?)*$/u;

function listPlaces(path, turn) {
  const parts = path && path.length <= 80 && PATH.test(path) ? path.split("/") : [];
  return [...parts.map((part) => part.split(".").map(Number)), [turn]];
}

function isBefore(one, other) {
  for (let depth = 0; depth < Math.min(one.length, other.length); depth += 1) {
    const [ours, theirs] = [one[depth], other[depth]];
    if (ours[0] !== theirs[0]) return ours[0] < theirs[0];
    if (ours.join() !== theirs.join()) return ours[1] === theirs[1] && (ours[2] ?? 0) < (theirs[2] ?? 0);
  }
  return false;
}

/** Give the seqs of the messages that tell of it: questions and answers, requests for approval and decisions. */
export function listMessages(work) {
  const seqs = work.flatMap((work) => (work.type === "call" ? [...Object.values(work.questions), ...work.replies, work.request, work.approval?.seq, ...(work.approval?.votes ?? []).map((vote) => vote.seq)] : []));
  return [...new Set(seqs.filter(Boolean))];
}

/** Give one piece of work with the words of whom it asked. `messages` are those that may be seen, by their seqs. */
export function tellWork(item, messages) {
  if (item.type !== "call") return item;
  const { seq, path, turn, call, tool, result, is_ok } = item;
  return { type: "call", seq, path, turn, call, tool, arguments: item.arguments, result, is_ok, ...tellExchange(item, messages) };
}

/** Give who decided: all who approved, or who denied. */
const listPeople = ({ votes = [], is_approved: isApproved, by }) => (isApproved && votes.length ? votes.map((vote) => vote.by) : [by]);

/** Give what each person said. */
const listSaid = ({ votes = [], said = "", by }) => (votes.length ? votes : [{ by, said }]).filter((vote) => vote.said).map((vote) => `${vote.by}: ${vote.said}`).join("; ");

/** Give whom a call asked, each with the answer, and how it was approved. */
export function tellExchange(item, messages) {
  const asked = Object.entries(item.questions).map(([agent_id, seq]) => {
    const answer = item.replies.map((reply) => messages[reply]).find((reply) => reply?.reply_to === seq);
    const told = answer && { seq: answer.seq, text: textOf(answer), is_declined: answer.metadata?.declined === true };
    return { agent_id, seq, text: messages[seq] ? textOf(messages[seq]) : null, answer: told ?? null };
  });
  const made = item.approval;
  const decided = made && { is_approved: made.is_approved, by: made.by, seq: made.seq, arguments: made.arguments ?? null, reason: made.reason ?? "" };
  const votes = (made?.votes ?? []).map(({ by, seq, at, said }) => ({ by, seq, at, said }));
  if (votes.length) decided.votes = votes;
  const approval = item.request !== null || made ? { request: item.request, is_approved: null, ...decided } : null;
  return { asked, approval };
}

/**
 * Find what of a reaction sent a message: a call of its, or its answer; null where the records do not say.
 * @param {ReturnType<typeof readReaction>} reaction @param {string} message_id
 */
export function traceMessage(reaction, message_id) {
  const own = reaction.runs.get("");
  if (message_id === derivedId(reaction.reaction, "", 0, "answer")) {
    const turn = Math.max(0, ...own.replies.keys());
    return createSent("its answer", "", turn, own.replies.get(turn));
  }
  const id = message_id.replace(/^call:/u, "");
  const how = message_id.endsWith("-approval") ? "a request for approval of" : "the call of";
  for (const [path, run] of reaction.runs) {
    for (const [turn, replied] of run.replies) {
      const call = (replied.reply.tool_calls ?? []).findIndex((_, number) => id.startsWith(derivedId(reaction.reaction, path, turn, number)));
      if (call >= 0) return createSent(how, path, turn, replied, call, run.results.get(`${turn}.${call}`)?.content ?? null);
    }
  }
  return null;
}

function createSent(how, path, turn, replied, call = null, result = null) {
  const reply = replied ? completeReply(replied.reply) : null;
  const tool_call = call === null ? null : reply.tool_calls[call];
  return { how, path, turn, call, tool_call, result, reply, agent_id: String(replied?.agent ?? "") };
}

const completeReply = ({ text, tool_calls = [], usage, finish_reason = "stop", model = "" }) => ({
  text,
  tool_calls,
  usage: addUsage(usage),
  finish_reason,
  model,
  reasoning: "",
});
