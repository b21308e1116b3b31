/**
 * The state of one participant's screens, and how each event changes it.
 *
 * `apply` is pure (no DOM, no clock, no IO) and never changes the given state. Deliveries, answers and results may
 * come in any order: the result equals the state after a refetch (docs/decisions/page-state.md). A frame that contains the whole change is
 * applied here. A frame that only announces a change sets a mark in `stale`, and `#core/fetching.js` reads that part again.
 *
 * Events are the hub's frames, each with `at` (ms), and
 *   {type: "result", call: {op, args}, value}      a call was answered
 *   {type: "fetching", what, thread_id?, ids?}     a read is sent now; its answer is newer than every event before
 *   {type: "failed", what, ids?, thread_id?}       that read was refused
 *   {type: "outbox", entry} | {type: "outbox", message_id}   an own message waits, is sent or refused; or has left the outbox
 *   {type: "connection", state, error?}            connecting, online, offline, refused
 *   {type: "open", thread_id} | {type: "close", thread_id}   a screen needs the messages of a thread, or no longer does
 *   {type: "drawn", seq}                           an own message is on the screen and its delivery status is unknown
 *   {type: "reset"}                                everything must be fetched again
 *   {type: "tick"}                                 time passes
 */

import { Draft, drop, put } from "#core/draft.js";
import { lineOf } from "#core/text.js";
import * as live from "#core/live_activity.js";

const MAX_UNREAD = 100; // the hub also stops counting at this number
const UNREAD_LOOKED_AT = 200; // the hub counts unread messages only among this many of the newest messages
const MAX_THREADS = 2000; // maximum number of rows in the list; the oldest are removed
const MAX_LOADED = 6000; // maximum number of messages of one open thread
const TRIMMED = 1000; // number of messages that are removed when a thread exceeds MAX_LOADED
const KEPT_CLOSED = 4; // number of closed threads that keep their messages
const MAX_RECENT = 64; // number of newest messages of a thread that may arrive in any order
const MAX_STATUS = 500; // maximum number of messages whose delivery status is kept
// Maximum number of log rows that an operator's page reads after a lost connection. If there are more, it reads everything again.
const MAX_BEHIND = 5000;

/** Return the state before the first event. */
export function createState() {
  return {
    me: { agent_id: "", kind: "", is_operator: false },
    network: { name: "", epoch: "" },
    connection: "connecting",
    limits: {},
    /** @type {{leader: string, as_of: number} | null} at a read replica: its leader, and the time of the data shown */
    follows: null,
    is_read_only: false,
    head: 0,
    ...nothingHeard(),
    outbox: {},
    live_activity: live.createLiveActivity(),
  };
}

const nothingHeard = () => ({
  threads: {},
  is_listed: false, // whether the list of threads has arrived
  has_more_threads: false,
  messages: {},
  agents: {},
  status: {},
  inbox: { items: [], is_stale: true },
  log_at: 0, // for operators: position up to which the log was read
  closed: [], // threads that were open, the most recent last
  stale: { threads: true, rows: {}, agents: true, inbox: true, loaded: {}, messages: {}, status: {} },
  reading: { threads: 0 }, // running reads of threads
});

/** Return the state after one event. */
export const apply = (state, event) => applyAll(state, [event]);

/** Return the state after several events, in order. One call is cheaper than one `apply` per event. */
export function applyAll(state, events) {
  const draft = new Draft(state);
  for (const event of events) applyEvent(draft, event);
  return draft.state;
}

/**
 * Return the part of a state that must equal a refetch: thread rows, loaded messages, the registry and the inbox.
 * `floors` contains the lowest seq to compare in each thread. Signals, receipts and this client's own state are left
 * out.
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

/** Return whether no part is marked as out of date. Only such a state can be compared with a fresh state. */
export function isSettled(state) {
  const { threads, rows, agents, inbox, loaded, messages } = state.stale;
  const marked = [rows, loaded, messages].some((value) => Object.keys(value).length);
  const isLoading = Object.values(state.threads).some((thread) => thread.loaded?.is_loading || thread.loaded?.fresh);
  return !(threads || agents || inbox || marked || isLoading || state.reading.threads);
}

/**
 * Return whether a request for approval still waits for a decision, as far as this client knows. For a person who may
 * decide, the inbox shows this at once. For everybody else, the activity of the agent shows whether the request waits.
 * @param {object} state @param {object} request the message @param {boolean} mayDecide whether a reply of this
 * participant decides
 */
export function isAwaited(state, { seq, sender_id, metadata }, mayDecide) {
  const { inbox, agents, live_activity: liveActivity } = state;
  if (mayDecide) return inbox.is_stale || seq in liveActivity.undecided || isListed(inbox, seq);
  const { activity, work = [], open_reactions: open = 0 } = agents[sender_id] ?? {};
  const at = work.find((work) => work.reaction === metadata.approval.reaction)?.activity;
  if (at !== undefined) return at !== "stopping"; // the hub lists the request while its reaction is open
  return activity === undefined || open > work.length || seq in liveActivity.undecided;
}

/** Return whether the inbox lists an approval, or may list it on a later page. */
function isListed({ items, has_more }, seq) {
  return items.some((item) => item.kind === "approval" && item.seq === seq) || Boolean(has_more && seq < items.at(-1)?.seq);
}

// --- one event

function applyEvent(draft, event) {
  const { state } = draft;
  switch (event.type) {
    case "welcome":
      return applyWelcome(draft, event);
    case "deliver":
      return applyMessage(draft, event.message, true);
    case "stored":
      return applyStored(draft, event);
    case "notice":
      return applyNotice(draft, event);
    case "presence":
      return applyPresence(draft, event);
    case "signal":
      live.applySignal(draft, event, event.at);
      if (event.kind === "thinking") draft.own("stale").agents = true;
      if (event.kind !== "delta") markReceipts(draft, event.thread_id);
      return;
    case "result":
      return applyResult(draft, event.call.op, event.call.args, event.value);
    case "fetching":
      return startFetching(draft, event);
    case "failed":
      return applyFailure(draft, event);
    case "outbox":
      return applyOutbox(draft, event);
    case "connection":
      state.connection = event.state;
      state.error = event.error;
      if (event.state !== "online") live.clearWork(draft);
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
      if (isAnybodyAtWork(state)) draft.own("stale").agents = true; // no frame announces the end of all work
      return live.expirePeople(draft, event.at);
    default: // an unknown frame of a newer hub
  }
}

function applyWelcome(draft, frame) {
  const { state } = draft;
  const isOther = state.network.epoch !== "" && state.network.epoch !== frame.network.epoch;
  const isFarBehind = frame.is_operator && state.log_at && frame.head - state.log_at > MAX_BEHIND;
  // Forget everything, because messages may be missing in between. A screen with the older messages would hide the gap.
  if (isOther || frame.resume === "limited" || isFarBehind) forgetAll(draft);
  state.me = { agent_id: frame.agent_id, kind: frame.kind, is_operator: frame.is_operator === true };
  state.log_at = state.log_at || frame.head;
  state.is_read_only = frame.is_read_only === true || (state.is_read_only && state.follows === null); // a recording stays read-only
  state.follows = frame.follows ?? null;
  state.network = frame.network;
  state.limits = frame.limits;
  state.connection = "online";
  state.error = undefined;
  state.head = Math.max(state.head, frame.head);
  live.clearWork(draft);
  // Read these parts again, because notices and presence may be lost with the connection. Deliveries continue without a
  // gap.
  Object.assign(draft.own("stale"), { threads: true, agents: true, inbox: true });
  for (const row of Object.values(state.threads)) if (row.loaded) markReceipts(draft, row.thread_id);
}

/** Forget everything, because the ledger has a different history. Open threads stay open and are read again. */
function forgetAll(draft) {
  const { state } = draft;
  const open = Object.values(state.threads).filter((thread) => thread.loaded?.is_open);
  const { reading } = state; // the connection repeats running reads, so their answers still arrive
  Object.assign(state, nothingHeard(), { reading, head: 0, live_activity: live.createLiveActivity() });
  for (const { thread_id } of open) openThread(draft, thread_id);
}

// --- messages

/** Apply a message. `isDelivered` is true if the message was delivered to this participant. An operator also reads
 * messages between others in the log. */
function applyMessage(draft, message, isDelivered = false) {
  const { state } = draft;
  const { seq } = message;
  const isNew = count(draft, message, isDelivered);
  addToWindow(draft, message);
  if (message.sender_id === state.me.agent_id && message.message_id in state.outbox) {
    delete draft.own("outbox")[message.message_id];
  }
  if (!isNew) return;
  state.head = Math.max(state.head, seq);
  recordActivity(draft, message);
  // Read the receipts of the user's message again when it gets an answer, because a recipient has handled it.
  for (const named of [message.cause, message.reply_to]) {
    if (state.messages[named]?.sender_id === state.me.agent_id) draft.own("stale", "status")[named] = true;
  }
}

function recordActivity(draft, message) {
  live.applyMessage(draft, message);
  if (message.kind !== "direct") draft.own("stale", "rows")[message.thread_id] = true; // its readers may have changed
}

/** Count a message once in the row of its thread. Return whether the message is new. */
function count(draft, message, isDelivered) {
  const { state } = draft;
  const { seq, thread_id: id, sender_id } = message;
  const current = state.threads[id];
  const isOther = isDelivered && (sender_id !== state.me.agent_id || message.kind === "mod");
  if (current !== undefined && (seq <= current.base || current.recent.has(seq))) {
    // Count a delivery that arrived earlier through the log.
    if (isOther && current.recent.get(seq) === false) countOther(draft, ownRow(draft, id), seq);
    return false;
  }
  const row = ownRow(draft, id);
  if (!row.messages) draft.own("stale", "rows")[id] = true; // earlier messages, readers and read state are unknown
  row.messages += 1;
  row.recent = new Map(row.recent).set(seq, false);
  if (isOther) countOther(draft, row, seq);
  if (row.recent.size > MAX_RECENT) {
    // Treat everything up to this seq as counted. A later delivery with a lower seq is not counted again.
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

/**
 * Return the row of a thread for writing. `recent` contains each counted seq above `base`, with whether it is a
 * delivered message from somebody else. The recent messages may arrive in any order. `lost` is the newest seq that was
 * removed from `recent` since the row was last read.
 */
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
  const removable = Object.values(threads).filter((thread) => !thread.loaded && !thread.mark.is_pinned && thread.last_seq);
  removable.sort((first, second) => first.last_seq - second.last_seq);
  for (const item of removable.slice(0, Object.keys(threads).length - MAX_THREADS)) delete draft.own("threads")[item.thread_id];
  draft.state.has_more_threads = true;
}

function describeLast(message) {
  const { seq, sender_id, sender_kind, sent_at } = message;
  return { seq, sender_id, sender_kind, sent_at, text: lineOf(message) };
}

/** Add a message to the loaded messages of its thread, if they reach that far back. A stored message replaces its
 * provisional copy. */
function addToWindow(draft, message) {
  const { state } = draft;
  const { seq, thread_id: id } = message;
  const { loaded, last } = state.threads[id] ?? {};
  if (last?.seq === seq && last.sent_at !== message.sent_at) ownRow(draft, id).last = describeLast(message);
  // Ignore a message below the loaded messages. The messages in between may be missing, and the thread would seem to
  // begin there.
  if (!loaded || seq < loaded.complete_from) return;
  const current = state.messages[seq];
  // A page that was read before an edit may arrive after the edited message. It must not undo the edit. For the same
  // reason, the mark in `stale` stays until the message is read once more.
  const isRevised = current !== undefined && revisionOf(message) > revisionOf(current);
  if (current === undefined || (!message.is_provisional && (current.is_provisional || isRevised))) put(draft, "messages", seq, message);
  if (loaded.fresh && !loaded.fresh.includes(seq)) draft.own("threads", id, "loaded", "fresh").push(seq);
  insert(draft.own("threads", id, "loaded", "seqs"), seq);
  if (loaded.error) draft.own("threads", id, "loaded").error = undefined;
  if (state.threads[id].loaded.seqs.length > MAX_LOADED) trimLoaded(draft, id);
}

function revisionOf(message) {
  return Math.max(message.edited_at ?? 0, message.deleted_at ?? 0);
}

function insert(seqs, seq) {
  let place = seqs.length;
  // Search from the end, because nearly every message is the newest.
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

// --- own messages

function applyOutbox(draft, event) {
  const outbox = draft.own("outbox");
  if (event.entry) outbox[event.entry.message_id] = event.entry;
  else delete outbox[event.message_id];
}

/** Update the state after the hub has stored a message of this page. The hub does not deliver a message to the session
 * that sent it. A provisional copy of the sent message is shown until the message is read from the hub. */
function applyStored(draft, frame) {
  const { state } = draft;
  const entry = state.outbox[frame.message_id];
  if (entry === undefined || frame.thread_id === undefined) return;
  delete draft.own("outbox")[frame.message_id];
  const { agent_id: sender_id, kind: sender_kind } = state.me;
  const { message_id, to, content, reply_to, requires_response, metadata } = entry;
  const fields = { message_id, to, content, reply_to, requires_response, metadata };
  const message = {
    ...Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== undefined)),
    seq: frame.seq, thread_id: frame.thread_id, kind: kindOf(to), sender_id, sender_kind,
    sent_at: frame.at ?? entry.at, root: reply_to ?? frame.seq, hops: 0, is_provisional: true,
  };
  const isNew = count(draft, message, false);
  addToWindow(draft, message);
  if (isNew || state.messages[frame.seq]?.is_provisional) draft.own("stale", "messages")[frame.seq] = frame.thread_id;
  if (isNew) recordActivity(draft, message);
  if (frame.seq in state.messages) draft.own("stale", "status")[frame.seq] = true;
}

function kindOf(to) {
  const kind = to.split(":")[0];
  return kind === "agent" ? "direct" : kind;
}

// --- notices, presence

function applyNotice(draft, frame) {
  const { body = {}, thread_id: id } = frame;
  switch (frame.kind) {
    case "taken":
    case "given":
      draft.own("stale", "rows")[id] = true; // the hub decides who may see the takeover, so read the row
      draft.own("stale").agents = true;
      return;
    case "marked":
      return applyMark(draft, id, body);
    case "mod": // a message was edited or deleted: fetch it again
      if (body.mod !== "messages" || !["edited", "deleted"].includes(body.event)) return;
      // Fetch an unknown message too: an older form may be in a page that is being read, or in a delivery on its way.
      if (body.seq in draft.state.messages || draft.state.threads[id]?.loaded) draft.own("stale", "messages")[body.seq] = id;
      if (id in draft.state.threads) draft.own("stale", "rows")[id] = true; // the title of the thread may quote the message
      markInbox(draft); // the inbox may quote the message
      return;
    case "members":
      return applyMembership(draft, id, body.agent_id);
    case "inbox":
      markInbox(draft);
      draft.own("stale").agents = true; // a fault of an agent may have appeared or ended
      return;
    case "dead_letter":
    case "dead_letter_withdrawn":
    case "loop_stopped":
    case "budget_exhausted":
      markInbox(draft);
      if (body.seq in draft.state.messages) draft.own("stale", "status")[body.seq] = true;
      return;
    default: // an unknown kind of notice
  }
}

/** Apply a change of a channel's members. Without `agentId`, the access rules have changed. Without `channel`, a
 * participant was removed. */
function applyMembership(draft, channel, agentId) {
  const { state } = draft;
  if (channel === undefined) Object.assign(draft.own("stale"), { agents: true, threads: true });
  const isMine = agentId === undefined || agentId === state.me.agent_id;
  if (isMine) draft.own("stale").threads = true;
  for (const { thread_id: id, loaded, messages } of Object.values(state.threads)) {
    if (id !== channel && !id.startsWith("thread:")) continue; // any reply thread may belong to the channel
    if (messages) draft.own("stale", "rows")[id] = true;
    if (isMine && loaded) draft.own("stale", "loaded")[id] = true;
  }
}

/** Return whether the passing of time changes the screen, because somebody works, types or views a thread. */
export function isAnybodyAtWork(state) {
  const { typing, viewing } = state.live_activity;
  return [typing, viewing].some((value) => Object.keys(value).length) || Object.values(state.agents).some((agent) => agent.open_reactions);
}

function markInbox(draft) {
  draft.own("stale").inbox = true;
  draft.own("inbox").is_stale = true;
}

function applyPresence(draft, frame) {
  const current = draft.state.agents[frame.agent_id];
  const agent = { ...(current ?? { agent_id: frame.agent_id, kind: "" }), state: frame.state };
  if (frame.card !== undefined) agent.card = frame.card;
  draft.own("agents")[frame.agent_id] = agent;
  draft.own("stale").agents = true;
  if (frame.state === "offline") live.removeWorkOf(draft, frame.agent_id);
}

/** Mark the receipts in a thread that may have changed: the receipts of the user's newest messages, and of undelivered
 * messages. */
function markReceipts(draft, id) {
  const { state } = draft;
  const loaded = state.threads[id]?.loaded;
  if (!loaded?.is_open) return;
  const own = loaded.seqs.slice(-50).filter((seq) => state.messages[seq].sender_id === state.me.agent_id);
  const isOnItsWay = (seq) => state.status[seq]?.some((recipient) => recipient.state === "queued" || recipient.state === "delivered");
  for (const [place, seq] of own.entries()) {
    if (place >= own.length - 5 || isOnItsWay(seq)) draft.own("stale", "status")[seq] = true;
  }
}

/** Keep at most MAX_STATUS entries. The entries furthest from `seq` are removed, because messages near `seq` are
 * probably on the screen. */
function boundStatus(status, seq) {
  const seqs = Object.keys(status).map(Number); // ascending: integer keys are ordered
  while (seqs.length > MAX_STATUS) delete status[seq - seqs[0] > seqs.at(-1) - seq ? seqs.shift() : seqs.pop()];
}

// --- read state

function applyMark(draft, id, mark) {
  if (!(id in draft.state.threads)) return;
  const row = ownRow(draft, id);
  const before = row.mark.read_upto;
  if ((row.mark.title ?? "") !== (mark.title ?? "")) { // the hub derives the title of the thread from this name
    row.title = undefined;
    draft.own("stale", "rows")[id] = true;
  }
  // Never decrease the position, although another device may report an older position later.
  row.mark = { ...mark, read_upto: Math.max(before, mark.read_upto) };
  if (row.mark.read_upto !== before) countUnread(draft, row);
  if (draft.state.reading.threads) draft.own("stale", "rows")[id] = true; // a running read may return the old row
}

function countUnread(draft, row) {
  const { state } = draft;
  const upto = row.mark.read_upto;
  const { loaded } = row;
  if (upto >= row.last_seq) row.unread = 0;
  // Count only if every unread message is loaded. The loaded messages of an operator also include messages between
  // others.
  else if (!state.me.is_operator && loaded && !loaded.is_loading && !loaded.fresh && loaded.complete_from <= upto + 1) {
    const isUnread = (message) => message.seq > upto && (message.sender_id !== state.me.agent_id || message.kind === "mod");
    row.unread = loaded.seqs.slice(-UNREAD_LOOKED_AT).filter((seq) => isUnread(state.messages[seq])).length;
    row.unread = Math.min(MAX_UNREAD, row.unread);
  } else draft.own("stale", "rows")[row.thread_id] = true;
}

// --- open threads

function openThread(draft, id) {
  const { state } = draft;
  const row = ownRow(draft, id);
  state.closed = state.closed.filter((other) => other !== id);
  if (row.loaded) {
    draft.own("threads", id, "loaded").is_open = true;
    if (row.loaded.error) draft.own("stale", "loaded")[id] = true; // read again, because the thread may exist now
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
  if (state.threads[id].loaded.error && !state.threads[id].messages) return unload(draft, id); // the thread never existed
  state.closed = [...state.closed.filter((other) => other !== id), id];
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

/** Update the state when a read is sent. The answer to the read contains everything that is stored before, so only later
 * messages are added to its counts. */
function startFetching(draft, event) {
  const { state } = draft;
  const stale = draft.own("stale");
  switch (event.what) {
    case "threads":
      draft.own("reading").threads += 1;
      if (event.ids === undefined) Object.assign(stale, { threads: false, rows: {} });
      for (const id of event.ids ?? Object.keys(state.threads)) {
        delete draft.own("stale", "rows")[id];
        const row = state.threads[id];
        if (row?.recent.size || row?.lost) {
          // The answer to the read counts the known messages. Add only later messages to its counts.
          Object.assign(ownRow(draft, id), { recent: new Map(), base: row.last_seq, lost: 0 });
        }
      }
      return;
    case "agents":
      stale.agents = false;
      return;
    case "inbox":
      stale.inbox = false;
      return;
    case "history": // read the newest page; messages that arrive meanwhile are added to it
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
      throw new Error(`Unknown read "${event.what}".`);
  }
}

function applyFailure(draft, { what, thread_id: id, error }) {
  if (what === "threads") draft.own("reading").threads -= 1;
  if (what === "inbox") draft.own("inbox").is_stale = false;
  if (what === "history" && draft.state.threads[id]?.loaded) {
    const loaded = draft.own("threads", id, "loaded");
    const isBegun = loaded.fresh?.length > 0; // a message arrived meanwhile, so the thread exists
    if (isBegun) draft.own("stale", "loaded")[id] = true;
    Object.assign(loaded, { is_loading: false, fresh: undefined, error: isBegun ? undefined : error });
    if (loaded.error?.code === "unknown_message") { // the thread is empty, or this participant may not read it
      dropMessages(draft, loaded.seqs);
      Object.assign(loaded, { seqs: [], has_before: false, complete_from: 0 });
    }
  }
}

function applyResult(draft, op, args, value) {
  const { state } = draft;
  switch (op) {
    case "network.list_threads":
      return applyThreads(draft, args, value);
    case "network.history":
      return args.trigger === undefined ? applyHistory(draft, args, value) : undefined;
    case "network.log":
      for (const message of value.messages) applyMessage(draft, message);
      state.log_at = value.next;
      state.head = Math.max(state.head, value.head);
      return;
    case "network.list_agents":
      if (args.whole) applyAgents(draft, value.agents);
      return;
    case "network.inbox":
      if (args.before === undefined && args.after === undefined) {
        const ended = state.inbox.items.filter((item) => item.kind === "approval" && !isListed(value, item.seq));
        live.removeRequests(draft, ended.map((item) => item.seq));
        state.inbox = { items: value.items, has_more: value.has_more, is_stale: state.stale.inbox };
      }
      return;
    case "network.mark": {
      const { thread_id: id, ...mark } = value;
      return applyMark(draft, id, mark);
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

/** Apply an answer of `network.list_threads`. `args` is {whole: true} for the list from its start, {threads: ids} for
 * single rows, and {before} for a later page. */
function applyThreads(draft, args, { threads, has_more }) {
  const { state } = draft;
  if (args.before === undefined || args.whole) draft.own("reading").threads -= 1;
  for (const row of threads) mergeRow(draft, row);
  const named = new Set(threads.map((thread) => thread.thread_id));
  if (args.threads) {
    for (const id of args.threads) if (!named.has(id)) forgetRow(draft, id);
    return;
  }
  state.has_more_threads = has_more;
  if (!args.whole) return;
  state.is_listed = true;
  const lowest = has_more ? Math.min(...threads.map((thread) => thread.last_seq)) : 0;
  for (const { thread_id: id, last_seq } of Object.values(state.threads)) {
    if (last_seq >= lowest && !named.has(id)) forgetRow(draft, id);
  }
}

/** Forget a thread that the hub no longer lists, because this participant may not read it. Messages that arrived during
 * the read prove that this participant may read the thread. */
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

/** Merge a row from the hub with the messages that were counted since the read was sent. */
function mergeRow(draft, fresh) {
  const row = ownRow(draft, fresh.thread_id);
  const { last_seq, messages, readers, held, may_take, last, title, unread = 0, mark = {} } = fresh;
  const since = [...row.recent].filter(([seq]) => seq > last_seq);
  const isNewer = row.last_seq > last_seq && since.length > 0;
  if (row.lost > last_seq) draft.own("stale", "rows")[fresh.thread_id] = true; // too many messages arrived to be counted
  const readUpto = row.mark.read_upto;
  const read_upto = Math.max(readUpto, mark.read_upto ?? 0);
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
  if (readUpto > (mark.read_upto ?? 0)) countUnread(draft, row);
}

function applyHistory(draft, args, { messages, has_more, damaged }) {
  const { state } = draft;
  const id = args.thread_id;
  const previous = state.threads[id]?.loaded;
  if (!previous) return messages.forEach((message) => addToWindow(draft, message));
  const loaded = draft.own("threads", id, "loaded");
  const lowest = has_more && messages.length ? messages[0].seq : 0;
  if (args.before === undefined && previous.fresh) {
    // The hub may still deliver older messages. Drop them: the messages between them and the page are missing.
    const fresh = previous.fresh.filter((seq) => seq >= lowest);
    const seqSet = new Set([...messages.map((message) => message.seq), ...fresh]);
    dropMessages(draft, previous.seqs.filter((seq) => !seqSet.has(seq)));
    const seqs = [...seqSet].sort((first, second) => first - second);
    Object.assign(loaded, { seqs, complete_from: lowest, has_before: has_more });
  } else if (args.before === undefined || args.before >= previous.complete_from) {
    if (lowest <= previous.complete_from) Object.assign(loaded, { complete_from: lowest, has_before: has_more });
  } else return; // ignore the page: messages between it and the loaded messages are missing
  if (args.before === undefined) Object.assign(loaded, { is_loading: false, fresh: undefined, error: undefined });
  if (damaged) loaded.damaged = [...new Set([...(loaded.damaged ?? []), ...damaged])];
  for (const message of messages) addToWindow(draft, message);
  if (args.before === undefined) markReceipts(draft, id);
}

function applyAgents(draft, agents) {
  draft.state.agents = Object.fromEntries(agents.map((agent) => [agent.agent_id, agent]));
  live.applyWork(draft, agents);
}
