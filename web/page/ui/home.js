/**
 * The first screen shows the last conversation, or the agents to talk to. This module only chooses the conversation.
 * Other modules draw the thread, and the dialog that starts a conversation.
 */
import {computed} from "#vendor/signals.js";
import {useEffect, useRef} from "#vendor/hooks.js";
import {partiesOf} from "#core/text.js";
import {describeAvailability} from "#ui/agents.js";
import {useRows} from "#ui/keys.js";
import {Agent, Button, Empty, Face, html, Loading} from "#ui/parts.js";
import {go, linkTo, route} from "#ui/router.js";
import {agents, isReadOnly, me, state, threads} from "#ui/store.js";
import {isBeginning, startWith} from "#ui/threads.js";

const isListed = computed(() => Boolean(state.value.is_listed));

/** Return the newest conversation in which this person takes part. If this person has none, return the newest
 * conversation that the person may read, or null. An operator's list also contains conversations between others, which
 * count only in the second case. */
function findLast() {
  const own = me.value.agent_id;
  const rank = ({thread_id: id, mark, last}) => {
    if (partiesOf(id).includes(own) && id.startsWith("direct:")) return 3;
    if (id === "broadcast") return 0; // mostly messages between agents
    return last?.sender_id === own || mark.read_upto > 0 ? 2 : 1;
  };
  const candidates = Object.values(threads.value).filter((thread) => thread.messages && thread.readers.includes(own)
    && !thread.thread_id.startsWith("mod:") && !thread.mark.is_archived && !thread.mark.is_muted);
  const best = Math.max(...candidates.map(rank)) >= 2 ? 2 : 0;
  const chosen = candidates.filter((item) => rank(item) >= best && rank(item) > 0);
  return chosen.sort((a, b) => b.last_seq - a.last_seq)[0] ?? null;
}

/** The first screen, which navigates to the last conversation if there is one. */
export function Home() {
  const isKnown = isListed.value && Boolean(me.value.agent_id);
  const last = isKnown && !isReadOnly.value ? findLast() : null;
  useEffect(() => { if (last) go(linkTo.thread(last.thread_id), {replace: true}); }, [last?.thread_id]);
  return isKnown && !last ? html`<${Welcome} />` : html`<${Loading} />`;
}

/** The agents with whom a person can talk, with their activity and availability. A click starts a conversation. */
export function Welcome() {
  const list = useRef(null);
  useRows(list, route.value.screen === "home");
  const listed = Object.values(agents.value).filter((agent) => agent.kind === "agent").sort(compare);
  return html`<div class="screen welcome"><h1 tabindex="-1">Who do you want to talk to?</h1>
    ${listed.length ? html`<ul class="card card-list" ref=${list} aria-label="Agents">${listed.map((item) => html`<${Offer} key=${item.agent_id} agent=${item} />`)}</ul>`
    : !Object.keys(agents.value).length ? html`<${Loading} />` : html`<${Empty} icon="agents" title="No agents yet">Agents appear here once they have joined this network.<//>`}
    <div class="tools"><${Button} run=${() => { isBeginning.value = true; }}>A person or a channel…<//></div></div>`;
}

function Offer({agent}) {
  const [dot, text] = describeAvailability(agent);
  return html`<li><button type="button" class="row" data-row onClick=${() => startWith(agent)}>
    <${Face} id=${agent.agent_id} /><span class="row-main"><span class="row-line"><${Agent} id=${agent.agent_id} />
      <span class="state"><span class=${`dot ${dot}`} aria-hidden="true"></span>${text}</span></span>
      <span class="what faint" dir="auto">${agent.card?.description || "No description"}</span></span></button></li>`;
}

/** Sort agents, available ones first. */
function compare(one, other) {
  const isAway = ({state: session, activity}) => Number(session !== "online" || activity === "stopped");
  return isAway(one) - isAway(other) || (one.agent_id < other.agent_id ? -1 : 1);
}
