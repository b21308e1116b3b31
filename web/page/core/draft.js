/**
 * A state under change: copies each part once before the first write, so that the original state stays as it was. `apply`
 * makes one for each batch of events; it does not outlive the batch.
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
      // Copied once per batch: later writes of the same batch go to the copy.
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
 * Set an entry of a large part of the state. The new part has the old one as its prototype, which avoids copying thousands
 * of entries for each change. Such a part must be read by key.
 */
export function put(draft, part, key, value) {
  const base = draft.state[part];
  if (!draft._owned.has(base)) {
    const depth = (base[DEPTH] ?? 0) + 1;
    const layer = depth > MAX_DEPTH ? flatten(base) : Object.create(base, { [DEPTH]: { value: depth } });
    draft._owned.add(layer);
    draft.state[part] = layer;
  }
  // Not by assignment: if the prototype is frozen, assignment throws.
  Object.defineProperty(draft.state[part], key, { value, writable: true, enumerable: true, configurable: true });
}

/** Remove entries of such a part, and copy it into one layer. */
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

/** Remove the first entries of an owned object until `most` are left. */
export function bound(object, most) {
  const keys = Object.keys(object);
  for (const key of keys.slice(0, Math.max(0, keys.length - most))) delete object[key];
}
