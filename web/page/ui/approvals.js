/**
 * Calls that need approval: the request in a message, the decision about it, and the card for deciding. `readApproval`,
 * `readDecisions`, `readYesOrNo` and `formatCall` are pure. The store sends a decision.
 */
import {useState} from "#vendor/hooks.js";
import {isObject, listOf, readArguments, writeArguments} from "#core/json.js";
import {isAwaited} from "#core/state.js";
import {saidOf} from "#core/text.js";
import {isDecision} from "#core/live_activity.js";
import {Agent, Badge, Button, html, Icon, now, formatMoment, formatSpan} from "#ui/parts.js";
import {linkTo} from "#ui/router.js";
import {actions, isOver, me, nameHere} from "#ui/store.js";

const SHOWN_CHARS = 300;
const SHOWN_LINES = 6;
const CALL_CHARS = 120;

/** Return the decisions of people by the seq of the request: {by, people, at, seq, text, scope, isApproved}. A decision
 * does not count if the agent could not use it (`still_waits`), or if the person may not decide.
 * @param {object[]} messages of a thread, in ascending order */
export function readDecisions(messages) {
  const asked = new Map();
  const decisions = new Map();
  const votes = new Map();
  for (const message of messages) {
    const request = readApproval(message);
    if (request !== null) asked.set(message.seq, {...request, sender: message.sender_id});
    const waits = message.metadata?.still_waits;
    const report = readDecided(message);
    const of = asked.get(report?.request ?? message.reply_to);
    if (report !== null && of?.sender === message.sender_id) decisions.set(report.request, report);
    else if (asked.get(waits)?.sender === message.sender_id && decisions.get(waits)?.seq === message.reply_to) decisions.delete(waits);
    else if (of && report === null && !decisions.has(message.reply_to) && isDecision(message) && mayDecideOn(of, message.sender_id)) {
      const decision = readDecision(message);
      const people = new Set([...(votes.get(message.reply_to) ?? []), message.sender_id]);
      votes.set(message.reply_to, people);
      if (!decision.isApproved) decisions.set(message.reply_to, decision);
      else if (people.size >= of.needed) decisions.set(message.reply_to, {...decision, people: [...people]});
    }
  }
  return decisions;
}

/** Parse a decision: {by, people, at, seq, text, scope, isApproved}. */
function readDecision(message) {
  const text = saidOf(message).trim();
  const scope = /^\/approve\s+(thread|always)\s*$/i.exec(text)?.[1].toLowerCase() ?? "once";
  const {sender_id: by, sent_at: at, seq} = message;
  return {by, people: [by], at, seq, text, scope, isApproved: !/^\/deny/i.test(text)};
}

/** Return a decision from another thread that an agent reports, or null for any other message. */
function readDecided(message) {
  const report = message.metadata?.decided;
  const people = listOf(report?.by).filter((name) => typeof name === "string");
  if (message.sender_kind !== "agent" || !Number.isInteger(report?.request) || !people.length) return null;
  const texts = listOf(report.said).filter((message) => typeof message === "string" && message);
  return {request: report.request, by: people[0], people, at: Number(report.at) || message.sent_at, seq: Number(report.seq) || message.seq,
    text: texts.at(-1) ?? "", scope: report.scope ?? "once", isApproved: report.is_approved === true};
}

/** Return the call that a message asks a person to approve, or null. */
export function readApproval(message) {
  const asked = message.metadata?.approval;
  if (typeof asked?.reaction !== "string" || message.sender_kind !== "agent") return null;
  const span = typeof asked.timeout_s === "number" && asked.timeout_s > 0 ? asked.timeout_s * 1000 : Infinity;
  const textOr = (value) => (typeof value === "string" ? value : "");
  const texts = (value) => (Array.isArray(value) ? value.filter((text) => typeof text === "string") : null);
  return {
    reaction: asked.reaction, tool: textOr(asked.tool) || "a tool", arguments: textOr(asked.arguments), reason: textOr(asked.reason),
    until: message.sent_at + span, needed: Number.isInteger(asked.needed) && asked.needed > 1 ? asked.needed : 1,
    approvers: texts(asked.approvers), deciders: texts(asked.deciders), ledBy: readLedBy(asked.led_by),
  };
}

/** Return the message that led to the call. The agent copies it into the request, for approvers who cannot read the
 * message itself. */
function readLedBy(copy) {
  if (!isObject(copy) || !Number.isInteger(copy.seq) || typeof copy.thread_id !== "string") return null;
  const textOr = (value) => (typeof value === "string" ? value : "");
  return {seq: copy.seq, thread_id: copy.thread_id, sender_id: textOr(copy.sender_id), text: textOr(copy.text)};
}

/** Return whether a reader of the request may decide about it. */
const mayDecideOn = (asked, agentId) => asked.deciders === null || asked.deciders.includes(agentId);

/** Return whether the sender of a message may decide about a request. */
export const decidesOn = (message, request) => {
  const asked = readApproval(request);
  return asked !== null && mayDecideOn(asked, message.sender_id);
};

const PLAIN_VALUE = /^[\p{L}\p{N}_ .@:/+#-]+$/u;

/** Format an argument. A text is quoted if its characters could end the call and be mistaken for another sentence. */
const writeValue = (value) => (typeof value === "string" && PLAIN_VALUE.test(value) ? value : JSON.stringify(value));

/** Format a call as one line: `refund(order=17)`. */
function formatCall(asked) {
  const read = readArguments(asked.arguments);
  const parts = isObject(read) ? Object.entries(read).map(([name, value]) => `${name}=${writeValue(value)}`) : [asked.arguments];
  const text = parts.join(", ");
  return `${asked.tool}(${text.length > CALL_CHARS ? `${text.slice(0, CALL_CHARS)}…` : text})`;
}

/** Format a message of a thread as one line. A decision is described in words, and any other text stays unchanged. */
export function describeLine(text) {
  const [, word, rest = ""] = /^\/(approve|deny|edit)\b\s*([^]*)$/i.exec(text) ?? [];
  if (word === undefined) return text;
  const phrase = {approve: "approved a call", deny: "denied a call", edit: "approved a call with other arguments"}[word.toLowerCase()];
  return word.toLowerCase() === "deny" && rest ? `${phrase}: ${rest}` : phrase;
}

const YES = new Set(["yes", "y", "yep", "ok", "okay", "sure", "approve", "approved"]);
const NO = new Set(["no", "n", "nope", "deny", "denied"]);

/** Return the meaning of a plain yes, ok or no while a call waits: "approve" or "deny". Return null for any other text.
 */
export function readYesOrNo(text) {
  const word = text.trim().replace(/[.!]+$/, "").toLowerCase();
  return YES.has(word) ? "approve" : NO.has(word) ? "deny" : null;
}

/**
 * Return the requests of a thread that this person can decide: {message, asked}.
 * @param {object} given the state @param {object} thread @param {object} own the current user
 */
export function listOpen(current, thread, own) {
  if (own.kind !== "human") return [];
  const messages = (thread.loaded?.seqs ?? []).map((seq) => current.messages[seq]);
  const decisions = readDecisions(messages);
  return messages.map((message) => ({message, asked: readApproval(message)})).filter(({message, asked}) => asked !== null
    && !decisions.has(message.seq) && asked.until > Date.now() && mayDecideOn(asked, own.agent_id) && isAwaited(current, message, true));
}

/** The card of a call that needs approval, or the decision about the call.
 * @param {{isNamed?: boolean, item?: object}} props `isNamed`: a heading above the card already names the call. `item`:
 * its item in the inbox */
export function Approval({message, asked, decision, isAwaited = true, isNamed = false, mayDecide, item}) {
  const [form, setForm] = useState(null);
  const rest = (item?.until ?? asked.until) - now.value;
  const own = me.value.agent_id;
  const isCalled = item?.may_call === true; // decide with an operation, because the operator cannot read the thread
  const may = mayDecide && (isCalled || mayDecideOn(asked, own));
  const voters = listOf(item?.approved_by);
  const ended = decision ? "" : isOver.value ? "No decision yet when this was recorded." : rest <= 0 ? "Expired without a decision." : isAwaited ? "" : "No longer needed.";
  const decide = (what, rest) => actions.decide(message.seq, what, rest, {isCalled});
  const others = asked.deciders?.filter((id) => id !== own) ?? [];
  const thread = asked.ledBy ?? {thread_id: message.thread_id, seq: message.reply_to ?? message.seq};
  return html`<section class=${`approval ${decision ? (decision.isApproved ? "approved" : "denied") : ended ? "over" : "waits"}`} aria-label=${`Approval of ${asked.tool}`}>
    <p class="approval-head">${!isNamed && html`<${Badge} kind=${decision || ended ? "plain" : "warn"}>${decision || ended ? "Approval" : "Needs approval"}<//> `}<${Agent} id=${message.sender_id} /> wants to call <code dir="auto">${asked.tool}</code></p>
    ${(decision || ended || form !== "edit") && html`<${Arguments} text=${asked.arguments} />`}
    ${asked.reason && html`<p class="approval-why"><span class="faint">Why: </span><span class="as-is" dir="auto">${asked.reason}</span></p>`}
    ${asked.ledBy && html`<blockquote class="led-by"><span class="faint"><${Agent} id=${asked.ledBy.sender_id} /> wrote:</span> <span class="as-is" dir="auto">${asked.ledBy.text}</span></blockquote>`}
    ${(isNamed || asked.ledBy) && html`<p><a href=${linkTo.thread(thread.thread_id, thread.seq)}>Open conversation</a> <span class="faint">${nameHere(thread.thread_id)}</span></p>`}
    ${decision ? html`<${Decided} decision=${decision} />
      ${!isOver.value && may && decision.scope !== "once" && decision.people.includes(own) && html`<div class="tools"><${Button} run=${() => decide("deny", "from now on")} title="The agent asks again before its next call">Ask again from now on<//></div>`}`
    : ended ? html`<p class="faint">${ended}</p>`
    : html`${asked.needed > 1 && html`<p>Needs approval by ${asked.needed} people.${voters.length > 0 && ` Approved by ${voters.join(", ")}.`}</p>`}
      ${!may && asked.deciders && html`<p>Waiting for ${asked.deciders.join(" or ") || "nobody"}.</p>`}
      ${may && others.length > 0 && html`<p class="faint">${others.join(", ")} may decide too.</p>`}
      ${rest < Infinity && html`<p class="faint">Expires in ${formatSpan(rest)}, at ${new Date(asked.until).toLocaleString([], {dateStyle: "medium", timeStyle: "short"})}</p>`}
      ${may && !form && html`<div class="tools">
          <${Button} kind="primary" run=${() => decide("approve")}>Approve once<//>
          <${Button} kind="danger" run=${() => setForm("deny")}>Deny…<//>
          ${asked.needed === 1 && html`<${Button} run=${() => setForm("edit")}>Edit…<//>`}</div>
        ${!isCalled && html`<${Longer} asked=${asked} agent=${message.sender_id} decide=${decide} />`}`}
      ${may && form && html`<${DecisionForm} asked=${asked} kind=${form} decide=${decide} onCancel=${() => setForm(null)} />`}`}
  </section>`;
}

/** The arguments of a call, as a table, or as text if they are not an object. Long values are cut off. */
function Arguments({text}) {
  const read = readArguments(text);
  if (!isObject(read)) return html`<pre tabindex="0" dir="ltr" aria-label="Arguments">${writeArguments(text)}</pre>`;
  const rows = Object.entries(read);
  if (!rows.length) return html`<p class="faint">Without arguments</p>`;
  return html`<table class="arguments" aria-label="Arguments"><tbody>${rows.map(([name, value]) => html`<tr key=${name}>
    <th scope="row" dir="auto">${name}</th><td><${Value} value=${value} /></td></tr>`)}</tbody></table>`;
}

function Value({value}) {
  const [isWhole, setWhole] = useState(false);
  const isText = typeof value === "string";
  const text = isText ? value : JSON.stringify(value, null, 2);
  const lines = text.split("\n");
  const cut = lines.slice(0, SHOWN_LINES).join("\n").slice(0, SHOWN_CHARS);
  const shown = isWhole ? text : cut;
  return html`<span class=${`as-is${isText ? "" : " value"}`} dir=${isText ? "auto" : "ltr"}>${shown}${!isWhole && cut !== text && "…"}</span>
    ${cut !== text && html` <button type="button" class="link-button" aria-expanded=${isWhole} onClick=${() => setWhole(!isWhole)}>${isWhole ? "Show less" : `Show all (${text.length.toLocaleString()} characters)`}</button>`}`;
}

/** Buttons that approve further calls too. These buttons are separate from the other buttons, and spell out what they
 * allow. */
function Longer({asked, agent, decide}) {
  const who = `, whoever asks for it${asked.deciders ? " (but never for your own requests)" : ""}`;
  const both = asked.needed > 1 ? ` This needs ${asked.needed} people.` : "";
  const end = "until you revoke it at this card";
  return html`<details class="longer"><summary>Don't ask again…</summary>
    <div><p>${agent} calls <code dir="auto">${asked.tool}</code> <strong>in ${asked.ledBy ? "that" : "this"} conversation</strong> without asking, with any arguments${who}, ${end}.${both}</p>
      <${Button} run=${() => decide("thread")}>Always in ${asked.ledBy ? "that" : "this"} conversation<//></div>
    <div><p>${agent} calls <code dir="auto">${asked.tool}</code> <strong>in every conversation where you may decide</strong> without asking, with any arguments${who}, ${end}.${both}</p>
      <${Button} run=${() => decide("always")}>Always everywhere<//></div>
  </details>`;
}

/** Text about a decision: who decided, when, and with which words. */
function Decided({decision}) {
  const [, word, rest] = /^\/(\w+)\s*([^]*)$/.exec(decision.text) ?? [];
  const scope = {thread: " for this thread", always: " for always"}[decision.scope] ?? "";
  const outcome = !decision.isApproved ? "denied" : word?.toLowerCase() === "edit" ? "approved with other arguments" : `approved${scope || " once"}`;
  const words = ["deny", "edit"].includes(word?.toLowerCase()) ? rest : "";
  return html`<p class="decided"><${Badge} kind=${decision.isApproved ? "good" : "bad"}>${outcome}<//> by ${decision.people.map((person, place) => html`${place > 0 && " and "}<${Agent} id=${person} />`)}
    ${words && html`<span class="as-is" dir="auto">: ${words}</span>`}
    <span class="faint"> ${formatMoment(decision.at)}</span></p>`;
}

/** A person's decision as a line in the conversation: `mia approved refund(order=17)`. */
export function DecisionLine({message, request, sender = message.sender_id}) {
  const decision = readDecision(message);
  const asked = request && readApproval(request);
  const [, word, rest] = /^\/(\w+)\s*([^]*)$/.exec(decision.text) ?? [];
  const isEdit = word?.toLowerCase() === "edit";
  const call = asked ? formatCall(isEdit ? {...asked, arguments: rest} : asked) : `the call of #${message.reply_to}`;
  const scope = {thread: ", and further calls of it in this conversation", always: ", and all further calls of it"}[decision.scope] ?? "";
  const reason = decision.isApproved ? "" : rest;
  return html`<p class=${`decision-line ${decision.isApproved ? "good" : "bad"}`}><${Icon} name=${decision.isApproved ? "check" : "close"} /> <${Agent} id=${sender} /> ${decision.isApproved ? "approved" : "denied"} <code dir="auto">${call}</code>${isEdit && " with other arguments"}${scope}${reason && html`<span class="as-is" dir="auto">: ${reason}</span>`}</p>`;
}

/** Asks whether a plain yes, ok or no is meant as a decision, before the text is sent.
 * @param {{how: string, text: string, requests: {message: object, asked: object}[], decide: function, send: function,
 * cancel: function}} props */
export function Meant({how, text, requests, decide, send, cancel}) {
  const does = how === "approve" ? "Approve" : "Deny";
  const isOne = requests.length === 1;
  const kind = how === "approve" ? "primary" : "danger";
  const press = (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    cancel();
  };
  return html`<div class="meant" role="group" aria-label=${isOne ? `${does}?` : "Which call?"} onKeyDown=${press}
      ref=${(element) => element && !element.dataset.shown && ((element.dataset.shown = "1"), element.querySelector("button").focus())}>
    <p>${isOne ? html`${does} <code dir="auto">${formatCall(requests[0].asked)}</code>?` : `${does} which call?`}</p>
    <div class="tools">${requests.map((request) => html`<${Button} key=${request.message.seq} kind=${isOne ? kind : ""} run=${() => decide(request.message.seq)}>${isOne ? does : formatCall(request.asked)}<//>`)}
      <${Button} run=${send}>Send “${text}” as a message<//><${Button} run=${cancel}>Cancel<//></div></div>`;
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
      return setProblem(`The arguments are not valid JSON: ${error.message}`);
    }
  };
  const cancel = (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    onCancel();
  };
  return html`<div class="decision" onKeyDown=${cancel}><label>${isEdit ? "Arguments (JSON)" : "Reason (the agent reads it)"}
      <textarea rows=${isEdit ? Math.min(12, text.split("\n").length + 1) : 2} dir=${isEdit ? "ltr" : "auto"} spellcheck=${!isEdit} class=${isEdit ? "code" : ""} value=${text}
        ref=${(element) => element && !element.dataset.shown && ((element.dataset.shown = "1"), element.focus())} onInput=${(event) => setText(event.target.value)} /></label>
    ${problem && html`<p class="refused" role="alert">${problem}</p>`}
    <div class="tools"><${Button} kind=${isEdit ? "primary" : "danger"} run=${submit}>${isEdit ? "Approve with these" : "Deny"}<//><${Button} run=${onCancel}>Back<//></div></div>`;
}
