/**
 * Small components that all screens share: relative times, colored names, badges, menus, dialogs and errors. The
 * components draw their props and never call the hub.
 */
import {h, Component} from "#vendor/preact.js";
import {useEffect, useId, useLayoutEffect, useRef, useState} from "#vendor/hooks.js";
import {signal} from "#vendor/signals.js";
import htm from "#vendor/htm.js";
import {linkTo} from "#ui/router.js";

/** The htm template function, bound to preact. */
export const html = htm.bind(h);

// --- time

/** The current time in ms. The value is updated every few seconds while the page is visible, so that relative times
 * stay correct. */
export const now = signal(Date.now());
const TICK_MS = 5000;

/** Start the clock of `now`. */
export function startClock() {
  const tick = () => { if (!document.hidden) now.value = Date.now(); };
  setInterval(tick, TICK_MS);
  document.addEventListener("visibilitychange", tick);
}

const SPANS = [[86_400, "d"], [3600, "h"], [60, "min"]];

/** Format a duration in the largest unit that results in a number of at least two, rounded: "3 min", "47 h". */
export function formatSpan(ms) {
  const seconds = Math.max(0, Math.round(ms / 1000));
  for (const [size, unit] of SPANS) if (seconds >= 2 * size) return `${Math.round(seconds / size)} ${unit}`;
  return `${seconds} s`;
}

/** Format a date and time in the local time zone. */
export const formatMoment = (at) => MOMENT.format(at);
/** Format the time of day. */
export const formatClock = (at) => new Date(at).toLocaleTimeString(undefined, {hour: "2-digit", minute: "2-digit"});
const MOMENT = new Intl.DateTimeFormat(undefined, {dateStyle: "medium", timeStyle: "medium"}); // shared, because it is slow to create

/** A relative time ("3 min"), or a duration with a `label` ("for "). `at` is in ms. The exact time is shown as the
 * tooltip. */
export function Age({at, label = ""}) {
  const ms = Math.max(0, now.value - at);
  const text = ms < 10_000 && !label ? "now" : formatSpan(ms);
  return html`<time class="age" datetime=${new Date(at).toISOString()} title=${formatMoment(at)}>${label}${text}</time>`;
}

/** Format the time of day for a time of today, and the date for an earlier time. */
export function Time({at}) {
  const date = new Date(at);
  const isToday = date.toDateString() === new Date(now.value).toDateString();
  const text = isToday ? date.toLocaleTimeString(undefined, {hour: "2-digit", minute: "2-digit"})
    : date.toLocaleDateString(undefined, {day: "numeric", month: "short"});
  return html`<time class="age" datetime=${date.toISOString()} title=${formatMoment(at)}>${text}</time>`;
}

// --- participants

/** Return the hue of an id, from 0 to 359. An id always has the same hue. */
export function hueOf(id) {
  let sum = 2166136261;
  for (const char of String(id)) sum = Math.imul(sum ^ char.codePointAt(0), 16777619);
  return ((sum >>> 0) % 24) * 15;
}

/** A participant's name in its color. With `link`, the name links to the participant's page. */
export function Agent({id, link = false}) {
  const props = {class: "who", dir: "auto", style: {"--hue": hueOf(id)}};
  return link ? html`<a ...${props} href=${linkTo.agent(id)}>${id}</a>` : html`<span ...${props}>${id}</span>`;
}

/** A participant's avatar: its initial letters in its color. */
export function Face({id, isSmall = false}) {
  const letters = [...String(id).replace(/^[^\p{L}\p{N}]+/u, "")].slice(0, 2).join("").toUpperCase() || "?";
  return html`<span class=${`face${isSmall ? " small" : ""}`} aria-hidden="true" style=${{"--hue": hueOf(id)}}>${letters}</span>`;
}

// --- small components

/** @param {{kind?: "accent"|"good"|"warn"|"bad"|"plain"}} props */
export function Badge({kind = "plain", title, children}) {
  return html`<span class=${`badge ${kind}`} title=${title}>${children}</span>`;
}

/** A count, which is hidden if it is 0. Screen readers also read `what`. */
export function Count({of, what}) {
  if (!of) return null;
  return html`<span class="count"><span aria-hidden="true">${of > 99 ? "99+" : of}</span><span class="unseen">${of} ${what}</span></span>`;
}

/** A button. While the promise of `run` is pending, the button is disabled. An error appears next to the button. */
export function Button({kind = "", run, title, icon, isDisabled = false, children, ...rest}) {
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  const press = async () => {
    if (busy) return;
    setBusy(true);
    setError(null);
    try {
      await run();
    } catch (problem) {
      setError(problem);
    } finally {
      setBusy(false);
    }
  };
  return html`<button type="button" class=${`button ${kind}`} title=${title} aria-busy=${busy} disabled=${isDisabled}
      onClick=${press} ...${rest}>${icon && html`<${Icon} name=${icon} />`}${children}</button>
    ${error && html`<span class="refused" role="alert">${describeError(error)}</span>`}`;
}

/** Return the message of an error: the hub's sentence, if the error has one. */
export const describeError = (error) => String(error?.message ?? error ?? "Failed for an unknown reason.");

/** An error with buttons for what to do next. `children` are additional buttons. */
export function ErrorBox({error, retry, children}) {
  return html`<div class="error-box" role="alert"><p>${describeError(error)}</p>
    <div class="tools">${retry && html`<${Button} run=${retry}>Try again<//>`}${children}</div></div>`;
}

/** The content of an empty screen or list. */
export function Empty({title, icon, children}) {
  return html`<div class="empty">${icon && html`<${Icon} name=${icon} />`}<p class="empty-title">${title}</p>
    ${children && html`<p>${children}</p>`}</div>`;
}

/** A loading message. CSS delays the message, so that a fast answer causes no flicker. */
export const Loading = ({what = "Loading…"}) => html`<p class="loading" role="status">${what}</p>`;

const PATHS = {
  inbox: "M3 13h4l2 3h6l2-3h4M5 5h14l2 8v6H3v-6z",
  threads: "M4 5h16v11H10l-4 4v-4H4z",
  agents: "M8 11a3 3 0 1 0 0-6 3 3 0 0 0 0 6zm-6 8c0-3 3-5 6-5s6 2 6 5M17 11a2.5 2.5 0 1 0 0-5M17 14c3 0 5 2 5 5",
  cost: "M4 20V10M10 20V4M16 20v-7M22 20H2",
  timeline: "M4 6h7M8 12h9M13 18h7M4 3v18",
  search: "M10 17a7 7 0 1 0 0-14 7 7 0 0 0 0 14zm5-2 6 6",
  why: "M6 4v6a4 4 0 0 0 4 4h8m-4-4 4 4-4 4",
  menu: "M5 12h.01M12 12h.01M19 12h.01",
  plus: "M12 5v14M5 12h14",
  back: "M15 5l-7 7 7 7",
  theme: "M12 3a9 9 0 1 0 9 9 7 7 0 0 1-9-9z",
  help: "M9 9a3 3 0 1 1 4 2.8c-.8.4-1 1-1 2M12 17h.01",
  out: "M10 4H5v16h5M15 8l4 4-4 4M19 12H9",
  pin: "M9 4h6l-1 6 3 3v2H7v-2l3-3zM12 15v5",
  mute: "M5 9v6h4l5 4V5L9 9zM18 9l4 6M22 9l-4 6",
  hold: "M8 12V6a1.5 1.5 0 0 1 3 0v5V4.500a1.500 1.500 0 0 1 3 0V11V6a1.500 1.500 0 0 1 3 0v8a6 6 0 0 1-6 6c-3 0-4-1-7-6l2-1z",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  archive: "M4 5h16v4H4zM6 9v10h12V9M10 13h4",
  stop: "M7 7h10v10H7z",
  list: "M8 6h12M8 12h12M8 18h12M4 6h.01M4 12h.01M4 18h.01",
  board: "M4 4h4v16H4zM10 4h4v10h-4zM16 4h4v13h-4z",
  document: "M6 3h8l4 4v14H6zM14 3v4h4M9 12h6M9 16h6",
  check: "M5 13l4 4L19 7",
  close: "M6 6l12 12M18 6L6 18",
};

/** An icon next to words. An icon never replaces words. */
export const Icon = ({name}) => html`<svg class="icon" viewBox="0 0 24 24" aria-hidden="true"><path d=${PATHS[name]} /></svg>`;

/** A text field with a label, which screen readers always read. */
export function Field({label, isLabelSeen = false, ...props}) {
  const id = useId();
  return html`<label class=${isLabelSeen ? "field" : "field bare"} for=${id}><span class=${isLabelSeen ? "" : "unseen"}>${label}</span>
    <input id=${id} dir="auto" autocomplete="off" spellcheck="false" ...${props} /></label>`;
}

/** A choice between a few options. Each option is [value, text]. */
export function Choice({label, value, options, onChoose}) {
  return html`<div class="choice" role="group" aria-label=${label}>${options.map(([name, text]) => html`
    <button type="button" aria-pressed=${name === value} onClick=${() => onChoose(name)}>${text}</button>`)}</div>`;
}

/** A button that opens a menu of actions, [{text, run, icon?}]. Falsy entries are ignored. */
export function Menu({label, items, icon = "menu"}) {
  const [isOpen, setOpen] = useState(false);
  const place = useRef(null);
  const entries = () => [...place.current.querySelectorAll("[role=menuitem]")];
  useEffect(() => {
    if (!isOpen) return undefined;
    entries()[0]?.focus();
    const leave = (event) => { if (!place.current?.contains(event.target)) setOpen(false); };
    document.addEventListener("pointerdown", leave);
    return () => document.removeEventListener("pointerdown", leave);
  }, [isOpen]);
  const close = () => {
    setOpen(false);
    place.current.querySelector("button").focus();
  };
  const press = (event) => {
    if (!isOpen) return;
    const step = {ArrowDown: 1, ArrowUp: -1}[event.key];
    if (step) {
      const all = entries();
      all[(all.indexOf(document.activeElement) + step + all.length) % all.length].focus();
    } else if (event.key === "Escape") close();
    else if (event.key !== "Tab") return;
    else return void setOpen(false);
    event.preventDefault();
    event.stopPropagation();
  };
  return html`<span class="menu" ref=${place} onKeyDown=${press}>
    <button type="button" class="icon-button" aria-haspopup="menu" aria-expanded=${isOpen} aria-label=${label} title=${label}
      onClick=${() => setOpen(!isOpen)}><${Icon} name=${icon} /></button>
    ${isOpen && html`<span class="menu-list" role="menu" aria-label=${label}>${items.filter(Boolean).map((item) => html`
      <button type="button" role="menuitem" tabindex="-1" onClick=${() => { close(); item.run(); }}>
        ${item.icon && html`<${Icon} name=${item.icon} />`}${item.text}</button>`)}</span>`}
  </span>`;
}

/** A modal dialog. Escape or a click outside closes the dialog. */
export function Dialog({title, onClose, children}) {
  const place = useRef(null);
  const id = useId();
  useLayoutEffect(() => place.current.showModal(), []);
  return html`<dialog ref=${place} aria-labelledby=${id} onClose=${onClose}
      onClick=${(event) => event.target === place.current && place.current.close()}>
    <div class="dialog"><header><h2 id=${id}>${title}</h2>
      <button type="button" class="icon-button" aria-label="Close" onClick=${() => place.current.close()}><${Icon} name="close" /></button></header>
      ${children}</div></dialog>`;
}

/** The heading of a screen, which gets the focus after a navigation. */
export function Head({title, back, children}) {
  return html`<header class="head">${back && html`<a class="icon-button" href=${back} aria-label="Back"><${Icon} name="back" /></a>`}
    <h1 tabindex="-1" dir="auto">${title}</h1><div class="head-tools">${children}</div></header>`;
}

/** A bar that shows a share of a whole. `text` describes the share in words. */
export function Bar({share, text, kind = ""}) {
  const percent = Math.round(Math.max(0, Math.min(1, share)) * 100);
  return html`<span class=${`bar ${kind}`} role="img" aria-label=${text} title=${text} style=${{"--share": `${percent}%`}}></span>`;
}

/**
 * Fetch again whenever one of `needs` changes. Return {value, error, isLoading, again}. A late answer for earlier
 * `needs` is ignored.
 */
export function useFetched(fetch, needs) {
  const [got, setGot] = useState({isLoading: true});
  const [round, setRound] = useState(0);
  useEffect(() => {
    let isWanted = true;
    setGot((before) => ({...before, isLoading: true, error: undefined}));
    Promise.resolve().then(fetch).then(
      (value) => isWanted && setGot({value, isLoading: false}),
      (error) => isWanted && setGot({error, isLoading: false}),
    );
    return () => { isWanted = false; };
  }, [...needs, round]);
  return {...got, again: () => setRound(round + 1)};
}

/** Shows an error instead of a part of the page that fails. The rest of the page keeps working. */
export class Boundary extends Component {
  constructor() {
    super();
    this.state = {error: null};
  }

  static getDerivedStateFromError(error) {
    return {error};
  }

  componentDidCatch(error) {
    console.error(error);
  }

  render({children}, {error}) {
    if (!error) return children;
    return html`<div class="error-box" role="alert"><p>This part of the page failed: ${describeError(error)}</p>
      <${Button} run=${() => this.setState({error: null})}>Try again<//>
      <${Button} run=${() => location.reload()}>Reload page<//></div>`;
  }
}
