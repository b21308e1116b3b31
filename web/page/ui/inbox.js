/**
 * The inbox with everything that waits for the current user: approvals, questions, dead letters, stopped conversations
 * and exceeded budgets. Each item has its actions. The hub decides which items belong to the inbox (`network.inbox`).
 */
import {computed, signal} from "#vendor/signals.js";
import {useEffect, useRef} from "#vendor/hooks.js";
import {Approval, readApproval} from "#ui/approvals.js";
import {useRows} from "#ui/keys.js";
import {Age, Agent, Badge, Button, Choice, Empty, Face, Head, html, Icon, Loading, useFetched} from "#ui/parts.js";
import {linkTo} from "#ui/router.js";
import {actions, fetchMessage, nameHere, state} from "#ui/store.js";

/** The items of the inbox, in the order of the hub. */
export const inboxItems = computed(() => state.value.inbox?.items ?? []);
const isComing = computed(() => !inboxItems.value.length && state.value.inbox?.is_stale !== false);
const shown = signal("all");

const KINDS = {
  approval: {text: "Needs approval", badge: "accent", group: "approval"},
  question: {text: "Question", badge: "good", group: "question"},
  dead_letter: {text: "Not delivered", badge: "bad", group: "trouble"},
  stopped: {text: "Stopped", badge: "warn", group: "trouble"},
  budget: {text: "Budget exceeded", badge: "warn", group: "trouble"},
  fault: {text: "Cannot answer", badge: "bad", group: "trouble"},
};
const groupOf = (item) => KINDS[item.kind]?.group ?? "trouble";

/** The inbox screen. */
export function Inbox() {
  const list = useRef(null);
  useRows(list);
  const items = inboxItems.value;
  const groups = [["all", "All"], ["approval", "Approvals"], ["question", "Questions"], ["trouble", "Problems"]];
  const options = groups.filter(([value]) => value === "all" || value === shown.value || items.some((item) => groupOf(item) === value))
    .map(([name, text]) => [name, `${text} ${items.filter((item) => name === "all" || groupOf(item) === name).length}`]);
  const chosen = items.filter((item) => shown.value === "all" || groupOf(item) === shown.value);
  return html`<div class="screen"><${Head} title="Inbox">
      ${items.length > 1 && html`<${Choice} label="What to show" value=${shown.value} options=${options} onChoose=${(choice) => { shown.value = choice; }} />`}
      <${Notify} /><//>
    ${chosen.length ? html`<ul class="card card-list" ref=${list} aria-label="Inbox">
      ${chosen.map((item) => html`<${Item} key=${`${item.kind} ${item.seq} ${item.agent_id}`} item=${item} />`)}</ul>`
      : isComing.value ? html`<${Loading} />` : html`<${Empty} icon="check" title="Your inbox is empty">Approvals, questions to you and delivery problems appear here.<//>`}
  </div>`;
}

function Item({item}) {
  const {kind, seq, thread_id: thread, agent_id: agent} = item;
  const {text, badge} = KINDS[kind] ?? {text: kind, badge: "plain"};
  return html`<li class="row inbox-item" tabindex="-1" data-row>
    ${agent ? html`<${Face} id=${agent} />` : html`<span class="face none"><${Icon} name="stop" /></span>`}
    <div class="row-main">
      <div class="row-line"><${Badge} kind=${badge}>${text}<//>${agent && html`<${Agent} id=${agent} link />`}
        ${thread && html`<a class="faint cut" dir="auto" href=${linkTo.thread(thread, seq || undefined)}>${nameHere(thread) === agent ? "direct message" : nameHere(thread)}</a>`}<${Age} at=${item.at} /></div>
      ${kind === "approval" ? html`<${Asked} item=${item} />` : html`<p class="said" dir="auto">${describeItem(item)}</p>`}
      ${kind !== "approval" && html`<div class="tools"><${Tools} item=${item} /></div>`}
    </div></li>`;
}

function describeItem(item) {
  if (item.kind === "dead_letter") {
    const why = item.reason ? `: ${item.reason}` : "";
    return `“${item.text}”\n${item.agent_id} failed ${item.attempts} times${why}`;
  }
  if (item.kind === "stopped" && item.root) {
    const share = item.used_by ? `. ${item.used} of its messages are from ${item.used_by}` : "";
    return `The conversation of #${item.root} stopped at its limit (${String(item.limit).replace("limits.", "")})${share}.`;
  }
  if (item.kind === "fault") return item.reason ? `${item.text}\n${item.reason}` : item.text;
  return item.kind === "budget" && item.seq ? `“${item.text}”\n${item.agent_id} stopped working on this: budget exceeded.` : item.text;
}

function Tools({item}) {
  const {kind, seq, agent_id, thread_id, root} = item;
  const jump = thread_id && html`<a class=${`button ${kind === "question" ? "primary" : ""}`} href=${linkTo.thread(thread_id, seq)}>${kind === "question" ? "Answer" : "Open"}</a>`;
  return html`${jump}
    ${kind === "dead_letter" && item.may_retry && html`<${Button} run=${() => actions.retryDeadLetter(item)}>Retry<//>
      <${Button} run=${() => actions.call("network.drop_dead_letter", {seq, agent_id})}>Discard<//>`}
    ${kind === "fault" && html`<a class="button" href=${linkTo.agent(agent_id)}>Agent</a>`}
    ${root && html`<${Button} run=${() => actions.resumeRoot(root)}>Resume<//>`}
    ${kind === "stopped" && !root && html`<${Button} run=${() => actions.call("network.resume_agent", {agent_id})}>Resume<//>`}
    <${Button} run=${() => actions.dismiss(item)}>Dismiss<//>`;
}

/** A call that needs approval. The message of the call is loaded, because only the message contains the arguments and
 * the reason.
 */
function Asked({item}) {
  const {value} = useFetched(() => fetchMessage(item.thread_id, item.seq), [item.seq]);
  const asked = value && readApproval(value);
  return asked ? html`<${Approval} message=${value} asked=${asked} item=${item} isNamed mayDecide />` : html`<p class="said" dir="auto">${item.text}</p>`;
}

// --- browser notifications

const permission = signal(globalThis.Notification?.permission ?? "denied");

/** A button that asks for permission to show notifications while the page is hidden. */
function Notify() {
  if (permission.value !== "default" || state.value.is_read_only) return null;
  return html`<${Button} run=${async () => { permission.value = await Notification.requestPermission(); }}>Turn on notifications<//>`;
}

/** Shows a browser notification for each new item while the page is hidden. */
export function useNotifications() {
  const seen = useRef(null);
  const items = inboxItems.value;
  useEffect(() => {
    const fresh = seen.current ? items.filter((item) => !seen.current.has(`${item.kind} ${item.seq}`)) : [];
    if (items.length || state.peek().connection === "online") seen.current = new Set(items.map((item) => `${item.kind} ${item.seq}`));
    if (!fresh.length || !document.hidden || permission.value !== "granted") return;
    const notification = new Notification(`${fresh[0].agent_id ?? ""} ${KINDS[fresh[0].kind]?.text ?? ""}`.trim(), {body: fresh[0].text, tag: "roundelay-inbox"});
    notification.onclick = () => { focus(); location.hash = linkTo.inbox(); };
  }, [items]);
}
