/** Stands for the screen Threads until it is there. */
import {html, Head} from "#ui/parts.js";

/** The screen. */
export const Threads = () => html`<div class="screen"><${Head} title="Threads" /></div>`;
