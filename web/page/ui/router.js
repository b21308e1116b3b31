/**
 * The page's addresses: which screen a fragment (`#/thread/...`) names, and the fragment of a screen. The fragment is
 * never sent to a server. Owns `route`; knows no screen's content.
 */
import {signal} from "#vendor/signals.js";

/** @typedef {{screen: string, id?: string, at?: number, query: Record<string, string>}} Route */

const SCREENS = ["home", "inbox", "threads", "thread", "why", "agents", "cost", "search", "timeline"];

/** Where the page is. @type {import("#vendor/signals.js").Signal<Route>} */
export const route = signal(readRoute(""));
let followed; // the fragment that `route` is of

/** Follow the address bar from now on: a key that comes before the browser tells of a link belongs to where that leads. */
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

/** Read a fragment. Anything unknown is the first screen; what cannot be decoded is taken as it is. @returns {Route} */
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

/** The text that an encoded one stands for; itself where it stands for none. */
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
  search: (q = "") => withQuery("#/search", q ? {q} : {}),
};

function withQuery(path, query) {
  const search = new URLSearchParams(Object.entries(query).filter(([, it]) => it)).toString();
  return search ? `${path}?${search}` : path;
}

/** Go to a fragment; `replace` leaves no step for the back button. */
export function go(hash, {replace = false} = {}) {
  if (!replace) location.hash = hash;
  else if (location.hash !== followed) follow(); // somebody has gone on since: what was to be replaced is not there
  else {
    history.replaceState(null, "", hash);
    follow();
  }
}
