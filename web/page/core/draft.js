/**
 * A state under change: copies each part of it once, before the first write, so that the state that it began with
 * stays as it was. `apply` makes one for each batch of events; nothing of it outlives the batch.
 */

export class Draft {
  constructor(state) {
    this.state = { ...state };
    this._owned = new Set();
  }

  /** The part of the state at these keys, to be written to. What is not there is made: an empty object. */
  own(...keys) {
    let at = this.state;
    for (const key of keys) {
      let part = at[key];
      if (part === undefined || !this._owned.has(part)) {
        part = Array.isArray(part) ? part.slice() : { ...part };
        at[key] = part;
        this._owned.add(part);
      }
      at = part;
    }
    return at;
  }
}

/** Keep at most `most` keys of an object that is owned: the first ones go. */
export function bound(object, most) {
  const keys = Object.keys(object);
  for (const key of keys.slice(0, Math.max(0, keys.length - most))) delete object[key];
}
