/** Who is here and what each really does, as the hub knows it from sessions and open reactions; and a page of each, with its card. */
import {computed, signal} from "#vendor/signals.js";
import {useRef, useState} from "#vendor/hooks.js";
import {readCost} from "#core/cost.js";
import {sha256} from "#core/hash.js";
import {directThread, tellCount} from "#core/text.js";
import {useRows} from "#ui/keys.js";
import {makeToken} from "#ui/login.js";
import {Age, Agent, Badge, Button, Choice, Empty, Face, Head, html, Loading, useFetched} from "#ui/parts.js";
import {writeCost} from "#ui/prices.js";
import {linkTo} from "#ui/router.js";
import {actions, agents, isReadOnly, me, nameHere} from "#ui/store.js";

const sorted = computed(() => Object.values(agents.value).sort((a, b) => rank(a) - rank(b) || (a.agent_id < b.agent_id ? -1 : 1)));
const kind = signal("agent");

/** Whether an agent that does nothing at the moment has a fault, which is then what it is said to do. */
const showsFault = ({activity, open_reactions: open = 0, fault}) => Boolean(fault) && (activity === "idle" || (activity === "gone" && !open));
const RANKS = {stopped: 0, works: 1, waits: 2, stopping: 2, queued: 2, held: 2, idle: 3, gone: 5};
const rank = (it) => showsFault(it) ? 0 : RANKS[it.activity] ?? (it.state === "online" ? 4 : 6);

/** What a participant does, in a few words: the twin of roundelay/runs/activity.py. */
function describeActivity(agent) {
  const {activity, work = [], open_reactions: open = 0} = agent;
  if (activity === undefined) return agent.state;
  if (showsFault(agent)) return agent.fault.text;
  if (activity === "gone") return open ? `gone, in the middle of ${tellCount(open, "reaction")}` : "gone";
  if (activity === "idle" || activity === "stopped" || !work.length) return activity;
  const same = work.filter((it) => it.activity === activity);
  return describeWork(same.length ? same : work);
}

/** What reactions of one agent that are in the same state do. */
function describeWork(work) {
  const triggers = listFew(work.map((it) => `#${it.trigger}`));
  switch (work[0].activity) {
    case "works": return `works on ${triggers}`;
    case "waits": return `waits for ${tellAwaited(work) || `others, on ${triggers}`}`;
    case "queued": return `has yet to take up ${triggers}`;
    case "held": return `is silent on ${triggers}: a person has taken over`;
    case "stopping": return `was asked to stop ${triggers}`;
    default: return `was interrupted on ${triggers}`;
  }
}

function tellAwaited(work) {
  const names = [...new Set(work.flatMap((it) => it.waits_for ?? []))];
  const requests = [...new Set(work.flatMap((it) => it.decisions ?? []))].map((it) => `#${it}`);
  return [names.length && listFew(names), requests.length && `a person's decision on ${listFew(requests)}`].filter(Boolean).join(" and ");
}

/** Whether an agent can be talked to now, in words for somebody who has never heard of sessions: [dot, text]. */
export function tellAvailability(agent) {
  const {state, activity} = agent;
  if (showsFault(agent)) return ["fault", "Cannot answer right now"];
  if (activity === "stopped") return ["stopped", "Stopped"];
  if (state !== "online") return ["gone", "Offline"];
  return activity === "works" ? ["works", "Working…"] : ["online", "Available"];
}

const listFew = (names) => names.slice(0, 5).join(", ") + (names.length > 5 ? ` and ${names.length - 5} more` : "");

/** The screen; with an `id` the page of one. */
export function Agents({id}) {
  return id ? html`<${One} id=${id} />` : html`<${All} />`;
}

function All() {
  const list = useRef(null);
  useRows(list);
  const found = sorted.value.filter((it) => (kind.value === "agent") === (it.kind === "agent"));
  return html`<div class="screen"><${Head} title="Agents"><${Choice} label="Whom to show" value=${kind.value} options=${[["agent", "Agents"], ["human", "People and services"]]} onChoose=${(it) => { kind.value = it; }} /><//>
    ${found.length ? html`<ul class="card card-list" ref=${list} aria-label="Who is here">${found.map((it) => html`<li key=${it.agent_id}><a class="row" data-row href=${linkTo.agent(it.agent_id)}>
        <${Face} id=${it.agent_id} /><span class="row-main"><span class="row-line"><${Agent} id=${it.agent_id} /><span class="state"><${Dot} agent=${it} />${describeActivity(it)}</span></span>
          <span class="faint cut" dir="auto">${it.card?.description || (it.kind === "agent" ? "Says nothing of itself" : it.kind)}</span></span></a></li>`)}</ul>`
      : !sorted.value.length ? html`<${Loading} />` : html`<${Empty} icon="agents" title="Nobody is here">Agents that have joined this network once are listed here.<//>`}</div>`;
}

const Dot = ({agent}) => html`<span class=${`dot ${showsFault(agent) ? "fault" : agent.activity ?? agent.state}`} aria-hidden="true"></span>`;

function One({id}) {
  const agent = agents.value[id];
  if (!agent) return html`<div class="screen"><${Head} title=${id} back=${linkTo.agents()} />${!sorted.value.length ? html`<${Loading} />` : html`<${Empty} icon="agents" title="Nobody is registered under this id" />`}</div>`;
  const {card = {}, work = [], open_reactions: open = 0} = agent;
  const facts = [["Kind", agent.kind], ["Session", agent.state], ["Visibility", card.visibility], ["Open reactions", open || undefined]].filter(([, it]) => it);
  const tools = (card.tools ?? []).map((it) => (typeof it === "string" ? {name: it} : it));
  const direct = directThread(me.value.agent_id, id);
  return html`<div class="screen"><${Head} title=${html`<${Agent} id=${id} />`} back=${linkTo.agents()}>
      ${id !== me.value.agent_id && html`<a class="button primary" href=${linkTo.thread(direct)}>Write</a>`}<a class="button" href=${linkTo.cost({agent: id})}>Cost</a><//>
    <div class="row profile"><${Face} id=${id} /><div class="row-main"><p class="state"><${Dot} agent=${agent} />${describeActivity(agent)}</p>
      ${card.description && html`<p dir="auto">${card.description}</p>`}
      ${card.tags?.length > 0 && html`<p class="tools">${card.tags.map((it) => html`<${Badge}><bdi>${it}</bdi><//>`)}</p>`}</div></div>
    ${agent.fault && html`<${Fault} fault=${agent.fault} />`}
    ${agent.kind === "agent" && me.value.is_operator && !isReadOnly.value && html`<${Process} id=${id} agent=${agent} />`}
    ${agent.kind === "human" && me.value.is_operator && !isReadOnly.value && html`<${Logins} id=${id} state=${agent.state} />`}
    ${work.length > 0 && html`<section class="section"><h2>What it works on</h2><ul class="card card-list">${work.map((it) => html`<${Work} key=${it.reaction} work=${it} />`)}</ul>
      ${open > work.length && html`<p class="faint">and ${open - work.length} more</p>`}</section>`}
    <section class="section"><h2>Card</h2><dl class="facts">${facts.map(([name, it]) => html`<div><dt>${name}</dt><dd dir="auto">${it}</dd></div>`)}</dl></section>
    ${tools.length > 0 && html`<section class="section"><h2>Tools</h2><ul class="card card-list">${tools.map((it) => html`
      <li class="row tool"><code dir="auto">${it.name}</code><span class="faint" dir="auto">${it.description ?? ""}</span></li>`)}</ul></section>`}
    ${agent.kind === "agent" && html`<${Models} id=${id} />`}</div>`;
}

/** What keeps it from its work; the reason, and what to do, are told to operators alone. */
function Fault({fault}) {
  const {text, count, since, last_at: last, reason, to_do: toDo} = fault;
  return html`<section class="section fault" role="status"><h2>Cannot answer</h2><p dir="auto">${text} <${Age} at=${last} /></p>
    ${toDo && html`<p>${toDo}</p>`}${reason && html`<p class="faint" dir="auto">${reason}</p>`}
    ${count > 1 && html`<p class="faint">${count} times, the first <${Age} at=${since} /></p>`}</section>`;
}

/** Where a person is logged in, and a new link for that person; for operators. */
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
    ${value?.length ? html`<ul class="card card-list">${value.map((it) => html`<li class="row tool" key=${it.hash}><code>${it.hash}…</code>
      <span class="faint">${it.sessions ? tellCount(it.sessions, "session") : "not connected"}, since <${Age} at=${it.created_at} /></span>
      <${Button} kind="danger" run=${async () => { await actions.call("network.revoke_token", {agent_id: id, token_hash: it.hash}); again(); }}>Log out<//></li>`)}</ul>` : html`<p class="faint">Nobody is logged in as ${id} with a token of its own.</p>`}
    <div class="tools"><${Button} run=${make}>New login link<//></div>
    ${link && html`<p role="status">Give this link to ${id}. It logs in once, within 10 minutes: <input class="mono" readonly aria-label="Login link for ${id}" value=${link} onFocus=${(event) => event.target.select()} /></p>`}</section>`;
}

async function listTokens(id) {
  const found = [];
  for (let after; ;) {
    const {tokens, has_more: hasMore} = await actions.call("network.list_tokens", after === undefined ? {} : {after});
    found.push(...tokens.filter((it) => it.agent_id === id && !it.revoked));
    if (!hasMore) return found;
    after = tokens.at(-1).hash;
  }
}

const PROCESS_STATES = {taken_over: "another runner has taken over", restarting: "crashed, starts again soon", ended: "ended"};

/** The process of an agent that the node runs, with what an operator may do about it; nothing of an agent that runs elsewhere. */
function Process({id, agent}) {
  const {value, again} = useFetched(() => actions.call("network.node_agents"), [id, agent.state, agent.fault?.last_at]);
  const found = value?.agents.find((it) => it.agent_id === id);
  if (!found) return null;
  const control = (action) => async () => { await actions.call("network.control_agent", {agent_id: id, action}); again(); };
  const {state, file, error, has_changed: hasChanged} = found;
  const isStopped = state === "stopped" || state === "ended";
  return html`<section class="section" aria-label="Process"><h2>Process</h2>
    <p>${PROCESS_STATES[state] ?? state} <span class="faint" dir="auto">${file}</span></p>
    ${error && html`<p class="faint" dir="auto">${error}</p>`}
    ${hasChanged && html`<p role="status">${file.split("/").pop()} has changed. The agent goes on with the file as loaded until you reload it.</p>`}
    <div class="tools"><${Button} kind=${hasChanged ? "primary" : ""} run=${control("reload")}>Reload<//>
      ${isStopped ? html`<${Button} run=${control("start")}>Start<//>` : html`<${Button} run=${control("restart")}>Restart<//>
      <${Button} kind="danger" icon="stop" run=${control("stop")}>Stop agent<//>`}</div></section>`;
}

/** What it has asked, by its records: the card names no model. Nothing where those are not the reader's to see. */
function Models({id}) {
  const {value} = useFetched(() => readCost(actions.call, {agent_id: id}, "model"), [id]);
  if (!value?.groups.length) return null;
  return html`<section class="section"><h2>Models it has asked</h2><ul class="card card-list">${value.groups.map((it) => html`<li class="row tool" key=${it.model}><b dir="auto">${it.model}</b>
    <span class="faint">${it.calls.toLocaleString()} call${it.calls === 1 ? "" : "s"}, ${it.prompt_tokens.toLocaleString()} tokens in, ${it.completion_tokens.toLocaleString()} out, ${writeCost(it)}</span></li>`)}</ul></section>`;
}

function Work({work}) {
  const {reaction, thread_id: thread, trigger, at} = work;
  return html`<li class="row"><div class="row-main"><span class="row-line"><span class="state">${describeWork([work])}</span>${at && html`<${Age} at=${at} label="for " />`}</span>
    <a class="cut" dir="auto" href=${linkTo.thread(thread, trigger)}>${nameHere(thread)}</a></div>
    ${!isReadOnly.value && html`<${Button} kind="danger" icon="stop" run=${() => actions.stop({reaction})}>Stop<//>`}</li>`;
}
