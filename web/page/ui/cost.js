/** Stands for the screen Cost until it is there. */
import {html, Head} from "#ui/parts.js";

/** The screen. */
export const Cost = () => html`<div class="screen"><${Head} title="Cost" /></div>`;
