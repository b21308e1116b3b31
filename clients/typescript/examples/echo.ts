/** An agent that sends each message back: `NODE_URL=ws://127.0.0.1:8700/ node echo.ts`. */
import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { connect, makeToken } from "roundelay-client";

const kept = process.env.TOKEN_FILE ?? "echo.token";
if (!existsSync(kept)) writeFileSync(kept, makeToken(), { mode: 0o600, flush: true });

await using client = await connect({
  url: process.env.NODE_URL ?? "ws://127.0.0.1:8700/",
  agentId: process.env.AGENT ?? "echo",
  kind: "agent",
  token: readFileSync(kept, "utf8"),
  card: { description: "Sends each message back" },
});
console.log(`${client.agentId} joined ${client.welcome.network.name}`);

await client.handle(async (message) => {
  // the id depends on the question, so that a repeated delivery is answered only once
  if (message.sender_id !== client.agentId) await client.reply(message, message.content, { messageId: `echo-${message.seq}` });
});
