/** Tests of the page's requests for outdated data: which data it fetches, and how many requests run at once. */
import assert from "node:assert/strict";
import test from "node:test";
import { Fetching } from "../../../web/page/core/fetching.js";
import { apply, createState } from "../../../web/page/core/state.js";

const THREAD = "direct:bob~mia";
const WELCOME = { type: "welcome", agent_id: "mia", kind: "human", network: { name: "n", epoch: "e" }, limits: {}, head: 0, resume: "full" };
const ofMia = (seq) => ({ seq, message_id: `m${seq}`, kind: "direct", sender_id: "mia", sender_kind: "human", to: "agent:bob", thread_id: THREAD, root: seq, hops: 0, sent_at: 1, content: "" });

/** A page at a hub with these messages of mia. `asked` lists the requests for each, `busy` the number of concurrent status calls. */
function openPage(messages, recipients = () => [{ agent_id: "bob", state: "handled" }]) {
  const page = { state: createState(), asked: [], busy: 0, most: 0 };
  const answers = {
    "network.history": () => ({ messages, has_more: false }),
    "network.list_threads": () => ({ threads: [{ thread_id: THREAD, last_seq: messages.length, messages: messages.length, readers: [] }], has_more: false }),
    "network.list_agents": () => ({ agents: [], has_more: false }),
    "network.inbox": () => ({ items: [], has_more: false }),
    "network.message_status": ({ seq }) => ({ recipients: recipients(seq) }),
  };
  const call = async (op, args) => {
    if (op === "network.message_status") {
      page.asked.push(args.seq);
      page.most = Math.max(page.most, (page.busy += 1));
      await new Promise(setImmediate);
      page.busy -= 1;
    }
    return answers[op]?.(args) ?? {};
  };
  const dispatch = (event) => {
    page.state = apply(page.state, { at: 1, ...event });
    page.fetching.startReads();
    page.onChange?.();
  };
  const timers = { setTimeout: (run) => setImmediate(run), clearTimeout: clearImmediate };
  page.fetching = new Fetching({ source: { call }, getState: () => page.state, dispatch, timers });
  page.dispatch = dispatch;
  page.until = (holds) => new Promise((resolve) => {
    page.onChange = () => holds() && resolve();
    page.onChange();
  });
  dispatch(WELCOME);
  return page;
}

test("every message of one's own that is drawn gets its status, one call at a time", async () => {
  const page = openPage([...Array(40)].map((_, place) => ofMia(place + 1)));
  page.dispatch({ type: "open", thread_id: THREAD });
  await page.until(() => page.state.threads[THREAD]?.loaded?.seqs.length === 40);
  for (let seq = 20; seq <= 40; seq += 1) page.dispatch({ type: "drawn", seq });
  await page.until(() => Object.keys(page.state.status).length === 21);
  assert.deepEqual([Math.min(...page.asked), Math.max(...page.asked), page.most], [20, 40, 1]);
});

test("what was on its way is asked for again when somebody begins to work, however old it is", async () => {
  const at = { 1: "queued" };
  const page = openPage([...Array(20)].map((_, place) => ofMia(place + 1)), (seq) => [{ agent_id: "bob", state: at[seq] ?? "handled" }]);
  page.dispatch({ type: "open", thread_id: THREAD });
  await page.until(() => page.state.threads[THREAD]?.loaded?.seqs.length === 20);
  page.dispatch({ type: "drawn", seq: 1 });
  await page.until(() => page.state.status[1]?.[0].state === "queued");
  at[1] = "in_prompt";
  page.dispatch({ type: "signal", kind: "thinking", sender_id: "bob", thread_id: THREAD, body: { reaction: "r", active: true } });
  await page.until(() => page.state.status[1]?.[0].state === "in_prompt");
});

test("of many statuses those stay that are near the one which was asked for last", () => {
  const told = (state, seq) => apply(state, { type: "result", call: { op: "network.message_status", args: { seq } }, value: { recipients: [] } });
  let state = createState();
  for (let seq = 1001; seq <= 1600; seq += 1) state = told(state, seq);
  assert.deepEqual([Object.keys(state.status).length, state.status[1100], state.status[1600]], [500, undefined, []]);
  state = told(state, 3);
  assert.deepEqual([Object.keys(state.status).length, state.status[3], state.status[1600]], [500, [], undefined]);
});
