/**
 * The addresses of the page. Converts a fragment (`#/thread/...`) to a screen, and a screen to a fragment. Browsers
 * never send a fragment to a server. This module owns `route` and does not depend on the content of any screen.
 */
import {signal} from "#vendor/signals.js";

/** @typedef {{screen: string, id?: string, at?: number, query: Record<string, string>}} Route */

const SCREENS = ["home", "inbox", "threads", "thread", "why", "agents", "cost", "search", "timeline", "mods"];

/** The current address. @type {import("#vendor/signals.js").Signal<Route>} */
export const route = signal(readRoute(""));
let followed; // the fragment that `route` represents

/** Update `route` from the address bar. Keyboard shortcuts call this function too, because a key can arrive before the
 * browser reports a followed link. */
export function startRouter() {
  addEventListener("hashchange", follow);
  addEventListener("keydown", follow, {capture: true});
  follow();
}

function follow() {
  if (followed === location.hash) return;
  followed = location.hash;
  route.value = readRoute(followed);
}

/** Parse a fragment. An unknown fragment leads to the first screen. Text that cannot be decoded stays unchanged.
 * @returns {Route} */
function readRoute(hash) {
  const [path, search = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const [screen, ...rest] = path.split("/");
  const query = Object.fromEntries(new URLSearchParams(search));
  if (!SCREENS.includes(screen)) return {screen: "home", query: {}};
  const id = rest.length ? decode(rest.join("/")) : undefined;
  if ((screen === "thread" || screen === "why") && !id) return {screen: screen === "thread" ? "threads" : "home", query};
  const at = /^\d+$/.test(query.at ?? "") ? Number(query.at) : undefined;
  return {screen, id, at, query};
}

/** Decode a text. Return the text unchanged if it is not valid. */
export function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Functions that return the fragment of each screen. */
export const linkTo = {
  home: () => "#/",
  inbox: () => "#/inbox",
  threads: () => "#/threads",
  thread: (id, at) => `#/thread/${encodeURIComponent(id)}${at ? `?at=${at}` : ""}`,
  why: (seq) => `#/why/${seq}`,
  agents: () => "#/agents",
  agent: (id) => `#/agents/${encodeURIComponent(id)}`,
  cost: (query = {}) => withQuery("#/cost", query),
  timeline: (query = {}) => withQuery("#/timeline", query),
  mod: (id) => `#/mods/${id}`,
  search: (q = "") => withQuery("#/search", q ? {q} : {}),
};

function withQuery(path, query) {
  const search = new URLSearchParams(Object.entries(query).filter(([, value]) => value)).toString();
  return search ? `${path}?${search}` : path;
}

/** Navigate to a fragment. `replace` adds no entry to the history. */
export function go(hash, {replace = false} = {}) {
  if (!replace) location.hash = hash;
  else if (location.hash !== followed) follow(); // the person has navigated meanwhile, so keep the new address
  else {
    history.replaceState(null, "", hash);
    follow();
  }
}
