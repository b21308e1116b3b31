/**
 * Follow a network with the page's own modules but without a page, and compare the page's state with a full refetch.
 * Each line of the input is a command, and each line of the output is an answer {done, ...} or {failed}.
 */
import { createInterface } from "node:readline";
import { Connection } from "../../web/page/core/connection.js";
import { Fetching } from "../../web/page/core/fetching.js";
import { apply, applyAll, createState, isSettled, project } from "../../web/page/core/state.js";

const WAIT_MS = 15_000;
const PAGE = 500;
const counts = { frames: {}, compared: 0, drops: 0, welcomes: 0 };
const pauses = { threads: 5, agents: 5, inbox: 5, status: 5 }; // as on the page, but shorter
const waiting = [];
const watchers = new Set();
const sockets = new Set();
const recorded = [];
let state = createState();
let url;
let connection;
let fetching;

/** Socket of this run. It connects to the hub's current address, and the test can drop it. */
class Socket extends WebSocket {
  constructor(_, protocol) {
    super(url, protocol);
    sockets.add(this);
    this.addEventListener("close", () => sockets.delete(this));
  }
}

function take(event) {
  const kind = event.type === "notice" || event.type === "signal" ? `${event.type}.${event.kind}` : event.type;
  counts.frames[kind] = (counts.frames[kind] ?? 0) + 1;
  if (recorded.length < 20_000) recorded.push(event);
  waiting.push(event);
}

/** Apply all pending events together, as the page's store does. */
function newest() {
  if (waiting.length) {
    const events = waiting.splice(0);
    state = applyAll(state, events);
    for (const event of events) if (event.type === "welcome") fetching.startReads(event);
    fetching.startReads();
    for (const look of [...watchers]) look();
  }
  return state;
}

function dispatch(event) {
  take({ at: Date.now(), ...event });
  newest();
}

/** Wait until a condition on the state is true. */
function until(fact, what, ms = WAIT_MS) {
  return new Promise((resolve, reject) => {
    const late = setTimeout(() => end(reject, new Error(`${what} did not come: ${describe()}`)), ms);
    const look = () => fact(state) && end(resolve);
    const end = (settle, value) => {
      clearTimeout(late);
      watchers.delete(look);
      settle(value);
    };
    watchers.add(look);
    newest();
    look();
  });
}

const describe = () => JSON.stringify({ stale: state.stale, reading: state.reading, connection: state.connection, error: state.error });

// --- a full refetch from the hub, in the form of `project`

async function refetch(floors) {
  const call = (op, args) => connection.call(op, args);
  const rows = await readAll((before) => call("network.list_threads", { limit: PAGE, before }), "threads", "last_seq");
  const threads = {};
  for (const { mark = {}, readers, thread_id, last_seq, messages, held, last, title, unread = 0 } of rows) {
    const known = Object.fromEntries(Object.entries(mark).filter(([, value]) => value));
    threads[thread_id] = { thread_id, last_seq, messages, readers: [...readers].sort(), held, last, title, unread, mark: known };
  }
  const loaded = {};
  for (const [id, floor] of Object.entries(floors)) {
    const found = [];
    let before;
    for (let has_more = true; has_more && (before === undefined || before > floor); ) {
      const page = await call("network.history", { thread_id: id, before, limit: PAGE });
      found.unshift(...page.messages);
      before = page.messages[0]?.seq;
      has_more = page.has_more && before !== undefined;
    }
    const shown = found.filter((it) => it.seq >= floor);
    if (shown.length) loaded[id] = shown;
  }
  const { agents: listed } = await call("network.list_agents", {});
  const agents = Object.fromEntries(listed.map(({ agent_id, kind, state: at, card }) => [agent_id, { kind, state: at, card }]));
  const inbox = await call("network.inbox", {}).then((it) => it.items, () => []);
  return { me: state.me.agent_id, epoch: state.network.epoch, threads, loaded, agents, inbox };
}

async function readAll(read, field, cursor) {
  const found = [];
  let before;
  for (let has_more = true; has_more; ) {
    const page = await read(before);
    found.push(...page[field]);
    before = page[field].at(-1)?.[cursor];
    has_more = page.has_more && before !== undefined;
  }
  return found;
}

/** Return the first paths at which two JSON values differ. */
function differences(live, fresh, path = "") {
  if (JSON.stringify(live) === JSON.stringify(fresh)) return [];
  const isBoth = [live, fresh].every((it) => typeof it === "object" && it !== null);
  if (!isBoth) return [`${path}: ${JSON.stringify(live)?.slice(0, 300)} is ${JSON.stringify(fresh)?.slice(0, 300)}`];
  const keys = [...new Set([...Object.keys(live), ...Object.keys(fresh)])];
  return keys.flatMap((key) => differences(live[key], fresh[key], `${path}/${key}`)).slice(0, 5);
}

async function compare() {
  let found = [];
  // Presence and the inbox arrive in no order with deliveries. On a difference, wait for events that are still on their way.
  for (const end = Date.now() + WAIT_MS; ; ) {
    await until(isSettled, "quiet");
    const rows = Object.values(newest().threads).filter((it) => it.loaded && !it.loaded.error && it.messages);
    const floors = Object.fromEntries(rows.map((it) => [it.thread_id, it.loaded.complete_from]));
    const fresh = await refetch(floors);
    if (!isSettled(newest())) continue;
    found = differences(project(state), fresh);
    counts.compared += 1;
    if (!found.length || Date.now() > end - WAIT_MS + 2000) break;
    const before = state;
    await until((it) => it !== before, "anything more", 2000).catch(() => {});
    if (state === before) break;
  }
  if (found.length) throw new Error(`the state is not what the hub says: ${found.join("\n")}`);
  return { threads: Object.keys(state.threads).length, messages: Object.values(state.threads).reduce((sum, it) => sum + (it.loaded?.seqs.length ?? 0), 0) };
}

/** Freeze a value deeply. A frozen value is skipped, because its content is frozen too. */
function freeze(value) {
  if (typeof value !== "object" || value === null || Object.isFrozen(value)) return value;
  Object.freeze(value);
  for (const inner of Object.values(value)) freeze(inner);
  return value;
}

// --- commands

const commands = {
  begin({ agent_id, kind, token, options = {} }) {
    const given = { url, agentId: agent_id, kind, token, WebSocketCtor: Socket, random: () => 0.1, maxDelay: 100, ...options };
    connection = new Connection(given);
    fetching = new Fetching({ source: connection, getState: newest, dispatch, pauses });
    connection.connect((event) => {
      take(event);
      if (event.type === "welcome") counts.welcomes += 1;
      queueMicrotask(newest);
    });
    return until((it) => it.connection === "online" && it.is_listed, "the list of threads");
  },
  open: ({ thread_id }) => dispatch({ type: "open", thread_id }),
  close: ({ thread_id }) => dispatch({ type: "close", thread_id }),
  earlier: ({ thread_id, limit }) => fetching.loadEarlier(thread_id, limit).catch(() => {}),
  send: ({ message }) => ({ message_id: connection.send(message) }),
  call: async ({ op, args }) => {
    const value = await connection.call(op, args).catch((error) => ({ error: error.code }));
    if (!value.error) dispatch({ type: "result", call: { op, args }, value });
    return { value };
  },
  /** Drop the connection as a failing network does, without a close frame. */
  drop() {
    counts.drops += 1;
    for (const socket of sockets) {
      const end = socket.onclose;
      socket.onclose = socket.onmessage = null;
      socket.close();
      end?.({ code: 1006, reason: "" });
    }
  },
  sent: () => until((it) => Object.values(it.outbox).every((entry) => entry.state === "refused"), "an empty outbox"),
  reached: ({ seq }) => until((it) => it.head >= seq && (!it.me.is_operator || it.log_at >= seq), `#${seq}`),
  compare,
  /** Wait until no agent works. Time passes as on the page, which polls working agents. */
  async idle() {
    const passing = setInterval(() => dispatch({ type: "tick" }), 20);
    try {
      await until((it) => isSettled(it) && !Object.keys(it.live_activity.works).length, "the end of all work");
    } finally {
      clearInterval(passing);
    }
  },
  seen: ({ threads }) => until((it) => threads.every((id) => (it.threads[id]?.messages ?? 0) > 1), "an answer in each thread"),
  said: ({ thread_id, text }) => until((it) => it.threads[thread_id]?.last?.text === text, text),
  async approve() {
    const request = await until((it) => Object.values(it.live_activity.undecided).length > 0, "a request");
    const { seq, agent_id } = Object.values(state.live_activity.undecided)[0];
    connection.send({ to: `agent:${agent_id}`, content: "/approve", reply_to: seq });
    await until((it) => !(seq in it.live_activity.undecided), "the decision");
    return request;
  },
  wait: ({ connection: wanted }) => until((it) => it.connection === wanted, wanted),
  look: ({ path }) => ({ value: path.reduce((at, key) => at?.[key], newest()) }),
  counts: () => ({ counts }),
  /** Apply all events again to frozen states, to prove that no published state is modified. */
  async replay() {
    await until(isSettled, "quiet");
    const last = recorded.reduce((before, event) => freeze(apply(before, event)), freeze(createState()));
    for (const [how, made] of [["one by one", last], ["together", applyAll(createState(), recorded)]]) {
      const found = differences(project(made), project(state));
      if (found.length) throw new Error(`applied ${how} it is not the same: ${found.join("\n")}`);
    }
    return { events: recorded.length };
  },
  end() {
    connection?.close();
    process.exitCode = 0;
    setTimeout(() => process.exit(), 50);
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const { do: name, url: now, ...given } = JSON.parse(line);
  url = now ?? url;
  try {
    const answer = await commands[name]?.(given);
    process.stdout.write(`${JSON.stringify({ done: name, ...answer })}\n`);
  } catch (error) {
    process.stdout.write(`${JSON.stringify({ failed: error.message })}\n`);
  }
}
