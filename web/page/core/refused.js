/** The error of every call that a hub, or a source in its place, refuses. */

/** `code` is a code of the protocol, or `closed` after the connection has ended. */
export class Refused extends Error {
  /** @param {string} code @param {string} message @param {number} [retryAfterMs] */
  constructor(code, message, retryAfterMs) {
    super(message);
    this.name = "Refused";
    this.code = code;
    /** @type {number | undefined} */
    this.retry_after_ms = retryAfterMs;
  }
}
