/**
 * The state of one participant's screens, and how each event changes it. `apply` is pure: no DOM, no clock, no IO, and
 * a state is never written to. Whatever order deliveries, answers and results come in, the state ends as a refetch
 * would give it (docs/decisions/page-state.md): what a frame says in full is taken in here, what it only hints at is
 * marked in `stale`, and `#core/fetching.js` fetches that again.
 *
 * Events are the hub's frames, each with `at` (ms), and
 *   {type: "result", call: {op, args}, value}      a call was answered
 *   {type: "fetching", what, thread_id?, ids?}     a read is sent now: what it answers is newer than what was heard before
 *   {type: "failed", what, ids?, thread_id?}       that read was refused
 *   {type: "outbox", entry} | {type: "outbox", message_id}   a message of one's own waits, is sent, refused; or is gone
 *   {type: "connection", state, error?}            connecting, online, offline, refused
 *   {type: "open", thread_id} | {type: "close", thread_id}   a thread's messages are wanted, or no more
 *   {type: "drawn", seq}                           a message of one's own is seen of which it is not known what became of it
 *   {type: "reset"}                                all is to be fetched anew
 *   {type: "tick"}                                 time passes
 */

import { Draft, drop, put } from "#core/draft.js";
import { textOf, writeLine } from "#core/text.js";
import * as live from "#core/under_way.js";

const MAX_UNREAD = 100; // the hub counts no further either
const UNREAD_LOOKED_AT = 200; // and looks at so many messages, the newest
const MAX_THREADS = 2000; // rows of the list; the oldest go
const MAX_LOADED = 6000; // messages of one thread that is open
const TRIMMED = 1000; // of these, at once
const KEPT_CLOSED = 4; // threads that keep their messages after they were closed
const MAX_RECENT = 64; // messages of a thread that may come in any order
const MAX_STATUS = 500;
const MAX_BEHIND = 5000; // rows of the log that an operator's page goes through after a loss; beyond, it fetches anew

/** A state before anything was heard. */
export function createState() {
  return {
    me: { agent_id: "", kind: "", is_operator: false },
    network: { name: "", epoch: "" },
    connection: "connecting",
    limits: {},
    /** @type {{leader: string, as_of: number} | null} of a node that follows: whom, and as of when it shows what it has */
    follows: null,
    is_read_only: false,
    head: 0,
    ...nothingHeard(),
    outbox: {},
    under_way: live.createUnderWay(),
  };
}

const nothingHeard = () => ({
  threads: {},
  is_listed: false, // whether the list of threads has come
  has_more_threads: false,
  messages: {},
  agents: {},
  status: {},
  inbox: { items: [], is_stale: true },
  log_at: 0, // of operators: up to where the log is followed
  closed: [], // threads that were open, the last one last
  stale: { threads: true, rows: {}, agents: true, inbox: true, loaded: {}, messages: {}, status: {} },
  reading: { threads: 0 }, // reads under way that give threads
});

/** The state after one event. */
export const apply = (state, event) => applyAll(state, [event]);

/** The state after several events, in their order; cheaper than one by one. */
export function applyAll(state, events) {
  const draft = new Draft(state);
  for (const event of events) takeEvent(draft, event);
  return draft.state;
}

/**
 * What has to be equal after a refetch: of each thread its row, of loaded ones their messages (above `floors`, by
 * thread, if given), the registry, the inbox. Signals, receipts and what is only this client's own are left out.
 */
export function project(state, floors = {}) {
  const threads = {};
  const loaded = {};
  for (const row of Object.values(state.threads)) {
    const { thread_id: id, last_seq, messages, readers, held, last, title, unread } = row;
    const mark = Object.fromEntries(Object.entries(row.mark).filter(([, value]) => value));
    if (messages) {
      threads[id] = { thread_id: id, last_seq, messages, readers: [...readers].sort(), held, last, title, unread, mark };
    }
    if (row.loaded?.seqs.length) {
      const shown = row.loaded.seqs.filter((seq) => seq >= (floors[id] ?? 0));
      loaded[id] = shown.map((seq) => state.messages[seq]);
    }
  }
  const agents = Object.fromEntries(
    Object.values(state.agents).map(({ agent_id, kind, state: at, card }) => [agent_id, { kind, state: at, card }]),
  );
  return { me: state.me.agent_id, epoch: state.network.epoch, threads, loaded, agents, inbox: state.inbox.items };
}

/** Whether something is known to be out of date. A state is compared with a fresh one only where nothing is. */
export function isSettled(state) {
  const { threads, rows, agents, inbox, loaded, messages } = state.stale;
  const marked = [rows, loaded, messages].some((it) => Object.keys(it).length);
  const isLoading = Object.values(state.threads).some((it) => it.loaded?.is_loading || it.loaded?.fresh);
  return !(threads || agents || inbox || marked || isLoading || state.reading.threads);
}

/**
 * Whether a request for approval still waits for somebody's decision, as far as the hub has told. Who may decide is told
 * by the inbox, at once, and by what was heard since; others by what the agent is at.
 * @param {object} state @param {object} request the message @param {boolean} mayDecide whether one's own reply would decide
 */
export function isAwaited(state, { seq, sender_id, metadata }, mayDecide) {
  const { inbox, agents, under_way: underWay } = state;
  if (mayDecide) return inbox.is_stale || seq in underWay.undecided || isListed(inbox, seq);
  const { activity, work = [], open_reactions: open = 0 } = agents[sender_id] ?? {};
  const at = work.find((it) => it.reaction === metadata.approval.reaction)?.activity;
  if (at !== undefined) return at !== "stopping"; // the hub lists it as long as its reaction is open
  return activity === undefined || open > work.length || seq in underWay.undecided;
}

/** Whether an inbox has an approval; what is below its last item it does not tell. */
function isListed({ items, has_more }, seq) {
  return items.some((it) => it.kind === "approval" && it.seq === seq) || Boolean(has_more && seq < items.at(-1)?.seq);
}

// --- one event

function takeEvent(draft, event) {
  const { state } = draft;
  switch (event.type) {
    case "welcome":
      return takeWelcome(draft, event);
    case "deliver":
      return takeMessage(draft, event.message, true);
    case "stored":
      return takeStored(draft, event);
    case "notice":
      return takeNotice(draft, event);
    case "presence":
      return takePresence(draft, event);
    case "signal":
      live.takeSignal(draft, event, event.at);
      if (event.kind === "thinking") draft.own("stale").agents = true;
      if (event.kind !== "delta") markReceipts(draft, event.thread_id);
      return;
    case "result":
      return takeResult(draft, event.call.op, event.call.args, event.value);
    case "fetching":
      return takeFetching(draft, event);
    case "failed":
      return takeFailed(draft, event);
    case "outbox":
      return takeOutbox(draft, event);
    case "connection":
      state.connection = event.state;
      state.error = event.error;
      if (event.state !== "online") live.takeLoss(draft);
      return;
    case "open":
      return openThread(draft, event.thread_id);
    case "close":
      return closeThread(draft, event.thread_id);
    case "drawn":
      draft.own("stale", "status")[event.seq] = true;
      return undefined;
    case "reset":
      return forgetAll(draft);
    case "as_of":
      if (state.follows !== null) state.follows = { ...state.follows, as_of: event.as_of };
      return undefined;
    case "tick":
      if (isAnybodyAtWork(state)) draft.own("stale").agents = true; // no frame tells when all of it is done
      return live.takeTick(draft, event.at);
    default: // a newer hub's frame
  }
}

function takeWelcome(draft, frame) {
  const { state } = draft;
  const isOther = state.network.epoch !== "" && state.network.epoch !== frame.network.epoch;
  const isFarBehind = frame.is_operator && state.log_at && frame.head - state.log_at > MAX_BEHIND;
  if (isOther || frame.resume === "limited" || isFarBehind) forgetAll(draft);
  state.me = { agent_id: frame.agent_id, kind: frame.kind, is_operator: frame.is_operator === true };
  state.log_at = state.log_at || frame.head;
  state.is_read_only = frame.is_read_only === true || (state.is_read_only && state.follows === null); // a recording stays one
  state.follows = frame.follows ?? null;
  state.network = frame.network;
  state.limits = frame.limits;
  state.connection = "online";
  state.error = undefined;
  state.head = Math.max(state.head, frame.head);
  live.takeLoss(draft);
  // notices and presence may be lost with a connection; deliveries go on where they were
  Object.assign(draft.own("stale"), { threads: true, agents: true, inbox: true });
  for (const row of Object.values(state.threads)) if (row.loaded) markReceipts(draft, row.thread_id);
}

/** Another history: what was heard is void. Threads that are open stay open, and are fetched. */
function forgetAll(draft) {
  const { state } = draft;
  const open = Object.values(state.threads).filter((it) => it.loaded?.is_open);
  const { reading } = state; // reads that are under way are repeated, and answered
  Object.assign(state, nothingHeard(), { reading, head: 0, under_way: live.createUnderWay() });
  for (const { thread_id } of open) openThread(draft, thread_id);
}

// --- messages

/** `isDelivered`: it is this participant's own to read; an operator reads others' conversations too. */
function takeMessage(draft, message, isDelivered = false) {
  const { state } = draft;
  const { seq } = message;
  const isNew = count(draft, message, isDelivered);
  show(draft, message);
  if (message.sender_id === state.me.agent_id && message.message_id in state.outbox) {
    delete draft.own("outbox")[message.message_id];
  }
  if (!isNew) return;
  state.head = Math.max(state.head, seq);
  noteSaid(draft, message);
  for (const named of [message.cause, message.reply_to]) {
    if (state.messages[named]?.sender_id === state.me.agent_id) draft.own("stale", "status")[named] = true;
  }
}

function noteSaid(draft, message) {
  live.takeSaid(draft, message);
  if (message.kind !== "direct") draft.own("stale", "rows")[message.thread_id] = true; // its readers may be others now
}

/** Count a message in its thread's row, once. Gives whether it is new. */
function count(draft, message, isDelivered) {
  const { state } = draft;
  const { seq, thread_id: id, sender_id } = message;
  const known = state.threads[id];
  const isOther = isDelivered && (sender_id !== state.me.agent_id || message.kind === "mod");
  if (known !== undefined && (seq <= known.base || known.recent.has(seq))) {
    if (isOther && known.recent.get(seq) === false) countOther(draft, ownRow(draft, id), seq); // the log was faster
    return false;
  }
  const row = ownRow(draft, id);
  if (!row.messages) draft.own("stale", "rows")[id] = true; // its earlier messages, readers and marks are not known
  row.messages += 1;
  row.recent = new Map(row.recent).set(seq, false);
  if (isOther) countOther(draft, row, seq);
  if (row.recent.size > MAX_RECENT) {
    row.base = row.lost = Math.min(...row.recent.keys());
    row.recent.delete(row.lost);
  }
  if (row.unread && row.unread < MAX_UNREAD && row.messages > UNREAD_LOOKED_AT) draft.own("stale", "rows")[id] = true;
  if (seq > row.last_seq) {
    row.last_seq = seq;
    row.last = describeLast(message);
  }
  return true;
}

function countOther(draft, row, seq) {
  row.recent = new Map(row.recent).set(seq, true);
  if (seq > row.mark.read_upto) row.unread = Math.min(MAX_UNREAD, row.unread + 1);
}

/** The row of a thread, to be written to. `recent` (seq -> whether it is somebody else's to this participant) holds what
 * was counted above `base`: it may come in any order. `lost`: the newest that left `recent` since the row was last asked for. */
function ownRow(draft, id) {
  if (!(id in draft.state.threads)) {
    const threads = draft.own("threads");
    threads[id] = {
      thread_id: id, last_seq: 0, messages: 0, readers: [], unread: 0, mark: { read_upto: 0 }, base: 0,
      recent: new Map(), lost: 0,
    };
    boundThreads(draft);
  }
  return draft.own("threads", id);
}

function boundThreads(draft) {
  const { threads } = draft.state;
  if (Object.keys(threads).length <= MAX_THREADS + 100) return;
  const kept = Object.values(threads).filter((it) => !it.loaded && !it.mark.is_pinned && it.last_seq);
  kept.sort((first, second) => first.last_seq - second.last_seq);
  for (const it of kept.slice(0, Object.keys(threads).length - MAX_THREADS)) delete draft.own("threads")[it.thread_id];
  draft.state.has_more_threads = true;
}

function describeLast(message) {
  const { seq, sender_id, sender_kind, sent_at } = message;
  return { seq, sender_id, sender_kind, sent_at, text: writeLine(textOf(message)) };
}

/** Put a message into the window of its thread, if that is loaded and reaches down to it. What was sent, and stood for
 * a message of one's own, gives way to it. */
function show(draft, message) {
  const { state } = draft;
  const { seq, thread_id: id } = message;
  const { loaded, last } = state.threads[id] ?? {};
  if (last?.seq === seq && last.sent_at !== message.sent_at) ownRow(draft, id).last = describeLast(message);
  if (!loaded || seq < loaded.complete_from) return;
  const known = state.messages[seq];
  if (known === undefined || (known.is_provisional && !message.is_provisional)) {
    put(draft, "messages", seq, message);
    if (!message.is_provisional) delete draft.own("stale", "messages")[seq];
  }
  if (loaded.fresh && !loaded.fresh.includes(seq)) draft.own("threads", id, "loaded", "fresh").push(seq);
  insert(draft.own("threads", id, "loaded", "seqs"), seq);
  if (loaded.error) draft.own("threads", id, "loaded").error = undefined;
  if (state.threads[id].loaded.seqs.length > MAX_LOADED) trimLoaded(draft, id);
}

function insert(seqs, seq) {
  let place = seqs.length;
  while (place > 0 && seqs[place - 1] > seq) place -= 1;
  if (seqs[place - 1] !== seq) seqs.splice(place, 0, seq);
}

function trimLoaded(draft, id) {
  const loaded = draft.own("threads", id, "loaded");
  drop(draft, "messages", loaded.seqs.slice(0, TRIMMED));
  loaded.seqs = loaded.seqs.slice(TRIMMED);
  loaded.complete_from = loaded.seqs[0];
  loaded.has_before = true;
}

// --- what one sends

function takeOutbox(draft, event) {
  const outbox = draft.own("outbox");
  if (event.entry) outbox[event.entry.message_id] = event.entry;
  else delete outbox[event.message_id];
}

/** The hub has stored a message of one's own. It does not come to the session that sent it: until it is fetched, what
 * was sent stands for it. */
function takeStored(draft, frame) {
  const { state } = draft;
  const entry = state.outbox[frame.message_id];
  if (entry === undefined || frame.thread_id === undefined) return;
  delete draft.own("outbox")[frame.message_id];
  const { agent_id: sender_id, kind: sender_kind } = state.me;
  const { message_id, to, content, reply_to, requires_response, metadata } = entry;
  const given = { message_id, to, content, reply_to, requires_response, metadata };
  const message = {
    ...Object.fromEntries(Object.entries(given).filter(([, value]) => value !== undefined)),
    seq: frame.seq, thread_id: frame.thread_id, kind: kindOf(to), sender_id, sender_kind,
    sent_at: frame.at ?? entry.at, root: reply_to ?? frame.seq, hops: 0, is_provisional: true,
  };
  const isNew = count(draft, message, false);
  show(draft, message);
  if (isNew || state.messages[frame.seq]?.is_provisional) draft.own("stale", "messages")[frame.seq] = frame.thread_id;
  if (isNew) noteSaid(draft, message);
  if (frame.seq in state.messages) draft.own("stale", "status")[frame.seq] = true;
}

function kindOf(to) {
  const kind = to.split(":")[0];
  return kind === "agent" ? "direct" : kind;
}

// --- notices, presence

function takeNotice(draft, frame) {
  const { body = {}, thread_id: id } = frame;
  switch (frame.kind) {
    case "taken":
    case "given":
      draft.own("stale", "rows")[id] = true; // who may know of it is judged by the hub
      draft.own("stale").agents = true;
      return;
    case "marked":
      return takeMark(draft, id, body);
    case "members":
      return takeMembers(draft, id, body.agent_id);
    case "inbox":
      markInbox(draft);
      draft.own("stale").agents = true; // a fault of an agent may have come or gone
      return;
    case "dead_letter":
    case "dead_letter_withdrawn":
    case "loop_stopped":
    case "budget_exhausted":
      markInbox(draft);
      if (body.seq in draft.state.messages) draft.own("stale", "status")[body.seq] = true;
      return;
    default: // there may be kinds that this page does not know
  }
}

/** Who is in a channel has changed; or, of oneself or of all, what may be read there; or somebody was removed. */
function takeMembers(draft, channel, agentId) {
  const { state } = draft;
  if (channel === undefined) Object.assign(draft.own("stale"), { agents: true, threads: true });
  const isMine = agentId === undefined || agentId === state.me.agent_id;
  if (isMine) draft.own("stale").threads = true;
  for (const { thread_id: id, loaded, messages } of Object.values(state.threads)) {
    if (id !== channel && !id.startsWith("thread:")) continue; // a reply thread may be in any channel
    if (messages) draft.own("stale", "rows")[id] = true;
    if (isMine && loaded) draft.own("stale", "loaded")[id] = true;
  }
}

/** Whether time changes what is shown: somebody is at work, types, or looks. */
export function isAnybodyAtWork(state) {
  const { typing, viewing } = state.under_way;
  return [typing, viewing].some((it) => Object.keys(it).length) || Object.values(state.agents).some((it) => it.open_reactions);
}

function markInbox(draft) {
  draft.own("stale").inbox = true;
  draft.own("inbox").is_stale = true;
}

function takePresence(draft, frame) {
  const known = draft.state.agents[frame.agent_id];
  const agent = { ...(known ?? { agent_id: frame.agent_id, kind: "" }), state: frame.state };
  if (frame.card !== undefined) agent.card = frame.card;
  draft.own("agents")[frame.agent_id] = agent;
  draft.own("stale").agents = true;
  if (frame.state === "offline") live.takeOffline(draft, frame.agent_id);
}

/** Receipts of one's own messages in a thread may have changed: of the newest ones, and of those that were on their way. */
function markReceipts(draft, id) {
  const { state } = draft;
  const loaded = state.threads[id]?.loaded;
  if (!loaded?.is_open) return;
  const own = loaded.seqs.slice(-50).filter((seq) => state.messages[seq].sender_id === state.me.agent_id);
  const isOnItsWay = (seq) => state.status[seq]?.some((it) => it.state === "queued" || it.state === "delivered");
  for (const [place, seq] of own.entries()) {
    if (place >= own.length - 5 || isOnItsWay(seq)) draft.own("stale", "status")[seq] = true;
  }
}

/** Keep so many as are bounded: what is furthest from the one that was asked for goes, which may be any that is seen. */
function boundStatus(status, seq) {
  const seqs = Object.keys(status).map(Number); // ascending
  while (seqs.length > MAX_STATUS) delete status[seq - seqs[0] > seqs.at(-1) - seq ? seqs.shift() : seqs.pop()];
}

// --- marks

function takeMark(draft, id, mark) {
  if (!(id in draft.state.threads)) return;
  const row = ownRow(draft, id);
  const before = row.mark.read_upto;
  if ((row.mark.title ?? "") !== (mark.title ?? "")) { // the hub puts it together with the place
    row.title = undefined;
    draft.own("stale", "rows")[id] = true;
  }
  row.mark = { ...mark, read_upto: Math.max(before, mark.read_upto) };
  if (row.mark.read_upto !== before) countUnread(draft, row);
  if (draft.state.reading.threads) draft.own("stale", "rows")[id] = true; // a list that is on its way may be older
}

function countUnread(draft, row) {
  const { state } = draft;
  const upto = row.mark.read_upto;
  const { loaded } = row;
  if (upto >= row.last_seq) row.unread = 0;
  else if (!state.me.is_operator && loaded && !loaded.is_loading && !loaded.fresh && loaded.complete_from <= upto + 1) {
    const isUnread = (it) => it.seq > upto && (it.sender_id !== state.me.agent_id || it.kind === "mod");
    row.unread = loaded.seqs.slice(-UNREAD_LOOKED_AT).filter((seq) => isUnread(state.messages[seq])).length;
    row.unread = Math.min(MAX_UNREAD, row.unread);
  } else draft.own("stale", "rows")[row.thread_id] = true;
}

// --- threads that are open

function openThread(draft, id) {
  const { state } = draft;
  const row = ownRow(draft, id);
  state.closed = state.closed.filter((it) => it !== id);
  if (row.loaded) {
    draft.own("threads", id, "loaded").is_open = true;
    if (row.loaded.error) draft.own("stale", "loaded")[id] = true; // it may be there now
  } else {
    row.loaded = { seqs: [], has_before: true, complete_from: 0, is_open: true, is_loading: true };
    draft.own("stale", "loaded")[id] = true;
  }
  markReceipts(draft, id);
}

function closeThread(draft, id) {
  const { state } = draft;
  if (!state.threads[id]?.loaded) return;
  draft.own("threads", id, "loaded").is_open = false;
  if (state.threads[id].loaded.error && !state.threads[id].messages) return unload(draft, id); // there was none
  state.closed = [...state.closed.filter((it) => it !== id), id];
  for (const old of state.closed.slice(0, -KEPT_CLOSED)) unload(draft, old);
  state.closed = state.closed.slice(-KEPT_CLOSED);
}

function unload(draft, id) {
  const { state } = draft;
  const row = state.threads[id];
  if (!row?.loaded) return;
  dropMessages(draft, row.loaded.seqs);
  delete draft.own("stale", "loaded")[id];
  if (row.messages) delete ownRow(draft, id).loaded;
  else delete draft.own("threads")[id];
}

function dropMessages(draft, seqs) {
  if (!seqs.length) return;
  drop(draft, "messages", seqs);
  const status = draft.own("status");
  const stale = draft.own("stale", "messages");
  for (const seq of seqs) {
    delete status[seq];
    delete stale[seq];
  }
}

// --- reads and their results

/** A read is sent: it will tell all that was stored before, so that only what comes from now on is counted beside it. */
function takeFetching(draft, event) {
  const { state } = draft;
  const stale = draft.own("stale");
  switch (event.what) {
    case "threads":
      draft.own("reading").threads += 1;
      if (event.ids === undefined) Object.assign(stale, { threads: false, rows: {} });
      for (const id of event.ids ?? Object.keys(state.threads)) {
        delete draft.own("stale", "rows")[id];
        const known = state.threads[id];
        if (known?.recent.size || known?.lost) {
          Object.assign(ownRow(draft, id), { recent: new Map(), base: known.last_seq, lost: 0 });
        }
      }
      return;
    case "agents":
      stale.agents = false;
      return;
    case "inbox":
      stale.inbox = false;
      return;
    case "history": // the newest page: what comes meanwhile belongs to it
      delete draft.own("stale", "loaded")[event.thread_id];
      if (state.threads[event.thread_id]?.loaded) draft.own("threads", event.thread_id, "loaded").fresh = [];
      return;
    case "message":
      delete draft.own("stale", "messages")[event.seq];
      return;
    case "status":
      delete draft.own("stale", "status")[event.seq];
      return;
    default:
      throw new Error(`Nothing is fetched by the name of ${event.what}.`);
  }
}

function takeFailed(draft, { what, thread_id: id, error }) {
  if (what === "threads") draft.own("reading").threads -= 1;
  if (what === "inbox") draft.own("inbox").is_stale = false;
  if (what === "history" && draft.state.threads[id]?.loaded) {
    const loaded = draft.own("threads", id, "loaded");
    const isBegun = loaded.fresh?.length > 0; // meanwhile: it is there now
    if (isBegun) draft.own("stale", "loaded")[id] = true;
    Object.assign(loaded, { is_loading: false, fresh: undefined, error: isBegun ? undefined : error });
    if (loaded.error?.code === "unknown_message") { // nothing was said there yet, or one may read it no more
      dropMessages(draft, loaded.seqs);
      Object.assign(loaded, { seqs: [], has_before: false, complete_from: 0 });
    }
  }
}

function takeResult(draft, op, args, value) {
  const { state } = draft;
  switch (op) {
    case "network.list_threads":
      return takeThreads(draft, args, value);
    case "network.history":
      return args.trigger === undefined ? takeHistory(draft, args, value) : undefined;
    case "network.log":
      for (const message of value.messages) takeMessage(draft, message);
      state.log_at = value.next;
      state.head = Math.max(state.head, value.head);
      return;
    case "network.list_agents":
      if (args.whole) takeAgents(draft, value.agents);
      return;
    case "network.inbox":
      if (args.before === undefined && args.after === undefined) {
        const ended = state.inbox.items.filter((it) => it.kind === "approval" && !isListed(value, it.seq));
        live.takeUnlisted(draft, ended.map((it) => it.seq));
        state.inbox = { items: value.items, has_more: value.has_more, is_stale: state.stale.inbox };
      }
      return;
    case "network.mark": {
      const { thread_id: id, ...mark } = value;
      return takeMark(draft, id, mark);
    }
    case "network.message_status": {
      const status = draft.own("status");
      status[args.seq] = value.recipients;
      boundStatus(status, args.seq);
      return;
    }
    case "network.dismiss":
    case "network.retry_dead_letter":
    case "network.drop_dead_letter":
    case "network.resume_root":
      return markInbox(draft);
    case "network.take":
    case "network.give":
      draft.own("stale", "rows")[args.thread_id] = true;
      return;
    default:
      if (value?.seq !== undefined && value.thread_id !== undefined && /^channels\.(post|reply)$/.test(op)) {
        draft.own("stale", "rows")[value.thread_id] = true;
        if (state.threads[value.thread_id]?.loaded) draft.own("stale", "messages")[value.seq] = value.thread_id;
      }
  }
}

/** `args`: {whole: true} of the list from its beginning, {threads: ids} of some rows, {before} of a further page. */
function takeThreads(draft, args, { threads, has_more }) {
  const { state } = draft;
  if (args.before === undefined || args.whole) draft.own("reading").threads -= 1;
  for (const row of threads) mergeRow(draft, row);
  const named = new Set(threads.map((it) => it.thread_id));
  if (args.threads) {
    for (const id of args.threads) if (!named.has(id)) forgetRow(draft, id);
    return;
  }
  state.has_more_threads = has_more;
  if (!args.whole) return;
  state.is_listed = true;
  const lowest = has_more ? Math.min(...threads.map((it) => it.last_seq)) : 0;
  for (const { thread_id: id, last_seq } of Object.values(state.threads)) {
    if (last_seq >= lowest && !named.has(id)) forgetRow(draft, id);
  }
}

/** A thread that the hub no longer names: it may not be read any more. What came meanwhile speaks for itself. */
function forgetRow(draft, id) {
  const row = draft.state.threads[id];
  if (row === undefined) return;
  if (row.recent.size) {
    draft.own("stale", "rows")[id] = true;
  } else if (row.loaded) {
    if (row.messages) draft.own("stale", "loaded")[id] = true;
    Object.assign(ownRow(draft, id), { messages: 0, last_seq: 0, unread: 0, last: undefined, readers: [] });
  } else {
    delete draft.own("threads")[id];
  }
}

/** A row as the hub has it, and beside it what was counted since. */
function mergeRow(draft, given) {
  const row = ownRow(draft, given.thread_id);
  const { last_seq, messages, readers, held, may_take, last, title, unread = 0, mark = {} } = given;
  const since = [...row.recent].filter(([seq]) => seq > last_seq);
  const isNewer = row.last_seq > last_seq && since.length > 0;
  if (row.lost > last_seq) draft.own("stale", "rows")[given.thread_id] = true; // too much came meanwhile to tell
  const known = row.mark.read_upto;
  const read_upto = Math.max(known, mark.read_upto ?? 0);
  const others = since.filter(([seq, isOther]) => isOther && seq > read_upto).length;
  row.readers = readers;
  row.held = held;
  row.may_take = may_take === true;
  row.title = title;
  row.messages = messages + since.length;
  row.unread = Math.min(MAX_UNREAD, unread + others);
  row.mark = { ...mark, read_upto };
  row.base = Math.max(last_seq, row.lost);
  row.recent = new Map(since);
  if (!isNewer) {
    row.last_seq = last_seq;
    row.last = last;
  }
  if (known > (mark.read_upto ?? 0)) countUnread(draft, row);
}

function takeHistory(draft, args, { messages, has_more, damaged }) {
  const { state } = draft;
  const id = args.thread_id;
  const known = state.threads[id]?.loaded;
  if (!known) return messages.forEach((it) => show(draft, it));
  const loaded = draft.own("threads", id, "loaded");
  const lowest = has_more && messages.length ? messages[0].seq : 0;
  if (args.before === undefined && known.fresh) {
    const kept = new Set([...messages.map((it) => it.seq), ...known.fresh]);
    dropMessages(draft, known.seqs.filter((seq) => !kept.has(seq)));
    const seqs = [...kept].sort((first, second) => first - second);
    Object.assign(loaded, { seqs, complete_from: lowest, has_before: has_more });
  } else if (args.before === undefined || args.before >= known.complete_from) {
    if (lowest <= known.complete_from) Object.assign(loaded, { complete_from: lowest, has_before: has_more });
  } else return; // it does not reach up to what is there
  if (args.before === undefined) Object.assign(loaded, { is_loading: false, fresh: undefined, error: undefined });
  if (damaged) loaded.damaged = [...new Set([...(loaded.damaged ?? []), ...damaged])];
  for (const message of messages) show(draft, message);
  if (args.before === undefined) markReceipts(draft, id);
}

function takeAgents(draft, agents) {
  draft.state.agents = Object.fromEntries(agents.map((it) => [it.agent_id, it]));
  live.takeWork(draft, agents);
}
