/**
 * The page's addresses: the screen of a fragment (`#/thread/...`), and the fragment of a screen. Browsers never send a
 * fragment to a server. This module owns `route` and knows no screen's content.
 */
import {signal} from "#vendor/signals.js";

/** @typedef {{screen: string, id?: string, at?: number, query: Record<string, string>}} Route */

const SCREENS = ["home", "inbox", "threads", "thread", "why", "agents", "cost", "search", "timeline", "mods"];

/** The current address. @type {import("#vendor/signals.js").Signal<Route>} */
export const route = signal(readRoute(""));
let followed; // the fragment of `route`

/** Follow the address bar. Keys follow it too, because a key can arrive before the browser reports a link. */
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

/** Parse a fragment. An unknown one is the first screen; text that cannot be decoded stays as it is. @returns {Route} */
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

/** Decode a text; return it unchanged if it is not encoded. */
export function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** The fragments of the screens. */
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

/** Go to a fragment; `replace` adds no entry to the history. */
export function go(hash, {replace = false} = {}) {
  if (!replace) location.hash = hash;
  else if (location.hash !== followed) follow(); // the person has navigated since; do not replace that
  else {
    history.replaceState(null, "", hash);
    follow();
  }
}
