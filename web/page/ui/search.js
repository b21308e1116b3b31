/** Stands for the screen Search until it is there. */
import {html, Head} from "#ui/parts.js";

/** The screen. */
export const Search = () => html`<div class="screen"><${Head} title="Search" /></div>`;
