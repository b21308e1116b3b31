/**
 * Errors for the refusals of a hub. Each error has a `code` (docs/protocol/errors.md). Grouped by what to do:
 *
 *   RoundelayError
 *     fix the call    InvalidFrame, InvalidArguments, UnknownRecipient, UnknownMessage, UnknownOperation, IdConflict, TooLarge,
 *                     NotAuthenticated, Forbidden, UnsupportedProtocol
 *     retry           RateLimited, Overloaded (the client retries, unless its own outbox is full), BudgetExhausted (tomorrow)
 *     a person        Held, LoopStopped
 *     give up         InternalError, Superseded, ConnectError
 */

export class RoundelayError extends Error {
  readonly code: string;
  /** Time after which the same request may be accepted, in milliseconds. */
  readonly retryAfterMs: number | undefined;

  constructor(code: string, message: string, retryAfterMs?: number) {
    super(message);
    this.name = new.target.name;
    this.code = code;
    this.retryAfterMs = retryAfterMs;
  }
}

export class InvalidFrame extends RoundelayError {}
export class InvalidArguments extends RoundelayError {}
export class UnknownRecipient extends RoundelayError {}
export class UnknownMessage extends RoundelayError {}
export class UnknownOperation extends RoundelayError {}
export class IdConflict extends RoundelayError {}
export class TooLarge extends RoundelayError {}
export class NotAuthenticated extends RoundelayError {}
export class Forbidden extends RoundelayError {}
export class UnsupportedProtocol extends RoundelayError {}
export class RateLimited extends RoundelayError {}
export class Overloaded extends RoundelayError {}
export class BudgetExhausted extends RoundelayError {}
export class Held extends RoundelayError {}
export class LoopStopped extends RoundelayError {}
export class InternalError extends RoundelayError {}
/** A newer reactor session of the agent has replaced this session, which must not react any more. */
export class Superseded extends RoundelayError {}
/** There is no connection: the hub did not answer in time, or this client was closed. */
export class ConnectError extends RoundelayError {}

/** The error class for each code of the protocol. */
export const ERRORS: Readonly<Record<string, typeof RoundelayError>> = {
  invalid_frame: InvalidFrame,
  invalid_arguments: InvalidArguments,
  unknown_recipient: UnknownRecipient,
  unknown_message: UnknownMessage,
  unknown_operation: UnknownOperation,
  id_conflict: IdConflict,
  too_large: TooLarge,
  not_authenticated: NotAuthenticated,
  forbidden: Forbidden,
  unsupported_protocol: UnsupportedProtocol,
  rate_limited: RateLimited,
  overloaded: Overloaded,
  budget_exhausted: BudgetExhausted,
  held: Held,
  loop_stopped: LoopStopped,
  internal: InternalError,
  superseded: Superseded,
  closed: ConnectError,
};

/** Convert a refusal to an error of the class for its code. An unknown code of a newer hub becomes a `RoundelayError`.
 */
export function makeError(refused: { code: string; message: string; retry_after_ms?: number | undefined }): RoundelayError {
  const Class = Object.hasOwn(ERRORS, refused.code) ? ERRORS[refused.code] : undefined;
  return new (Class ?? RoundelayError)(refused.code, refused.message, refused.retry_after_ms);
}
