/** Errors that TypeScript reports for wrong uses of the client. This file is type-checked but not run. */
import { connect, UnknownRecipient, type WireMessage } from "roundelay-client";

export async function isChecked(): Promise<number[]> {
  // @ts-expect-error the address is required
  await connect({ agentId: "ann" });
  const client = await connect({ url: "ws://127.0.0.1:8700/", agentId: "ann", token: "t" });
  const { recipients } = await client.call("network.message_status", { seq: 5 });
  const attempts: number[] = recipients.map((it) => it.attempts);
  // @ts-expect-error the argument is required
  await client.call("network.message_status");
  // @ts-expect-error the operation has no such argument
  await client.call("network.history", { thread_id: "broadcast", since: 4 });
  // @ts-expect-error the state has other values
  if (recipients[0]?.state === "seen") attempts.push(1);
  await client.call("mymod.count", { anything: [1] });
  // @ts-expect-error unknown kind of signal
  client.signal("shouting", {}, { to: "agent:bob" });
  client.on("notice", ({ kind, body }) => void [kind === "behind", body]);
  // @ts-expect-error unknown event
  client.on("message", () => {});
  try {
    await client.send("agent:bob", { any: ["json"] }, { conversation: "plans", signal: AbortSignal.timeout(1000) });
  } catch (error) {
    if (error instanceof UnknownRecipient) attempts.push(error.retryAfterMs ?? 0);
  }
  for await (const delivery of client.deliveries()) {
    const message: WireMessage = delivery.message;
    // @ts-expect-error a delivery is read-only
    delivery.message = message;
    delivery.ack();
  }
  return attempts;
}
