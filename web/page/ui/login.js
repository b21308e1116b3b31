/**
 * The login of this browser. This module takes a login code from the page's address, stores the token for this origin,
 * and asks for a link if there is no token. A token exists only in localStorage and in the `hello` frame, never in an
 * address or a cookie.
 */
import {effect, signal} from "#vendor/signals.js";
import {useState} from "#vendor/hooks.js";
import {Button, Field, html} from "#ui/parts.js";
import {decode} from "#ui/router.js";
import {forgetAllBut, storeValue, canStore, loadValue} from "#ui/storage.js";
import {actions, state} from "#ui/store.js";
import {THEME_KEY} from "#ui/theme.js";

const KEY = "roundelay.login";

/** @typedef {{agent_id: string, token: string, login_code?: string, before?: Credentials}} Credentials */

/** The login of this browser, or null. @type {{value: Credentials|null}} */
export const credentials = signal(null);

/** A login link that waits until the person has read that this browser stores nothing. */
const waitingLink = signal("");

/** Take the login from the address or from the storage, and join. A recording needs no login. */
export function startLogin() {
  if (state.value.is_read_only) return;
  const waits = holdLink();
  credentials.value = (waits ? null : readLink(location.hash, loadLogin())) ?? loadLogin();
  if (location.hash.startsWith("#login=")) history.replaceState(null, "", "#/");
  addEventListener("hashchange", () => {
    const login = readLink(location.hash, credentials.value);
    if (!login) return;
    const waits = holdLink();
    history.replaceState(null, "", "#/");
    if (waits) return;
    dispatchEvent(new HashChangeEvent("hashchange"));
    join(login);
  });
  if (credentials.value) join(credentials.value);
  effect(finishLogin);
}

/** Hold back a login link if a reload would lose its login, because a link works only once. Return whether the link is
 * held back. */
function holdLink() {
  const waits = !credentials.value && !canStore() && readLink(location.hash, null) !== null;
  if (waits) waitingLink.value = location.hash;
  return waits;
}

/** Parse the `#login=ID~CODE` of a link. Return the id, a new token, and the code with which the token is bound to the
 * id. */
function readLink(text, before) {
  const match = /#login=([^~#]+)~([\w-]+)$/.exec(text.trim());
  if (!match) return null;
  return {agent_id: decode(match[1]), token: makeToken(), login_code: match[2], before: before ?? undefined};
}

/** Return a new secret, for a token or for the code of a login link. */
export function makeToken() {
  const bytes = crypto.getRandomValues(new Uint8Array(32));
  return btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

/** Store the login before it is used. If the welcome is lost, the same code and token can be used again. */
function join(login) {
  storeLogin(login);
  actions.connect({agent_id: login.agent_id, token: login.token, login_code: login.login_code});
}

/** Remove the code after the welcome. If the code was refused, restore the previous login. */
function finishLogin() {
  const {connection} = state.value;
  const login = credentials.peek();
  if (!login?.login_code) return;
  if (connection === "online") storeLogin({agent_id: login.agent_id, token: login.token});
  else if (connection === "refused" && login.before) join(login.before);
}

/** Delete all data of this user from the browser: token, drafts, unsent messages and the state in memory. The theme
 * stays. */
export function logOut() {
  actions.disconnect();
  credentials.value = null;
  forgetAllBut(THEME_KEY);
  history.replaceState(null, "", "#");
  location.reload();
}

function storeLogin(login) {
  credentials.value = login;
  storeValue(KEY, login);
}

function loadLogin() {
  const stored = loadValue(KEY);
  return typeof stored?.agent_id === "string" && typeof stored?.token === "string" ? stored : null;
}

/** The login form, for a link or for an id with its token. */
export function Login() {
  const [link, setLink] = useState("");
  const [id, setId] = useState("");
  const [token, setToken] = useState("");
  const {error, connection} = state.value;
  const isRefused = connection === "refused" && error;
  const enter = () => {
    const login = readLink(link || waitingLink.value, null);
    if (login) join(login);
    else if (id.trim() && token.trim()) join({agent_id: id.trim(), token: token.trim()});
    else throw new Error("This is not a login link. A login link ends with #login=, an id, ~ and a code.");
  };
  return html`<main class="login"><h1 tabindex="-1">Roundelay</h1>
    ${isRefused && html`<div class="error-box" role="alert"><p>${error.message}</p>
      ${credentials.value && !credentials.value.login_code && html`<${Button} run=${() => join(credentials.value)}>Try again<//>`}</div>`}
    <p>${isRefused && error.message.includes("roundelay web") ? "Open its link in this browser, or paste it here."
      : html`${!isRefused && "You are not logged in. "}On the node's machine, <code>roundelay web --as ID</code> prints a link that works once. Open it in this browser, or paste it here.`}</p>
    ${!canStore() && html`<div class="error-box" role="alert"><p>This browser stores nothing for this page, as in a private window or
      with blocked site data. Your login lasts until you reload or leave the page, and the link works only once. To stay logged in, allow
      site data for this address, or use another browser.</p></div>`}
    <form onSubmit=${(event) => event.preventDefault()}>
      <${Field} label="Login link" isLabelSeen value=${link || waitingLink.value} onInput=${(event) => setLink(event.target.value)} />
      <details><summary>I have a token</summary>
        <${Field} label="Your id" isLabelSeen value=${id} onInput=${(event) => setId(event.target.value)} />
        <${Field} label="Token" isLabelSeen type="password" value=${token} onInput=${(event) => setToken(event.target.value)} />
      </details>
      <${Button} kind="primary" type="submit" run=${enter}>Log in<//>
    </form></main>`;
}
