/** Tests of the connection's decisions. The hub is a script of frames, without a socket and a clock. */
import assert from "node:assert/strict";
import test from "node:test";
import { Connection } from "../../../web/page/core/connection.js";

const WELCOME = {
  type: "welcome", protocol: 1, server: "roundelay", agent_id: "mia", kind: "human", role: "observer", network: { name: "n", epoch: "e1" },
  session_id: "s", cursor: 4, head: 4, resume: "full", mods: [], limits: { max_reads: 2, max_frame_bytes: 400 },
};

const deliver = (seq, attempt = 1) => ({
  type: "deliver", attempt,
  message: {
    seq, message_id: `m-${seq}`, kind: "direct", sender_id: "bob", sender_kind: "agent", to: "agent:mia", thread_id: "direct:bob~mia",
    root: seq, hops: 0, sent_at: 1, content: "x",
  },
});

/** Timers that fire when the test advances the time. */
class Time {
  constructor() {
    this.at = 1000;
    this.due = new Map();
    this.setTimeout = (run, ms) => {
      const id = {};
      this.due.set(id, { at: this.at + ms, run });
      return id;
    };
    this.clearTimeout = (id) => this.due.delete(id);
  }

  pass(ms) {
    const end = this.at + ms;
    for (;;) {
      const next = [...this.due].filter(([, it]) => it.at <= end).sort(([, a], [, b]) => a.at - b.at)[0];
      if (next === undefined) break;
      this.due.delete(next[0]);
      this.at = Math.max(this.at, next[1].at);
      next[1].run();
    }
    this.at = end;
  }
}

/** A stand-in for localStorage. */
class Storage {
  constructor() {
    this.kept = new Map();
  }
  get length() {
    return this.kept.size;
  }
  key = (place) => [...this.kept.keys()][place];
  getItem = (key) => this.kept.get(key) ?? null;
  setItem = (key, value) => this.kept.set(key, value);
  removeItem = (key) => this.kept.delete(key);
}

function begin(options = {}) {
  const time = new Time();
  const sockets = [];
  class Socket {
    constructor(url, protocol) {
      Object.assign(this, { url, protocol, readyState: 0, sent: [], bufferedAmount: 0 });
      sockets.push(this);
    }
    send(text) {
      this.sent.push(JSON.parse(text));
    }
    close() {
      this.readyState = 3;
    }
    open() {
      this.readyState = 1;
      this.onopen();
    }
    tell(frame) {
      this.onmessage({ data: JSON.stringify(frame) });
    }
    end(code, reason = "") {
      this.readyState = 3;
      this.onclose({ code, reason });
    }
    /** Fails as the package ws does at a 503. */
    on(name, run) {
      assert.equal(name, "unexpected-response");
      this.refuse = (leader) => {
        run({}, { headers: { "roundelay-leader": leader } });
        this.end(1006);
      };
    }
    list(type) {
      return this.sent.filter((it) => it.type === type);
    }
  }
  let ids = 0;
  const events = [];
  const storage = new Storage();
  const given = { url: "ws://hub/", agentId: "mia", token: "t", WebSocketCtor: Socket, now: () => time.at, random: () => 0, storage };
  const connection = new Connection({ ...given, timers: time, newId: () => `id-${++ids}`, ...options });
  connection.connect((event) => events.push(event));
  const join = (welcome = WELCOME) => {
    sockets.at(-1).open();
    sockets.at(-1).tell(welcome);
    return sockets.at(-1);
  };
  return { time, sockets, events, connection, storage, join, last: (type) => events.findLast((it) => it.type === type) };
}

test("it joins with its subprotocol, and comes back where it was", () => {
  const { sockets, time, join } = begin();
  const first = join();
  assert.equal(first.protocol, "roundelay.v1");
  assert.deepEqual(first.sent[0], { type: "hello", protocol: 1, agent_id: "mia", kind: "human", role: "observer", client: "roundelay-web", token: "t" });
  first.tell(deliver(7));
  first.tell({ type: "stored", message_id: "elsewhere", seq: 99, duplicate: false });
  first.end(1006);
  time.pass(10_000);
  assert.deepEqual(sockets.length, 2);
  assert.deepEqual(join().sent[0].resume, { epoch: "e1", cursor: 7 });
});

test("a one-time login is used up by the welcome, and goes with its new token until then", () => {
  const { time, sockets, join } = begin({ token: "code", newToken: "new" });
  sockets[0].open();
  sockets[0].end(1006);
  time.pass(10_000);
  const second = join();
  assert.deepEqual([second.sent[0].token, second.sent[0].new_token], ["code", "new"]);
  second.end(1006);
  time.pass(10_000);
  const third = join();
  assert.deepEqual([third.sent[0].token, third.sent[0].new_token], ["new", undefined]);
});

test("what was taken in is acknowledged together; another attempt alone", () => {
  const { time, join } = begin();
  const socket = join();
  for (const [seq, attempt] of [[5, 1], [8, 1], [6, 2], [9, 1]]) socket.tell(deliver(seq, attempt));
  time.pass(100);
  assert.deepEqual(socket.list("ack"), [{ type: "ack", seq: 9 }, { type: "ack", seq: 6, only: true }]);
});

test("messages go out one after the other, and again after a loss, in their order and under their ids", () => {
  const { connection, time, storage, join, last } = begin();
  const first = join();
  for (const content of ["one", "two", "three"]) connection.send({ to: "agent:bob", content });
  assert.deepEqual(first.list("send").map((it) => it.content), ["one"]);
  first.tell({ type: "stored", message_id: "id-1", seq: 5, thread_id: "direct:bob~mia", duplicate: false });
  assert.deepEqual(first.list("send").map((it) => it.content), ["one", "two"]);
  first.end(1006);
  assert.equal(last("outbox").entry.state, "waiting");
  time.pass(10_000);
  const second = join();
  second.tell({ type: "stored", message_id: "id-2", seq: 6, thread_id: "direct:bob~mia", duplicate: true });
  assert.deepEqual(second.list("send").map((it) => [it.message_id, it.content]), [["id-2", "two"], ["id-3", "three"]]);
  assert.equal(storage.length, 1);
});

test("what waits to be sent outlives the page, and goes under the same id", () => {
  const before = begin();
  before.connection.send({ to: "agent:bob", content: "kept", thread_id: "direct:bob~mia" });
  const after = begin({ storage: before.storage });
  assert.equal(after.last("outbox").entry.content, "kept");
  assert.deepEqual(after.join().list("send").map((it) => [it.message_id, it.content, it.thread_id]), [["id-1", "kept", undefined]]);
});

test("a message that is put off goes again after its time, before what was said later", () => {
  const { connection, time, join } = begin();
  const socket = join();
  connection.send({ to: "agent:bob", content: "one" });
  socket.tell({ type: "error", code: "rate_limited", message: "Later.", message_id: "id-1", retry_after_ms: 500 });
  connection.send({ to: "agent:bob", content: "two" });
  time.pass(499);
  assert.deepEqual(socket.list("send").map((it) => it.content), ["one"]);
  time.pass(200);
  assert.deepEqual(socket.list("send").map((it) => it.content), ["one", "one"]);
});

test("a refused message keeps its sentence, holds up nothing, and can be sent again or given up", () => {
  const { connection, events, join, storage } = begin();
  const socket = join();
  connection.send({ to: "agent:rob", content: "one" });
  connection.send({ to: "agent:bob", content: "two" });
  socket.tell({ type: "error", code: "unknown_recipient", message: "Nobody is rob.", message_id: "id-1" });
  const refused = events.findLast((it) => it.entry?.message_id === "id-1").entry;
  assert.deepEqual([refused.state, refused.error.message], ["refused", "Nobody is rob."]);
  socket.tell({ type: "stored", message_id: "id-2", seq: 9, thread_id: "direct:bob~mia", duplicate: false });
  connection.retry("id-1");
  assert.deepEqual(socket.list("send").map((it) => it.content), ["one", "two", "one"]);
  socket.tell({ type: "error", code: "unknown_recipient", message: "Nobody is rob.", message_id: "id-1" });
  connection.discard("id-1");
  assert.equal(storage.length, 0);
});

test("what no hub takes is refused at once, and too much is not kept", () => {
  const { connection, join, last } = begin();
  const socket = join();
  connection.send({ to: "agent:bob", content: "x".repeat(400) });
  assert.equal(last("outbox").entry.error.code, "too_large");
  assert.deepEqual(socket.list("send"), []);
  assert.throws(() => {
    for (let count = 0; count < 300; count += 1) connection.send({ to: "agent:bob", content: "again" });
  }, { code: "overloaded" });
});

test("calls keep to what the hub takes at a time, and are repeated after a loss under their ids", async () => {
  const { connection, time, join } = begin();
  const first = join();
  const values = ["a", "b", "c"].map((op) => connection.call(op));
  assert.deepEqual(first.list("call").map((it) => it.op), ["a", "b"]);
  first.tell({ type: "result", call_id: "id-1", value: 1 });
  assert.deepEqual(first.list("call").map((it) => it.op), ["a", "b", "c"]);
  first.tell({ type: "error", call_id: "id-3", code: "forbidden", message: "No." });
  await assert.rejects(values[2], { code: "forbidden", message: "No." });
  first.end(1006);
  time.pass(10_000);
  const second = join();
  assert.deepEqual(second.list("call").map((it) => [it.call_id, it.op]), [["id-2", "b"]]);
  second.tell({ type: "result", call_id: "id-2", value: 2 });
  assert.deepEqual([await values[0], await values[1]], [1, 2]);
});

for (const [code, isFinal] of [[4401, true], [4403, true], [4409, true], [4400, true], [4503, false], [4429, false], [1006, false], [1011, false]]) {
  test(`close ${code} ${isFinal ? "is final" : "is come back from"}`, () => {
    const { time, sockets, join, last } = begin();
    join().end(code, "Because.");
    time.pass(60_000);
    assert.equal(sockets.length > 1, !isFinal);
    if (isFinal) assert.equal(last("connection").state, "refused");
  });
}

const MOVED = "Another node leads now. Roundelay-Leader: ";

test("closed by a node that leads no longer it goes where that says, stays there, and comes back to its own when that is gone", () => {
  const { time, sockets, join } = begin({ goesToLeader: true, url: "wss://a:8700/,wss://b:8700/" });
  join().end(4503, `${MOVED}c.example:8702`);
  time.pass(100);
  join().end(1006);
  time.pass(200);
  join().end(4503, `${MOVED}[fe80::1]:8703`);
  for (let count = 0; count < 4; count += 1) time.pass(200), sockets.at(-1).readyState === 0 && sockets.at(-1).end(1006);
  const [a, b, c, d] = ["wss://a:8700/", "wss://b:8700/", "wss://c.example:8702/", "wss://[fe80::1]:8703/"];
  assert.deepEqual(sockets.slice(0, 6).map((it) => it.url), [a, c, c, d, b, a]);
});

test("who was named is tried again after the others, until one of those lets it in", () => {
  const { time, sockets, join } = begin({ goesToLeader: true, url: "ws://a:1/" });
  join().end(4503, `${MOVED}c:2`);
  for (let count = 0; count < 4; count += 1) time.pass(2_000), sockets.at(-1).end(1006);
  const [a, c] = ["ws://a:1/", "ws://c:2/"];
  assert.deepEqual(sockets.slice(0, 5).map((it) => it.url), [a, c, a, c, a]);
  while (sockets.at(-1).url !== a || sockets.at(-1).readyState !== 0) time.pass(2_000), sockets.at(-1).url === a || sockets.at(-1).end(1006);
  const known = sockets.length;
  join().end(1006);
  for (let count = 0; count < 4; count += 1) time.pass(60_000), sockets.at(-1).end(1006);
  assert.deepEqual([...new Set(sockets.slice(known).map((it) => it.url))], [a]);
});

for (const told of ["user@c:1", "c:1/other", "c", "c:99999", "c:1 was here", "[::1", "a b:1", `${"x".repeat(300)}:1`]) {
  test(`${told.slice(0, 20)} is no address to go to`, () => {
    const { time, sockets, join } = begin({ goesToLeader: true });
    join().end(4503, MOVED + told);
    time.pass(100);
    assert.deepEqual(sockets.map((it) => it.url), ["ws://hub/", "ws://hub/"]);
  });
}

test("a page goes to nobody but its own node", () => {
  const { time, sockets, join } = begin();
  join().end(4503, `${MOVED}c:8702`);
  time.pass(100);
  assert.deepEqual(sockets.map((it) => it.url), ["ws://hub/", "ws://hub/"]);
});

test("nodes that name each other hold nobody, and one that is silent is left soon", () => {
  const { time, sockets } = begin({ goesToLeader: true, url: "ws://a/,ws://b/" });
  let count = 0;
  while (count < sockets.length) sockets[count].refuse(`c:${++count}`);
  assert.deepEqual(sockets.map((it) => it.url), ["ws://a/", "ws://c:1/", "ws://c:2/", "ws://c:3/", "ws://b/"]);
  time.pass(100);
  sockets[5].refuse("d:1");
  assert.equal(sockets[6].url, "ws://d:1/");
  sockets[6].open();
  time.pass(3_000);
  assert.deepEqual(sockets.slice(7).map((it) => it.url), ["ws://b/"]);
});

const OTHER = { ...WELCOME, network: { name: "other", epoch: "e9" } };

test("what was meant for one network is not sent to another one that is among the addresses", () => {
  const { time, sockets, connection, join, last } = begin({ url: "ws://a:1/,ws://e:1/", hello: { role: "reactor" } });
  join({ ...WELCOME, fence: 3 });
  connection.send({ to: "agent:bob", content: "for n" });
  void connection.call("network.info").catch(() => {});
  sockets[0].end(1006);
  time.pass(100);
  sockets[1].end(1006);
  sockets[2].open();
  sockets[2].tell({ type: "error", code: "forbidden", message: "The fence 3 was never given out." });
  sockets[2].end(4403);
  time.pass(1_000);
  const [a, e] = ["ws://a:1/", "ws://e:1/"];
  assert.deepEqual(sockets.map((it) => it.url), [a, a, e, e]);
  const there = sockets.at(-1);
  join({ ...OTHER, fence: 1 });
  assert.equal(there.readyState, 3);
  assert.deepEqual(there.sent.map((it) => it.type), ["hello"]);
  assert.equal(connection.welcome.network.epoch, "e1");
  sockets.at(-1).end(1006);
  assert.equal(last("connection").error.message, `${e} holds another network (other) than ${a}: check the addresses, or connect again.`);
  time.pass(2_000);
  join(OTHER);
  assert.equal(sockets.at(-1).url, a);
  const back = join({ ...WELCOME, fence: 4, network: { name: "n", epoch: "e2" } }); // the node's file was lost
  assert.deepEqual(back.list("hello").map((it) => it.fence), [3]);
  assert.deepEqual(back.list("send").map((it) => it.content), ["for n"]);
  assert.equal(back.list("call").length, 1);
});

test("another network that does not know the token ends nothing; its own does", () => {
  const { time, sockets, join, last } = begin({ url: "ws://a:1/,ws://e:1/" });
  const refuse = () => {
    sockets.at(-1).open();
    sockets.at(-1).tell({ type: "error", code: "not_authenticated", message: "Who is that?" });
    sockets.at(-1).end(4401);
  };
  join().end(1006);
  time.pass(200);
  sockets.at(-1).end(1006);
  refuse();
  const told = "ws://e:1/ holds another network than ws://a:1/, which has let in mia: check the addresses, or connect again. (Who is that?)";
  assert.deepEqual([last("connection").state, last("connection").error.message], ["offline", told]);
  time.pass(200);
  assert.equal(sockets.at(-1).url, "ws://a:1/");
  refuse();
  assert.deepEqual([last("connection").state, last("connection").error.message], ["refused", "Who is that?"]);
});

test("another network among the addresses keeps nobody from the node that was named", () => {
  const { time, sockets, join } = begin({ goesToLeader: true, url: "ws://a:1/,ws://e:1/" });
  join().end(4503, `${MOVED}c:2`);
  for (let count = 0; count < 5; count += 1) {
    time.pass(2_000);
    if (sockets.at(-1).url === "ws://e:1/") join(OTHER);
    else sockets.at(-1).end(1006);
  }
  assert.deepEqual(sockets.slice(0, 6).map((it) => it.url.slice(5, 6)).join(""), "aceaec");
});

test("an error before the welcome says why, and when to come again", () => {
  const refused = begin();
  refused.sockets[0].open();
  refused.sockets[0].tell({ type: "error", code: "not_authenticated", message: "Ask for another link." });
  refused.sockets[0].end(4401);
  assert.deepEqual(refused.last("connection").error, { code: "not_authenticated", message: "Ask for another link." });
  const later = begin();
  later.sockets[0].open();
  later.sockets[0].tell({ type: "error", code: "rate_limited", message: "Later.", retry_after_ms: 5000 });
  later.sockets[0].end(4503);
  later.time.pass(4999);
  assert.equal(later.sockets.length, 1);
  later.time.pass(2);
  assert.equal(later.sockets.length, 2);
});

test("tries grow apart, and begin anew at once when the network is there again", () => {
  const { time, sockets, connection } = begin({ random: () => 1 });
  const gaps = [];
  for (let count = 0; count < 9; count += 1) {
    const before = time.at;
    sockets.at(-1).end(1006);
    const known = sockets.length;
    while (sockets.length === known) time.pass(10);
    gaps.push(time.at - before);
  }
  assert.ok(gaps.slice(1).every((gap, place) => gap >= gaps[place]));
  assert.ok(gaps[0] <= 200 && gaps.at(-1) <= 10_000 && gaps.at(-1) >= 9_000, `${gaps}`);
  sockets.at(-1).end(1006);
  const known = sockets.length;
  connection.wake();
  assert.equal(sockets.length, known + 1);
});

test("a hub that says nothing is asked, and given up", () => {
  const { time, sockets, join } = begin();
  const socket = join();
  time.pass(26_000);
  assert.equal(socket.list("call").at(-1).op, "network.info");
  time.pass(16_000);
  assert.equal(sockets.length, 2);
});

test("a request at which the connection ends again and again is given up", async () => {
  const { time, connection, join } = begin();
  const value = connection.call("network.history", {});
  value.catch(() => {});
  for (let count = 0; count < 3; count += 1) {
    join().end(1011);
    time.pass(20_000);
  }
  await assert.rejects(value, { code: "internal" });
});

test("a request outlives any number of unanswered pings", async () => {
  const { time, connection, join } = begin();
  const value = connection.call("network.history", {});
  for (let count = 0; count < 4; count += 1) {
    join().end(1011, "the last ping was not answered");
    time.pass(20_000);
  }
  assert.equal(join().list("call").at(-1).op, "network.history");
  assert.equal(await Promise.race([value, "pending"]), "pending");
});

test("what a killed hub had not kept of many acknowledgements is handed out once", () => {
  const { events, connection, sockets, time, join } = begin({ staysInPlace: false, handlesAtOnce: false });
  const many = Array.from({ length: 20_000 }, (_, place) => place + 5);
  for (const _ of [1, 2]) {
    const socket = join();
    for (const seq of many) {
      socket.tell(deliver(seq));
      connection.ack(seq);
    }
    time.pass(100);
    const acks = socket.list("ack");
    assert.ok(Math.max(...acks.map((it) => it.seq)) === many.at(-1), "each session is told what it was given");
    socket.end(1006);
    time.pass(10_000);
  }
  assert.equal(sockets.length, 3);
  assert.equal(events.filter((it) => it.type === "deliver").length, many.length);
});
