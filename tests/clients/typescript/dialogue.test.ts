/** Tests of the client with a node: the rules of docs/protocol.md, from joining to leaving. */
import assert from "node:assert/strict";
import { mkdtempSync, readdirSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import test from "node:test";
import {
  connect, makeToken, ConnectError, Forbidden, IdConflict, InvalidArguments, NotAuthenticated, RoundelayError, Superseded, TooLarge,
  UnknownRecipient, type Stored,
} from "roundelay-client";
import { fileStore } from "roundelay-client/node";
import { hash, joinAgent, joinOwner, joinPerson, makeTokenOf, newName, once, Sockets, take, URL } from "./setting.ts";

test("the dialogue of the protocol's page", async () => {
  const [name, person, token] = [newName("bob"), newName("mia"), makeToken()];
  const sockets = new Sockets();
  const bob = await joinAgent(name, token, { role: "reactor", card: { description: "Adds numbers" }, WebSocket: sockets.Constructor });
  assert.equal(bob.welcome.fence, 1);
  const miaToken = await makeTokenOf(person);
  const mia = await connect({ url: URL, agentId: person, token: miaToken });
  assert.equal(mia.welcome.kind, "human");

  const question = await mia.send(`agent:${name}`, "17 and 23?", { messageId: "m-1" });
  assert.equal(question.duplicate, false);
  const [asked] = await take(bob, 1, { isAcked: false });
  assert.deepEqual([asked!.message.seq, asked!.message.content, asked!.attempt], [question.seq, "17 and 23?", 1]);
  const started = await bob.record("bob-at", "started", { trigger: question.seq }, { recordId: "r-1" });
  assert.ok(started.seq > question.seq && !started.duplicate);
  await bob.record("bob-at", "model_reply", { turn: 1, reply: { text: "40." } }, { recordId: "r-2" });
  const answer = await bob.reply(asked!.message, "40.", { messageId: "bob-answer" });
  await bob.record("bob-at", "finished", { status: "finished", reason: "answered", turns: 1 }, { recordId: "r-3" });
  assert.equal((await bob.record("bob-at", "started", { trigger: question.seq }, { recordId: "r-1" })).duplicate, true);
  const [answered] = await take(mia, 1);
  const { seq, reply_to, cause, root, hops } = answered!.message;
  assert.deepEqual([seq, reply_to, cause, root, hops], [answer.seq, question.seq, question.seq, question.seq, 1]);

  const status = await mia.call("network.message_status", { seq: question.seq });
  assert.deepEqual(status.recipients.map((it) => [it.agent_id, it.state, it.reaction_status]), [[name, "in_prompt", "finished"]]);
  const again = await mia.send(`agent:${name}`, "17 and 23?", { messageId: "m-1" });
  assert.deepEqual([again.seq, again.duplicate], [question.seq, true]);
  await assert.rejects(mia.send(`agent:${name}`, "Another", { messageId: "m-1" }), IdConflict);
  await assert.rejects(mia.send("agent:nobody-here", "And you?"), (error) => error instanceof UnknownRecipient && error.code === "unknown_recipient");

  const isBack = once(bob, "state", (it) => it.state === "online");
  sockets.cut();
  const thanks = await mia.send(`agent:${name}`, "Thanks");
  await isBack;
  assert.equal(bob.welcome.fence, 2);
  const [thanked] = await take(bob, 1);
  assert.equal(thanked!.message.seq, thanks.seq);
  assert.deepEqual(sockets.urls, [URL, URL]);
  const [first, second] = sockets.list("hello");
  assert.deepEqual([first.fence, second.fence, second.instance], [undefined, 1, first.instance]);

  const resume = mia.cursor;
  await mia.close();
  await assert.rejects(mia.send(`agent:${name}`, "late"), ConnectError);
  const later = await bob.send(`agent:${person}`, "You are welcome.", { cause: thanks.seq });
  const back = await connect({ url: URL, agentId: person, token: miaToken, resume });
  assert.deepEqual([back.welcome.resume, back.welcome.cursor], ["full", resume.cursor]);
  assert.deepEqual((await take(back, 2)).map((it) => it.message.seq), [thanks.seq, later.seq]);
  assert.equal(back.cursor.cursor, later.seq);
  await back.close();
  await bob.close();
  assert.deepEqual(await bob.deliveries().next(), { done: true, value: undefined });
});

test("many messages keep their order, and what was not acknowledged comes again", async () => {
  const [ann, ben, token] = [newName("ann"), newName("ben"), makeToken()];
  const from = await joinPerson(ann, { maxUnanswered: 64 });
  const to = await joinAgent(ben, token);
  const sent = Array.from({ length: 200 }, (_, n) => from.send(`agent:${ben}`, { n }));
  const taken = await take(to, 200, { isAcked: false });
  assert.deepEqual(taken.map((it) => (it.message.content as { n: number }).n), Array.from({ length: 200 }, (_, n) => n));
  assert.deepEqual(taken.map((it) => it.message.seq), (await Promise.all(sent)).map((it) => it.seq));
  for (const [n, delivery] of taken.entries()) if (n !== 1 && n !== 150) delivery.ack(); // two stay open, and the order does not matter
  assert.equal(to.cursor.cursor, taken[0]!.message.seq);
  await to.close();
  const again = await joinAgent(ben, token);
  assert.deepEqual((await take(again, 2)).map((it) => (it.message.content as { n: number }).n), [1, 150]);
  await again.close();
  await from.close();
});

test("what a handler throws at is delivered again, as another attempt", async () => {
  const [ann, ben] = [newName("ann"), newName("ben")];
  const [from, to] = [await joinPerson(ann), await joinAgent(ben, makeToken())];
  const { seq } = await from.send(`agent:${ben}`, "fails at first");
  const attempts: number[] = [];
  for await (const delivery of to.deliveries()) {
    assert.equal(delivery.message.seq, seq);
    attempts.push(delivery.attempt);
    if (delivery.attempt < 3) delivery.nack("not now", 1);
    else break;
  }
  assert.deepEqual(attempts, [1, 2, 3]);
  await Promise.all([from.close(), to.close()]);
});


test("operations are called once under their id, and refused as errors with a code", async () => {
  const client = await joinPerson(newName("ann"));
  const name = newName("tea");
  const [one, two] = await Promise.all([
    client.call("channels.create", { name, topic: "tea" }, { callId: `make-${name}` }),
    client.call("network.info"),
  ]);
  assert.deepEqual([one.channel, two.name], [name, client.welcome.network.name]);
  assert.deepEqual(await client.call("channels.create", { name, topic: "tea" }, { callId: `make-${name}` }), one);
  await assert.rejects(client.call("channels.create", { name, topic: "milk" }, { callId: `make-${name}` }), IdConflict);
  await assert.rejects(client.call("network.rows"), Forbidden);
  await assert.rejects(client.call("no.such", {}), (error) => error instanceof RoundelayError && error.code === "unknown_operation");
  assert.deepEqual((await client.call("channels.list", {})).channels.find((it) => it.name === name)?.topic, "tea");
  const many = await Promise.all(Array.from({ length: 200 }, () => client.call("network.info")));
  assert.equal(many.length, 200); // calls beyond the hub's limit wait for their turn
  await client.close();
});

test("a conversation of its own has a thread of its own, and an answer stays in it", async () => {
  const [ann, ben] = [newName("ann"), newName("ben")];
  const [from, to] = [await joinPerson(ann), await joinAgent(ben, makeToken())];
  const asked = await from.send(`agent:${ben}`, "in private", { conversation: "plans" });
  assert.equal(asked.threadId, `direct:${[ann, ben].sort().join("~")}:plans`);
  const [got] = await take(to, 1);
  const answer = await to.reply(got!.message, "yes");
  assert.equal(answer.threadId, asked.threadId);
  await Promise.all([from.close(), to.close()]);
});

test("signals, presence and notices are told as events", async () => {
  const [ann, ben, token] = [newName("ann"), newName("ben"), makeToken()];
  const from = await joinPerson(ann);
  const first = await joinAgent(ben, token);
  const { threadId } = await first.send(`agent:${ann}`, "hello");
  await from.call("network.watch", { presence: true, signals: true });
  const typing = once(from, "signal");
  first.signal("typing", { active: true }, { threadId: threadId! });
  const { sender_id, kind, body } = await typing;
  assert.deepEqual([sender_id, kind, body], [ben, "typing", { active: true }]);
  const gone = once(from, "presence", (it) => it.agent_id === ben && it.state === "offline");
  await first.close();
  await gone;
  const elsewhere = await joinPersonAgain(from, ann);
  const marked = once(from, "notice", (it) => it.kind === "marked");
  await elsewhere.call("network.mark", { thread_id: threadId!, is_pinned: true });
  assert.equal((await marked).thread_id, threadId);
  await Promise.all([from.close(), elsewhere.close()]);
});

/** Open another session of a participant, with another token. */
async function joinPersonAgain(_: unknown, agentId: string) {
  return await connect({ url: URL, agentId, token: await makeTokenOf(agentId) });
}

test("a newer reactor ends the older one for good", async () => {
  const [name, token] = [newName("bob"), makeToken()];
  const older = await joinAgent(name, token, { role: "reactor" });
  const told = once(older, "notice", (it) => it.kind === "superseded");
  const ended = once(older, "state", (it) => it.state === "ended");
  const newer = await joinAgent(name, token, { role: "reactor" });
  await told;
  assert.ok((await ended).error instanceof Superseded);
  await assert.rejects(older.send(`agent:${name}`, "still here"), Superseded);
  await assert.rejects(older.call("network.info"), Superseded);
  await assert.rejects(older.deliveries().next(), Superseded);
  assert.ok(older.failure instanceof Superseded);
  // A process that was superseded while it was offline is notified too.
  await assert.rejects(joinAgent(name, token, { role: "reactor", fence: older.welcome.fence! }), Superseded);
  await newer.close();
});

test("a place in another history is told as limited", async () => {
  const client = await joinPerson(newName("ann"), { resume: { epoch: "another", cursor: 3 } });
  assert.equal(client.welcome.resume, "limited");
  assert.equal(typeof client.welcome.missing_before, "number");
  await client.close();
});

test("without its token nobody gets in, and the token is in no address", async () => {
  const [name, token] = [newName("bob"), makeToken()];
  const sockets = new Sockets();
  await (await joinAgent(name, token, { WebSocket: sockets.Constructor })).close();
  assert.ok(sockets.urls.every((it) => !it.includes(token) && it === URL));
  await assert.rejects(joinAgent(name, makeToken()), (error) => error instanceof NotAuthenticated && /token/i.test(error.message));
  await assert.rejects(connect({ url: URL, agentId: newName("mia"), kind: "human" }), NotAuthenticated);
});

test("a login's code lets in once, and ties a token that lets in from then on", async () => {
  const [person, code, token] = [newName("mia"), makeToken(), makeToken()];
  await using owner = await joinOwner();
  await owner.call("network.create_login", { agent_id: person, login_hash: hash(code) });
  const mia = await connect({ url: URL, agentId: person, token: code, newToken: token });
  assert.equal(mia.welcome.kind, "human");
  await mia.close();
  await assert.rejects(connect({ url: URL, agentId: person, token: code, newToken: makeToken() }), NotAuthenticated);
  await (await connect({ url: URL, agentId: person, token })).close();
});

test("what no hub takes is refused, and everything else goes on", async () => {
  const [ann, ben] = [newName("ann"), newName("ben")];
  const [from, to] = [await joinPerson(ann), await joinAgent(ben, makeToken())];
  const huge = "x".repeat(from.welcome.limits.max_frame_bytes!);
  await assert.rejects(from.send(`agent:${ben}`, huge), TooLarge);
  await assert.rejects(from.call("network.search", { query: huge }), TooLarge);
  await assert.rejects(from.send(`agent:${ben}`, undefined), InvalidArguments);
  await assert.rejects(from.send("nobody", "x"), (error) => error instanceof RoundelayError && error.code === "invalid_frame");
  const content = { n: 1 };
  const sent = from.send(`agent:${ben}`, content);
  content.n = 2; // the sent message does not change
  const { seq } = await sent;
  const [got] = await take(to, 1);
  assert.deepEqual([got!.message.seq, got!.message.content], [seq, { n: 1 }]);
  await Promise.all([from.close(), to.close()]);
});

test("who waits may stop to wait", async () => {
  await assert.rejects(connect({ url: "ws://127.0.0.1:9/", agentId: "ann", token: "t", signal: AbortSignal.timeout(50) }), { name: "TimeoutError" });
  await assert.rejects(connect({ url: "ws://127.0.0.1:9/", agentId: "ann", token: "t", connectTimeoutMs: 50 }), ConnectError);
  await assert.rejects(connect({ url: "no url", agentId: "ann", token: "t" }), ConnectError);
  const [ann, ben] = [newName("ann"), newName("ben")];
  const sockets = new Sockets();
  const [from, to] = [await joinPerson(ann, { WebSocket: sockets.Constructor }), await joinAgent(ben, makeToken())];
  await assert.rejects(to.deliveries({ signal: AbortSignal.timeout(5) }).next(), { name: "TimeoutError" });
  const [isAway, isBack] = [once(from, "state", (it) => it.state === "offline"), once(from, "state", (it) => it.state === "online")];
  sockets.cut();
  await isAway;
  const over = new AbortController();
  const [waiting, taken, kept] = [from.call("network.info", {}, over), from.send(`agent:${ben}`, "taken back", over), from.send(`agent:${ben}`, "kept")];
  over.abort();
  await assert.rejects(waiting, { name: "AbortError" });
  await assert.rejects(taken, { name: "AbortError" });
  await isBack;
  const [got] = await take(to, 1);
  assert.deepEqual([got!.message.content, got!.message.seq], ["kept", (await kept).seq]);
  await Promise.all([from.close(), to.close()]);
});

test("a store that cannot keep a message has it not sent", async () => {
  const [ann, ben] = [newName("ann"), newName("ben")];
  const to = await joinAgent(ben, makeToken());
  const folder = mkdtempSync(join(tmpdir(), "outbox-"));
  const store = fileStore(folder);
  const from = await joinPerson(ann, { outbox: store });
  await from.send(`agent:${ben}`, "kept, and then sent");
  assert.deepEqual(readdirSync(folder), []);
  store.setItem = () => {
    throw new Error("the disk is full");
  };
  await assert.rejects(from.send(`agent:${ben}`, "not kept"), { message: "the disk is full" });
  delete (store as { setItem?: unknown }).setItem;
  await from.send(`agent:${ben}`, "the next");
  assert.deepEqual((await take(to, 2)).map((it) => it.message.content), ["kept, and then sent", "the next"]);
  await Promise.all([from.close(), to.close()]);
});

test("a store from which nothing can be taken out holds nobody up, and doubles nothing", async () => {
  const [ann, ben] = [newName("ann"), newName("ben")];
  const to = await joinAgent(ben, makeToken());
  const [folder, token] = [mkdtempSync(join(tmpdir(), "outbox-")), await makeTokenOf(ann)];
  const store = fileStore(folder);
  store.removeItem = () => {
    throw new Error("EROFS: read-only file system");
  };
  const from = await joinAgent(ann, token, { kind: "human", outbox: store });
  const said = await Promise.all(["one", "two", "three"].map((it) => from.send(`agent:${ben}`, it)));
  await from.close();
  const later = await joinAgent(ann, token, { kind: "human", outbox: fileStore(folder) });
  const again: Stored[] = [];
  while (again.length < said.length) again.push(await once(later, "stored"));
  await later.send(`agent:${ben}`, "four");
  assert.deepEqual(again.map((it) => [it.seq, it.duplicate]), said.map((it) => [it.seq, true]));
  assert.deepEqual((await take(to, 4)).map((it) => it.message.content), ["one", "two", "three", "four"]);
  await Promise.all([later.close(), to.close()]);
});

test("a folder that holds something else is no outbox, and the file is named", () => {
  const folder = mkdtempSync(join(tmpdir(), "outbox-"));
  writeFileSync(join(folder, "half.json"), '{"key": "roundelay.out');
  assert.throws(() => fileStore(folder), /half\.json contains no message \(SyntaxError/);
  assert.throws(() => fileStore(join(folder, "half.json")), /EEXIST.*half\.json/);
});
