/**
 * What the hub's frames and operations hold. Made by `python -m tests.support.typescript_types` of docs/asyncapi.json and
 * of the operations of a hub with its own mods; not to be changed by hand.
 */

/** Any JSON value. */
export type Json = null | boolean | number | string | Json[] | { [key: string]: Json };

export interface WireMessage {
  seq: number;
  message_id: string;
  kind: "broadcast" | "channel" | "direct" | "mod";
  sender_id: string;
  sender_kind: string;
  to: string;
  thread_id: string;
  reply_to?: number;
  cause?: number;
  root: number;
  hops: number;
  sent_at: number;
  content: Json;
  text_representation?: string;
  requires_response?: boolean | string[];
  metadata?: Json;
}

export interface WelcomeFrame {
  protocol: number;
  server: string;
  network: NetworkInfo;
  agent_id: string;
  kind: "agent" | "human" | "service";
  is_operator?: boolean;
  is_read_only?: boolean;
  follows?: Follows;
  role: "observer" | "reactor";
  session_id: string;
  fence?: number;
  cursor: number;
  head: number;
  resume: "full" | "limited" | "new";
  missing_before?: number;
  open_reactions?: OpenReactionInfo[];
  mods: ModInfo[];
  limits: Record<string, number>;
}

export interface NetworkInfo {
  name: string;
  epoch: string;
}

export interface OpenReactionInfo {
  reaction: string;
  trigger: number;
  seq: number;
  overtaken?: boolean;
}

export interface ModInfo {
  id: string;
  operations: OperationInfo[];
}

export interface OperationInfo {
  op: string;
  description: string;
  args_schema: Record<string, Json>;
  kind?: "change" | "read";
}

export interface StoredFrame {
  message_id?: string;
  record_id?: string;
  seq: number;
  thread_id?: string;
  duplicate: boolean;
}

export interface SignalOutFrame {
  sender_id: string;
  thread_id: string;
  kind: string;
  body: Json;
}

export interface PresenceFrame {
  agent_id: string;
  state: "offline" | "online";
  card?: Json;
}

export interface NoticeFrame {
  kind: (string & {}) | "behind" | "budget_exhausted" | "damaged" | "dead_letter" | "dead_letter_withdrawn" | "draining" | "given" | "inbox" | "loop_stopped" | "marked" | "members" | "superseded" | "taken";
  thread_id?: string;
  body: Json;
}

export interface Follows {
  leader: string;
  as_of: number;
}

export interface UsedTokens {
  model: string;
  prompt_tokens?: number;
  completion_tokens?: number;
  cached_tokens?: number;
}

/** The arguments of each operation. */
export interface OperationArgs {
  /** Create a channel, own it and join it. Access "open": anybody may join; "invite": everybody sees it, only those whom you invite may join; "closed": nobody else even sees that there is one. With history "members", late joiners may read what was written before. */
  "channels.create": {
    name: string;
    topic?: string;
    history?: "members" | "since_join";
    access?: "closed" | "invite" | "open";
  };
  /** Let somebody join a channel that you own. Nobody is told: write to them, so that they join. */
  "channels.invite": {
    name: string;
    agent_id: string;
  };
  /** Join a channel that is open or that you are invited to, to get its messages and to write in it. */
  "channels.join": {
    name: string;
  };
  /** Leave a channel. To come back to one that is not open you need another invitation, unless you own it. */
  "channels.leave": {
    name: string;
  };
  /** List the channels that you may see: name, topic, who may join, who owns it, how many members, and whether you are one or are invited. By name; those above `after`. */
  "channels.list": {
    after?: string;
    limit?: number;
    trigger?: number | null;
  };
  /** List who is in a channel, by id, those above `after`; its members and operators may ask. */
  "channels.members": {
    name: string;
    after?: string;
    limit?: number;
    trigger?: number | null;
  };
  /** Write in a channel that you are in. */
  "channels.post": {
    name: string;
    text: string;
    cause?: number | null;
  };
  /** Take a member, or an invitation, out of a channel that you own. Who was removed reads nothing that is written afterwards, and comes back only if it is invited again. */
  "channels.remove": {
    name: string;
    agent_id: string;
  };
  /** Answer a channel message in its reply thread; reply_to is the message's seq. */
  "channels.reply": {
    reply_to: number;
    text: string;
    cause?: number | null;
  };
  /** Choose who may join a channel that you own: "open", "invite" or "closed". Its members stay. */
  "channels.set_access": {
    name: string;
    access: "closed" | "invite" | "open";
  };
  /** Choose what late joiners may read; the channel's owner may, or an operator. */
  "channels.set_history": {
    name: string;
    history: "members" | "since_join";
  };
  /** Give a channel that you own to another member of it. */
  "channels.set_owner": {
    name: string;
    agent_id: string;
  };
  /** Say what people call a channel that you own; an empty title takes that away. Its name stays. */
  "channels.set_title": {
    name: string;
    title: string;
  };
  /** Say what a channel is about; its members may. */
  "channels.set_topic": {
    name: string;
    topic: string;
  };
  /** Find participants whose card speaks of what you need: tags, tools or description. The best match comes first. */
  "discovery.find": {
    query: string;
    limit?: number;
    online?: boolean | null;
  };
  /** Say that these messages are handled: they are not delivered again. It is durable when the answer comes. */
  "network.acknowledge": {
    seqs: number[];
  };
  /** Calls that wait for a person's decision, by the seq of the message that asks for it, above `after`: those whose message the caller may read. `may_decide` says whether a reply of the caller's would decide, `may_call` whether `network.decide` would. */
  "network.approvals": {
    after?: number;
    limit?: number;
  };
  /** The people whom ids and roles (`role:NAME`, of the page `rights`) name: whether each reads the first of these messages, and whether it led to one of them (`is_requester`): it wrote that, or a cause of it. `unknown` are names of nobody, or of no role. */
  "network.approvers": {
    names: string[];
    seqs: number[];
  };
  /** Ask the reactions of a thread, or one reaction, to stop, and those of the agents that these wrote to directly. */
  "network.cancel": {
    reaction?: string | null;
    thread_id?: string | null;
  };
  /** Start, stop, restart or reload the process of an agent that this node runs. `reload` takes its changed file, and refuses a wrong one. */
  "network.control_agent": {
    agent_id: string;
    action: "reload" | "restart" | "start" | "stop";
  };
  /** What models used and cost, in groups, the most expensive first: of the calls of an agent, in a thread, in a conversation, or since a time. */
  "network.cost_report": {
    by?: "agent" | "day" | "model" | "reaction" | "root" | "thread";
    agent_id?: string | null;
    thread_id?: string | null;
    root?: number | null;
    since?: number;
  };
  /** What these uses of models cost by the prices that the node knows: dollars in the same order, null where no price is known. */
  "network.costs": {
    uses: UsedTokens[];
  };
  /** Let the code with this hash (SHA-256, hex) log in as an id once, within `ttl_ms`: a `hello` with it ties a token to the id that the client made. */
  "network.create_login": {
    agent_id: string;
    login_hash: string;
    kind?: "human" | "service";
    ttl_ms?: number;
    operator?: boolean;
  };
  /** Let the token with this hash (SHA-256, hex) join as an id. The token itself is never sent. */
  "network.create_token": {
    agent_id: string;
    kind: "agent" | "human" | "service";
    token_hash: string;
    operator?: boolean;
  };
  /** Messages that failed too often at their recipient: the caller's own, or, for operators, anybody's or everybody's. By recipient and seq; those behind `after`, which is AGENT/SEQ of the last one. */
  "network.dead_letters": {
    agent_id?: string | null;
    after?: string | null;
    limit?: number;
  };
  /** Decide on the call that the message `seq` asks for, as a reply to it would: `/approve`, `/deny REASON` or `/edit ARGUMENTS`. For people who may decide and do not read that message: operators, where no approvers are named. Whoever reads it may add `thread` or `always` to `/approve`. */
  "network.decide": {
    seq: number;
    decision: string;
  };
  /** Be told no more of what waits under a kind and a seq, or of the fault of an agent, until it comes about again. Nothing else changes. */
  "network.dismiss": {
    kind: "budget" | "dead_letter" | "fault" | "question" | "stopped";
    seq?: number | null;
    agent_id?: string | null;
  };
  /** Forget a dead letter; the message itself stays in its thread. */
  "network.drop_dead_letter": {
    seq: number;
    agent_id?: string | null;
  };
  /** What followed from a message, as a tree: the reactions to it, and the messages that these and others sent. */
  "network.effects": {
    seq: number;
    limit?: number;
  };
  /** Why a message was sent: the messages up to its root, each with the reaction that sent it, the work before it and the messages of its prompt. `next` is where to continue if the answer would be too large. */
  "network.explain": {
    seq: number;
  };
  /** Give a thread back that was taken over, by whomever: its agents answer there again. */
  "network.give": {
    thread_id: string;
  };
  /** Messages of one thread, oldest first. With a `trigger` only what an agent may see in its reaction to that message, what has come since included up to `until`. */
  "network.history": {
    thread_id: string;
    before?: number | null;
    limit?: number;
    trigger?: number | null;
    visibility?: "all" | "current" | "people" | "strict" | null;
    until?: number | null;
  };
  /** What followed from a message: messages above `after`, ascending, and the reactions that sent them. */
  "network.impact": {
    seq: number;
    after?: number | null;
    limit?: number;
    trigger?: number | null;
    visibility?: "all" | "current" | "people" | "strict" | null;
  };
  /** What waits for the caller, the newest first: calls that it may decide on, questions to it, messages that failed, conversations that stopped, spent budgets. Go on with `before` the answer's `next`. */
  "network.inbox": {
    limit?: number;
    before?: string | null;
  };
  /** What this network is. */
  "network.info": {};
  /** Everyone who is registered, by id; those above `after`. */
  "network.list_agents": {
    kind?: "agent" | "human" | "service" | null;
    online?: boolean | null;
    after?: string;
    limit?: number;
  };
  /** Threads that the caller may read, newest first; those whose last message is below `before`, of all or of these `threads`, with what is unread in them and what the caller keeps of them for itself. */
  "network.list_threads": {
    before?: number | null;
    limit?: number;
    threads?: string[] | null;
  };
  /** Who has tokens, without the tokens, and how many sessions joined with each, by id and age; those behind the one whose `hash` is `after`. */
  "network.list_tokens": {
    after?: string | null;
    limit?: number;
  };
  /** Every message with a seq above `after`, ascending; if there is none, the answer waits for up to `wait_ms`. */
  "network.log": {
    after?: number;
    limit?: number;
    wait_ms?: number;
  };
  /** Keep for oneself how far one has read a thread, whether it is pinned, muted or archived, and a title of one's own for it. What is left out stays; an empty title takes it away. */
  "network.mark": {
    thread_id: string;
    read_upto?: number | null;
    is_pinned?: boolean | null;
    is_muted?: boolean | null;
    is_archived?: boolean | null;
    title?: string | null;
  };
  /** What the caller last wrote down of each of these threads in records of kind `memory`, if every message that it was made of may enter the prompt for `trigger`; else what it wrote before that. */
  "network.memory": {
    threads: string[];
    trigger: number;
    visibility?: "all" | "current" | "people" | "strict" | null;
  };
  /** How far a message has got with each of its recipients, by id; those above `after`. */
  "network.message_status": {
    seq: number;
    after?: string;
    limit?: number;
  };
  /** Say that handling a message failed: it is given again after `retry_after_ms`, at the fifth failure it becomes a dead letter. It is durable when the answer comes. */
  "network.nack": {
    seq: number;
    reason: string;
    retry_after_ms?: number | null;
  };
  /** The agents that this node runs: what the process of each does, and whether its file has changed. */
  "network.node_agents": {};
  /** Reactions begun and not finished, by the seq of their beginning, above `after`: one's own; operators name anybody, or nobody for all. */
  "network.open_reactions": {
    agent_id?: string | null;
    after?: number;
    limit?: number;
  };
  /** What participants have stored today and may store, the fullest quota first: one's own; operators name anybody, or nobody for all. */
  "network.quotas": {
    agent_id?: string | null;
    limit?: number;
  };
  /** The messages that are delivered to the caller, ascending: those above `after` (with `unhandled`, of these what is not handled yet), or, without it, the oldest that are not handled yet. If there is none, the answer waits for up to `wait_ms`. */
  "network.receive": {
    after?: number | null;
    limit?: number;
    wait_ms?: number;
    peek?: boolean;
    unhandled?: boolean;
  };
  /** The turn records of a reaction above `after`, oldest first; its agent's and operators' to read, who may name the agent. */
  "network.records": {
    reaction: string;
    agent_id?: string | null;
    after?: number;
    limit?: number;
  };
  /** Remove a participant for good. */
  "network.remove": {
    agent_id: string;
  };
  /** Let an agent go on that has answered without causes until it was stopped. ``was_stopped``: it had been. */
  "network.resume_agent": {
    agent_id: string;
  };
  /** Let a conversation that has used its budget go on, with as much again. ``was_stopped``: the hub had stopped it; the budgets that its agents keep are not the hub's to know. */
  "network.resume_root": {
    root: number;
  };
  /** Deliver a dead letter again, with five attempts as at first. */
  "network.retry_dead_letter": {
    seq: number;
    agent_id?: string | null;
  };
  /** Revoke every token of an id, and the logins to it that nobody has used, and close its sessions; or, with a `token_hash` (or its beginning, as `network.list_tokens` shows it), that token alone, and the sessions that joined with it. */
  "network.revoke_token": {
    agent_id: string;
    token_hash?: string | null;
  };
  /** The log itself, every row above `after`, ascending, as lines of JSON, byte by byte what is stored. */
  "network.rows": {
    after?: number;
    limit?: number;
  };
  /** The newest messages, below `before`, in which every word of `query` stands, oldest first; case, accents and endings do not count; "in quotation marks" a word stands for itself, and `deploy*` for all that begin so. `sender_id`, `said_after` and `said_before` (ms) choose by who said it and when, as `from:ID`, `after:2026-11-27` and `before:2026-11-28` in `query` do. `next` is the `before` to go on with, if there may be more. With a `trigger` as in `network.history`. */
  "network.search": {
    query: string;
    thread_id?: string | null;
    before?: number | null;
    limit?: number;
    trigger?: number | null;
    visibility?: "all" | "current" | "people" | "strict" | null;
    sender_id?: string | null;
    said_after?: number | null;
    said_before?: number | null;
  };
  /** Tokens that models used, by model: in the conversation that a message belongs to, in an open reaction of the caller's, and by the caller today. */
  "network.spent": {
    seq: number;
    reaction?: string | null;
  };
  /** The hub's figures. */
  "network.status": {};
  /** Conversations that stopped at a limit and were not let go on, the newest first, of those whose root is below `before`; and agents that answered without causes until they were stopped. */
  "network.stopped": {
    before?: number | null;
    limit?: number;
  };
  /** Take a thread over: agents answer there no more until it is given back, or `ttl_ms` are over (the node's `takeover_ms` without). People in a direct thread do, and operators; in others whoever has the right to. */
  "network.take": {
    thread_id: string;
    ttl_ms?: number | null;
  };
  /** What an agent's records above `after` say of its model calls, ascending: one's own; operators name anybody. */
  "network.usage": {
    agent_id?: string | null;
    after?: number;
    limit?: number;
  };
  /** Choose whether this session is sent presence and signals. */
  "network.watch": {
    presence?: boolean | null;
    signals?: boolean | null;
  };
  /** What a message follows from: it, the reaction that sent it, the message before, up to the root. */
  "network.why": {
    seq: number;
    trigger?: number | null;
    visibility?: "all" | "current" | "people" | "strict" | null;
  };
  /** The conversation that an agent may see for a trigger: threads in a stable order, messages oldest first. */
  "network.window": {
    trigger: number;
    threads?: number | string[] | null;
    per_thread?: number | null;
    visibility?: "all" | "current" | "people" | "strict" | null;
  };
  /** What an agent did in a reaction: its state, its work, and the same as steps with times. */
  "network.work": {
    reaction: string;
    agent_id: string;
  };
}
