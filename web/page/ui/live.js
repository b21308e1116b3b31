/**
 * The live activity of a thread: running reactions with their calls and the texts that they are writing, including the
 * reactions of agents that were called. This module draws `state.live_activity` and keeps no state. Participants write
 * all of these texts, so each text becomes a text node or is rendered by `markdown.js`.
 */
import {listActors} from "#core/live_activity.js";
import {GrowingMarkdown} from "#ui/markdown.js";
import {Agent, Button, Face, html} from "#ui/parts.js";
import {actions} from "#ui/store.js";

const SHOWN_CHARS = 1500;

/** One running reaction: its agent, its calls, its thoughts and its text. */
export function Work({work, isWaiting, mayStop}) {
  const own = work.streams.findLast((stream) => stream.kind === "text" && !stream.path);
  const others = isWaiting ? [] : work.streams.filter((stream) => stream !== own);
  const calls = Object.entries(work.calls).sort(([one], [other]) => comparePaths(one, other));
  const doing = isWaiting ? "Needs approval" : own ? "Typing" : calls.length ? "Working" : "Thinking";
  return html`<article class="message live" tabindex="-1" aria-label=${`${work.agent_id}: ${doing}`}>
    <${Face} id=${work.agent_id} isSmall />
    <div class="message-main">
      <header class="message-head"><${Agent} id=${work.agent_id} link /><span class="doing">${doing}${!isWaiting && html`<span class="dots" aria-hidden="true" />`}</span>
        ${mayStop && html`<${Button} kind="danger small" title=${`Stop ${work.agent_id}`} run=${() => actions.stop({reaction: work.reaction})}>Stop<//>`}</header>
      ${calls.length > 0 && html`<ul class="calls">${calls.map(([path, call]) => html`<${Call} key=${path} work=${work} path=${path} call=${call} />`)}</ul>`}
      ${others.map((other) => html`<${Stream} key=${`${other.path} ${other.turn} ${other.kind} ${other.call}`} work=${work} stream=${other} />`)}
      ${own && !isWaiting && html`<${GrowingMarkdown} text=${own.text} />`}
    </div></article>`;
}

/** Compare two paths by their numbers, so that call 10 comes after call 2. */
function comparePaths(one, other) {
  return one.localeCompare(other, "en", {numeric: true});
}

function Call({work, path, call}) {
  const depth = path.split("/").length - 1;
  const outer = path.includes("/") ? path.slice(0, path.lastIndexOf("/")) : "";
  const isAgent = call.asked.length > 0;
  return html`<li class=${`call depth-${Math.min(depth, 4)}`}>${depth > 0 && html`<${Way} names=${listActors(work, outer).slice(1)} />`}
    ${isAgent ? html`waiting for ${call.asked.map((id, index) => html`${index > 0 && ", "}<${Agent} id=${id} />`)}` : html`running <code dir="auto">${call.tool}</code>`}</li>`;
}

const Way = ({names}) => html`<span class="way">${names.map((name) => html`<bdi>${name}</bdi> › `)}</span>`;

/** The text, thoughts or progress of an agent or tool while it is being written. */
function Stream({work, stream}) {
  const text = stream.text.length > SHOWN_CHARS ? `…${stream.text.slice(-SHOWN_CHARS)}` : stream.text;
  const names = listActors(work, stream.path).slice(1);
  if (stream.kind === "progress") return html`<p class="report"><${Way} names=${names} /><span dir="auto">${text}</span></p>`;
  const label = {reasoning: "Thinking", tool: stream.tool || "a tool", text: "Typing"}[stream.kind];
  return html`<details class=${`stream ${stream.kind}`} open=${stream.kind !== "tool"}><summary><${Way} names=${names} /><bdi>${label}</bdi></summary>
    <p class="as-is" dir="auto">${text}</p></details>`;
}
