/**
 * Which deliveries were handled, and what to say of it to the hub: the twin of `Acks` in network/client/acks.py.
 * No IO, no clock.
 *
 * The prefix is the seq up to which everything that was delivered is handled, or was refused. It never goes back, and one `ack` says it.
 * What comes again at or below it is late: it is acknowledged alone, and while it is open the prefix, which would cover it, is not said.
 */

// Handled seqs, to recognise what a new session delivers again: all that a hub may not have on its disk yet when it is killed, which is a second's
// worth (docs/protocol.md, Delivery), or more where it is killed again and again within the second.
const MAX_REMEMBERED = 65_536;

export class Acks {
  constructor() {
    this.prefix = 0;
    /** Whether the hub has another history by now. */
    this.isStale = false;
    /** @type {number[]} what was delivered and is not passed by the prefix, as it came */
    this._order = [];
    /** @type {Set<number>} */
    this._open = new Set();
    /** @type {Set<number>} */
    this._handled = new Set();
    /** @type {Set<number>} open ones at or below the prefix */
    this._late = new Set();
    /** @type {Set<number>} of these, what was handled since */
    this._named = new Set();
    /** @type {Set<number>} what is to be acknowledged alone, as far as the prefix does not cover it */
    this._single = new Set();
    /** @type {number[]} what the prefix has passed since it was last said */
    this._covered = [];
    this._isPrefixDue = false;
    this._sessionTop = 0;
  }

  /** A new session delivers again what was not acknowledged, from `cursor`. @param {number} cursor */
  beginSession(cursor) {
    this._order = this._order.filter((it) => this._open.has(it));
    this._single.clear();
    this._named.clear();
    this._covered = [];
    this._sessionTop = cursor;
    this.prefix = Math.max(this.prefix, cursor);
    this._isPrefixDue = false;
  }

  /** A delivery has arrived. False: it is being handled, or was; then it is only acknowledged again.
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

  /** One delivery is handled. False: it was not open. @param {number} seq */
  handle(seq) {
    if (!this._open.delete(seq)) return false;
    this._handled.add(seq);
    for (const oldest of this._handled) {
      if (this._handled.size <= MAX_REMEMBERED) break;
      this._handled.delete(oldest);
    }
    if (this._late.delete(seq)) this._named.add(seq);
    this._settle(seq);
    return true;
  }

  /** One delivery is no longer this client's: it failed, or the hub made it a dead letter. False: it was not open.
   * @param {number} seq */
  drop(seq) {
    this._late.delete(seq);
    if (!this._open.delete(seq)) return false;
    this._advance();
    return true;
  }

  /** What to acknowledge now: everything up to a seq (or null), and these alone. It counts as said. */
  takeDue() {
    const isDue = this._isPrefixDue && this.prefix <= this._sessionTop; // the hub takes no ack of what this session was not given
    const isSaid = isDue && !this._late.size; // it would acknowledge these too
    const passed = isDue ? this._covered : [];
    const alone = [...passed, ...this._single].filter((it) => !isSaid || it > this.prefix);
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
