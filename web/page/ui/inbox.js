/** Stands for the screen Inbox until it is there. */
import {html, Head} from "#ui/parts.js";

/** The screen. */
export const Inbox = () => html`<div class="screen"><${Head} title="Inbox" /></div>`;
