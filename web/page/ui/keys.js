/**
 * Keyboard shortcuts. Each component registers its keys while it is mounted. The component that was mounted last gets a
 * key first. A space separates the keys of a sequence ("g i"). While a person is typing, only "Escape" and keys with
 * Control are shortcuts. This module defines no actions.
 *
 * In an open conversation, a letter is text, which goes into the composer wherever the focus is. A letter is a shortcut
 * only after the keyboard has moved the focus to a row of a list.
 */
import {signal} from "#vendor/signals.js";
import {useLayoutEffect, useRef} from "#vendor/hooks.js";

const SEQUENCE_MS = 1200;

/** The active shortcuts as [{key, text}], for the help. */
export const takenKeys = signal([]);
const layers = [];
let pending = "";
/** The open conversation: {field, isForReading}. `field` is a ref to the textarea of the composer. `isForReading` means
 * that nobody can write there. */
let conversation = null;
/** Whether the keyboard moved the focus to the focused row. A click on a message does not count. */
let isRowChosen = false;
let pendingSince = 0;

/**
 * Register keys while the component is mounted.
 * @param {Record<string, {text: string, run: (event: KeyboardEvent) => unknown}>} keys `run` returns false if it did
 *   nothing; the next component then gets the key
 * @param {boolean} isActive
 */
export function useKeys(keys, isActive = true) {
  const own = useRef(keys);
  own.current = keys;
  useLayoutEffect(() => { // register synchronously, because a key may be pressed before the next frame
    if (!isActive) return undefined;
    layers.push(own);
    publishTaken();
    return () => {
      layers.splice(layers.indexOf(own), 1);
      publishTaken();
    };
  }, [isActive]);
}

/**
 * Register an open conversation while the component is mounted.
 * @param {{current: HTMLElement|null}} field the composer's textarea, once it is drawn
 * @param {boolean} isForReading whether nobody can write there, so that letters are shortcuts
 */
export function useConversation(field, isForReading) {
  useLayoutEffect(() => {
    conversation = {field, isForReading};
    isRowChosen = false;
    return () => { conversation = null; };
  }, [field, isForReading]);
}

/** Whether the page may move the focus to a text field without a click. On a touch screen, this would open a keyboard
 * that covers half of the conversation. */
export const mayFocusField = () => !matchMedia("(pointer: coarse)").matches;

/** Record that the keyboard moved the focus to a row. Letters are shortcuts until the next click. */
export function chooseRow() {
  isRowChosen = true;
}

/** Start listening to the keyboard. Call this function once. */
export function startKeys() {
  document.addEventListener("pointerdown", () => { isRowChosen = false; }, {capture: true});
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.isComposing || event.altKey || event.metaKey) return;
    const name = `${event.ctrlKey ? "Control+" : ""}${event.key}`;
    if (event.key === "Tab") chooseRow();
    if (isTyping(event.target) && !event.ctrlKey && event.key !== "Escape") return;
    if (document.querySelector("dialog[open]")) return;
    if (isText(event)) return void conversation.field.current?.focus(); // the browser inserts the letter after the focus has moved
    const inTime = pending && event.timeStamp - pendingSince < SEQUENCE_MS;
    const tried = inTime ? [`${pending} ${name}`, name] : [name];
    pending = "";
    if (tried.some((key) => press(key, event))) event.preventDefault();
    else if (begins(name)) [pending, pendingSince] = [name, event.timeStamp];
  });
}

/** Return whether a key is a letter for the composer of the open conversation. Space and Enter still press buttons. */
function isText({key, ctrlKey, target}) {
  const isPrintable = key.length === 1 && key !== " " && !ctrlKey;
  if (!isPrintable || conversation === null || conversation.isForReading) return false;
  return !(isRowChosen && target instanceof HTMLElement && target.closest("[data-row], [role=log]"));
}

function press(key, event) {
  return [...layers].reverse().some((layer) => layer.current[key] && layer.current[key].run(event) !== false);
}

function begins(name) {
  return layers.some((layer) => Object.keys(layer.current).some((key) => key.startsWith(`${name} `)));
}

function isTyping(target) {
  return target instanceof HTMLElement
    && (target.isContentEditable || ["TEXTAREA", "SELECT"].includes(target.tagName)
      || (target.tagName === "INPUT" && !["checkbox", "radio", "button"].includes(target.type)));
}

function publishTaken() {
  const texts = new Map();
  for (const layer of layers) {
    for (const [key, {text}] of Object.entries(layer.current)) texts.set(key, text);
  }
  takenKeys.value = [...texts].map(([key, text]) => ({key, text}));
}

/**
 * Move through the rows of a list with j and k, and open one with Enter. Rows are elements with `data-row` inside `list`. The
 * selected row has the focus, so that the browser scrolls to it.
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
    k: {text: "Previous row", run: () => move(-1)},
  }, isActive);
}
