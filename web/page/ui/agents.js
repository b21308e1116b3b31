/** Shows the participants with their activity, and a page for each participant. The hub derives the activity from
 * sessions and open reactions. */
import {computed, signal} from "#vendor/signals.js";
import {useRef, useState} from "#vendor/hooks.js";
import {sha256} from "#core/hash.js";
import {directThread, formatCount} from "#core/text.js";
import {useRows} from "#ui/keys.js";
import {makeToken} from "#ui/login.js";
import {Age, Agent, Badge, Button, Choice, Empty, Face, Head, html, Loading, useFetched} from "#ui/parts.js";
import {writeCost} from "#ui/prices.js";
import {linkTo} from "#ui/router.js";
import {actions, agents, isReadOnly, me, nameHere} from "#ui/store.js";

const sorted = computed(() => Object.values(agents.value).sort((a, b) => rank(a) - rank(b) || (a.agent_id < b.agent_id ? -1 : 1)));
const kind = signal("agent");

/** Return whether to show the fault of an agent instead of its activity. The fault is shown only for an idle or offline
 * agent. */
const showsFault = ({activity, open_reactions: open = 0, fault}) => Boolean(fault) && (activity === "idle" || (activity === "gone" && !open));
const RANKS = {stopped: 0, works: 1, waits: 2, stopping: 2, queued: 2, held: 2, idle: 3, gone: 5};
const rank = (agent) => showsFault(agent) ? 0 : RANKS[agent.activity] ?? (agent.state === "online" ? 4 : 6);

/** Describe what a participant does in a few words. Follows roundelay/display/activity.py. */
function describeActivity(agent) {
  const {activity, work = [], open_reactions: open = 0} = agent;
  if (activity === undefined) return agent.state;
  if (showsFault(agent)) return agent.fault.text;
  if (activity === "gone") return open ? `offline, with ${formatCount(open, "open reaction")}` : "offline";
  if (activity === "idle" || activity === "stopped" || !work.length) return activity;
  const same = work.filter((work) => work.activity === activity);
  return describeWork(same.length ? same : work);
}

/** Describe reactions of one agent that have the same activity. */
function describeWork(work) {
  const triggers = listFew(work.map((work) => `#${work.trigger}`));
  switch (work[0].activity) {
    case "works": return `working on ${triggers}`;
    case "waits": return `waiting for ${describeAwaited(work) || `others, on ${triggers}`}`;
    case "queued": return `${triggers} queued`;
    case "held": return `silent on ${triggers}: taken over by a person`;
    case "stopping": return `stopping ${triggers}`;
    default: return `interrupted on ${triggers}`;
  }
}

function describeAwaited(work) {
  const names = [...new Set(work.flatMap((work) => work.waits_for ?? []))];
  const requests = [...new Set(work.flatMap((work) => work.decisions ?? []))].map((seq) => `#${seq}`);
  return [names.length && listFew(names), requests.length && `approval of ${listFew(requests)}`].filter(Boolean).join(" and ");
}

/** Return the availability of an agent as [dot, text], in words for people who do not know sessions. */
export function describeAvailability(agent) {
  const {state, activity} = agent;
  if (showsFault(agent)) return ["fault", "Cannot answer right now"];
  if (activity === "stopped") return ["stopped", "Stopped"];
  if (state !== "online") return ["gone", "Offline"];
  return activity === "works" ? ["works", "Working…"] : ["online", "Available"];
}

const listFew = (names) => names.slice(0, 5).join(", ") + (names.length > 5 ? ` and ${names.length - 5} more` : "");

/** The screen with all participants, or with the page of the participant `id`. */
export function Agents({id}) {
  return id ? html`<${One} id=${id} />` : html`<${All} />`;
}

function All() {
  const list = useRef(null);
  useRows(list);
  const shown = sorted.value.filter((item) => (kind.value === "agent") === (item.kind === "agent"));
  return html`<div class="screen"><${Head} title="Agents"><${Choice} label="Kind of participant" value=${kind.value} options=${[["agent", "Agents"], ["human", "People and services"]]} onChoose=${(choice) => { kind.value = choice; }} /><//>
    ${shown.length ? html`<ul class="card card-list" ref=${list} aria-label="Participants">${shown.map((item) => html`<li key=${item.agent_id}><a class="row" data-row href=${linkTo.agent(item.agent_id)}>
        <${Face} id=${item.agent_id} /><span class="row-main"><span class="row-line"><${Agent} id=${item.agent_id} /><span class="state"><${Dot} agent=${item} />${describeActivity(item)}</span></span>
          <span class="faint cut" dir="auto">${item.card?.description || (item.kind === "agent" ? "No description" : item.kind)}</span></span></a></li>`)}</ul>`
      : !sorted.value.length ? html`<${Loading} />` : html`<${Empty} icon="agents" title="Nobody here yet">Agents appear here once they have joined this network.<//>`}</div>`;
}

const Dot = ({agent}) => html`<span class=${`dot ${showsFault(agent) ? "fault" : agent.activity ?? agent.state}`} aria-hidden="true"></span>`;

function One({id}) {
  const agent = agents.value[id];
  if (!agent) return html`<div class="screen"><${Head} title=${id} back=${linkTo.agents()} />${!sorted.value.length ? html`<${Loading} />` : html`<${Empty} icon="agents" title="There is no participant with this id" />`}</div>`;
  const {card = {}, work = [], open_reactions: open = 0} = agent;
  const facts = [["Kind", agent.kind], ["Session", agent.state], ["Visibility", card.visibility], ["Open reactions", open || undefined]].filter(([, value]) => value);
  const tools = (card.tools ?? []).map((tool) => (typeof tool === "string" ? {name: tool} : tool));
  const direct = directThread(me.value.agent_id, id);
  return html`<div class="screen"><${Head} title=${html`<${Agent} id=${id} />`} back=${linkTo.agents()}>
      ${id !== me.value.agent_id && html`<a class="button primary" href=${linkTo.thread(direct)}>Message</a>`}<a class="button" href=${linkTo.cost({agent: id})}>Cost</a><//>
    <div class="row profile"><${Face} id=${id} /><div class="row-main"><p class="state"><${Dot} agent=${agent} />${describeActivity(agent)}</p>
      ${card.description && html`<p dir="auto">${card.description}</p>`}
      ${card.tags?.length > 0 && html`<p class="tools">${card.tags.map((tag) => html`<${Badge}><bdi>${tag}</bdi><//>`)}</p>`}</div></div>
    ${agent.fault && html`<${Fault} fault=${agent.fault} />`}
    ${agent.kind === "agent" && me.value.is_operator && !isReadOnly.value && html`<${Process} id=${id} agent=${agent} />`}
    ${agent.kind === "human" && me.value.is_operator && !isReadOnly.value && html`<${Logins} id=${id} state=${agent.state} />`}
    ${work.length > 0 && html`<section class="section"><h2>Open reactions</h2><ul class="card card-list">${work.map((work) => html`<${Work} key=${work.reaction} work=${work} />`)}</ul>
      ${open > work.length && html`<p class="faint">and ${open - work.length} more</p>`}</section>`}
    <section class="section"><h2>Card</h2><dl class="facts">${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd dir="auto">${value}</dd></div>`)}</dl></section>
    ${tools.length > 0 && html`<section class="section"><h2>Tools</h2><ul class="card card-list">${tools.map((tool) => html`
      <li class="row tool"><code dir="auto">${tool.name}</code><span class="faint" dir="auto">${tool.description ?? ""}</span></li>`)}</ul></section>`}
    ${agent.kind === "agent" && html`<${Models} id=${id} />`}</div>`;
}

/** The fault that keeps an agent from working. Only operators see the reason and the advice. */
function Fault({fault}) {
  const {text, count, since, last_at: last, reason, to_do: toDo} = fault;
  return html`<section class="section fault" role="status"><h2>Cannot answer</h2><p dir="auto">${text} <${Age} at=${last} /></p>
    ${toDo && html`<p>${toDo}</p>`}${reason && html`<p class="faint" dir="auto">${reason}</p>`}
    ${count > 1 && html`<p class="faint">${count} times, the first <${Age} at=${since} /></p>`}</section>`;
}

/** The logins of a person, with a button that creates a login link. For operators. */
function Logins({id, state}) {
  const {value, again} = useFetched(() => listTokens(id), [id, state]);
  const [link, setLink] = useState("");
  const make = async () => {
    const code = makeToken();
    const {public_url: publicUrl} = await actions.call("network.info");
    await actions.call("network.create_login", {agent_id: id, login_hash: sha256(code)});
    setLink(`${publicUrl ?? new URL(".", location.href).href.replace(/\/$/, "")}/#login=${id}~${code}`);
  };
  return html`<section class="section" aria-label="Logins"><h2>Logins</h2>
    ${value?.length ? html`<ul class="card card-list">${value.map((login) => html`<li class="row tool" key=${login.hash}><code>${login.hash}…</code>
      <span class="faint">${login.sessions ? formatCount(login.sessions, "session") : "not connected"}, since <${Age} at=${login.created_at} /></span>
      <${Button} kind="danger" run=${async () => { await actions.call("network.revoke_token", {agent_id: id, token_hash: login.hash}); again(); }}>Log out<//></li>`)}</ul>` : html`<p class="faint">No logins for ${id}.</p>`}
    <div class="tools"><${Button} run=${make}>New login link<//></div>
    ${link && html`<p role="status">Give this link to ${id}. It works once, within 10 minutes: <input class="mono" readonly aria-label="Login link for ${id}" value=${link} onFocus=${(event) => event.target.select()} /></p>`}</section>`;
}

async function listTokens(id) {
  const logins = [];
  for (let after; ;) {
    const {tokens, has_more: hasMore} = await actions.call("network.list_tokens", after === undefined ? {} : {after});
    logins.push(...tokens.filter((token) => token.agent_id === id && !token.revoked));
    if (!hasMore) return logins;
    after = tokens.at(-1).hash;
  }
}

const PROCESS_STATES = {taken_over: "replaced by another runner", restarting: "crashed, restarting", ended: "ended"};

/** The process of an agent that the node runs, with the actions of an operator. The component is empty for an agent
 * that runs elsewhere.
 */
function Process({id, agent}) {
  const {value, again} = useFetched(() => actions.call("network.node_agents"), [id, agent.state, agent.fault?.last_at]);
  const process = value?.agents.find((agent) => agent.agent_id === id);
  if (!process) return null;
  const control = (action) => async () => { await actions.call("network.control_agent", {agent_id: id, action}); again(); };
  const {state, file, error, has_changed: hasChanged} = process;
  const isStopped = state === "stopped" || state === "ended";
  return html`<section class="section" aria-label="Process"><h2>Process</h2>
    <p>${PROCESS_STATES[state] ?? state} <span class="faint" dir="auto">${file}</span></p>
    ${error && html`<p class="faint" dir="auto">${error}</p>`}
    ${hasChanged && html`<p role="status">${file.split("/").pop()} has changed. Reload the agent to apply the change.</p>`}
    <div class="tools"><${Button} kind=${hasChanged ? "primary" : ""} run=${control("reload")}>Reload<//>
      ${isStopped ? html`<${Button} run=${control("start")}>Start<//>` : html`<${Button} run=${control("restart")}>Restart<//>
      <${Button} kind="danger" icon="stop" run=${control("stop")}>Stop agent<//>`}</div></section>`;
}

/** The models that an agent called, according to its records, because its card names no model. The list is empty if the
 * reader may not see the records. */
function Models({id}) {
  const {value} = useFetched(() => actions.call("network.cost_report", {by: "model", agent_id: id}), [id]);
  if (!value?.groups.length) return null;
  return html`<section class="section"><h2>Models</h2><ul class="card card-list">${value.groups.map((group) => html`<li class="row tool" key=${group.model}><b dir="auto">${group.model}</b>
    <span class="faint">${group.calls.toLocaleString()} call${group.calls === 1 ? "" : "s"}, ${group.prompt_tokens.toLocaleString()} tokens in, ${group.completion_tokens.toLocaleString()} out, ${writeCost(group)}</span></li>`)}</ul></section>`;
}

function Work({work}) {
  const {reaction, thread_id: thread, trigger, at} = work;
  return html`<li class="row"><div class="row-main"><span class="row-line"><span class="state">${describeWork([work])}</span>${at && html`<${Age} at=${at} label="for " />`}</span>
    <a class="cut" dir="auto" href=${linkTo.thread(thread, trigger)}>${nameHere(thread)}</a></div>
    ${!isReadOnly.value && html`<${Button} kind="danger" icon="stop" run=${() => actions.stop({reaction})}>Stop<//>`}</li>`;
}
