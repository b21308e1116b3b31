/**
 * The only module in which screens meet the protocol. This module holds the newest state as a signal, and the actions
 * of a person. Frames that arrive together are applied together, so that the signal changes at most once per drawn
 * frame.
 *
 * A `source` feeds the store. `#core/connection.js` is the live source, and a recording is another one:
 *   connect(onEvent)   starts the source; `onEvent` gets the events of `#core/state.js`, a `welcome` first
 *   call(op, args)     returns a promise of the value, which rejects with an error that has a `code`
 *   close()
 *   is_read_only       if true, the source has no further methods; otherwise it also has
 *   send(message) -> message_id, retry(message_id), discard(message_id), signal(kind, body, where), wake()
 * `useSource(source)` before the login makes the page show that source instead of joining a hub.
 */
import {computed, signal} from "#vendor/signals-core.js";
import {Connection} from "#core/connection.js";
import {Fetching} from "#core/fetching.js";
import {applyAll, createState, isAnybodyAtWork} from "#core/state.js";
import {addressOf, conversationOf, directThread, nameOf, nameThread, partiesOf, replyAddress} from "#core/text.js";
import {findStorage} from "#ui/storage.js";

const TICK_MS = 2_000;
const HIDDEN_MS = 250; // update interval of a hidden page
const APPLIED = /^(network\.(message_status|mark|dismiss|take|give|resume_root|retry_dead_letter|drop_dead_letter)|channels\..*)$/; // operations whose results change the state
const DECISIONS = {approve: "/approve", thread: "/approve thread", always: "/approve always", deny: "/deny", edit: "/edit"};

/** The newest state, as `#core/state.js` describes it. `is_read_only` is true for a recording. */
export const state = signal(createState());

let current = state.value;
let source = null;
let fetching = null;
let isDrawing = false;
const waiting = []; // events that were not applied yet
const reading = new Map(); // maps a thread to the seq up to which it will be marked as read

// --- events

/** Show the events of a source (the hub or a recording), and close the previous source. */
export function useSource(next) {
  leave();
  source = next;
  current = {...createState(), is_read_only: Boolean(next.is_read_only)};
  state.value = current;
  const dispatchNow = (event) => next === source && dispatch(event);
  fetching = new Fetching({source: next, getState: newest, dispatch: dispatchNow});
  if (next.is_read_only) for (const name of CHANGING) delete actions[name];
  next.connect((event) => {
    if (next !== source) return;
    waiting.push(event);
    if (event.type === "welcome" || event.type === "connection") newest();
    draw();
  });
}

function leave() {
  fetching?.close();
  source?.close();
  source = fetching = null;
  waiting.length = 0;
}

/** Apply all waiting events, and return the newest state. The screen may not show this state yet. */
function newest() {
  if (waiting.length) {
    const events = waiting.splice(0);
    current = applyAll(current, events);
    for (const event of events) if (event.type === "welcome") fetching?.startReads(event);
    fetching?.startReads();
  }
  return current;
}

/** Apply an event that the page itself creates, without delay. */
function dispatch(event) {
  waiting.push({at: Date.now(), ...event});
  newest();
  draw();
}

function draw() {
  if (isDrawing) return;
  isDrawing = true;
  const update = () => {
    isDrawing = false;
    state.value = newest();
  };
  if (globalThis.document === undefined || document.hidden) setTimeout(update, HIDDEN_MS);
  else requestAnimationFrame(update);
}

if (globalThis.document !== undefined) {
  const wake = () => source?.wake?.();
  addEventListener("online", wake);
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) state.value = newest();
    if (!document.hidden) wake();
  });
  setInterval(() => {
    if (!document.hidden && current.connection === "online" && isAnybodyAtWork(current)) dispatch({type: "tick"});
  }, TICK_MS);
}

// --- reading

/** Parts of the state that change less often than the whole state. */
export const me = computed(() => state.value.me);
export const threads = computed(() => state.value.threads);
export const agents = computed(() => state.value.agents);
export const isReadOnly = computed(() => Boolean(state.value.is_read_only));
/** At a read replica, its leader and the time of its data: {leader, as_of}. */
export const follows = computed(() => state.value.follows);
/** Whether the page shows a finished run instead of a live network. */
export const isOver = computed(() => isReadOnly.value && !follows.value);

/** Return the title of a thread, as the current user sees it. @param {string} id */
export const nameHere = (id) => nameThread(threads.value[id] ?? {thread_id: id}, me.value.agent_id);

/** Fetch a message of a thread. The result is undefined if the message no longer exists. */
export async function fetchMessage(threadId, seq) {
  const {messages} = await actions.call("network.history", {thread_id: threadId, before: seq + 1, limit: 1});
  return messages.find((message) => message.seq === seq);
}

// --- actions

/** The actions of a person. On a read-only page, the actions that change something are missing. */
export const actions = {
  /** Join a hub as a participant. `login_code` is a one-time login code, which binds `token` to the participant. */
  connect({agent_id, token, login_code}) {
    const url = new URL("/?read_only=1", location.href); // allows reading from a read replica; a leader ignores the parameter
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    const tokens = login_code ? {token: login_code, newToken: token} : {token};
    useSource(new Connection({url: url.href.split("#")[0], agentId: agent_id, storage: findStorage(), ...tokens}));
  },

  disconnect() {
    leave();
    current = createState();
    state.value = current;
  },

  /** Call an operation and return its value. If the value contains threads or messages, they are added to the state. */
  async call(op, args = {}) {
    if (source === null) throw new Error("This page is not connected.");
    const value = await source.call(op, args);
    if (APPLIED.test(op)) dispatch({type: "result", call: {op, args}, value});
    return value;
  },

  /** Load the messages of a thread. If `at` is given, load back to the message with this seq. */
  async openThread(id, at) {
    dispatch({type: "open", thread_id: id});
    if (at !== undefined) await fetching?.reach(id, at);
  },

  /** Request the delivery status of one of the user's messages, because the message is now on the screen. */
  markDrawn: (seq) => dispatch({type: "drawn", seq}),

  closeThread: (id) => dispatch({type: "close", thread_id: id}),
  loadEarlier: async (id) => fetching?.loadEarlier(id),
  loadMoreThreads: async () => fetching?.loadMoreThreads(),

  /** Send a message to an address or a thread. Return the id of the message in `outbox`. `content` is a text or {text,
   * files, images}. `text` is another name for `content`. */
  send({to, thread_id: id, content, text, reply_to, requires_response, metadata}) {
    const answered = reply_to !== undefined ? newest().messages[reply_to] : lastOfChain(id);
    const body = {content: content ?? text, requires_response, metadata};
    return sendTo(to ?? findAddress(id, answered), body, answered ?? {thread_id: id}, reply_to);
  },

  /** Send one of the user's messages again with new content, and ask the reactions to the old message to stop. */
  async resend(seq, content) {
    const {recipients} = await actions.call("network.message_status", {seq});
    const latest = recipients.map((recipient) => recipient.again ?? recipient); // use the newest reaction if a takeover interrupted the first one
    const open = latest.filter((recipient) => recipient.reaction_status === "open" && recipient.reaction).map((recipient) => recipient.reaction);
    await Promise.all(open.map((reaction) => actions.call("network.cancel", {reaction})));
    const {to, reply_to, requires_response, thread_id} = newest().messages[seq];
    return sendTo(to, {content, requires_response, metadata: {replaces: seq}}, newest().messages[reply_to] ?? {thread_id}, reply_to);
  },

  retry: (messageId) => source.retry(messageId),
  discard: (messageId) => source.discard(messageId),
  stop: ({thread_id, reaction}) => actions.call("network.cancel", reaction ? {reaction} : {thread_id}),
  take: (id, ttl_ms) => actions.call("network.take", {thread_id: id, ttl_ms}),
  give: (id) => actions.call("network.give", {thread_id: id}),

  /** Decide about a request for approval: "approve" (once), "thread", "always", "deny" or "edit". `rest` is the reason
   * or the arguments. With `isCalled`, the decision is sent as an operation, for an operator who cannot read the
   * thread. */
  async decide(seq, how, rest = "", {isCalled = false} = {}) {
    const text = `${DECISIONS[how]} ${how === "deny" || how === "edit" ? rest : ""}`.trim();
    if (isCalled) return actions.call("network.decide", {seq, decision: text});
    const request = await findMessage(seq);
    return sendTo(replyAddress(request, newest().me.agent_id), {content: text}, request, seq);
  },

  /** Mark a thread as read up to a message. Calls run one at a time, and only the newest seq is sent. */
  async markRead(id, seq) {
    const isRead = seq <= (newest().threads[id]?.mark.read_upto ?? 0) || seq <= (reading.get(id) ?? 0);
    if (isRead) return;
    const isUnderWay = reading.has(id);
    reading.set(id, seq);
    if (isUnderWay) return;
    try {
      for (let sent = 0; sent < reading.get(id); ) {
        sent = reading.get(id);
        await actions.call("network.mark", {thread_id: id, read_upto: sent});
      }
    } finally {
      reading.delete(id);
    }
  },

  /** Change this person's view of a thread: {title?, is_pinned?, is_muted?, is_archived?}. */
  mark: (id, changed) => actions.call("network.mark", {thread_id: id, ...changed}),
  dismiss: ({kind, seq, agent_id}) => actions.call("network.dismiss", kind === "fault" ? {kind, agent_id} : {kind, seq}),
  resumeRoot: (root) => actions.call("network.resume_root", {root}),
  retryDeadLetter: ({seq, agent_id}) => actions.call("network.retry_dead_letter", agent_id ? {seq, agent_id} : {seq}),

  /** Signal that this person types in a thread. Repeat the signal every three seconds, because others show it for six
   * seconds. */
  typing: (id) => source?.signal?.("typing", {}, {thread_id: id}),

  /** Signal that this person views a thread, or no longer views it. Repeat the signal every twenty seconds, because
   * others show it for thirty seconds. */
  viewing: (id, isActive) => source?.signal?.("viewing", {active: isActive}, {thread_id: id}),
};

const CHANGING = [
  "connect", "disconnect", "markDrawn", "send", "resend", "retry", "discard", "stop", "take", "give", "decide", "markRead", "mark", "dismiss",
  "resumeRoot", "retryDeadLetter", "typing", "viewing",
];

/** Send a message. `answered` is the message to which the new message replies, or {thread_id} if only the thread is
 * known. `answered` determines the conversation. */
function sendTo(to, message, answered, replyTo) {
  if (source === null) throw new Error("This page is not connected.");
  const reply = replyTo ?? answered?.seq;
  const conversation = to.startsWith("agent:") ? conversationOf(answered?.thread_id ?? "") || undefined : undefined;
  const fields = {to, ...message, reply_to: reply, cause: reply, conversation, thread_id: findThread(to, answered)};
  return source.send(Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== undefined)));
}

function findThread(to, answered) {
  if (to.startsWith("agent:")) return directThread(newest().me.agent_id, nameOf(to), conversationOf(answered?.thread_id ?? ""));
  if (to.startsWith("mod:")) return answered?.thread_id ?? `${to}~${newest().me.agent_id}`;
  if (answered?.seq === undefined) return to;
  return answered.thread_id.startsWith("thread:") ? answered.thread_id : `thread:${answered.seq}`;
}

/** Return a message with `reply_to` set. In a reply thread, every message replies to the newest message. */
function lastOfChain(id) {
  if (!id?.startsWith("thread:")) return undefined;
  return newest().messages[newest().threads[id]?.loaded?.seqs.at(-1)];
}

function findAddress(id, answered) {
  const own = newest().me.agent_id;
  const to = answered ? replyAddress(answered, own) : addressOf(id, own);
  const isElsewhere = id?.startsWith("direct:") && !partiesOf(id).includes(own);
  if (to === null || isElsewhere) throw new Error("Nothing can be sent to this thread from here.");
  return to;
}

/** Find a message by its seq. The message must be loaded, or the inbox or a request for approval must name its thread.
 */
async function findMessage(seq) {
  const {messages, inbox, live_activity: liveActivity} = newest();
  if (messages[seq]) return messages[seq];
  const named = inbox.items.find((item) => item.seq === seq) ?? liveActivity.undecided[seq];
  if (named === undefined) throw new Error(`Message #${seq} is not shown here; open its thread first.`);
  const message = await fetchMessage(named.thread_id, seq);
  if (message === undefined) throw new Error(`Message #${seq} no longer exists.`);
  return message;
}
