/** What a hub, or what stands in its place, refuses: the error of every call. */

/** `code` is the protocol's, or `closed` where the connection has ended. */
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
