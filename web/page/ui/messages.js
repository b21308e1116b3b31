/**
 * Messages as people read them: the rows of a thread, and one message with all its parts. `windowed.js` scrolls the
 * rows, and `live.js` draws live activity. `listRows` is pure.
 */
import {useEffect, useState} from "#vendor/hooks.js";
import {Component} from "#vendor/preact.js";
import {isObject, listOf} from "#core/json.js";
import {formatCount, isStored, textOf, writeContent, writeSize} from "#core/text.js";
import {isDecision} from "#core/live_activity.js";
import {Approval, DecisionLine, decidesOn, readApproval, readDecisions, describeLine} from "#ui/approvals.js";
import {saveBytes, StoredFile} from "#ui/files.js";
import {CopyButton, Markdown, renderImage, renderLink} from "#ui/markdown.js";
import {Agent, Badge, Button, Face, html, describeError, formatMoment} from "#ui/parts.js";
import {linkTo} from "#ui/router.js";
import {actions, agents, state} from "#ui/store.js";

const LONG_CHARS = 6000;

/**
 * Return the rows of a thread, oldest first: {key, guess, kind, ...}. A message of this person keeps its key from the moment it is
 * written, so that nothing jumps when it is stored.
 * @param {{thread: object, messages: object, outbox: object[], works: object[], silent?: string[], me: string, unread: {from: number, upto: number}, awaits: function(object): boolean}} given
 *   `awaits`: whether a request for approval still waits; `unread`: the seqs between which the first message of others gets the line "New"
 */
export function listRows({thread, messages, outbox, works, silent = [], me, unread, awaits}) {
  const listed = (thread.loaded?.seqs ?? []).map((seq) => messages[seq]);
  const decisions = readDecisions(listed);
  const replaced = listReplaced(listed);
  const rootSeq = Number(/^thread:(\d+)$/.exec(thread.thread_id)?.[1]);
  const rows = [];
  let before = null;
  let isUnreadFound = false;
  for (const message of listed) {
    const {guess, day} = factsOf(message);
    const isFirst = before === null || factsOf(before).day !== day;
    const isUnread = !isUnreadFound && message.seq > unread.from && message.seq <= unread.upto && message.sender_id !== me;
    isUnreadFound ||= isUnread;
    const isNext = !isFirst && !isUnread && before.sender_id === message.sender_id && !replaced.has(before.seq) && !readApproval(before)
      && Math.floor(before.sent_at / 60_000) === Math.floor(message.sent_at / 60_000);
    rows.push({
      key: message.sender_id === me ? `own ${message.message_id}` : `seq ${message.seq}`, kind: "message", message,
      guess, isNext, isFirst, isUnread, decision: decisions.get(message.seq),
      isAwaited: readApproval(message) !== null && !decisions.has(message.seq) && awaits(message),
      replacedBy: replaced.get(message.seq), replied: [before?.seq, rootSeq].includes(message.reply_to) ? undefined : message.reply_to,
    });
    before = message;
  }
  for (const id of silent) rows.push({key: `silent ${id}`, kind: "silent", id, guess: 40});
  for (const work of works) rows.push({key: `work ${work.agent_id} ${work.reaction}`, kind: "work", work, guess: 80});
  for (const entry of outbox) rows.push({key: `own ${entry.message_id}`, kind: "outbox", entry, guess: 70});
  return rows;
}

/** Return the messages that their senders have replaced in the same thread, with the messages that replace them. */
function listReplaced(list) {
  const senders = new Map(list.map((message) => [message.seq, message.sender_id]));
  const newer = list.filter((message) => message.metadata?.replaces < message.seq && senders.get(message.metadata.replaces) === message.sender_id);
  return new Map(newer.map((message) => [message.metadata.replaces, message.seq]));
}

const facts = new WeakMap();

/** Return cached facts about a message: its day, and an estimate of its height in pixels. */
function factsOf(message) {
  if (!facts.has(message)) {
    const lines = textOf(message).slice(0, LONG_CHARS).split("\n").reduce((sum, line) => sum + Math.ceil((line.length + 1) / 90), 0);
    facts.set(message, {guess: 34 + 22 * Math.min(lines, 60), day: new Date(message.sent_at).toDateString()});
  }
  return facts.get(message);
}

// --- one message in the list

/** A message, which is drawn again only if one of its values changes. All rows share the state of the thread's screen,
 * `desk`. */
export class Message extends Component {
  shouldComponentUpdate({row, replies, desk}) {
    const own = this.props;
    const isSame = Object.keys(row).every((key) => key === "guess" || row[key] === own.row[key]);
    return !isSame || replies !== own.replies || desk !== own.desk;
  }

  render({row, replies, desk}) {
    const {message, isNext, isFirst, isUnread} = row;
    return html`${isFirst && html`<div class="day"><span>${DAY.format(message.sent_at)}</span></div>`}
      ${isUnread && html`<div class="new-line"><span>New</span></div>`}
      ${row.replacedBy ? html`<${Replaced} row=${row} desk=${desk} />` : html`<${Whole} row=${row} replies=${replies} isNext=${isNext} desk=${desk} />`}`;
  }
}

const DAY = new Intl.DateTimeFormat([], {weekday: "long", day: "numeric", month: "long", year: "numeric"});
const CLOCK = new Intl.DateTimeFormat([], {hour: "2-digit", minute: "2-digit"});

function Whole({row, replies, isNext, desk}) {
  const {message} = row;
  const {me} = desk;
  const isOwn = message.sender_id === me.agent_id;
  const asked = readApproval(message);
  const at = html`<a class="age" href=${linkTo.thread(message.thread_id, message.seq)} title=${`${formatMoment(message.sent_at)} · #${message.seq}`}>${CLOCK.format(message.sent_at)}</a>`;
  return html`<article class=${`message${isNext ? " next" : ""}${isOwn ? " own" : ""}${desk.marked === message.seq ? " marked" : ""}`} tabindex="-1" data-seq=${message.seq}
      aria-label=${`${message.sender_id}, ${CLOCK.format(message.sent_at)}`}>
    ${isNext ? html`<span class="face-place">${at}</span>` : html`<${Face} id=${message.sender_id} />`}
    <div class="message-main">
      ${!isNext && html`<header class="message-head"><${Agent} id=${message.sender_id} link />
        ${message.sender_kind !== "human" && html`<span class="kind">${message.sender_kind}</span>`}${at}</header>`}
      ${row.replied !== undefined && html`<${Quote} seq=${row.replied} message=${message} desk=${desk} />`}
      ${asked ? html`<${Approval} message=${message} asked=${asked} decision=${row.decision} isAwaited=${row.isAwaited} mayDecide=${desk.mayDecide} />`
        : isAnswered(message) ? html`<${DecisionLine} message=${message} request=${state.peek().messages[message.reply_to]} />` : html`<${Body} message=${message} />`}
      <${Notes} message=${message} me=${me.agent_id} />
      <footer class="message-foot">
        ${replies > 0 && html`<a class="replies" href=${linkTo.thread(`thread:${message.seq}`)}>${replies} ${replies === 1 ? "reply" : "replies"} ›</a>`}
        ${isOwn && !desk.isReadOnly && html`<${Receipts} seq=${message.seq} />`}
      </footer>
    </div>
    <div class="message-tools" role="group" aria-label="Message">
      ${!desk.isReadOnly && desk.mayWrite && html`<button type="button" class="tool-button" onClick=${() => desk.reply(message)}>Reply</button>`}
      <${CopyButton} text=${textOf(message)} />
      ${isOwn && !desk.isReadOnly && desk.mayWrite && !asked && html`<button type="button" class="tool-button" title="Send a corrected message" onClick=${() => desk.edit(message)}>Edit</button>`}
      <a class="tool-button" href=${linkTo.why(message.seq)} title="Why this was sent">Why</a>
    </div></article>`;
}

/** Return whether a message decides about a request. If the request is not loaded, only the words of the message count.
 */
function isAnswered(message) {
  if (message.reply_to === undefined || !isDecision(message)) return false;
  const request = state.peek().messages[message.reply_to];
  return request === undefined || decidesOn(message, request);
}

/** A replaced message, which is one line until the person opens it. */
function Replaced({row, desk}) {
  const [isOpen, setOpen] = useState(false);
  const {message, replacedBy} = row;
  if (isOpen) return html`<div class="replaced open"><${Whole} row=${row} replies=${0} isNext=${false} desk=${desk} /></div>`;
  return html`<p class="replaced" tabindex="-1"><${Agent} id=${message.sender_id} /> edited this: <button type="button" class="link-button" onClick=${() => desk.jump(replacedBy)}>show new message</button>, ${" "}<button type="button" class="link-button" onClick=${() => setOpen(true)}>show original</button></p>`;
}

/** A link to the message to which this message replies. */
function Quote({seq, message, desk}) {
  const quoted = state.peek().messages[seq];
  const isRoot = message.thread_id === `thread:${seq}`;
  const text = quoted ? describeLine(textOf(quoted)).replace(/\s+/g, " ").slice(0, 120) : `message #${seq}`;
  const jump = () => (isRoot ? desk.go(message.to, seq) : desk.jump(seq));
  return html`<button type="button" class="quote" onClick=${jump} title="Go to the message that this replies to"><span aria-hidden="true">↳ </span>
    ${quoted && html`<${Agent} id=${quoted.sender_id} /> `}<bdi class="cut">${text}</bdi></button>`;
}

/** The text, data, images and files of a message. */
function Body({message}) {
  const {content} = message;
  const isParted = isObject(content) && message.text_representation === undefined;
  const {text, images, files, ...rest} = isObject(content) ? content : {};
  const words = isParted ? (typeof text === "string" ? text : "") : typeof content === "string" || message.text_representation ? textOf(message) : "";
  const data = isParted ? (Object.keys(rest).length ? rest : null) : words ? null : content;
  return html`${words && html`<${Long} text=${words}><${Markdown} text=${words} of=${message} /><//>`}
    ${data !== null && data !== undefined && html`<pre class="data" dir="auto" tabindex="0" aria-label="Data">${writeContent(data)}</pre>`}
    ${listOf(images).map((image) => html`<${Attachment} given=${image} word="image" />`)}
    ${listOf(files).map((file) => html`<${Attachment} given=${file} word="file" />`)}`;
}

/** A very long text, which is folded at first. */
function Long({text, children}) {
  const [isOpen, setOpen] = useState(text.length < LONG_CHARS);
  return isOpen ? children : html`<div class="folded">${children}</div>
    <button type="button" class="link-button" onClick=${() => setOpen(true)}>Show all (${text.length.toLocaleString()} characters)</button>`;
}

/** An image or a file in the message: its name, and a button that saves it. */
function Attachment({given, word}) {
  if (isStored(given)) return html`<${StoredFile} given=${given} />`;
  const attachment = isObject(given) ? given : {url: given};
  const pick = (...keys) => keys.map((key) => attachment[key]).find((value) => typeof value === "string" && value) ?? "";
  const url = pick("url", "path") || (pick("data") && `data:${pick("media_type", "mime_type") || "application/octet-stream"};base64,${pick("data")}`);
  const isHere = url.startsWith("data:");
  const type = pick("media_type", "mime_type", "type") || (isHere ? url.slice(5).split(/[;,]/)[0] : "");
  const name = pick("name", "filename", "title") || (isHere || !url ? word : url.slice(0, 200));
  const label = [type, writeSize(attachment.size ?? attachment.bytes)].filter(Boolean).join(", ");
  const picture = word === "image" && isHere ? renderImage(url, name) : null;
  const text = pick("text");
  return html`<figure class="attachment">${isObject(picture) && picture}
    <figcaption><bdi>${isHere || !url ? name : renderLink(url, name, name)}</bdi>${label && html` <span class="faint">${label}</span>`}
      ${isHere && html` <${Button} kind="small" run=${() => saveFile(url, name)}>Save<//>`}</figcaption>
    ${text && html`<details><summary>Text of the file</summary><pre dir="auto">${text}</pre></details>`}</figure>`;
}

/** Let the browser save the bytes of a data: URL as a file. The browser never opens the bytes as a page. */
function saveFile(url, name) {
  const [, head, body] = /^data:([^,]*),([^]*)$/.exec(url) ?? [];
  const raw = head?.endsWith(";base64") ? atob(body) : decodeURIComponent(body ?? "");
  saveBytes(head?.endsWith(";base64") ? Uint8Array.from(raw, (char) => char.charCodeAt(0)) : raw, name);
}

/** Badges that show the metadata of a message. */
function Notes({message, me}) {
  const {requires_response: asks, metadata} = message;
  const names = listOf(asks).filter((ask) => typeof ask === "string");
  const isForMe = names.includes(me) || (asks === true && message.to === `agent:${me}`);
  const sources = listOf(metadata?.sources).filter(isObject).slice(0, 30);
  const checks = listOf(metadata?.failed_checks).filter((check) => typeof check === "string").slice(0, 10);
  const passed = listOf(metadata?.passed_checks).filter((check) => typeof check === "string").slice(0, 10);
  const failure = typeof metadata?.failure === "string" ? metadata.failure.slice(0, 40) : "";
  if (!asks && !sources.length && !checks.length && !passed.length && !failure && metadata?.declined !== true) return null;
  return html`<div class="notes">
    ${isForMe ? html`<${Badge} kind="accent">asks you for an answer<//>` : asks === true ? html`<${Badge}>asks for an answer<//>`
    : names.length > 0 && html`<${Badge}>asks ${names.slice(0, 8).join(", ")} for an answer<//>`}
    ${metadata?.declined === true && html`<${Badge}>no answer<//>`}
    ${failure && html`<span title=${`Reason: ${failure.replaceAll("_", " ")}`}><${Badge} kind="warn">No answer<//></span>`}
    ${checks.map((check) => html`<${Badge} kind="warn">check failed: ${check}<//>`)}
    ${passed.map((check) => html`<${Badge}>✓ check passed: ${check}<//>`)}
    ${sources.map((source) => html`<span class="source">[${String(source.n ?? "")}] ${renderLink(source.url, String(source.title ?? source.id ?? source.url ?? ""), "")} </span>`)}</div>`;
}

// --- delivery status

const WORDS = {queued: "Queued", delivered: "Delivered", in_prompt: "Seen by the agent", handled: "Handled", dead: "Not delivered", removed: "Recipient removed"};

/** Return whether a recipient gets the message only after it has connected again. */
const isWaiting = ({agent_id, state: delivery}) => delivery === "queued" && agents.value[agent_id]?.state === "offline";

/** The delivery status of one of the user's messages in one word. A click shows the status for each recipient. */
function Receipts({seq}) {
  const [isOpen, setOpen] = useState(false);
  const [error, setError] = useState(null);
  const recipients = state.value.status[seq];
  useEffect(() => { if (recipients === undefined) actions.markDrawn(seq); }, [seq, recipients === undefined]);
  const fetch = () => actions.call("network.message_status", {seq}).then(() => setError(null), setError);
  const toggle = () => {
    if (!isOpen || !recipients) fetch();
    setOpen(!isOpen);
  };
  const counts = Object.entries(WORDS).flatMap(([key, word]) => {
    const many = (recipients ?? []).filter((recipient) => recipient.state === key).length;
    return many ? [[key, (recipients.length > 1 ? `${word}: ${many}` : word)]] : [];
  });
  const isBad = counts.some(([key]) => key === "dead");
  const text = counts.map(([, value]) => value).join(" · ") || (recipients ? "No other readers" : "Sent");
  const waiting = (recipients ?? []).filter(isWaiting);
  return html`<span class="receipts"><button type="button" class=${`tool-button receipt${isBad ? " bad" : ""}`} aria-expanded=${isOpen} onClick=${toggle} title="Show delivery per recipient">
      <span aria-hidden="true">${isBad ? "✕" : recipients?.every((recipient) => ["handled", "in_prompt"].includes(recipient.state)) ? "✓✓" : "✓"}</span> ${text}${waiting.length === 1 && recipients.length === 1 ? `: waits until ${waiting[0].agent_id} is online` : ""}</button>
    ${isOpen && html`<ul class="receipt-list" aria-label="By recipient">${(recipients ?? []).map((recipient) => html`<li key=${recipient.agent_id}><${Agent} id=${recipient.agent_id} link />
      <span>${WORDS[recipient.state] ?? recipient.state}${isWaiting(recipient) ? ": offline, the message waits" : ""}${recipient.reaction_status ? `, its reaction is ${(recipient.again ?? recipient).reaction_status}` : ""}${recipient.attempts > 1 ? `, attempt ${recipient.attempts}` : ""}</span></li>`)}
      ${error && html`<li class="refused">${describeError(error)}</li>`}</ul>`}</span>`;
}

// --- messages that are not stored yet

/** One of the user's messages that is not stored yet, or that was refused. */
export function Outgoing({entry, me}) {
  const files = isObject(entry.content) ? [...listOf(entry.content.images), ...listOf(entry.content.files)] : [];
  const text = textOf({content: isObject(entry.content) ? entry.content.text ?? "" : entry.content});
  const isRefused = entry.state === "refused";
  const message = {...entry, sender_kind: "human", sender_id: me, sent_at: entry.at};
  return html`<article class=${`message own outgoing${isRefused ? " failed" : ""}`} tabindex="-1" aria-label=${isRefused ? "Not sent" : "Sending"}>
    <${Face} id=${me} /><div class="message-main"><header class="message-head"><${Agent} id=${me} /><span class="kind">${isRefused ? "not sent" : "sending…"}</span></header>
      ${isAnswered(message) ? html`<${DecisionLine} message=${message} request=${state.peek().messages[entry.reply_to]} />` : html`<${Markdown} text=${text} of=${entry} />`}${files.length > 0 && html`<p class="faint">with ${formatCount(files.length, "file")}</p>`}
      ${isRefused && html`<p class="refused" role="alert">${describeError(entry.error ?? "The hub refused it.")}</p>
        <div class="tools"><${Button} kind="primary" run=${() => actions.retry(entry.message_id)}>Send again<//>
          <${Button} kind="danger" run=${() => actions.discard(entry.message_id)}>Discard<//></div>`}
    </div></article>`;
}
