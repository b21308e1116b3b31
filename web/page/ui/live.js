/**
 * What is under way in a thread, drawn: reactions with their calls and what they write, agents elsewhere included.
 * It reads `state.under_way` and keeps nothing of its own.
 * Everything here is the writing of participants: texts are text nodes or go through `markdown.js`.
 */
import {who} from "#core/under_way.js";
import {GrowingMarkdown} from "#ui/markdown.js";
import {Agent, Button, Face, html} from "#ui/parts.js";
import {actions} from "#ui/store.js";

const SHOWN_CHARS = 1500;

/** One reaction: who, what it calls, what it thinks and writes. */
export function Work({work, isWaiting, mayStop}) {
  const own = work.streams.findLast((it) => it.kind === "text" && !it.path);
  const others = isWaiting ? [] : work.streams.filter((it) => it !== own);
  const calls = Object.entries(work.calls).sort(([one], [other]) => comparePaths(one, other));
  const doing = isWaiting ? "Needs approval" : own ? "Typing" : calls.length ? "Working" : "Thinking";
  return html`<article class="message live" tabindex="-1" aria-label=${`${work.agent_id}: ${doing}`}>
    <${Face} id=${work.agent_id} isSmall />
    <div class="message-main">
      <header class="message-head"><${Agent} id=${work.agent_id} link /><span class="doing">${doing}${!isWaiting && html`<span class="dots" aria-hidden="true" />`}</span>
        ${mayStop && html`<${Button} kind="danger small" title=${`Stop ${work.agent_id}`} run=${() => actions.stop({reaction: work.reaction})}>Stop<//>`}</header>
      ${calls.length > 0 && html`<ul class="calls">${calls.map(([path, call]) => html`<${Call} key=${path} work=${work} path=${path} call=${call} />`)}</ul>`}
      ${others.map((it) => html`<${Stream} key=${`${it.path} ${it.turn} ${it.kind} ${it.call}`} work=${work} stream=${it} />`)}
      ${own && !isWaiting && html`<${GrowingMarkdown} text=${own.text} />`}
    </div></article>`;
}

/** By number at each place, so that call 10 comes after call 2. */
function comparePaths(one, other) {
  return one.localeCompare(other, "en", {numeric: true});
}

function Call({work, path, call}) {
  const depth = path.split("/").length - 1;
  const outer = path.includes("/") ? path.slice(0, path.lastIndexOf("/")) : "";
  const isAgent = call.asked.length > 0;
  return html`<li class=${`call depth-${Math.min(depth, 4)}`}>${depth > 0 && html`<${Way} names=${who(work, outer).slice(1)} />`}
    ${isAgent ? html`waits for ${call.asked.map((it, index) => html`${index > 0 && ", "}<${Agent} id=${it} />`)}` : html`uses <code dir="auto">${call.tool}</code>`}</li>`;
}

const Way = ({names}) => html`<span class="way">${names.map((it) => html`<bdi>${it}</bdi> › `)}</span>`;

/** What somebody on the way writes, thinks or reports. */
function Stream({work, stream}) {
  const text = stream.text.length > SHOWN_CHARS ? `…${stream.text.slice(-SHOWN_CHARS)}` : stream.text;
  const names = who(work, stream.path).slice(1);
  if (stream.kind === "progress") return html`<p class="report"><${Way} names=${names} /><span dir="auto">${text}</span></p>`;
  const label = {reasoning: "Thinking", tool: stream.tool || "a tool", text: "Typing"}[stream.kind];
  return html`<details class=${`stream ${stream.kind}`} open=${stream.kind !== "tool"}><summary><${Way} names=${names} /><bdi>${label}</bdi></summary>
    <p class="as-is" dir="auto">${text}</p></details>`;
}
