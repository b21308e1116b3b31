/** Prints each delivery and then acknowledges it. Ends when a given word arrives. */
import { createInterface } from "node:readline";
import { connect } from "roundelay-client";

const { NODE_URL, TOKEN, AGENT } = process.env as Record<string, string>;
const tell = (value: object) => void process.stdout.write(`${JSON.stringify(value)}\n`);

const client = await connect({ url: NODE_URL!, agentId: AGENT!, token: TOKEN!, kind: "agent" });
createInterface({ input: process.stdin }).on("line", () => client.wake()).on("close", () => process.exit(1)); // the test has ended
client.on("state", ({ state }) => tell({ state }));
client.on("notice", ({ kind, body }) => tell({ notice: { kind, body } }));
tell({ began: client.welcome.cursor });
for await (const delivery of client.deliveries()) {
  const { seq, sender_id, content } = delivery.message;
  const { n } = content as { n: number | string };
  tell({ got: { seq, n, sender: sender_id } });
  delivery.ack();
  if (n === "the end") break;
}
await client.close();
process.exit(0);
