/** Stands for the screen Agents until it is there. */
import {html, Head} from "#ui/parts.js";

/** The screen. */
export const Agents = () => html`<div class="screen"><${Head} title="Agents" /></div>`;
