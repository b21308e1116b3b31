/** The theme of the page: light, dark, or the theme of the system. The theme is stored in this browser, and set on the
 * root element for style.css. */
import {signal} from "#vendor/signals.js";
import {storeValue, loadValue} from "#ui/storage.js";

/** Storage key of the chosen theme. */
export const THEME_KEY = "roundelay.theme";
const THEMES = ["system", "light", "dark"];

/** The chosen theme. */
export const theme = signal("system");

/** Restore the stored theme. */
export function startTheme() {
  const stored = loadValue(THEME_KEY);
  setTheme(THEMES.includes(stored) ? stored : "system");
}

/** Choose a theme. Without a name, choose the next of the three themes. */
export function setTheme(name = THEMES[(THEMES.indexOf(theme.value) + 1) % THEMES.length]) {
  theme.value = name;
  document.documentElement.dataset.theme = name;
  storeValue(THEME_KEY, name);
}
