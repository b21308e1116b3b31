/** Sends numbers to a participant one after the other, and prints the result of each. Unstored messages are kept in files. */
import { createInterface } from "node:readline";
import { connect } from "roundelay-client";
import { fileStore } from "roundelay-client/node";

const { NODE_URL, TOKEN, AGENT, KIND, TO, OUTBOX, FIRST = "0", LAST = "Infinity" } = process.env as Record<string, string>;
const tell = (value: object) => void process.stdout.write(`${JSON.stringify(value)}\n`);
const MAX_WAITING = 8;
let isOver = false;

const outbox = fileStore(OUTBOX!);
const left = outbox.length;
const client = await connect({ url: NODE_URL!, agentId: AGENT!, token: TOKEN!, outbox, ...(KIND === "human" && { kind: KIND }) });
createInterface({ input: process.stdin })
  .on("line", (line) => ("wake" in JSON.parse(line) ? client.wake() : (isOver = true)))
  .on("close", () => process.exit(1)); // the test has ended
const waiting = new Set<Promise<void>>();
let drained = () => {};
let known = 0;
client.on("stored", ({ id, seq, duplicate }) => {
  tell({ stored: { id, seq, duplicate } });
  known += 1;
  drained();
});
client.on("refused", ({ id, error }) => tell({ refused: { id, code: error.code } }));
tell({ began: left });
let said = 0;
for (let n = Number(FIRST); !isOver && n < Number(LAST); n += 1) {
  const sending: Promise<void> = client.send(TO!, { n }, { messageId: `${AGENT}-${n}` }).then(
    () => void waiting.delete(sending), (error) => tell({ failed: { n, why: String(error) } }),
  );
  waiting.add(sending);
  said += 1;
  tell({ said: n });
  if (waiting.size >= MAX_WAITING) await Promise.race(waiting);
}
await Promise.all(waiting);
while (outbox.length) await new Promise<void>((resolve) => (drained = resolve));
tell({ done: { said, left, known } });
await client.close();
process.exit(0);
