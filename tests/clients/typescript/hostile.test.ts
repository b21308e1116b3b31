/** Tests of hostile servers at a hub's address: the program continues, and learns what is wrong. */
import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { createServer, type Socket } from "node:net";
import test from "node:test";
import { connect, Forbidden, makeToken, RoundelayError, type Client } from "roundelay-client";
import { joinAgent, newName, once, Socket as WebSocketHere, URL } from "./setting.ts";

const WELCOME = {
  type: "welcome", protocol: 1, server: "s", network: { name: "n", epoch: "e" }, agent_id: "ann", kind: "agent", role: "observer",
  session_id: "s", cursor: 0, head: 0, resume: "full", mods: [], limits: {},
};
const message = (seq: number) => ({
  seq, message_id: `m-${seq}`, kind: "direct", sender_id: "bob", sender_kind: "agent", to: "agent:ann", thread_id: "direct:ann~bob",
  root: seq, hops: 0, sent_at: 1, content: "x",
});
const deliver = (seq: number) => JSON.stringify({ type: "deliver", attempt: 1, message: message(seq) });

function encode(text: string, opcode = 1): Buffer {
  const body = Buffer.from(text);
  const head = Buffer.alloc(10);
  head[0] = 0x80 | opcode;
  if (body.length < 126) head[1] = body.length;
  else if (body.length < 2 ** 16) head[1] = 126, head.writeUInt16BE(body.length, 2);
  else head[1] = 127, head.writeBigUInt64BE(BigInt(body.length), 2);
  return Buffer.concat([head.subarray(0, body.length < 126 ? 2 : body.length < 2 ** 16 ? 4 : 10), body]);
}

/** Run a WebSocket server that sends the test's frames to each connection. Return its address. */
async function serve(t: test.TestContext, tell: (say: (text: string, opcode?: number) => void, socket: Socket, count: number) => void) {
  let count = 0;
  const sockets = new Set<Socket>();
  const server = createServer((socket) => {
    sockets.add(socket);
    socket.on("error", () => {});
    socket.on("data", (data) => {
      if (data.includes(Buffer.from([0x88, 0x80])) || data.includes(Buffer.from([0x88, 0x82]))) socket.destroy(); // the client closes
    });
    socket.once("data", (data) => {
      const key = /sec-websocket-key: (\S+)/i.exec(data.toString())![1];
      const accept = createHash("sha1").update(`${key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11`).digest("base64");
      socket.write(`HTTP/1.1 101 X\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: ${accept}\r\nSec-WebSocket-Protocol: roundelay.v1\r\n\r\n`);
      tell((text, opcode) => void socket.write(encode(text, opcode)), socket, ++count);
    });
  });
  t.after(() => {
    for (const socket of sockets) socket.destroy();
    server.close();
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  return `ws://127.0.0.1:${(server.address() as { port: number }).port}/`;
}

const welcomed = (change: object) => JSON.stringify({ ...WELCOME, ...change });
const NO_FRAMES: Record<string, string> = {
  "no JSON": "{", "an empty text": "", "a number": "17", "null": "null", "an array": "[]", "no type": "{}", "a type that is no text": '{"type": 1}',
  "a deep text": "[".repeat(1_000_000), "a welcome without anything": '{"type": "welcome"}', "a network without an epoch": welcomed({ network: {} }),
  "a cursor that is no number": welcomed({ cursor: "x" }), "a negative cursor": welcomed({ cursor: -1 }), "a broken seq": welcomed({ cursor: 1.5 }),
  "limits that are no numbers": welcomed({ limits: { max_frame_bytes: "no" } }), "no limits": welcomed({ limits: null }),
};

for (const [name, text] of Object.entries(NO_FRAMES)) {
  test(`a server that answers with ${name} is no hub`, async (t) => {
    const url = await serve(t, (say) => say(text));
    await assert.rejects(connect({ url, agentId: "ann", token: "t" }), (error) => error instanceof RoundelayError && error.code === "invalid_frame");
  });
}

test("a binary frame is none either", async (t) => {
  const url = await serve(t, (say) => say(JSON.stringify(WELCOME), 2));
  await assert.rejects(connect({ url, agentId: "ann", token: "t" }), (error) => error instanceof RoundelayError && error.code === "invalid_frame");
});

const AFTER_WELCOME: Record<string, string> = {
  "a delivery without a message": '{"type": "deliver", "attempt": 1}',
  "a delivery of nobody": JSON.stringify({ type: "deliver", attempt: 1, message: { ...message(1), sender_id: null } }),
  "an answer to nothing": '{"type": "result", "value": 1}', "an error without words": '{"type": "error", "code": 17}',
};

for (const [name, text] of Object.entries(AFTER_WELCOME)) {
  test(`${name} ends a session, and everything that waits`, async (t) => {
    let say: (text: string) => void = () => {};
    const url = await serve(t, (it) => (say = it)(JSON.stringify(WELCOME)));
    const client = await connect({ url, agentId: "ann", token: "t" });
    const [waiting, sending] = [client.deliveries().next(), client.send("agent:bob", "x")];
    say(text);
    for (const it of [waiting, sending]) await assert.rejects(it, (error) => error instanceof RoundelayError && error.code === "invalid_frame");
    await client.close();
  });
}

test("what is not asked for, said twice, or unknown here, changes nothing", async (t) => {
  const url = await serve(t, (say) => {
    say(JSON.stringify(WELCOME));
    say('{"type": "stored", "message_id": "never", "seq": 7, "duplicate": false}');
    say('{"type": "stored", "record_id": "never", "seq": 7, "duplicate": false}');
    say('{"type": "result", "call_id": "never", "value": 1}');
    say('{"type": "error", "code": "__proto__", "message": "x", "call_id": "never"}');
    say('{"type": "error", "code": "constructor", "message": "x"}');
    say('{"type": "__proto__"}');
    say('{"type": "constructor", "__proto__": {"polluted": true}}');
    say('{"type": "notice", "kind": "dead_letter", "body": null}');
    say('{"type": "notice", "kind": "of a newer hub", "body": {"__proto__": {"polluted": true}}}');
    for (const seq of [3, 3, 2, 3]) say(deliver(seq));
    say(deliver(9));
  });
  const client = await connect({ url, agentId: "ann", token: "t" });
  const seqs: number[] = [];
  for await (const delivery of client.deliveries()) {
    seqs.push(delivery.message.seq);
    delivery.ack();
    if (delivery.message.seq === 9) break;
  }
  assert.deepEqual(seqs, [3, 2, 9]);
  assert.equal((Object.prototype as { polluted?: true }).polluted, undefined);
  await client.close();
});

test("an answer larger than any may be is not read, and the call that asked for it ends", async (t) => {
  let say: (text: string) => void = () => {};
  const url = await serve(t, (it) => (say = it)(JSON.stringify(WELCOME)));
  const client = await connect({ url, agentId: "ann", token: "t" });
  const asked = client.call("network.history", { thread_id: "broadcast" });
  const isBack = once(client, "state", (it) => it.state === "online");
  say(JSON.stringify({ type: "result", call_id: "x", value: "x".repeat(2 ** 24) }));
  await assert.rejects(asked, { code: "too_large" });
  await isBack;
  await client.close();
});

test("a server that ends each connection is come back to, later and later", async (t) => {
  const at: number[] = [];
  const url = await serve(t, (_, socket) => {
    at.push(Date.now());
    socket.destroy();
  });
  await assert.rejects(connect({ url, agentId: "ann", token: "t", connectTimeoutMs: 1500 }), { code: "closed" });
  assert.ok(at.length >= 3 && at.length <= 6, `${at.length} tries`);
});

test("of several addresses the one that serves is found at once, also when that is another one", async (t) => {
  const refused = createServer((socket) => void socket.end("HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"));
  await new Promise<void>((resolve) => refused.listen(0, "127.0.0.1", resolve));
  t.after(() => refused.close());
  const waiting = `ws://127.0.0.1:${(refused.address() as { port: number }).port}/`;
  const came: number[] = [];
  let leave = () => {};
  const serving = async (number: number) =>
    await serve(t, (say, socket) => {
      came.push(number);
      if (came.filter((it) => it === number).length > 1) return void socket.destroy(); // each server accepts one connection
      say(JSON.stringify(WELCOME));
      leave = () => socket.destroy();
    });
  const all = [waiting, await serving(1), "ws://127.0.0.1:1/", await serving(2)];
  const url = `roundelay://${all.map((it) => it.replace(/^ws:\/\/|\/$/g, "")).join()}/`;
  const client = await connect({ url, agentId: "ann", token: "t", connectTimeoutMs: 10_000 });
  assert.deepEqual(came, [1]);
  const isBack = once(client, "state", (it) => it.state === "online");
  const offline: unknown[] = [];
  client.on("state", ({ state }) => state === "offline" && offline.push(state));
  leave();
  await isBack;
  assert.deepEqual([came, offline.length], [[1, 1, 2], 1]);
  await client.close();
});

test("the one that leads is found at one that follows, where the socket shows what that says", async (t) => {
  const head = `HTTP/1.1 503 Service Unavailable\r\nRoundelay-Leader: ${new globalThis.URL(URL).host}\r\nContent-Length: 4\r\n\r\nNo.\n`;
  const following = createServer((socket) => void socket.on("error", () => {}).end(head));
  await new Promise<void>((resolve) => following.listen(0, "127.0.0.1", resolve));
  t.after(() => following.close());
  const url = `ws://127.0.0.1:${(following.address() as { port: number }).port}/`;
  const connecting = joinAgent(newName("ann"), makeToken(), { url, connectTimeoutMs: process.env.WS_MODULE ? 10_000 : 300 });
  if (!process.env.WS_MODULE) return await assert.rejects(connecting, { code: "closed" }); // node's own WebSocket does not
  const client = await connecting;
  assert.ok((await client.send(`agent:${client.agentId}`, "here")).seq);
  await client.close();
});

for (const url of ["ws://127.0.0.1:1/,nowhere", "ws://127.0.0.1:1/,", "ftp://127.0.0.1:1/", "ws://127.0.0.1:1/,ws://127.0.0.1:1/#x"]) {
  test(`${url} is refused before anything is tried`, async () => {
    await assert.rejects(connect({ url, agentId: "ann", token: "t", connectTimeoutMs: 5000 }), /is no hub URL/);
  });
}

test("no address at all is none of a hub", async () => {
  await assert.rejects(connect({ url: undefined as never, agentId: "ann", token: "t" }), /undefined is no hub URL/);
});

test("a hub that puts everybody off is asked again when it said, and a revoked token ends it", async (t) => {
  const at: number[] = [];
  const closing = (code: number) => String.fromCharCode(code >> 8, code & 255);
  const url = await serve(t, (say, socket, count) => {
    at.push(Date.now());
    if (count > 1) return say(JSON.stringify(WELCOME));
    say('{"type": "error", "code": "rate_limited", "message": "Later.", "retry_after_ms": 400}');
    socket.write(Buffer.concat([Buffer.from([0x88, 2]), Buffer.from(closing(4503), "latin1")]));
  });
  const client: Client = await connect({ url, agentId: "ann", token: "t" });
  assert.ok(at[1]! - at[0]! >= 399, `${at[1]! - at[0]!} ms`);
  await client.close();
  const refusing = await serve(t, (say, socket) => {
    say('{"type": "error", "code": "forbidden", "message": "You were removed."}');
    socket.write(Buffer.concat([Buffer.from([0x88, 2]), Buffer.from(closing(4403), "latin1")]));
  });
  await assert.rejects(connect({ url: refusing, agentId: "ann", token: "t" }), Forbidden);
});

/** Meaning of the hub's close codes by docs/protocol.md: whether the close is final, and the code of the client's error. */
const CLOSES: [number, string | null][] = [
  [4400, "invalid_frame"], [4401, "not_authenticated"], [4403, "forbidden"], [4409, "superseded"],
  [1000, null], [1001, null], [1011, null], [1012, null], [4408, null], [4413, null], [4429, null], [4503, null],
];

for (const [code, told] of CLOSES) {
  for (const isWelcome of [false, true]) {
    test(`${code} ${isWelcome ? "after" : "before"} the welcome ${told ? `is for good, as ${told}` : "is come back from"}`, async (t) => {
      const url = await serve(t, (say, socket, count) => {
        if (isWelcome || count > 1) say(JSON.stringify(WELCOME));
        if (count > 1) return;
        const reason = Buffer.from("In the hub's words.");
        socket.write(Buffer.concat([Buffer.from([0x88, 2 + reason.length, code >> 8, code & 255]), reason]));
      });
      const began = Date.now();
      const joining = connect({ url, agentId: "ann", token: "t", WebSocket: WebSocketHere });
      const client = isWelcome || told === null ? await joining : undefined;
      if (told === null) {
        if (isWelcome) await once(client!, "state", ({ state }) => state === "online");
        return await client!.close();
      }
      const error = client === undefined ? await joining.catch((it) => it) : await client.deliveries().next().catch((it) => it);
      assert.equal(error.code, told);
      if (told !== "superseded") assert.match(error.message, /In the hub's words/);
      assert.ok(Date.now() - began < 5000);
      await assert.rejects((async () => client ? await client.send("agent:bob", 1) : await joining)(), { code: told });
    });
  }
}

/** Socket that records whether the client waited for its end. */
function noted() {
  const ended: string[] = [];
  class Noted extends WebSocketHere {
    terminate() {
      ended.push("terminated");
      super.close();
    }
  }
  return { ended, WebSocket: Noted };
}

test("a node that is silent is left after its share of the time, for the next one, and hung up on", async (t) => {
  const silent = createServer(() => {});
  await new Promise<void>((resolve) => silent.listen(0, "127.0.0.1", resolve));
  t.after(() => silent.close());
  const { ended, WebSocket } = noted();
  const serving = await serve(t, (say) => say(JSON.stringify(WELCOME)));
  const url = `ws://127.0.0.1:${(silent.address() as { port: number }).port}/,${serving}`;
  const client = await connect({ url, agentId: "ann", token: "t", connectTimeoutMs: 1000, WebSocket });
  assert.deepEqual(ended, ["terminated"]);
  await client.close();
});

test("a hub that does not answer the goodbye is not waited for, and hung up on", async (t) => {
  const deaf = new Set<Socket>();
  const url = await serve(t, (say, socket) => {
    socket.removeAllListeners("data");
    socket.resume();
    deaf.add(socket);
    say(JSON.stringify(WELCOME));
  });
  const { ended, WebSocket } = noted();
  const client = await connect({ url, agentId: "ann", token: "t", WebSocket });
  await client.close();
  assert.deepEqual(ended, ["terminated"]);
});

test("where there is no WebSocket it is said, and what to give instead", async () => {
  const { WebSocket } = globalThis;
  globalThis.WebSocket = undefined as never;
  try {
    await assert.rejects(connect({ url: "ws://127.0.0.1:1/", agentId: "ann", token: "t" }), /There is no WebSocket here\. .* package ws/);
  } finally {
    globalThis.WebSocket = WebSocket;
  }
});

test("a listener that throws changes nothing of the connection", async (t) => {
  const thrown: unknown[] = [];
  const take = (error: unknown) => thrown.push(error);
  process.setUncaughtExceptionCaptureCallback(take);
  t.after(() => process.setUncaughtExceptionCaptureCallback(null));
  const url = await serve(t, (say) => {
    say(JSON.stringify(WELCOME));
    say('{"type": "notice", "kind": "inbox", "body": {}}');
    say(deliver(5));
  });
  const connecting = connect({ url, agentId: "ann", token: "t" });
  const client = await connecting;
  client.on("notice", () => {
    throw new Error("of the program");
  });
  const { value } = await client.deliveries().next();
  assert.equal(value!.message.seq, 5);
  await client.close();
  assert.ok(thrown.length <= 1);
  assert.notEqual(URL, url);
});
