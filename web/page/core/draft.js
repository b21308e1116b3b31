/**
 * A copy of the state that `apply` changes. Each part is copied once, before it is first changed, so the original state
 * stays unchanged. A draft is used for one batch of events.
 */

export class Draft {
  constructor(state) {
    this.state = { ...state };
    this._owned = new Set();
  }

  /** Return the part of the state at these keys for writing. A missing part becomes an empty object. */
  own(...keys) {
    let at = this.state;
    for (const key of keys) {
      let part = at[key];
      // Copy the part only once per batch. Later changes of the same batch change this copy.
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
 * Set an entry of a large part of the state. The new part has the old part as its prototype, which avoids copying
 * thousands of entries for each change. Read such a part only by key.
 */
export function put(draft, part, key, value) {
  const base = draft.state[part];
  if (!draft._owned.has(base)) {
    const depth = (base[DEPTH] ?? 0) + 1;
    const layer = depth > MAX_DEPTH ? flatten(base) : Object.create(base, { [DEPTH]: { value: depth } });
    draft._owned.add(layer);
    draft.state[part] = layer;
  }
  // Define the property instead of assigning it. Assignment throws if the prototype is frozen.
  Object.defineProperty(draft.state[part], key, { value, writable: true, enumerable: true, configurable: true });
}

/** Remove entries from a part that `put` changes. The part is copied into one layer. */
export function drop(draft, part, keys) {
  const copy = flatten(draft.state[part]);
  for (const key of keys) delete copy[key];
  draft._owned.add(copy);
  draft.state[part] = copy;
}

function flatten(part) {
  const layers = [];
  for (let at = part; at !== null && at !== Object.prototype; at = Object.getPrototypeOf(at)) layers.unshift(at);
  return Object.assign({}, ...layers);
}

/** Remove the first entries of an object until at most `most` entries are left. The object must be owned by the draft.
 */
export function bound(object, most) {
  const keys = Object.keys(object);
  for (const key of keys.slice(0, Math.max(0, keys.length - most))) delete object[key];
}
