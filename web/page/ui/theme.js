/** Light, dark, or as the system has it: kept in this browser, on the root element, where style.css looks. */
import {signal} from "#vendor/signals.js";
import {keep, load} from "#ui/storage.js";

/** Where it is kept. */
export const THEME_KEY = "roundelay.theme";
const THEMES = ["system", "light", "dark"];

/** Which is chosen. */
export const theme = signal("system");

/** Take up what was chosen before. */
export function startTheme() {
  const kept = load(THEME_KEY);
  setTheme(THEMES.includes(kept) ? kept : "system");
}

/** Choose one; the next of the three without a name. */
export function setTheme(name = THEMES[(THEMES.indexOf(theme.value) + 1) % THEMES.length]) {
  theme.value = name;
  document.documentElement.dataset.theme = name;
  keep(THEME_KEY, name);
}
