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

const DEPTH = Symbol("depth");
const MAX_DEPTH = 64;

/**
 * Put a value into a large part of the state: the new part lies over the old one (as its prototype) instead of copying
 * thousands of entries for each that is added. It is to be read by key.
 */
export function put(draft, part, key, value) {
  const base = draft.state[part];
  if (!draft._owned.has(base)) {
    const depth = (base[DEPTH] ?? 0) + 1;
    const made = depth > MAX_DEPTH ? flatten(base) : Object.create(base, { [DEPTH]: { value: depth } });
    draft._owned.add(made);
    draft.state[part] = made;
  }
  // not by `=`: where the part below is frozen, that would be refused
  Object.defineProperty(draft.state[part], key, { value, writable: true, enumerable: true, configurable: true });
}

/** Take keys out of such a part: it is copied, into one layer. */
export function drop(draft, part, keys) {
  const made = flatten(draft.state[part]);
  for (const key of keys) delete made[key];
  draft._owned.add(made);
  draft.state[part] = made;
}

function flatten(part) {
  const layers = [];
  for (let at = part; at !== null && at !== Object.prototype; at = Object.getPrototypeOf(at)) layers.unshift(at);
  return Object.assign({}, ...layers);
}

/** Keep at most `most` keys of an object that is owned: the first ones go. */
export function bound(object, most) {
  const keys = Object.keys(object);
  for (const key of keys.slice(0, Math.max(0, keys.length - most))) delete object[key];
}
