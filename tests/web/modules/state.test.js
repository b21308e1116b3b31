/** Tests of the page's state: the data that it keeps, and the data that it drops. */
import assert from "node:assert/strict";
import test from "node:test";
import { applyAll, createState, isAwaited } from "../../../web/page/core/state.js";

const WELCOME = { type: "welcome", agent_id: "mia", kind: "human", network: { name: "n", epoch: "e" }, limits: {}, head: 0, resume: "full" };
const say = (seq, thread_id = "direct:bob~mia") => {
  const message = { seq, message_id: `m${seq}`, kind: "direct", sender_id: "bob", sender_kind: "agent", to: "agent:mia", thread_id };
  return { type: "deliver", attempt: 1, at: 1, message: { ...message, root: seq, hops: 0, sent_at: 1, content: `${seq}` } };
};
const open = (thread_id) => [
  { type: "open", thread_id },
  { type: "fetching", what: "history", thread_id },
  { type: "result", call: { op: "network.history", args: { thread_id } }, value: { messages: [], has_more: false } },
];
const count = (state) => {
  let known = 0;
  for (const seq in state.messages) known += state.messages[seq] !== undefined;
  return known;
};

test("of threads that are not open no messages are kept, but for the last few that were", () => {
  const ids = [..."abcdefgh"].map((it) => `direct:${it}~mia`);
  let state = applyAll(createState(), [WELCOME, ...ids.flatMap(open)]);
  for (let seq = 1; seq <= 80; seq += 1) state = applyAll(state, [say(seq, ids[seq % ids.length])]);
  assert.equal(count(state), 80);
  state = applyAll(state, ids.map((thread_id) => ({ type: "close", thread_id })));
  assert.equal(count(state), 40);
  assert.deepEqual(Object.values(state.threads).map((it) => it.messages), ids.map(() => 10));
});

test("an open thread keeps its newest messages, and says that there are earlier ones", () => {
  let state = applyAll(createState(), [WELCOME, ...open("direct:bob~mia")]);
  for (let seq = 1; seq <= 9000; seq += 50) state = applyAll(state, [...Array(50)].map((_, place) => say(seq + place)));
  const { loaded, messages, unread } = state.threads["direct:bob~mia"];
  assert.ok(loaded.seqs.length <= 6000 && loaded.has_before);
  assert.deepEqual([loaded.seqs.at(-1), loaded.complete_from], [9000, loaded.seqs[0]]);
  assert.equal(count(state), loaded.seqs.length);
  assert.deepEqual([messages, unread], [9000, 100]);
});

test("old deliveries that arrive while a thread is read leave no gap in the thread", () => {
  const thread_id = "direct:bob~mia";
  const read = { op: "network.history", args: { thread_id } };
  const newest = [say(98), say(99)].map((it) => it.message);
  const state = applyAll(createState(), [
    WELCOME, { type: "open", thread_id }, say(1), { type: "fetching", what: "history", thread_id }, say(2), say(3), say(100),
    { type: "result", call: read, value: { messages: newest, has_more: true } }, say(4),
  ]);
  const { seqs, complete_from, has_before } = state.threads[thread_id].loaded;
  assert.deepEqual([seqs, complete_from, has_before, count(state)], [[98, 99, 100], 98, true, 3]);
});

const edited = (seq, at, content) => ({ ...say(seq).message, content, edited_at: at });
const page = (messages, args = {}) => ({
  type: "result", call: { op: "network.history", args: { thread_id: "direct:bob~mia", ...args } }, value: { messages, has_more: false },
});
const notice = (seq, event = "edited") => ({ type: "notice", kind: "mod", thread_id: "direct:bob~mia", body: { mod: "messages", event, seq } });

test("a page that was read before an edit does not undo the edit", () => {
  let state = applyAll(createState(), [WELCOME, ...open("direct:bob~mia"), say(1), page([edited(1, 5, "new")]), page([edited(1, 3, "old")])]);
  assert.equal(state.messages[1].content, "new");
  state = applyAll(state, [page([{ ...edited(1, 5, null), deleted_at: 6 }]), page([edited(1, 5, "new")])]);
  assert.equal(state.messages[1].content, null);
});

test("a message that is edited while it is read is read once more", () => {
  const thread_id = "direct:bob~mia";
  const reading = { type: "fetching", what: "message", seq: 1 };
  let state = applyAll(createState(), [WELCOME, ...open(thread_id), say(1), notice(1), reading, notice(1), page([edited(1, 3, "first")], { before: 2, limit: 1 })]);
  assert.deepEqual(state.stale.messages, { 1: thread_id });
  state = applyAll(createState(), [WELCOME, { type: "open", thread_id }, { type: "fetching", what: "history", thread_id }, notice(1), page([say(1).message])]);
  assert.deepEqual(state.stale.messages, { 1: thread_id });
  state = applyAll(createState(), [WELCOME, ...open(thread_id), notice(1), say(1)]);
  assert.deepEqual(state.stale.messages, { 1: thread_id });
});

test("threads beyond what a page lists leave it, the oldest first", () => {
  const events = [...Array(2500)].map((_, place) => say(place + 1, `direct:a${place}~mia`));
  const state = applyAll(createState(), [WELCOME, ...events]);
  assert.ok(Object.keys(state.threads).length <= 2101);
  assert.ok(state.has_more_threads && "direct:a2499~mia" in state.threads && !("direct:a0~mia" in state.threads));
});

test("an earlier state stays as it was", () => {
  const before = applyAll(createState(), [WELCOME, ...open("direct:bob~mia"), say(1)]);
  const told = JSON.stringify(before);
  applyAll(before, [say(2), { type: "close", thread_id: "direct:bob~mia" }, { type: "reset" }]);
  assert.equal(JSON.stringify(before), told);
  assert.equal(before.messages[2], undefined);
});

test("a request that the inbox lists no more is awaited by nobody, whichever signal was lost", () => {
  const request = { ...say(1).message, metadata: { approval: { reaction: "r1" } } };
  const inbox = (items, has_more = false) => ({ type: "result", call: { op: "network.inbox", args: {} }, value: { items, has_more } });
  const item = { kind: "approval", seq: 1 };
  const heard = applyAll(createState(), [WELCOME, { type: "deliver", attempt: 1, at: 1, message: request }, { type: "fetching", what: "inbox" }]);
  assert.ok(isAwaited(applyAll(heard, [inbox([])]), request, true)); // its agent has not yet recorded the wait
  const listed = applyAll(heard, [inbox([item])]);
  assert.ok(isAwaited(listed, request, true));
  assert.ok(isAwaited(applyAll(listed, [inbox([{ kind: "approval", seq: 9 }], true)]), request, true)); // the next page may list it
  assert.ok(!isAwaited(applyAll(listed, [inbox([])]), request, true));
});

test("who only looks on knows by what an agent is at whether its request is awaited", () => {
  const request = { ...say(1).message, metadata: { approval: { reaction: "r1" } } };
  const agents = (told) => ({ type: "result", call: { op: "network.list_agents", args: { whole: true } }, value: { agents: [{ agent_id: "bob", kind: "agent", ...told }] } });
  const heard = applyAll(createState(), [WELCOME, { type: "deliver", attempt: 1, at: 1, message: request }]);
  const isStill = (told) => isAwaited(applyAll(heard, [agents(told)]), request, false);
  const work = (activity) => ({ activity, open_reactions: 1, work: [{ reaction: "r1", thread_id: "direct:bob~mia", activity }] });
  assert.deepEqual(["works", "waits", "interrupted", "held", "stopping"].map((it) => isStill(work(it))), [true, true, true, true, false]);
  assert.ok(isStill({})); // unknown
  assert.ok(isStill({ activity: "waits", open_reactions: 17, work: [] }));
  assert.ok(!isStill({ activity: "idle" }));
});

const UNKNOWN = { type: "failed", what: "history", thread_id: "thread:7", error: { code: "unknown_message", message: "There is none." } };
const ask = [{ type: "open", thread_id: "thread:7" }, { type: "fetching", what: "history", thread_id: "thread:7" }];

test("a thread that is not there is asked for again when it is opened again, and forgotten when it is left", () => {
  const state = applyAll(createState(), [WELCOME, ...ask, UNKNOWN]);
  assert.equal(state.threads["thread:7"].loaded.error.code, "unknown_message");
  const again = applyAll(state, [ask[0]]);
  assert.deepEqual(again.stale.loaded, { "thread:7": true });
  assert.ok(!("thread:7" in applyAll(again, [{ type: "close", thread_id: "thread:7" }]).threads));
});

test("a thread in which something is said while it is asked for is there, whatever the answer was", () => {
  const { loaded } = applyAll(createState(), [WELCOME, ...ask, say(8, "thread:7"), UNKNOWN]).threads["thread:7"];
  assert.deepEqual([loaded.error, loaded.seqs], [undefined, [8]]);
});
