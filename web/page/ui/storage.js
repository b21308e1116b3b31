/**
 * Values that the page stores in this browser (localStorage), under keys that start with `roundelay.`. If the browser
 * stores nothing or its storage is full, the value is kept in memory until the page is closed.
 */

/** Return the value of a key, or null. @param {string} key */
export function loadValue(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null;
  }
}

/** Store a value. A null value deletes the key. @param {string} key */
export function storeValue(key, value) {
  try {
    if (value === null) localStorage.removeItem(key);
    else localStorage.setItem(key, JSON.stringify(value));
  } catch { /* the value is kept in memory, see the module comment */ }
}

/** Return whether stored values survive a reload of the page. */
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

/** Delete all values that the page has stored, except the values of these keys. @param {...string} keys */
export function forgetAllBut(...keys) {
  for (const key of Object.keys(findStorage() ?? {})) {
    if (key.startsWith("roundelay") && !keys.includes(key)) localStorage.removeItem(key);
  }
}

/** Return the storage of the browser, or undefined. */
export function findStorage() {
  try {
    return globalThis.localStorage ?? undefined; // some browsers throw an error, some return null
  } catch {
    return undefined;
  }
}
