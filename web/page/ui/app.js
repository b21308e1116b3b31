/**
 * The frame around the screens: navigation with counts, the state of the connection, the current user, keys that work
 * on every screen, the document title and the focus. The content of each screen belongs to its own module.
 */
import {computed, signal} from "#vendor/signals.js";
import {useEffect, useRef} from "#vendor/hooks.js";
import {readAddress} from "#core/leader.js";
import {Agents} from "#ui/agents.js";
import {Cost} from "#ui/cost.js";
import {Home, Welcome} from "#ui/home.js";
import {Inbox, inboxItems, useNotifications} from "#ui/inbox.js";
import {chooseRow, takenKeys, useKeys} from "#ui/keys.js";
import {credentials, Login, logOut} from "#ui/login.js";
import {Age, Boundary, Button, Count, Dialog, Face, html, Icon, now} from "#ui/parts.js";
import {go, linkTo, route} from "#ui/router.js";
import {Search} from "#ui/search.js";
import {actions, follows, isOver, isReadOnly, me, nameHere, state} from "#ui/store.js";
import {idOf, ModScreen, modScreens, useModScreens} from "#ui/screens.js";
import {setTheme, theme} from "#ui/theme.js";
import {Thread} from "#ui/thread.js";
import {isBeginning, NewConversation, Threads, unreadCount} from "#ui/threads.js";
import {Timeline} from "#ui/timeline.js";
import {Why} from "#ui/why.js";

const PLACES = [
  ["inbox", "Inbox", "i"], ["threads", "Threads", "t"], ["agents", "Agents", "a"], ["cost", "Cost", "c"],
  ["timeline", "Timeline", "l"], ["search", "Search", "/"],
];
const isHelpOpen = signal(false);
const isLeaving = signal(false);
const network = computed(() => state.value.network);
const connection = computed(() => state.value.connection);
const refusal = computed(() => state.value.error);
const places = computed(() => PLACES.filter(([place]) => {
  if (place === "inbox") return !isReadOnly.value;
  return place !== "timeline" || isOver.value || me.value?.is_operator;
}));

/** The whole page: the login, or the frame with the current screen. */
export function App() {
  const isNobody = !credentials.value || (connection.value === "refused" && !me.value?.agent_id);
  if (isNobody && !isReadOnly.value) return html`<${Boundary}><${Login} /><//>`;
  return html`<${Shell} />`;
}

function Shell() {
  const main = useRef(null);
  useKeys({
    "g i": {text: "Inbox", run: () => go(linkTo.inbox())},
    "g t": {text: "Threads", run: () => go(linkTo.threads())},
    "g a": {text: "Agents", run: () => go(linkTo.agents())},
    "g c": {text: "Cost", run: () => go(linkTo.cost())},
    "g l": {text: "Timeline", run: () => go(linkTo.timeline())},
    "/": {text: "Search", run: () => go(linkTo.search())},
    "?": {text: "These keys", run: () => { isHelpOpen.value = true; }},
    Escape: {text: "Back", run: leave},
  });
  useEffect(() => { // a recording has neither an inbox nor a last conversation
    if (isReadOnly.value && ["home", "inbox"].includes(route.value.screen)) go(linkTo.threads(), {replace: true});
  }, [isReadOnly.value, route.value]);
  useModScreens();
  useFocus(main);
  useTitle();
  useNotifications();
  const {screen} = route.value;
  const isSplit = ["home", "threads", "thread"].includes(screen);
  return html`<div class=${`shell on-${screen}`}>
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); focusHeading(main.current); }}>To the content</a>
    <${Nav} />
    <${Connection} />
    ${isSplit && html`<aside class="list-pane" aria-label="Threads"><${Boundary} key="threads"><${Threads} chosen=${route.value.id} /><//></aside>`}
    <main id="main" ref=${main}><${Boundary} key=${`${screen} ${route.value.id ?? ""}`}><${Screen} /><//></main>
    ${isBeginning.value && html`<${NewConversation} onClose=${() => { isBeginning.value = false; }} />`}
    ${isHelpOpen.value && html`<${Help} />`}
    ${isLeaving.value && html`<${LogOut} />`}
  </div>`;
}

function Screen() {
  const {screen, id, at, query} = route.value;
  switch (screen) {
    case "home": return html`<${Home} />`;
    case "threads": return isReadOnly.value ? html`<div class="no-thread"><p>Choose a conversation.</p></div>` : html`<${Welcome} />`;
    case "thread": return html`<${Thread} key=${id} id=${id} at=${at} />`;
    case "why": return html`<${Why} key=${id} seq=${Number(id)} />`;
    case "agents": return html`<${Agents} id=${id} />`;
    case "cost": return html`<${Cost} query=${query} />`;
    case "timeline": return html`<${Timeline} query=${query} />`;
    case "search": return html`<${Search} query=${query.q ?? ""} />`;
    case "mods": return html`<${ModScreen} id=${id} />`;
    case "inbox": return html`<${Inbox} />`;
    default: return null;
  }
}

/** Handle the Escape key. The key leaves a text field first, and then a screen that was opened from a list. */
function leave() {
  const active = document.activeElement;
  if (active instanceof HTMLElement && active.matches("input, textarea, select")) {
    active.blur();
    if (active.closest(".composer")) {
      chooseRow();
      [...document.querySelectorAll("[role=log] [data-seq]")].at(-1)?.focus({preventScroll: true}); // the keys j, k and r continue at this message
    }
    return undefined;
  }
  const {screen, id} = route.value;
  if (screen === "thread") return go(linkTo.threads());
  if (screen === "agents" && id) return go(linkTo.agents());
  if (screen === "why") return history.back();
  return false;
}

// --- navigation

function Nav() {
  const here = {home: "threads", thread: "threads", why: "threads"}[route.value.screen] ?? route.value.screen;
  const waiting = {inbox: [inboxItems.value.length, "wait for you"], threads: [unreadCount.value, "unread"]};
  const name = network.value?.name || "Roundelay";
  return html`<nav class="nav" aria-label="Screens">
    <p class="network" title=${`Network ${name}`}><span class="logo" aria-hidden="true"></span><span dir="auto">${name}</span></p>
    <ul>${places.value.map(([place, text, key]) => html`<li><a href=${linkTo[place]()} aria-current=${place === here ? "page" : undefined}
        aria-keyshortcuts=${key === "/" ? key : `g ${key}`}>
      <${Icon} name=${place} /><span class="nav-text">${text}</span>
      ${waiting[place] && html`<${Count} of=${waiting[place][0]} what=${waiting[place][1]} />`}</a></li>`)}
      ${modScreens.value.map((screen) => html`<li key=${idOf(screen)}><a href=${linkTo.mod(idOf(screen))} aria-current=${here === "mods" && route.value.id === idOf(screen) ? "page" : undefined}>
        <${Icon} name=${screen.view} /><span class="nav-text" dir="auto">${screen.title}</span></a></li>`)}</ul>
    <div class="nav-foot">
      <div class="nav-tools">
        <button type="button" class="icon-button" title="Keys (?)" aria-label="Keys" onClick=${() => { isHelpOpen.value = true; }}><${Icon} name="help" /></button>
        <button type="button" class="icon-button" title=${`Theme: ${theme.value}`} aria-label=${`Theme: ${theme.value}`} onClick=${() => setTheme()}><${Icon} name="theme" /></button>
        ${!isOver.value && html`<button type="button" class="icon-button" title="Log out: this browser forgets its token" aria-label="Log out"
          onClick=${() => { isLeaving.value = true; }}><${Icon} name="out" /></button>`}
      </div>
      <${Myself} />
    </div>
  </nav>`;
}

function Myself() {
  const who = me.value;
  if (!who?.agent_id) return null;
  const role = isOver.value ? "a recording" : who.is_operator ? "operator" : who.kind;
  return html`<p class="myself"><${Face} id=${who.agent_id} isSmall /><span class="myself-text"><span dir="auto">${who.agent_id}</span>
    <span class="faint"><span class=${`dot ${connection.value}`} aria-hidden="true"></span>${role}</span></span></p>`;
}

// --- the connection

const offlineSince = signal(0);
/** The address of the leader of a read replica, as HOST:PORT. */
const servedBy = signal("");

/** A banner that explains a problem of the connection and what to do. The banner is empty while there is no problem. */
function Connection() {
  const status = connection.value;
  useEffect(() => {
    if (status === "offline") offlineSince.value ||= Date.now();
    else if (status !== "connecting") offlineSince.value = 0;
    if (status === "offline" && !isOver.value) void findServing();
    else if (status === "online") servedBy.value = "";
  }, [status, refusal.value]);
  return html`<div class="connection-place" role="status" aria-live="polite">${describeConnection(status)}</div>`;
}

/** Ask the node of this page for the leader, because a browser does not show why a socket was refused. */
async function findServing() {
  try {
    const answer = await fetch("/readyz", {headers: {Accept: "application/json"}});
    const {state, shared_log: log} = await answer.json();
    servedBy.value = state === "following" ? readAddress(log.leader) : "";
  } catch { // this node does not answer either
    servedBy.value = "";
  }
}

function describeConnection(status) {
  if (status === "online") return follows.value && html`<${Following} ...${follows.value} />`;
  if (isOver.value) return html`<p class="connection warn">The program that shows this file has ended. <code>roundelay view</code> shows it again.</p>`;
  if (status === "refused") {
    const reason = refusal.value?.message ?? "The hub refuses this browser.";
    return html`<p class="connection bad">${reason} Run <code>roundelay web</code> on the node's machine for a new link.
      <span class="tools"><button type="button" class="button" onClick=${() => actions.connect(credentials.value)}>Try again</button>
        <button type="button" class="button" onClick=${logOut}>Log out</button></span></p>`;
  }
  if (offlineSince.value) {
    return html`<p class="connection warn">Offline<span aria-hidden="true"> <${Elapsed} since=${offlineSince.value} /></span>. ${servedBy.value && html`Another node serves this network: <${Serving} at=${servedBy.value} />. `}Your messages wait here, and are sent when the hub is back.</p>`;
  }
  return html`<p class="connection">Connecting to the hub…</p>`;
}

/** A banner for a read replica with its leader and the age of its data. Screen readers skip the age, because it changes
 * all the time. */
function Following({leader, as_of: asOf}) {
  return html`<p class="connection">This node is a read replica${readAddress(leader) ? html`. Write at its leader, <${Serving} at=${leader} />` : " of another node"}.<span aria-hidden="true"> Data as of ${new Date(asOf).toLocaleTimeString()}.</span></p>`;
}

/** Format a duration. The first two minutes are shown in seconds. */
function Elapsed({since}) {
  useEffect(() => {
    const tick = () => { if (!document.hidden && Date.now() - since < 130_000) now.value = Date.now(); };
    tick();
    const timer = setInterval(tick, 1_000);
    return () => clearInterval(timer);
  }, [since]);
  return html`<${Age} at=${since} label="for " />`;
}

const Serving = ({at}) => html`<a href=${`${location.protocol}//${at}/`}>${at}</a>`;

// --- title, focus, keys

function useTitle() {
  const {screen, id} = route.value;
  const waiting = inboxItems.value.length;
  const thread = screen === "thread" ? nameHere(id) : "";
  const names = {thread, why: `Why #${id}`, agents: id ?? "Agents", mods: modScreens.value.find((one) => idOf(one) === id)?.title};
  const name = names[screen] ?? PLACES.find(([value]) => value === screen)?.[1] ?? "";
  const title = `${waiting ? `(${waiting}) ` : ""}${name} · ${network.value?.name || "Roundelay"}`;
  useEffect(() => { document.title = title; }, [title]);
}

/**
 * After a navigation, move the focus to the heading of the screen, unless the screen or the person has moved the focus
 * meanwhile. The old focus is read while the screen is drawn. A later change may come from the person.
 */
function useFocus(main) {
  const {screen, id} = route.value;
  const place = `${screen} ${id ?? ""}`;
  const first = useRef(place);
  const drawn = useRef({});
  if (drawn.current.place !== place) drawn.current = {place, before: document.activeElement};
  useEffect(() => {
    if (first.current === place) return;
    first.current = null;
    requestAnimationFrame(() => {
      const active = document.activeElement;
      const isOnScreen = main.current?.contains(active) || active?.closest(".list-pane");
      if (active === drawn.current.before || !isOnScreen) focusHeading(main.current);
    });
  }, [place]);
}

function focusHeading(main) {
  const heading = main?.querySelector("h1") ?? document.querySelector(".list-pane h1");
  heading?.focus({preventScroll: true});
}

function LogOut() {
  return html`<${Dialog} title="Log out?" onClose=${() => { isLeaving.value = false; }}>
    <p>This browser forgets its token. The token stays valid at the node until it is revoked there. To come back you need a new link: run <code>roundelay web</code> on the node's machine.</p>
    <div class="dialog-tools"><${Button} kind="danger" run=${() => { isLeaving.value = false; logOut(); }}>Log out<//></div><//>`;
}

const KEY_NAMES = {" ": "Space", Escape: "Esc", "Control+Enter": "Ctrl Enter"};

function Help() {
  return html`<${Dialog} title="Keys" onClose=${() => { isHelpOpen.value = false; }}>
    <dl class="keys">${takenKeys.value.map(({key, text}) => html`<div><dt>${key.split(" ").map((part) => html`<kbd>${KEY_NAMES[part] ?? part}</kbd> `)}</dt><dd>${text}</dd></div>`)}
      <div><dt><kbd>Enter</kbd></dt><dd>Open the selected row</dd></div></dl><//>`;
}
