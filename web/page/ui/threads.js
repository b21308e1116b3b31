/**
 * The list of conversations with unread counts, last messages and working agents. A person can also start conversations
 * and join channels here.
 */
import {computed, signal} from "#vendor/signals.js";
import {useRef, useState} from "#vendor/hooks.js";
import {directThread, formatCount, nameThread, partiesOf} from "#core/text.js";
import {describeLine} from "#ui/approvals.js";
import {makeChannelName} from "#ui/channel.js";
import {useKeys, useRows} from "#ui/keys.js";
import {Agent, Badge, Button, Choice, Count, Dialog, Empty, ErrorBox, Face, Field, Head, html, hueOf, Icon, Loading, Time, useFetched} from "#ui/parts.js";
import {go, linkTo} from "#ui/router.js";
import {actions, agents, isReadOnly, me, state, threads} from "#ui/store.js";
import {newConversation, ThreadMenu} from "#ui/thread_menu.js";

/** The number of threads with unread messages that are neither muted nor archived. */
export const unreadCount = computed(() => Object.values(threads.value).filter((thread) => thread.unread > 0 && !thread.mark?.is_muted && !thread.mark?.is_archived).length);

/** The agents that work in each thread, and the agents that wait for a person's decision: {thread_id: {works: [ids],
 * decisions: [ids]}}. */
const workers = computed(() => {
  const byThread = {};
  for (const {agent_id, work = []} of Object.values(agents.value)) {
    for (const reaction of work.filter(({activity}) => !["gone", "held", "interrupted"].includes(activity))) {
      const names = byThread[reaction.thread_id] ??= {works: [], decisions: []};
      const list = reaction.decisions?.length ? names.decisions : names.works;
      if (!list.includes(agent_id)) list.push(agent_id);
    }
  }
  return byThread;
});
const listSome = (ids) => ids.slice(0, 2).join(", ") + (ids.length > 2 ? ` and ${ids.length - 2} more` : "");

const isListed = computed(() => Boolean(state.value.is_listed));
const hasMore = computed(() => Boolean(state.value.has_more_threads));
const filter = signal("");
const which = signal("open");
const MORE = 200;
const shownCount = signal(MORE);

/** Return the threads to show. Pinned threads come first, then the threads with the newest messages. */
function listThreads() {
  const words = filter.value.toLowerCase();
  const isThere = ({messages, loaded}) => messages || (loaded?.is_open && !loaded.is_loading && !loaded.error); // has messages, or was just started
  const isShown = (thread) => isThere(thread) && (which.value === "archived" ? thread.mark?.is_archived : !thread.mark?.is_archived && (which.value !== "unread" || thread.unread > 0));
  const matching = Object.values(threads.value).filter((thread) => isShown(thread)
    && (!words || `${nameThread(thread, me.value.agent_id)} ${thread.thread_id} ${thread.last?.text ?? ""}`.toLowerCase().includes(words)));
  return matching.sort((a, b) => Boolean(b.mark?.is_pinned) - Boolean(a.mark?.is_pinned) || b.last_seq - a.last_seq);
}

/** Whether the dialog for a new conversation is open. */
export const isBeginning = signal(false);
const begin = () => { isBeginning.value = true; };

/** The list of threads. `chosen` is the open thread. */
export function Threads({chosen}) {
  const list = useRef(null);
  const field = useRef(null);
  useRows(list, !chosen);
  useKeys({
    n: {text: "New conversation", run: begin},
    f: {text: "Filter threads", run: () => field.current.querySelector("input").focus()},
  });
  const listed = listThreads();
  const hasArchived = Object.values(threads.value).some((thread) => thread.mark?.is_archived);
  const options = [["open", "All"], ["unread", "Unread"], ...(hasArchived ? [["archived", "Archived"]] : [])];
  return html`<div class="threads">
    <div class="threads-top"><${Head} title="Threads">${!isReadOnly.value && html`<button type="button" class="icon-button" aria-label="New conversation" title="New conversation (n)"
        onClick=${begin}><${Icon} name="plus" /></button>`}<//>
      <div class="tools" ref=${field}><${Field} label="Filter threads" type="search" placeholder="Filter" value=${filter.value} onInput=${(event) => { filter.value = event.target.value; }} />
        <${Choice} label="Which threads" value=${which.value} options=${options} onChoose=${(choice) => { which.value = choice; }} /></div></div>
    ${listed.length ? html`<ul ref=${list} class="card-list" aria-label="Conversations">${listed.slice(0, shownCount.value).map((item) => html`
        <${Row} key=${item.thread_id} thread=${item} isChosen=${item.thread_id === chosen} />`)}</ul>
        ${listed.length > shownCount.value && html`<div class="tools more"><${Button} run=${() => { shownCount.value += MORE; }}>${listed.length - shownCount.value} more<//></div>`}
        ${listed.length <= shownCount.value && hasMore.value && html`<div class="tools more"><${Button} run=${actions.loadMoreThreads}>Earlier threads<//></div>`}`
      : !isListed.value ? html`<${Loading} />` : html`<${Empty} icon="threads" title=${filter.value || which.value !== "open" ? "No matches" : "No conversations yet"}>
        ${!filter.value && which.value === "open" && !isReadOnly.value && html`<${Button} kind="primary" run=${begin}>Start a conversation<//>`}<//>`}
  </div>`;
}

function Row({thread, isChosen}) {
  const {thread_id: id, last, mark = {}, unread, held} = thread;
  const name = nameThread(thread, me.value.agent_id);
  const {works, decisions} = workers.value[id] ?? {works: [], decisions: []};
  const by = last?.sender_id === me.value.agent_id ? "You: " : id.startsWith("direct:") && partiesOf(id).includes(me.value.agent_id) ? "" : `${last?.sender_id}: `;
  const state = unread && !mark.is_muted ? "unread" : "";
  return html`<li class=${`thread-row ${state}`}>
    <a class="row" data-row href=${linkTo.thread(id)} aria-current=${isChosen ? "true" : undefined}>
      <${Face} id=${/^(direct|mod):|^broadcast$/.test(id) ? nameThread({thread_id: id}, me.value.agent_id) : id.startsWith("thread:") ? last?.sender_id ?? "?" : id.replace(/^\w+:/, "")} />
      <span class="row-main"><span class="row-line"><span class="thread-name cut" dir="auto">${name}</span>
          ${mark.is_pinned && html`<${Mark} icon="pin" text="pinned" />`}${mark.is_muted && html`<${Mark} icon="mute" text="muted" />`}
          ${last && html`<${Time} at=${last.sent_at} />`}</span>
        <span class="row-line"><span class="cut faint" dir="auto">${last ? by + describeLine(last.text) : "No messages"}</span>
          <${Count} of=${unread} what="unread" /></span>
        ${(works.length > 0 || decisions.length > 0 || held) && html`<span class="row-line badges">${held && html`<${Badge} kind="warn"><${Icon} name="hold" />${held.by === me.value.agent_id ? "You took over" : `Taken over by ${held.by}`}<//>`}
          ${decisions.length > 0 && html`<${Badge} kind="accent">Needs approval: ${listSome(decisions)}<//>`}
          ${works.length > 0 && html`<${Badge} kind="good"><span class="pulse" aria-hidden="true"></span>Working: ${listSome(works)}<//>`}</span>`}
      </span></a>
    ${!isReadOnly.value && html`<${ThreadMenu} thread=${thread} label=${`Actions for ${name}`} />`}</li>`;
}

const Mark = ({icon, text}) => html`<span class="mark-icon"><${Icon} name=${icon} /><span class="unseen">${text}</span></span>`;

/** Open a conversation with a participant. With an agent, start a new conversation if the first one has messages, as
 * other chat programs do. With a person, there is only one conversation. */
export function startWith({agent_id: id, kind}) {
  const first = directThread(me.value.agent_id, id);
  const isUsed = kind === "agent" && threads.value[first]?.messages > 0;
  go(linkTo.thread(isUsed ? newConversation(id) : first));
}

/** The dialog that starts a conversation with an agent or a person, joins a channel, or creates one. */
export function NewConversation({onClose}) {
  const [query, setQuery] = useState("");
  const [access, setAccess] = useState("open");
  const {value, error, again} = useFetched(() => actions.call("channels.list", {}), []);
  const channels = value?.channels ?? [];
  const name = query.trim().replace(/^#/, "");
  const isLike = (...texts) => texts.some((text) => text?.toLowerCase().includes(name.toLowerCase()));
  const people = Object.values(agents.value).filter((agent) => agent.agent_id !== me.value.agent_id && isLike(agent.agent_id, agent.card?.description));
  const open = (id) => {
    onClose();
    go(linkTo.thread(id));
  };
  const enter = (channel) => async () => {
    if (!channel.is_member) await actions.call("channels.join", {name: channel.name});
    open(`channel:${channel.name}`);
  };
  const created = makeChannelName(name) || (name && `channel-${Date.now().toString(36)}`);
  const create = async () => {
    await actions.call("channels.create", {name: created, access});
    if (created !== name) await actions.call("channels.set_title", {name: created, title: name.slice(0, 100)});
    open(`channel:${created}`);
  };
  const matching = channels.filter((channel) => isLike(channel.name, channel.title, channel.topic) || channel.name === created);
  const mayCreate = name && value && !channels.some((channel) => channel.name === created) && !agents.value[name];
  return html`<${Dialog} title="New conversation" onClose=${onClose}>
    <${Field} label="To" type="search" placeholder="An agent, a person or a channel" value=${query} onInput=${(event) => setQuery(event.target.value)} autofocus />
    <ul class="choose" aria-label="Participants and channels">
      ${isLike("everybody", "broadcast") && html`<li><button type="button" onClick=${() => open("broadcast")}><${Face} id="broadcast" isSmall /><span class="row-main"><b>Everybody</b><span class="faint">All participants read it</span></span></button></li>`}
      ${people.map((person) => html`<li key=${person.agent_id}><button type="button" onClick=${() => { onClose(); startWith(person); }}><${Face} id=${person.agent_id} isSmall />
        <span class="row-main"><span class="row-line"><${Agent} id=${person.agent_id} /><span class="faint">${person.kind}${person.state === "online" ? "" : ", offline"}</span></span><span class="faint cut" dir="auto">${person.card?.description ?? ""}</span></span></button></li>`)}
      ${matching.map((item) => html`<li key=${`#${item.name}`} class="row-line"><span class="face small" aria-hidden="true" style=${{"--hue": hueOf(item.name)}}>#</span><span class="row-main"><b dir="auto">#${item.title || item.name}</b><span class="faint cut" dir="auto">${item.topic || formatCount(item.members, "member")}</span></span>
        <${Button} run=${enter(item)}>${item.is_member ? "Open" : "Join"}<//></li>`)}
    </ul>
    ${error && html`<${ErrorBox} error=${error} retry=${again} />`}
    ${mayCreate && html`<div class="tools"><${Choice} label="Who may join" value=${access} options=${[["open", "Open"], ["invite", "By invitation"], ["closed", "Closed"]]} onChoose=${setAccess} />
      <${Button} kind="primary" run=${create}>Create #${makeChannelName(name) || "a channel"}<//>${created !== name && html`<span class="faint" dir="auto">Its title is “${name}”.</span>`}</div>`}<//>`;
}
