/**
 * Who this browser is: takes the one-time code out of the address, keeps the token of this origin, asks for a link where
 * there is none. A token stands in localStorage and in `hello`, never in an address or a cookie.
 */
import {effect, signal} from "#vendor/signals.js";
import {useState} from "#vendor/hooks.js";
import {Button, Field, html} from "#ui/parts.js";
import {decode} from "#ui/router.js";
import {forgetAllBut, keep, keepsAnything, load} from "#ui/storage.js";
import {actions, state} from "#ui/store.js";
import {THEME_KEY} from "#ui/theme.js";

const KEY = "roundelay.login";

/** @typedef {{agent_id: string, token: string, login_code?: string, before?: Credentials}} Credentials */

/** As whom this browser joins; null where it does not know. @type {{value: Credentials|null}} */
export const credentials = signal(null);

/** A link that waits until somebody has read that this browser forgets them. */
const waitingLink = signal("");

/** Take the login of the address, or the one that is kept, and join. In a recording nobody joins. */
export function startLogin() {
  if (state.value.is_read_only) return;
  const waits = holdLink();
  credentials.value = (waits ? null : takeLink(location.hash, loadLogin())) ?? loadLogin();
  if (location.hash.startsWith("#login=")) history.replaceState(null, "", "#/");
  addEventListener("hashchange", () => {
    const found = takeLink(location.hash, credentials.value);
    if (!found) return;
    const waits = holdLink();
    history.replaceState(null, "", "#/");
    if (waits) return;
    dispatchEvent(new HashChangeEvent("hashchange"));
    join(found);
  });
  if (credentials.value) join(credentials.value);
  effect(settle);
}

/** Let the link of the address wait, where it would be used up for a login that a reload ends. Gives whether it waits. */
function holdLink() {
  const waits = !credentials.value && !keepsAnything() && takeLink(location.hash, null) !== null;
  if (waits) waitingLink.value = location.hash;
  return waits;
}

/** Read a link's `#login=ID~CODE`: the id, a new token for it, and the code that binds it. */
function takeLink(text, before) {
  const found = /#login=([^~#]+)~([\w-]+)$/.exec(text.trim());
  if (!found) return null;
  return {agent_id: decode(found[1]), token: makeToken(), login_code: found[2], before: before ?? undefined};
}

/** A new secret: a token, or the code of a login. */
export function makeToken() {
  const bytes = crypto.getRandomValues(new Uint8Array(32));
  return btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

/** Keep it before it is used: where the welcome is lost, the same pair is welcome again. */
function join(who) {
  keepLogin(who);
  actions.connect({agent_id: who.agent_id, token: who.token, login_code: who.login_code});
}

/** A code that was welcome is done with; one that was refused gives way to what this browser was before. */
function settle() {
  const {connection} = state.value;
  const who = credentials.peek();
  if (!who?.login_code) return;
  if (connection === "online") keepLogin({agent_id: who.agent_id, token: who.token});
  else if (connection === "refused" && who.before) join(who.before);
}

/** Leave nothing here of who was logged in: token, drafts, messages that wait, what the page holds in memory. The theme stays. */
export function logOut() {
  actions.disconnect();
  credentials.value = null;
  forgetAllBut(THEME_KEY);
  history.replaceState(null, "", "#");
  location.reload();
}

function keepLogin(who) {
  credentials.value = who;
  keep(KEY, who);
}

function loadLogin() {
  const kept = load(KEY);
  return typeof kept?.agent_id === "string" && typeof kept?.token === "string" ? kept : null;
}

/** Asks for a link, or for an id and its token. */
export function Login() {
  const [link, setLink] = useState("");
  const [id, setId] = useState("");
  const [token, setToken] = useState("");
  const {error, connection} = state.value;
  const isRefused = connection === "refused" && error;
  const enter = () => {
    const found = takeLink(link || waitingLink.value, null);
    if (found) join(found);
    else if (id.trim() && token.trim()) join({agent_id: id.trim(), token: token.trim()});
    else throw new Error("That is no login link: it ends in #login=, an id, ~ and a code.");
  };
  return html`<main class="login"><h1 tabindex="-1">Roundelay</h1>
    ${isRefused && html`<div class="error-box" role="alert"><p>${error.message}</p>
      ${credentials.value && !credentials.value.login_code && html`<${Button} run=${() => join(credentials.value)}>Try again<//>`}</div>`}
    <p>${isRefused && error.message.includes("roundelay web") ? "Open its link in this browser, or paste it here."
      : html`${!isRefused && "This browser is nobody here yet. "}<code>roundelay web --as ID</code>, on the machine of the node, prints a link that logs you in once: open it in this browser, or paste it here.`}</p>
    ${!keepsAnything() && html`<div class="error-box" role="alert"><p>This browser keeps nothing for this page, as in a private window or
      where site data is blocked. You can log in until you reload or leave the page; the link works only once. To stay logged in, allow
      site data for this address or use another browser.</p></div>`}
    <form onSubmit=${(event) => event.preventDefault()}>
      <${Field} label="Login link" isLabelSeen value=${link || waitingLink.value} onInput=${(event) => setLink(event.target.value)} />
      <details><summary>I have a token</summary>
        <${Field} label="Your id" isLabelSeen value=${id} onInput=${(event) => setId(event.target.value)} />
        <${Field} label="Token" isLabelSeen type="password" value=${token} onInput=${(event) => setToken(event.target.value)} />
      </details>
      <${Button} kind="primary" type="submit" run=${enter}>Log in<//>
    </form></main>`;
}
