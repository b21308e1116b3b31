/** The error of a call that a hub or a recording refuses. */

/** `code` is an error code of the protocol, or `closed` if the connection has ended. */
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
