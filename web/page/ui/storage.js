/**
 * Values that the page keeps in this browser (localStorage), under keys that start with `roundelay.`. A browser that stores
 * nothing, or is full, is no error: the value then lasts until the page is closed.
 */

/** Return the value of a key; null if there is none. @param {string} key */
export function loadValue(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null;
  }
}

/** Store a value; null deletes it. @param {string} key */
export function storeValue(key, value) {
  try {
    if (value === null) localStorage.removeItem(key);
    else localStorage.setItem(key, JSON.stringify(value));
  } catch { /* see above */ }
}

/** Whether stored values survive a reload. */
export function canStore() {
  const probe = "roundelay.probe";
  try {
    localStorage.setItem(probe, "1");
    localStorage.removeItem(probe);
    return true;
  } catch {
    return false;
  }
}

/** Delete everything that the page stored, except these keys. @param {...string} keys */
export function forgetAllBut(...keys) {
  for (const key of Object.keys(findStorage() ?? {})) {
    if (key.startsWith("roundelay") && !keys.includes(key)) localStorage.removeItem(key);
  }
}

/** Return the browser's storage; undefined if it has none. */
export function findStorage() {
  try {
    return globalThis.localStorage ?? undefined; // some browsers throw, some give null
  } catch {
    return undefined;
  }
}
