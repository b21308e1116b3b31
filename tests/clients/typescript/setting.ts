/** Helpers of the tests: people and agents of a node. The tests know the token of its owner. */
import { createHash } from "node:crypto";
import { connect, makeToken, type Client, type ConnectOptions, type Delivery } from "roundelay-client";

export const URL = process.env.NODE_URL ?? "";
const OWNER = process.env.OWNER_TOKEN ?? "";
/** WebSocket class of this run: node's own, or that of a package. */
export const Socket: typeof WebSocket = process.env.WS_MODULE ? (await import(process.env.WS_MODULE)).WebSocket : WebSocket;
let made = 0;

/** Return an ID that no other test uses. */
export const newName = (name: string) => `${name}-${++made}-${process.pid}`;

export const hash = (token: string) => createHash("sha256").update(token).digest("hex");

export type Asked = Partial<ConnectOptions>;

/** Connect an agent. The first use of its ID binds its token. */
export const joinAgent = (agentId: string, token: string, options: Asked = {}) =>
  connect({ url: URL, agentId, token, kind: "agent", WebSocket: Socket, ...options });

/** Connect the owner, who is an operator. */
export const joinOwner = (options: Asked = {}) => connect({ url: URL, agentId: newName("owner"), token: OWNER, kind: "human", WebSocket: Socket, ...options });

/** Create a token as an operator. */
export async function makeTokenOf(agentId: string, kind: "human" | "service" = "human"): Promise<string> {
  await using owner = await joinOwner();
  const token = makeToken();
  await owner.call("network.create_token", { agent_id: agentId, kind, token_hash: hash(token) });
  return token;
}

export async function joinPerson(agentId: string, options: Asked = {}): Promise<Client> {
  return await connect({ url: URL, agentId, token: await makeTokenOf(agentId), WebSocket: Socket, ...options });
}

/** Return the next `count` deliveries, and acknowledge them on request. */
export async function take(client: Client, count: number, { isAcked = true } = {}): Promise<Delivery[]> {
  const taken: Delivery[] = [];
  if (count === 0) return taken;
  for await (const delivery of client.deliveries()) {
    taken.push(delivery);
    if (isAcked) delivery.ack();
    if (taken.length === count) break;
  }
  return taken;
}

/** Return the next event of this name that satisfies the predicate. */
export const once = <Name extends Parameters<Client["on"]>[0]>(client: Client, name: Name, isIt: (event: any) => boolean = () => true) =>
  new Promise<any>((resolve) => {
    const stop = client.on(name, (event) => {
      if (!isIt(event)) return;
      stop();
      resolve(event);
    });
  });

/** Sockets that the test can end. */
export class Sockets {
  readonly open = new Set<WebSocket>();
  readonly urls: string[] = [];
  readonly said: string[] = [];
  readonly Constructor: typeof WebSocket;

  constructor() {
    const sockets = this;
    this.Constructor = class extends Socket {
      constructor(url: string | URL, protocol?: string | string[]) {
        super(url, protocol);
        sockets.open.add(this);
        sockets.urls.push(String(url));
        this.addEventListener("close", () => sockets.open.delete(this));
      }

      override send(data: string): void {
        sockets.said.push(data);
        super.send(data);
      }
    };
  }

  cut(): void {
    for (const socket of this.open) socket.close();
  }

  list(type: string): any[] {
    return this.said.map((it) => JSON.parse(it)).filter((it) => it.type === type);
  }
}
