/** Types of the values that operations return (docs/protocol.md). An operation that is missing here returns `Json`. */

import type { Json, OperationArgs, WireMessage } from "./protocol.ts";

export interface Page {
  messages: WireMessage[];
  has_more: boolean;
  /** Seqs of rows that are damaged in the hub's storage. The messages of these rows are left out. */
  damaged?: number[];
}

export interface Mark {
  read_upto: number;
  is_pinned: boolean;
  is_muted: boolean;
  is_archived: boolean;
  title?: string;
}

export interface Hold {
  by: string;
  seq: number;
  at: number;
}

export interface ThreadRow {
  thread_id: string;
  /** Title of the thread for the caller. Older hubs leave out the title. */
  title?: string;
  last_seq: number;
  messages: number;
  readers: string[];
  last: { seq: number; sender_id: string; sender_kind: string; sent_at: number; text: string };
  unread: number;
  mark?: Mark;
  held?: Hold;
}

export interface Participant {
  agent_id: string;
  kind: "agent" | "human" | "service";
  state: "online" | "offline";
  card?: Record<string, Json>;
  activity?: string;
  open_reactions?: number;
  work?: Json[];
}

export interface Receipt {
  agent_id: string;
  state: "queued" | "delivered" | "handled" | "in_prompt" | "dead" | "removed";
  attempts: number;
  reaction?: string;
  reaction_status?: ReactionStatus;
  again?: { reaction: string; reaction_status: ReactionStatus };
  is_overtaken?: boolean;
}

export type ReactionStatus = "open" | "finished" | "stopped" | "cancelled" | "failed";

export interface Channel {
  name: string;
  title?: string;
  topic: string;
  history: "since_join" | "members";
  access: "open" | "invite" | "closed";
  owner?: string;
  members: number;
  is_member: boolean;
  is_invited?: boolean;
}

interface KnownValues {
  "network.info": { name: string; epoch: string; server: string; head: number; participants: number; mods: Json };
  "network.list_agents": { agents: Participant[]; has_more: boolean };
  "network.list_threads": { threads: ThreadRow[]; has_more: boolean };
  "network.history": Page & { held?: Hold };
  "network.search": Page & { next?: number };
  "network.window": {
    threads: { thread_id: string; messages: WireMessage[]; omitted: number; damaged?: number[] }[];
    omitted_threads?: number;
    is_alone?: boolean;
    as_of: number;
  };
  "network.message_status": { seq: number; recipients: Receipt[]; has_more: boolean };
  "network.why": { chain: Json[]; has_more: boolean };
  "network.impact": { messages: WireMessage[]; reactions: Json[]; next: number; has_more: boolean };
  "network.receive": Page & { next: number };
  "network.acknowledge": { acknowledged: number };
  "network.records": {
    records: { seq: number; agent_id: string; record_id: string; kind: string; body: Json; at: number }[];
    has_more: boolean;
  };
  "network.watch": {};
  "network.open_items": { root: number; is_quiet: boolean; items: Json[]; hidden: number; has_more: boolean };
  "network.cancel": { reactions: string[] };
  "network.mark": Mark & { thread_id: string };
  "network.take": { thread_id: string; seq: number; until?: number };
  "network.give": { thread_id: string; seq: number; taken: number; by: string };
  "network.inbox": { items: Record<string, Json>[]; has_more: boolean; next?: string };
  "network.dismiss": {};
  "network.resume_root": { was_stopped: boolean };
  "network.create_login": { expires_at: number; warning?: string };
  "network.create_token": { warning?: string };
  "network.revoke_token": { revoked: number };
  "channels.create": { channel: string };
  "channels.join": { channel: string };
  "channels.leave": { channel: string };
  "channels.list": { channels: Channel[]; has_more: boolean };
  "channels.members": { channel: string; members: string[]; has_more: boolean };
  "channels.post": { seq: number; thread_id: string };
  "channels.reply": { seq: number; thread_id: string };
}

/** The operations of every hub and of its bundled mods. */
export type Operation = keyof OperationArgs;

/** The type of the value that an operation returns. */
export type OperationValue<Op extends string> = Op extends keyof KnownValues ? KnownValues[Op] : Json;

/** The parameters of `call` after the name of the operation. The arguments are optional if the operation requires none.
 */
export type ArgsOf<Op extends string> = Op extends Operation
  ? {} extends OperationArgs[Op]
    ? [args?: OperationArgs[Op], options?: CallOptions]
    : [args: OperationArgs[Op], options?: CallOptions]
  : [args?: Record<string, unknown>, options?: CallOptions];

export interface CallOptions {
  /** Id of the call. If a call is repeated with the same id, its change is made only once, even from another process.
   */
  callId?: string;
  /** Signal that ends the wait. A call that was already sent may still run. */
  signal?: AbortSignal;
}
