/** Light, dark, or as the system has it: kept in this browser, on the root element, where style.css looks. */
import {signal} from "#vendor/signals.js";

const KEY = "roundelay.theme";
const THEMES = ["system", "light", "dark"];

/** Which is chosen. */
export const theme = signal("system");

/** Take up what was chosen before. */
export function startTheme() {
  let kept = null;
  try {
    kept = localStorage.getItem(KEY);
  } catch { /* a browser that keeps nothing has the system's */ }
  setTheme(THEMES.includes(kept) ? kept : "system");
}

/** Choose one; the next of the three without a name. */
export function setTheme(name = THEMES[(THEMES.indexOf(theme.value) + 1) % THEMES.length]) {
  theme.value = name;
  document.documentElement.dataset.theme = name;
  try {
    localStorage.setItem(KEY, name);
  } catch { /* it holds until the page is left */ }
}
