/** Stands for the screen Thread until it is there. */
import {html, Head} from "#ui/parts.js";

/** The screen. */
export const Thread = () => html`<div class="screen"><${Head} title="Thread" /></div>`;
