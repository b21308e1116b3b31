/**
 * What waits for the person at the page, with what can be done about it in place: approvals, questions, dead letters,
 * conversations that stopped, budgets that are used up. The hub says what belongs here (`network.inbox`).
 */
import {computed, signal} from "#vendor/signals.js";
import {useEffect, useRef} from "#vendor/hooks.js";
import {Approval, readApproval} from "#ui/approvals.js";
import {useRows} from "#ui/keys.js";
import {Age, Agent, Badge, Button, Choice, Empty, Face, Head, html, Icon, Loading, useFetched} from "#ui/parts.js";
import {linkTo} from "#ui/router.js";
import {actions, fetchMessage, nameHere, state} from "#ui/store.js";

/** What waits, in the hub's order. */
export const inboxItems = computed(() => state.value.inbox?.items ?? []);
const isComing = computed(() => !inboxItems.value.length && state.value.inbox?.is_stale !== false);
const shown = signal("all");

const KINDS = {
  approval: {text: "Approval", badge: "accent", group: "approval"},
  question: {text: "Question", badge: "good", group: "question"},
  dead_letter: {text: "Not delivered", badge: "bad", group: "trouble"},
  stopped: {text: "Stopped", badge: "warn", group: "trouble"},
  budget: {text: "Budget", badge: "warn", group: "trouble"},
  fault: {text: "Cannot answer", badge: "bad", group: "trouble"},
};
const groupOf = (item) => KINDS[item.kind]?.group ?? "trouble";

/** The screen. */
export function Inbox() {
  const list = useRef(null);
  useRows(list);
  const items = inboxItems.value;
  const groups = [["all", "All"], ["approval", "Approvals"], ["question", "Questions"], ["trouble", "Trouble"]];
  const options = groups.filter(([it]) => it === "all" || it === shown.value || items.some((item) => groupOf(item) === it))
    .map(([it, text]) => [it, `${text} ${items.filter((item) => it === "all" || groupOf(item) === it).length}`]);
  const chosen = items.filter((item) => shown.value === "all" || groupOf(item) === shown.value);
  return html`<div class="screen"><${Head} title="Inbox">
      ${items.length > 1 && html`<${Choice} label="What to show" value=${shown.value} options=${options} onChoose=${(it) => { shown.value = it; }} />`}
      <${Notify} /><//>
    ${chosen.length ? html`<ul class="card card-list" ref=${list} aria-label="What waits for you">
      ${chosen.map((item) => html`<${Item} key=${`${item.kind} ${item.seq} ${item.agent_id}`} item=${item} />`)}</ul>`
      : isComing.value ? html`<${Loading} />` : html`<${Empty} icon="check" title="Nothing waits for you">Approvals that agents ask for, questions to you, and what could not be delivered come here.<//>`}
  </div>`;
}

function Item({item}) {
  const {kind, seq, thread_id: thread, agent_id: agent} = item;
  const {text, badge} = KINDS[kind] ?? {text: kind, badge: "plain"};
  return html`<li class="row inbox-item" tabindex="-1" data-row>
    ${agent ? html`<${Face} id=${agent} />` : html`<span class="face none"><${Icon} name="stop" /></span>`}
    <div class="row-main">
      <div class="row-line"><${Badge} kind=${badge}>${text}<//>${agent && html`<${Agent} id=${agent} link />`}
        ${thread && html`<a class="faint cut" dir="auto" href=${linkTo.thread(thread, seq || undefined)}>${nameHere(thread) === agent ? "directly" : nameHere(thread)}</a>`}<${Age} at=${item.at} /></div>
      ${kind === "approval" ? html`<${Asked} item=${item} />` : html`<p class="said" dir="auto">${tellItem(item)}</p>`}
      ${kind !== "approval" && html`<div class="tools"><${Tools} item=${item} /></div>`}
    </div></li>`;
}

function tellItem(item) {
  if (item.kind === "dead_letter") {
    const why = item.reason ? `: ${item.reason}` : "";
    return `“${item.text}”\n${item.agent_id} failed at it ${item.attempts} times${why}`;
  }
  if (item.kind === "stopped" && item.root) {
    const who = item.used_by ? `; ${item.used} of its messages are by ${item.used_by}` : "";
    return `The conversation that began with #${item.root} has stopped at its limit (${String(item.limit).replace("limits.", "")})${who}.`;
  }
  if (item.kind === "fault") return item.reason ? `${item.text}\n${item.reason}` : item.text;
  return item.kind === "budget" && item.seq ? `“${item.text}”\nThe budget of ${item.agent_id} has ended its reaction to this.` : item.text;
}

function Tools({item}) {
  const {kind, seq, agent_id, thread_id, root} = item;
  const jump = thread_id && html`<a class=${`button ${kind === "question" ? "primary" : ""}`} href=${linkTo.thread(thread_id, seq)}>${kind === "question" ? "Answer" : "Open"}</a>`;
  return html`${jump}
    ${kind === "dead_letter" && item.may_retry && html`<${Button} run=${() => actions.retryDeadLetter(item)}>Deliver again<//>
      <${Button} run=${() => actions.call("network.drop_dead_letter", {seq, agent_id})}>Drop<//>`}
    ${kind === "fault" && html`<a class="button" href=${linkTo.agent(agent_id)}>Agent</a>`}
    ${root && html`<${Button} run=${() => actions.resumeRoot(root)}>Let it go on<//>`}
    ${kind === "stopped" && !root && html`<${Button} run=${() => actions.call("network.resume_agent", {agent_id})}>Let it go on<//>`}
    <${Button} run=${() => actions.dismiss(item)}>Dismiss<//>`;
}

/** A call that waits for a decision; the message alone says with what arguments, and why. */
function Asked({item}) {
  const {value} = useFetched(() => fetchMessage(item.thread_id, item.seq), [item.seq]);
  const asked = value && readApproval(value);
  return asked ? html`<${Approval} message=${value} asked=${asked} item=${item} isNamed mayDecide />` : html`<p class="said" dir="auto">${item.text}</p>`;
}

// --- the browser's own notifications

const permission = signal(globalThis.Notification?.permission ?? "denied");

/** Asks whether the browser may tell what comes while the page is not looked at, and tells it. */
function Notify() {
  if (permission.value !== "default" || state.value.is_read_only) return null;
  return html`<${Button} run=${async () => { permission.value = await Notification.requestPermission(); }}>Notify me<//>`;
}

/** Tells the browser's user of items that are new while the page is hidden; mounted as long as the page. */
export function useNotifications() {
  const known = useRef(null);
  const items = inboxItems.value;
  useEffect(() => {
    const news = known.current ? items.filter((it) => !known.current.has(`${it.kind} ${it.seq}`)) : [];
    if (items.length || state.peek().connection === "online") known.current = new Set(items.map((it) => `${it.kind} ${it.seq}`));
    if (!news.length || !document.hidden || permission.value !== "granted") return;
    const told = new Notification(`${news[0].agent_id ?? ""} ${KINDS[news[0].kind]?.text ?? ""}`.trim(), {body: news[0].text, tag: "roundelay-inbox"});
    told.onclick = () => { focus(); location.hash = linkTo.inbox(); };
  }, [items]);
}
