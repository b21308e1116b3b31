/** Reactor of an agent. It prints each delivery, acknowledges the one before, and reconnects after every failure of its hub. */
import { connect, type Delivery } from "roundelay-client";

const { NODE_URL, TOKEN, AGENT } = process.env as Record<string, string>;
const tell = (value: object) => void process.stdout.write(`${JSON.stringify(value)}\n`);

const client = await connect({ url: NODE_URL!, agentId: AGENT!, token: TOKEN!, kind: "agent", role: "reactor" });
const tellWelcome = () => tell({ online: { epoch: client.welcome.network.epoch, fence: client.welcome.fence, cursor: client.cursor } });
client.on("state", ({ state }) => state === "online" && tellWelcome());
tellWelcome();
let before: Delivery | undefined;
for await (const delivery of client.deliveries()) {
  before?.ack();
  tell({ got: { seq: delivery.message.seq, content: delivery.message.content, was_stale: before?.isStale ?? null } });
  before = delivery;
  if (delivery.message.content === "the end") break;
}
before?.ack();
await client.close();
