/**
 * What keys do: each component says which it takes as long as it is mounted, the last one mounted first. Sequences are
 * written with a blank ("g i"). While somebody types, only "Escape" and those with Control are taken. Owns no action.
 *
 * While a conversation is open, a letter is text: it goes to the composer, wherever the focus is. It is a shortcut only
 * where the keyboard has put the focus on a row of a list, which shows it: a message or a conversation.
 */
import {signal} from "#vendor/signals.js";
import {useLayoutEffect, useRef} from "#vendor/hooks.js";

const SEQUENCE_MS = 1200;

/** The keys that are taken now: [{key, text}], for the help. */
export const takenKeys = signal([]);
const layers = [];
let pending = "";
/** The conversation that is open: {field: ref to where one writes, isForReading: nothing can be written there}. */
let conversation = null;
/** Whether the keyboard chose the row that has the focus: a click on a message is no choice of that kind. */
let isRowChosen = false;
let pendingSince = 0;

/**
 * Take keys while the component is mounted.
 * @param {Record<string, {text: string, run: (event: KeyboardEvent) => unknown}>} keys `run` gives false where it does
 *   nothing: then the next layer is asked
 * @param {boolean} isActive
 */
export function useKeys(keys, isActive = true) {
  const own = useRef(keys);
  own.current = keys;
  useLayoutEffect(() => { // as soon as it is drawn: a key that is pressed before the next frame counts
    if (!isActive) return undefined;
    layers.push(own);
    tellTaken();
    return () => {
      layers.splice(layers.indexOf(own), 1);
      tellTaken();
    };
  }, [isActive]);
}

/**
 * Say that a conversation is open, as long as the component is mounted.
 * @param {{current: HTMLElement|null}} field where one writes, once that is drawn
 * @param {boolean} isForReading whether nothing can be written there: then letters are shortcuts
 */
export function useConversation(field, isForReading) {
  useLayoutEffect(() => {
    conversation = {field, isForReading};
    isRowChosen = false;
    return () => { conversation = null; };
  }, [field, isForReading]);
}

/** Whether the page may move the focus to a field by itself: where the first pointer is a finger, that would open the
 * keyboard over half of the conversation. */
export const mayFocusField = () => !matchMedia("(pointer: coarse)").matches;

/** The keyboard moves the focus to a row: letters are shortcuts there, until the pointer goes elsewhere. */
export function chooseRow() {
  isRowChosen = true;
}

/** Listen to the keyboard, once for the page. */
export function startKeys() {
  document.addEventListener("pointerdown", () => { isRowChosen = false; }, {capture: true});
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.isComposing || event.altKey || event.metaKey) return;
    const name = `${event.ctrlKey ? "Control+" : ""}${event.key}`;
    if (event.key === "Tab") chooseRow();
    if (isTyping(event.target) && !event.ctrlKey && event.key !== "Escape") return;
    if (document.querySelector("dialog[open]")) return;
    if (isText(event)) return void conversation.field.current?.focus(); // the letter itself follows the focus
    const inTime = pending && event.timeStamp - pendingSince < SEQUENCE_MS;
    const tried = inTime ? [`${pending} ${name}`, name] : [name];
    pending = "";
    if (tried.some((key) => press(key, event))) event.preventDefault();
    else if (begins(name)) [pending, pendingSince] = [name, event.timeStamp];
  });
}

/** Whether a key is a letter for the composer of the open conversation. Space and Enter keep what they do to buttons. */
function isText({key, ctrlKey, target}) {
  const isPrintable = key.length === 1 && key !== " " && !ctrlKey;
  if (!isPrintable || conversation === null || conversation.isForReading) return false;
  return !(isRowChosen && target instanceof HTMLElement && target.closest("[data-row], [role=log]"));
}

function press(key, event) {
  return [...layers].reverse().some((it) => it.current[key] && it.current[key].run(event) !== false);
}

function begins(name) {
  return layers.some((it) => Object.keys(it.current).some((key) => key.startsWith(`${name} `)));
}

function isTyping(target) {
  return target instanceof HTMLElement
    && (target.isContentEditable || ["TEXTAREA", "SELECT"].includes(target.tagName)
      || (target.tagName === "INPUT" && !["checkbox", "radio", "button"].includes(target.type)));
}

function tellTaken() {
  const found = new Map();
  for (const it of layers) {
    for (const [key, {text}] of Object.entries(it.current)) found.set(key, text);
  }
  takenKeys.value = [...found].map(([key, text]) => ({key, text}));
}

/**
 * Move through a list of rows with j and k, and open one with Enter. Rows are elements with `data-row` inside of `list`.
 * The row that is chosen has the focus, so that the browser shows and scrolls to it.
 * @param {{current: HTMLElement|null}} list
 */
export function useRows(list, isActive = true) {
  const move = (step) => {
    const rows = [...(list.current?.querySelectorAll("[data-row]") ?? [])];
    if (!rows.length) return false;
    const here = rows.indexOf(document.activeElement?.closest?.("[data-row]"));
    rows[Math.max(0, Math.min(rows.length - 1, here < 0 ? 0 : here + step))].focus();
    chooseRow();
    return true;
  };
  useKeys({
    j: {text: "Next row", run: () => move(1)},
    k: {text: "Row before", run: () => move(-1)},
  }, isActive);
}
