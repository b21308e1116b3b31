/**
 * The dialog of a channel with its name, topic and members. The hub decides who may change a channel. A refusal appears
 * next to the button. The dialog calls the mod `channels` and keeps no state.
 */
import {useState} from "#vendor/hooks.js";
import {nameOf} from "#core/text.js";
import {Agent, Button, Dialog, ErrorBox, Field, html, Loading, useFetched} from "#ui/parts.js";
import {go, linkTo} from "#ui/router.js";
import {actions, agents, me} from "#ui/store.js";

const MAX_OFFERED = 6;
const MAX_NAME_CHARS = 64;

/** Convert a text to a valid channel name. Return "" if the text has no letter or digit. */
export function makeChannelName(text) {
  const plain = text.normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase();
  const name = plain.replace(/[^a-z0-9._]+/g, "-").replace(/^[-._]+/, "").slice(0, MAX_NAME_CHARS);
  return name.replace(/[-._]+$/, "");
}

/** The dialog of a channel. @param {{id: string, onClose: () => void}} props `id`: the id of the channel's thread */
export function ChannelDialog({id, onClose}) {
  const name = nameOf(id);
  const {value, error, again} = useFetched(() => readChannel(name), [name]);
  const own = me.value.agent_id;
  const leave = async () => {
    await actions.call("channels.leave", {name});
    onClose();
    go(linkTo.threads());
  };
  return html`<${Dialog} title=${`Channel #${name}`} onClose=${onClose}>
    ${error ? html`<${ErrorBox} error=${error} retry=${again} />` : !value ? html`<${Loading} />` : html`
      <${Facts} key=${`${value.title} ${value.topic}`} channel=${value} mayRename=${mayManage(value)} again=${again} />
      <${Members} channel=${value} again=${again} />
      ${value.is_member && html`<div class="dialog-tools"><${Button} kind="danger" run=${leave}>Leave #${name}<//></div>`}
      ${value.owner === own && value.is_member && html`<p class="faint">You stay the owner of this channel after you leave it.</p>`}`}<//>`;
}

const mayManage = ({owner}) => owner === me.value.agent_id || me.value.is_operator;

async function readChannel(name) {
  const {channels} = await actions.call("channels.list", {});
  const found = channels.find((channel) => channel.name === name);
  if (!found) throw new Error(`There is no channel #${name}, or it is one that you may not see.`);
  const {members} = found.is_member || me.value.is_operator ? await actions.call("channels.members", {name}) : {members: []};
  return {...found, ids: members};
}

/** The form for the name and the topic of a channel. */
function Facts({channel, mayRename, again}) {
  const [title, setTitle] = useState(channel.title ?? "");
  const [topic, setTopic] = useState(channel.topic);
  const {name} = channel;
  const save = async () => {
    if (title.trim() !== (channel.title ?? "")) await actions.call("channels.set_title", {name, title: title.trim()});
    if (topic.trim() !== channel.topic) await actions.call("channels.set_topic", {name, topic: topic.trim()});
    again();
  };
  return html`<form onSubmit=${(event) => event.preventDefault()}>
    ${mayRename && html`<${Field} label="Name" isLabelSeen maxlength="100" placeholder=${name} value=${title} onInput=${(event) => setTitle(event.target.value)} />`}
    <${Field} label="Topic" isLabelSeen maxlength="1000" value=${topic} onInput=${(event) => setTopic(event.target.value)} />
    <div class="dialog-tools"><${Button} type="submit" run=${save}>Save<//></div></form>`;
}

function Members({channel, again}) {
  const [query, setQuery] = useState("");
  const [invited, setInvited] = useState([]);
  const {name, ids} = channel;
  const own = me.value.agent_id;
  const words = query.trim().toLowerCase();
  const offered = Object.values(agents.value).filter((agent) => !ids.includes(agent.agent_id) && agent.agent_id.includes(words)).slice(0, MAX_OFFERED);
  const invite = (agent_id) => async () => {
    await actions.call("channels.invite", {name, agent_id});
    setInvited([...invited, agent_id]);
  };
  const remove = (agent_id) => async () => {
    await actions.call("channels.remove", {name, agent_id});
    again();
  };
  return html`<section class="section"><h2>${ids.length === 1 ? "1 member" : `${ids.length} members`}</h2>
    <ul class="card card-list members" aria-label="Members">${ids.map((id) => html`<li key=${id} class="row row-line"><${Agent} id=${id} link />
      <span class="faint">${id === channel.owner ? "owner" : agents.value[id]?.kind ?? ""}</span>
      ${mayManage(channel) && id !== own && html`<${Button} kind="small danger" run=${remove(id)}>Remove<//>`}</li>`)}</ul>
    ${mayManage(channel) && html`<div class="section"><${Field} label="Invite" isLabelSeen type="search" placeholder="An agent or a person" value=${query} onInput=${(event) => setQuery(event.target.value)} />
      <ul class="choose" aria-label="Invite">${offered.map((agent) => html`<li key=${agent.agent_id} class="row-line"><${Agent} id=${agent.agent_id} /><span class="faint">${agent.kind}</span>
        ${invited.includes(agent.agent_id) ? html`<span class="state">Invited</span>` : html`<${Button} kind="small" run=${invite(agent.agent_id)}>Invite<//>`}</li>`)}</ul></div>`}
  </section>`;
}
