/** The menu of a thread: the person's own title for the thread, and whether the thread is pinned, muted or archived.
 * The hub stores these settings, and only this person sees them. */
import {useState} from "#vendor/hooks.js";
import {directThread, nameThread, partiesOf} from "#core/text.js";
import {ChannelDialog} from "#ui/channel.js";
import {Button, Dialog, Field, html, Menu} from "#ui/parts.js";
import {go, linkTo} from "#ui/router.js";
import {actions, me} from "#ui/store.js";

/** Return the id of a new conversation with a participant. */
export const newConversation = (id) => directThread(me.value.agent_id, id, `c-${Date.now().toString(36)}`);

/** The menu of a thread. @param {{thread: object, label: string}} props */
export function ThreadMenu({thread, label}) {
  const [isNaming, setNaming] = useState(false);
  const [isChannelOpen, setChannelOpen] = useState(false);
  const {thread_id: id, mark = {}, unread = 0} = thread;
  const set = (changed) => () => actions.mark(id, changed);
  const own = me.value.agent_id;
  const [other] = id.startsWith("direct:") && partiesOf(id).includes(own) ? partiesOf(id).filter((id) => id !== own) : [];
  const items = [
    other && {text: "New conversation", icon: "edit", run: () => go(linkTo.thread(newConversation(other)))},
    id.startsWith("channel:") && {text: "Members and settings…", icon: "agents", run: () => setChannelOpen(true)},
    unread > 0 && {text: "Mark as read", icon: "check", run: () => actions.markRead(id, thread.last_seq)},
    {text: "Rename…", icon: "edit", run: () => setNaming(true)},
    {text: mark.is_pinned ? "Unpin" : "Pin", icon: "pin", run: set({is_pinned: !mark.is_pinned})},
    {text: mark.is_muted ? "Unmute" : "Mute", icon: "mute", run: set({is_muted: !mark.is_muted})},
    {text: mark.is_archived ? "Unarchive" : "Archive", icon: "archive", run: set({is_archived: !mark.is_archived})},
  ];
  return html`<${Menu} label=${label} items=${items} />
    ${isChannelOpen && html`<${ChannelDialog} id=${id} onClose=${() => setChannelOpen(false)} />`}
    ${isNaming && html`<${Naming} thread=${thread} onClose=${() => setNaming(false)} />`}`;
}

function Naming({thread, onClose}) {
  const [text, setText] = useState(thread.mark?.title ?? "");
  const save = async () => {
    await actions.mark(thread.thread_id, {title: text.trim()});
    onClose();
  };
  const own = nameThread({thread_id: thread.thread_id}, me.value.agent_id);
  return html`<${Dialog} title="Rename thread" onClose=${onClose}><form onSubmit=${(event) => event.preventDefault()}>
    <${Field} label="Name (only for you; empty restores the default)" isLabelSeen maxlength="200" placeholder=${own} value=${text}
      onInput=${(event) => setText(event.target.value)} autofocus />
    <div class="dialog-tools"><${Button} kind="primary" type="submit" run=${save}>Save<//></div></form><//>`;
}
