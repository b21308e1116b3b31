/**
 * The only place where screens meet the protocol: the newest state as a signal, and what a person does as actions.
 * Frames are applied together, and the signal is set once for each frame that the screen draws.
 *
 * What the store is fed by is a `source`; `#core/connection.js` is the live one, a recording another:
 *   connect(onEvent)   begins; onEvent takes events as `#core/state.js` names them, the first one a `welcome`
 *   call(op, args)     gives a promise of the value; rejects with an error that has `code`
 *   close()
 *   is_read_only       true: there is no other method. Else also
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
const HIDDEN_MS = 250; // how often a page that nobody sees is brought up to date
const APPLIED = /^(network\.(message_status|mark|dismiss|take|give|resume_root|retry_dead_letter|drop_dead_letter)|channels\..*)$/;
const DECISIONS = {approve: "/approve", thread: "/approve thread", always: "/approve always", deny: "/deny", edit: "/edit"};

/** The newest state: `#core/state.js` says what is in it; `is_read_only` in a recording. */
export const state = signal(createState());

let current = state.value;
let source = null;
let fetching = null;
let isDrawing = false;
const waiting = []; // events that came since the last draw
const reading = new Map(); // thread -> up to where it is to be marked as read

// --- feeding

/** Show what a source gives; forgets what another one gave. */
export function useSource(given) {
  leave();
  source = given;
  current = {...createState(), is_read_only: Boolean(given.is_read_only)};
  state.value = current;
  const dispatchNow = (event) => given === source && dispatch(event);
  fetching = new Fetching({source: given, getState: newest, dispatch: dispatchNow});
  if (given.is_read_only) for (const name of CHANGING) delete actions[name];
  given.connect((event) => {
    if (given !== source) return;
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

/** Everything that came is applied: the state as it is now, which the screen may not show yet. */
function newest() {
  if (waiting.length) {
    const events = waiting.splice(0);
    current = applyAll(current, events);
    for (const event of events) if (event.type === "welcome") fetching?.look(event);
    fetching?.look();
  }
  return current;
}

/** Apply an event of the page's own at once. */
function dispatch(event) {
  waiting.push({at: Date.now(), ...event});
  newest();
  draw();
}

function draw() {
  if (isDrawing) return;
  isDrawing = true;
  const show = () => {
    isDrawing = false;
    state.value = newest();
  };
  if (globalThis.document === undefined || document.hidden) setTimeout(show, HIDDEN_MS);
  else requestAnimationFrame(show);
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

// --- looking

/** Parts of the state, which change less often than the whole. */
export const me = computed(() => state.value.me);
export const threads = computed(() => state.value.threads);
export const agents = computed(() => state.value.agents);
export const isReadOnly = computed(() => Boolean(state.value.is_read_only));
/** Where the node only follows: {leader, as_of}. */
export const follows = computed(() => state.value.follows);
/** Whether a run is shown that is over, and not what goes on. */
export const isOver = computed(() => isReadOnly.value && !follows.value);

/** What a thread is called for the person at the page. @param {string} id */
export const nameHere = (id) => nameThread(threads.value[id] ?? {thread_id: id}, me.value.agent_id);

/** A message of a thread, as the hub has it; undefined where it is there no more. */
export async function fetchMessage(threadId, seq) {
  const {messages} = await actions.call("network.history", {thread_id: threadId, before: seq + 1, limit: 1});
  return messages.find((it) => it.seq === seq);
}

// --- doing

/** What a person does. What changes something is missing where the page is read only. */
export const actions = {
  /** Join a hub as somebody. `login_code`: a one-time login, by which `token` is bound. */
  connect({agent_id, token, login_code}) {
    const url = new URL("/?read_only=1", location.href); // a node that follows is read; one that leads takes no notice of it
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    const tokens = login_code ? {token: login_code, newToken: token} : {token};
    useSource(new Connection({url: url.href.split("#")[0], agentId: agent_id, storage: findStorage(), ...tokens}));
  },

  disconnect() {
    leave();
    current = createState();
    state.value = current;
  },

  /** Call an operation; gives its value. What it tells of threads and messages is taken into the state. */
  async call(op, args = {}) {
    if (source === null) throw new Error("This page is not connected.");
    const value = await source.call(op, args);
    if (APPLIED.test(op)) dispatch({type: "result", call: {op, args}, value});
    return value;
  },

  /** Want a thread's messages, down to `at` if it is given. */
  async openThread(id, at) {
    dispatch({type: "open", thread_id: id});
    if (at !== undefined) await fetching?.reach(id, at);
  },

  /** A message of one's own is seen: ask what became of it. */
  tellDrawn: (seq) => dispatch({type: "drawn", seq}),

  closeThread: (id) => dispatch({type: "close", thread_id: id}),
  loadEarlier: async (id) => fetching?.loadEarlier(id),
  loadMoreThreads: async () => fetching?.loadMoreThreads(),

  /** Send to an address or a thread; gives the id under which it waits in `outbox`. `content`: a text, or {text, files,
   * images}; `text` is another name for it. */
  send({to, thread_id: id, content, text, reply_to, requires_response, metadata}) {
    const answered = reply_to !== undefined ? newest().messages[reply_to] : lastOfChain(id);
    const said = {content: content ?? text, requires_response, metadata};
    return sendTo(to ?? findAddress(id, answered), said, answered ?? {thread_id: id}, reply_to);
  },

  /** Send one's message anew with another content, in the place of the old one; what works on that is asked to stop. */
  async resend(seq, content) {
    const {recipients} = await actions.call("network.message_status", {seq});
    const latest = recipients.map((it) => it.again ?? it); // the one since somebody took the thread over
    const open = latest.filter((it) => it.reaction_status === "open" && it.reaction).map((it) => it.reaction);
    await Promise.all(open.map((reaction) => actions.call("network.cancel", {reaction})));
    const {to, reply_to, requires_response, thread_id} = newest().messages[seq];
    return sendTo(to, {content, requires_response, metadata: {replaces: seq}}, newest().messages[reply_to] ?? {thread_id}, reply_to);
  },

  retry: (messageId) => source.retry(messageId),
  discard: (messageId) => source.discard(messageId),
  stop: ({thread_id, reaction}) => actions.call("network.cancel", reaction ? {reaction} : {thread_id}),
  take: (id, ttl_ms) => actions.call("network.take", {thread_id: id, ttl_ms}),
  give: (id) => actions.call("network.give", {thread_id: id}),

  /** Decide on the call that a message asks for: "approve" (once), "thread", "always", "deny" or "edit"; `rest` is the
   * reason, or the arguments. `isCalled`: by an operator who does not read that message. */
  async decide(seq, how, rest = "", {isCalled = false} = {}) {
    const text = `${DECISIONS[how]} ${how === "deny" || how === "edit" ? rest : ""}`.trim();
    if (isCalled) return actions.call("network.decide", {seq, decision: text});
    const request = await findMessage(seq);
    return sendTo(replyAddress(request, newest().me.agent_id), {content: text}, request, seq);
  },

  /** Everything of a thread up to a message is read. One call at a time; the newest place counts. */
  async markRead(id, seq) {
    const isRead = seq <= (newest().threads[id]?.mark.read_upto ?? 0) || seq <= (reading.get(id) ?? 0);
    if (isRead) return;
    const isUnderWay = reading.has(id);
    reading.set(id, seq);
    if (isUnderWay) return;
    try {
      for (let told = 0; told < reading.get(id); ) {
        told = reading.get(id);
        await actions.call("network.mark", {thread_id: id, read_upto: told});
      }
    } finally {
      reading.delete(id);
    }
  },

  /** Change one's view of a thread: {title?, is_pinned?, is_muted?, is_archived?}. */
  mark: (id, changed) => actions.call("network.mark", {thread_id: id, ...changed}),
  dismiss: ({kind, seq, agent_id}) => actions.call("network.dismiss", kind === "fault" ? {kind, agent_id} : {kind, seq}),
  resumeRoot: (root) => actions.call("network.resume_root", {root}),
  retryDeadLetter: ({seq, agent_id}) => actions.call("network.retry_dead_letter", agent_id ? {seq, agent_id} : {seq}),

  /** One types in a thread: to be told every three seconds, shown for six. */
  typing: (id) => source?.signal?.("typing", {}, {thread_id: id}),

  /** One looks at a thread: to be told every twenty seconds, shown for thirty; or no more. */
  viewing: (id, isActive) => source?.signal?.("viewing", {active: isActive}, {thread_id: id}),
};

const CHANGING = [
  "connect", "disconnect", "tellDrawn", "send", "resend", "retry", "discard", "stop", "take", "give", "decide", "markRead", "mark", "dismiss",
  "resumeRoot", "retryDeadLetter", "typing", "viewing",
];

/** `answered`: the message that this is a reply to, where it is known, or just {thread_id}: which of several conversations
 * this one belongs to. */
function sendTo(to, message, answered, replyTo) {
  if (source === null) throw new Error("This page is not connected.");
  const reply = replyTo ?? answered?.seq;
  const conversation = to.startsWith("agent:") ? conversationOf(answered?.thread_id ?? "") || undefined : undefined;
  const given = {to, ...message, reply_to: reply, cause: reply, conversation, thread_id: findThread(to, answered)};
  return source.send(Object.fromEntries(Object.entries(given).filter(([, value]) => value !== undefined)));
}

function findThread(to, answered) {
  if (to.startsWith("agent:")) return directThread(newest().me.agent_id, nameOf(to), conversationOf(answered?.thread_id ?? ""));
  if (to.startsWith("mod:")) return `${to}~${newest().me.agent_id}`;
  if (answered?.seq === undefined) return to;
  return answered.thread_id.startsWith("thread:") ? answered.thread_id : `thread:${answered.seq}`;
}

/** In a reply thread everything is a reply: to its newest message. */
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

/** A message that a screen names by its seq alone: loaded, or where the inbox or a live request says that it is. */
async function findMessage(seq) {
  const {messages, inbox, under_way: underWay} = newest();
  if (messages[seq]) return messages[seq];
  const named = inbox.items.find((it) => it.seq === seq) ?? underWay.undecided[seq];
  if (named === undefined) throw new Error(`Message #${seq} is not shown here; open its thread first.`);
  const message = await fetchMessage(named.thread_id, seq);
  if (message === undefined) throw new Error(`There is no message #${seq} any more.`);
  return message;
}
