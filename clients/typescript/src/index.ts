/** A client of Roundelay networks for browsers and Node, without dependencies. `roundelay-client/node` adds a store for
 * unsent messages in files. */

export { Client, Delivery, connect, makeToken } from "./client.ts";
export type {
  ConnectOptions, ConnectionState, Cursor, Events, Kind, OutboxStore, SendOptions, Stored, WebSocketConstructor,
} from "./client.ts";
export * from "./errors.ts";
export type * from "./protocol.ts";
export type { ArgsOf, CallOptions, Channel, Hold, Mark, Operation, OperationValue, Page, Participant, Receipt, ThreadRow } from "./values.ts";
