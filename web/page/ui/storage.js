/**
 * What the page keeps in this browser (localStorage), under keys that begin with `roundelay.`. A browser that keeps
 * nothing, or is full, is no error: what would be kept holds until the page is left.
 */

/** What is kept under a key; null where nothing is that can be read. @param {string} key */
export function load(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null;
  }
}

/** Keep a value; null takes away what was kept. @param {string} key */
export function keep(key, value) {
  try {
    if (value === null) localStorage.removeItem(key);
    else localStorage.setItem(key, JSON.stringify(value));
  } catch { /* see above */ }
}

/** Whether what is kept here is there after a reload. */
export function keepsAnything() {
  const probe = "roundelay.probe";
  try {
    localStorage.setItem(probe, "1");
    localStorage.removeItem(probe);
    return true;
  } catch {
    return false;
  }
}

/** Take away all that the page has kept here but these keys. @param {...string} keys */
export function forgetAllBut(...keys) {
  for (const key of Object.keys(findStorage() ?? {})) {
    if (key.startsWith("roundelay") && !keys.includes(key)) localStorage.removeItem(key);
  }
}

/** The browser's storage; undefined where it gives none. */
export function findStorage() {
  try {
    return globalThis.localStorage ?? undefined; // some browsers throw, some give null
  } catch {
    return undefined;
  }
}
