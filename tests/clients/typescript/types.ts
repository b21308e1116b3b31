/** What a program of TypeScript is told when it is written: this file is checked, and not run. */
import { connect, UnknownRecipient, type WireMessage } from "roundelay-client";

export async function isChecked(): Promise<number[]> {
  // @ts-expect-error there is no client without an address
  await connect({ agentId: "ann" });
  const client = await connect({ url: "ws://127.0.0.1:8700/", agentId: "ann", token: "t" });
  const { recipients } = await client.call("network.message_status", { seq: 5 });
  const attempts: number[] = recipients.map((it) => it.attempts);
  // @ts-expect-error its argument is required
  await client.call("network.message_status");
  // @ts-expect-error it has no such argument
  await client.call("network.history", { thread_id: "broadcast", since: 4 });
  // @ts-expect-error its state is none of these words
  if (recipients[0]?.state === "seen") attempts.push(1);
  await client.call("mymod.count", { anything: [1] });
  // @ts-expect-error a kind of signal that there is not
  client.signal("shouting", {}, { to: "agent:bob" });
  client.on("notice", ({ kind, body }) => void [kind === "behind", body]);
  // @ts-expect-error an event that there is not
  client.on("message", () => {});
  try {
    await client.send("agent:bob", { any: ["json"] }, { conversation: "plans", signal: AbortSignal.timeout(1000) });
  } catch (error) {
    if (error instanceof UnknownRecipient) attempts.push(error.retryAfterMs ?? 0);
  }
  for await (const delivery of client.deliveries()) {
    const message: WireMessage = delivery.message;
    // @ts-expect-error what was delivered is not changed
    delivery.message = message;
    delivery.ack();
  }
  return attempts;
}
