/**
 * Tracks which deliveries were handled, and which acks must be sent. The rules are those of `Acks` in
 * network/client/acks.py. This module uses no IO and no clock.
 *
 * The prefix is the seq up to which every delivery was handled or refused. The prefix never decreases, and one `ack`
 * covers all deliveries up to it. A delivery at or below the prefix that arrives again is late. A late delivery is
 * acknowledged separately. While a late delivery is open, the prefix is not sent, because it would also cover that
 * delivery.
 */

// Maximum number of handled seqs to remember. These seqs identify deliveries that a new session repeats. A hub that is
// killed loses at most the acks of the last second (docs/protocol.md, Delivery), or more if it is killed several times
// within a second.
const MAX_REMEMBERED = 65_536;

export class Acks {
  constructor() {
    this.prefix = 0;
    /** Whether the hub now has a different history. */
    this.isStale = false;
    /** @type {number[]} deliveries above the prefix, in order of arrival */
    this._order = [];
    /** @type {Set<number>} */
    this._open = new Set();
    /** @type {Set<number>} */
    this._handled = new Set();
    /** @type {Set<number>} open deliveries at or below the prefix */
    this._late = new Set();
    /** @type {Set<number>} late deliveries that were handled and must be acknowledged separately */
    this._named = new Set();
    /** @type {Set<number>} seqs to acknowledge separately, unless the prefix covers them */
    this._single = new Set();
    /** @type {number[]} seqs that the prefix has passed since it was last sent */
    this._covered = [];
    this._isPrefixDue = false;
    this._sessionTop = 0;
  }

  /** Start a session. The session repeats all unacknowledged deliveries from `cursor` on. @param {number} cursor */
  beginSession(cursor) {
    // The new session repeats every open delivery, so remove the handled deliveries from `_order`.
    this._order = this._order.filter((seq) => this._open.has(seq));
    this._single.clear();
    this._named.clear();
    this._covered = [];
    this._sessionTop = cursor;
    this.prefix = Math.max(this.prefix, cursor);
    this._isPrefixDue = false;
  }

  /** Record a delivery, and return whether it must be handled. A delivery that was already handled is only acknowledged
   * again.
   * @param {number} seq */
  take(seq) {
    this._sessionTop = Math.max(this._sessionTop, seq);
    if (this._open.has(seq)) return false;
    if (this._handled.has(seq)) {
      this._settle(seq);
      return false;
    }
    this._open.add(seq);
    this._order.push(seq);
    if (seq <= this.prefix) this._late.add(seq);
    return true;
  }

  /** Mark a delivery as handled. Return false if it was not open. @param {number} seq */
  handle(seq) {
    if (!this._open.delete(seq)) return false;
    this._handled.add(seq);
    for (const oldest of this._handled) {
      if (this._handled.size <= MAX_REMEMBERED) break;
      this._handled.delete(oldest);
    }
    // Acknowledge a late delivery separately. The prefix is already above it, so an ack of the prefix does not report
    // it.
    if (this._late.delete(seq)) this._named.add(seq);
    this._settle(seq);
    return true;
  }

  /** Forget a delivery that failed or became a dead letter. Return false if it was not open.
   * @param {number} seq */
  drop(seq) {
    this._late.delete(seq);
    if (!this._open.delete(seq)) return false;
    this._advance();
    return true;
  }

  /** Return the acks that must be sent now, and count them as sent: everything up to `prefix` (or null), and `single`
   * seqs. */
  takeDue() {
    // The hub refuses an ack above the newest delivery of the session.
    const isDue = this._isPrefixDue && this.prefix <= this._sessionTop;
    const isSaid = isDue && !this._late.size; // the prefix would also acknowledge open late deliveries
    const passed = isDue ? this._covered : [];
    const alone = [...passed, ...this._single].filter((check) => !isSaid || check > this.prefix);
    const single = [...new Set([...alone, ...this._named])];
    this._single.clear();
    this._named.clear();
    this._covered = [];
    this._isPrefixDue = false;
    return { prefix: isSaid ? this.prefix : null, single };
  }

  /** @param {number} seq */
  _settle(seq) {
    const before = this.prefix;
    this._advance();
    if (this.prefix === before || seq > this.prefix) this._single.add(seq);
  }

  _advance() {
    let place = 0;
    for (; place < this._order.length && !this._open.has(/** @type {number} */ (this._order[place])); place += 1) {
      const seq = /** @type {number} */ (this._order[place]);
      if (seq <= this.prefix) continue;
      this.prefix = seq;
      if (this._handled.has(seq)) this._covered.push(seq);
      this._isPrefixDue = true;
    }
    this._order.splice(0, place);
  }
}
