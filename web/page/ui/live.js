/**
 * What is under way in a thread, drawn: reactions with their calls and what they write, agents elsewhere included; and
 * the calls that wait for a person's decision. It reads `state.under_way` and messages; it keeps nothing of its own.
 * Everything here is the writing of participants: texts are text nodes or go through `markdown.js`.
 */
import {useState} from "#vendor/hooks.js";
import {isDecision, who} from "#core/under_way.js";
import {saidOf} from "#core/text.js";
import {GrowingMarkdown} from "#ui/markdown.js";
import {Agent, Badge, Button, Face, html, now, tellSpan} from "#ui/parts.js";
import {actions} from "#ui/store.js";

const SHOWN_CHARS = 1500;

/** One reaction: who, what it calls, what it thinks and writes. */
export function Work({work, isWaiting, mayStop}) {
  const own = work.streams.findLast((it) => it.kind === "text" && !it.path);
  const others = isWaiting ? [] : work.streams.filter((it) => it !== own);
  const calls = Object.entries(work.calls).sort(([one], [other]) => comparePaths(one, other));
  const doing = isWaiting ? "waits for a decision" : own ? "writes" : calls.length ? "works" : "thinks";
  return html`<article class="message live" tabindex="-1" aria-label=${`${work.agent_id} ${doing}`}>
    <${Face} id=${work.agent_id} isSmall />
    <div class="message-main">
      <header class="message-head"><${Agent} id=${work.agent_id} link /><span class="doing">${doing}${!isWaiting && html`<span class="dots" aria-hidden="true" />`}</span>
        ${mayStop && html`<${Button} kind="danger small" title=${`Stop what ${work.agent_id} is at`} run=${() => actions.stop({reaction: work.reaction})}>Stop<//>`}</header>
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
  const label = {reasoning: "thinks", tool: stream.tool || "a tool", text: "writes"}[stream.kind];
  return html`<details class=${`stream ${stream.kind}`} open=${stream.kind !== "tool"}><summary><${Way} names=${names} /><bdi>${label}</bdi></summary>
    <p class="as-is" dir="auto">${text}</p></details>`;
}

// --- approvals

/**
 * What people have decided, by the seqs of the requests: {by, at, seq, text, isApproved}. A decision that its agent
 * could not use (`still_waits`) counts no more.
 * @param {object[]} messages of a thread, ascending
 */
export function readDecisions(messages) {
  const asked = new Map();
  const found = new Map();
  for (const it of messages) {
    if (readApproval(it) !== null) asked.set(it.seq, it.sender_id);
    const waits = it.metadata?.still_waits;
    if (asked.get(waits) === it.sender_id && found.get(waits)?.seq === it.reply_to) found.delete(waits);
    else if (asked.has(it.reply_to) && !found.has(it.reply_to) && isDecision(it)) {
      const text = saidOf(it).trim();
      found.set(it.reply_to, {by: it.sender_id, at: it.sent_at, seq: it.seq, text, isApproved: !/^\/deny/i.test(text)});
    }
  }
  return found;
}

/** What a message asks a person to approve; null if it asks for nothing. */
export function readApproval(message) {
  const asked = message.metadata?.approval;
  if (typeof asked?.reaction !== "string" || message.sender_kind !== "agent") return null;
  const span = typeof asked.timeout_s === "number" && asked.timeout_s > 0 ? asked.timeout_s * 1000 : Infinity;
  const said = (value) => (typeof value === "string" ? value : "");
  return {reaction: asked.reaction, tool: said(asked.tool) || "a tool", arguments: said(asked.arguments), reason: said(asked.reason), until: message.sent_at + span};
}

/** A call that waits for a decision, or what was decided on it. */
export function Approval({message, asked, decision, mayDecide}) {
  const [form, setForm] = useState(null);
  const rest = asked.until - now.value;
  const isOver = decision === undefined && rest <= 0;
  const decide = (what, said) => actions.decide(message.seq, what, said);
  return html`<section class=${`approval ${decision ? (decision.isApproved ? "approved" : "denied") : isOver ? "over" : "waits"}`} aria-label=${`Approval of ${asked.tool}`}>
    <p class="approval-head"><${Badge} kind=${decision || isOver ? "plain" : "warn"}>Approval<//> <${Agent} id=${message.sender_id} /> wants to call <code dir="auto">${asked.tool}</code></p>
    ${asked.reason && html`<p class="as-is" dir="auto">${asked.reason}</p>`}
    ${(decision || form !== "edit") && html`<pre tabindex="0" dir="ltr" aria-label="Arguments">${writePretty(asked.arguments)}</pre>`}
    ${decision ? html`<p class="decided"><${Decided} decision=${decision} /></p>`
    : isOver ? html`<p class="faint">Nobody decided in time.</p>`
    : html`${rest < Infinity && html`<p class="faint">Waits for ${tellSpan(rest)} more, until ${new Date(asked.until).toLocaleString([], {dateStyle: "medium", timeStyle: "short"})}</p>`}
      ${mayDecide && !form && html`<div class="tools">
        <${Button} kind="primary" run=${() => decide("approve")}>Approve once<//>
        <${Button} run=${() => decide("thread")} title=${`${asked.tool} is not asked for again in this thread`}>For this thread<//>
        <${Button} run=${() => decide("always")} title=${`${asked.tool} is not asked for again wherever you may decide`}>Always<//>
        <${Button} run=${() => setForm("edit")}>Edit…<//>
        <${Button} kind="danger" run=${() => setForm("deny")}>Deny…<//></div>`}
      ${mayDecide && form && html`<${DecisionForm} asked=${asked} kind=${form} decide=${decide} onCancel=${() => setForm(null)} />`}`}
  </section>`;
}

function Decided({decision}) {
  const [, word, rest] = /^\/(\w+)\s*([^]*)$/.exec(decision.text) ?? [];
  const scope = {thread: " for this thread", always: " for always"}[rest?.toLowerCase()] ?? "";
  const said = {approve: `approved${scope || " once"}`, deny: "denied", edit: "approved with other arguments"}[word?.toLowerCase()] ?? "decided";
  return html`<${Badge} kind=${decision.isApproved ? "good" : "bad"}>${said}<//> by <${Agent} id=${decision.by} />
    ${rest && !scope && html`<span class="as-is" dir="auto">: ${rest}</span>`}`;
}

function DecisionForm({asked, kind, decide, onCancel}) {
  const isEdit = kind === "edit";
  const [text, setText] = useState(isEdit ? writePretty(asked.arguments) : "");
  const [problem, setProblem] = useState("");
  const submit = () => {
    if (!isEdit) return decide("deny", text.trim());
    try {
      return decide("edit", JSON.stringify(JSON.parse(text)));
    } catch (error) {
      return setProblem(`These are no arguments in JSON: ${error.message}`);
    }
  };
  const cancel = (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    onCancel();
  };
  return html`<div class="decision" onKeyDown=${cancel}><label>${isEdit ? "Arguments, as JSON" : "Why not? The agent reads it"}
      <textarea rows=${isEdit ? Math.min(12, text.split("\n").length + 1) : 2} dir=${isEdit ? "ltr" : "auto"} spellcheck=${!isEdit} class=${isEdit ? "code" : ""} value=${text}
        ref=${(it) => it && !it.dataset.shown && ((it.dataset.shown = "1"), it.focus())} onInput=${(event) => setText(event.target.value)} /></label>
    ${problem && html`<p class="refused" role="alert">${problem}</p>`}
    <div class="tools"><${Button} kind=${isEdit ? "primary" : "danger"} run=${submit}>${isEdit ? "Approve with these" : "Deny"}<//><${Button} run=${onCancel}>Back<//></div></div>`;
}

function writePretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
