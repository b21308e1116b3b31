/**
 * Calls that wait for a person's decision: what a message asks to approve, what was decided on it, and the card by which
 * one decides. `readApproval` and `readDecisions` are pure; a decision is sent by the store.
 */
import {useState} from "#vendor/hooks.js";
import {writeArguments} from "#core/json.js";
import {isDecision} from "#core/under_way.js";
import {saidOf} from "#core/text.js";
import {Agent, Badge, Button, html, now, tellSpan} from "#ui/parts.js";
import {actions, isOver} from "#ui/store.js";

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

/** A call that waits for a decision, or what was decided on it. @param {{isNamed?: boolean}} props `isNamed`: what it is stands above it */
export function Approval({message, asked, decision, isAwaited = true, isNamed = false, mayDecide}) {
  const [form, setForm] = useState(null);
  const rest = asked.until - now.value;
  const ended = decision ? "" : isOver.value ? "Nobody had decided when this was recorded." : rest <= 0 ? "Nobody decided in time." : isAwaited ? "" : "Nobody waits for it any more.";
  const decide = (what, said) => actions.decide(message.seq, what, said);
  return html`<section class=${`approval ${decision ? (decision.isApproved ? "approved" : "denied") : ended ? "over" : "waits"}`} aria-label=${`Approval of ${asked.tool}`}>
    <p class="approval-head">${!isNamed && html`<${Badge} kind=${decision || ended ? "plain" : "warn"}>Approval<//> `}<${Agent} id=${message.sender_id} /> wants to call <code dir="auto">${asked.tool}</code></p>
    ${asked.reason && html`<p class="as-is" dir="auto">${asked.reason}</p>`}
    ${(decision || ended || form !== "edit") && html`<pre tabindex="0" dir="ltr" aria-label="Arguments">${writeArguments(asked.arguments)}</pre>`}
    ${decision ? html`<p class="decided"><${Decided} decision=${decision} /></p>`
    : ended ? html`<p class="faint">${ended}</p>`
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
  const [text, setText] = useState(isEdit ? writeArguments(asked.arguments) : "");
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
