/** Stands for the screen Why until it is there. */
import {html, Head} from "#ui/parts.js";

/** The screen. */
export const Why = () => html`<div class="screen"><${Head} title="Why" /></div>`;
