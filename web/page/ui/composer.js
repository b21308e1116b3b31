/**
 * The composer, in which a person writes a message. The composer contains the text with its draft, the message that the
 * text replies to or replaces, the agents that it asks, and its attachments. This module owns the drafts (in
 * localStorage, one per participant and thread) and decides what to send. The store sends the message and waits for the
 * hub. `readMention` and `makeContent` are pure.
 */
import {useEffect, useLayoutEffect, useRef, useState} from "#vendor/hooks.js";
import {isObject, listOf} from "#core/json.js";
import {listMentioned} from "#core/mentions.js";
import {textOf, writeSize} from "#core/text.js";
import {listOpen, Meant, readYesOrNo} from "#ui/approvals.js";
import {uploadFile} from "#ui/files.js";
import {mayFocusField} from "#ui/keys.js";
import {Agent, html, Icon} from "#ui/parts.js";
import {storeValue, loadValue} from "#ui/storage.js";
import {actions, agents, state} from "#ui/store.js";

const MAX_OFFERED = 8;
const MAX_TEXT_FILE = 100_000;
const ROOM = 2_048; // bytes of a frame that are reserved for everything except the content
const TYPING_EVERY_MS = 3_000;

/** Return the beginning of a mention that ends at the caret as {begin, word}, or null. */
function readMention(text, caret) {
  const match = /(?<![A-Za-z0-9._%+@-])@([a-z0-9._-]*)$/i.exec(text.slice(0, caret));
  return match && {begin: match.index, word: match[1].toLowerCase()};
}

/** Return the content of a message: only its text, or its text with attachments. A replacement keeps everything of
 * `before` except the text. */
function makeContent(text, files, before) {
  const kept = isObject(before) && typeof before.text === "string" ? before : {};
  const list = (name, isImage) => [...listOf(kept[name]),
    ...files.filter((file) => file.isImage === isImage).map(({isImage: _, id: __, ...file}) => file)];
  const parts = Object.entries({images: list("images", true), files: list("files", false)}).filter(([, value]) => value.length);
  const whole = {...kept, text, ...Object.fromEntries(parts)};
  return Object.keys(whole).length > 1 ? whole : text;
}

const placeOf = (me, id) => `roundelay.draft ${me} ${id}`;

/**
 * props: `thread`, `me`, `target` (a signal: {kind: "reply"|"edit", message} or null), `field` (a ref to the textarea),
 * `onSent`.
 */
export function Composer({thread, me, target, field, onSent}) {
  const id = thread.thread_id;
  const place = placeOf(me.agent_id, id);
  const [draft, setDraft] = useState(() => ({text: "", ...loadValue(place)}));
  const [problem, setProblem] = useState("");
  const [offer, setOffer] = useState(null);
  const [meant, setMeant] = useState(null); // a plain yes or no that may be meant as a decision
  const caret = useRef(null); // position of the caret after the next draw
  const typedAt = useRef(0);
  const picker = useRef(null);
  const {files, setFiles, isOver, attach, paste, drag} = useAttachments(field, setProblem);
  const {text} = draft;
  const goal = target.value;

  const latest = useRef(draft); // effects run late, and the person may have removed the target meanwhile
  const write = (next) => {
    latest.current = next;
    setDraft(next);
    storeValue(place, next.text || next.target ? next : null);
  };
  const drafted = state.value.messages[draft.target?.seq];
  useEffect(() => { // restore the target of a draft when its message is loaded
    if (drafted && !target.peek() && latest.current.target?.seq === drafted.seq) target.value = {kind: draft.target.kind, message: drafted};
  }, [drafted]);
  useLayoutEffect(() => { // run synchronously, so that the next key goes into this field
    if (mayFocusField() && !document.querySelector("dialog[open]")) field.current.focus({preventScroll: true});
  }, []);
  useLayoutEffect(() => { // run before the next key, whose letter a later effect would overwrite
    if (!goal) return;
    const text = goal.kind === "edit" && draft.target?.seq !== goal.message.seq ? textOf({content: goal.message.content?.text ?? goal.message.content}) : draft.text;
    write({text, target: {kind: goal.kind, seq: goal.message.seq}});
    field.current?.focus();
  }, [goal]);
  useLayoutEffect(() => {
    const box = field.current;
    box.style.height = "auto";
    box.style.height = `${Math.min(box.scrollHeight + 2, innerHeight * 0.4)}px`;
    if (caret.current !== null) box.setSelectionRange(caret.current, caret.current);
    caret.current = null;
  }, [text]);

  const leaveTarget = () => {
    target.value = null;
    write({text: goal?.kind === "edit" ? "" : text});
    field.current?.focus();
  };
  const participants = Object.values(agents.value);
  const isForMany = !id.startsWith("direct:") && !id.startsWith("mod:");
  const asked = isForMany ? listMentioned(text, participants.filter((item) => item.kind === "agent").map((item) => item.agent_id)) : [];
  const offered = offer ? offerFor(offer.word, participants, thread.readers ?? [], me.agent_id) : [];

  const updateOffer = (box) => setOffer(box.selectionStart === box.selectionEnd ? withChoice(readMention(box.value, box.selectionStart)) : null);
  const type = (event) => {
    write({...draft, text: event.target.value});
    setProblem("");
    setMeant(null);
    updateOffer(event.target);
    if (event.timeStamp - typedAt.current < TYPING_EVERY_MS && typedAt.current) return;
    typedAt.current = event.timeStamp;
    actions.typing(id);
  };
  const complete = (name) => {
    const end = field.current.selectionStart;
    const head = `${text.slice(0, offer.begin)}@${name} `;
    write({...draft, text: head + text.slice(end)});
    setOffer(null);
    caret.current = head.length;
  };
  const send = ({isMeant = false} = {}) => {
    const words = text.trim();
    if (!words && !files.length) return;
    const how = isMeant || files.length || goal?.kind === "edit" ? null : readYesOrNo(words);
    const open = how ? listOpen(state.value, thread, me).filter((request) => goal === null || goal === undefined || request.message.seq === goal.message.seq) : [];
    if (open.length) return setMeant({how, text: words, requests: open});
    setMeant(null);
    const content = makeContent(words, files, goal?.kind === "edit" ? goal.message.content : undefined);
    const size = new TextEncoder().encode(JSON.stringify(content)).length;
    const most = (state.value.limits.max_frame_bytes ?? 262_144) - ROOM;
    if (size > most) {
      setProblem(`This message has ${writeSize(size)}, and the limit of this network is ${writeSize(most)}. ${files.length ? "Remove an attachment, or make it smaller." : "Send it in parts."}`);
      return;
    }
    const refuse = (error) => {
      setProblem(String(error?.message ?? error));
      if (!field.current?.value) write({text: words});
    };
    const deliver = async () => (goal?.kind === "edit" ? actions.resend(goal.message.seq, content)
      : actions.send({thread_id: id, content, reply_to: goal?.message.seq, requires_response: asked.length ? asked : undefined}));
    deliver().catch(refuse);
    target.value = null;
    write({text: ""});
    setFiles([]);
    setOffer(null);
    typedAt.current = 0;
    onSent(goal);
  };
  const leaveMeant = () => {
    setMeant(null);
    field.current?.focus();
  };
  const decide = async (seq) => {
    await actions.decide(seq, meant.how);
    target.value = null;
    write({text: ""});
    leaveMeant();
  };
  const press = (event) => {
    if (event.isComposing || event.keyCode === 229) return; // the key belongs to an input method
    if (offered.length && chooseOffered(event)) return event.preventDefault();
    if (event.key === "Enter" && !event.shiftKey && !event.altKey && !event.metaKey) {
      event.preventDefault();
      send();
    } else if (event.key === "Escape" && goal) {
      event.preventDefault();
      leaveTarget();
    }
  };
  const chooseOffered = ({key}) => {
    const step = {ArrowDown: 1, ArrowUp: -1}[key];
    if (step) setOffer({...offer, choice: (offer.choice + step + offered.length) % offered.length});
    else if (key === "Enter" || key === "Tab") complete(offered[offer.choice] ?? offered[0]);
    else if (key === "Escape") setOffer(null);
    else return false;
    return true;
  };
  return html`<form class=${`composer${isOver ? " over" : ""}`} aria-label="Write a message" onSubmit=${(event) => { event.preventDefault(); send(); }}
      onDragOver=${drag(true)} onDragLeave=${drag(false)} onDrop=${drag(false)}>
    ${goal && html`<${Goal} goal=${goal} leave=${leaveTarget} />`}
    ${files.length > 0 && html`<${Attached} files=${files} leaveOut=${(file) => setFiles(files.filter((other) => other !== file))} />`}
    ${problem && html`<p class="refused" role="alert">${problem}</p>`}
    ${meant && html`<${Meant} ...${meant} decide=${decide} send=${() => send({isMeant: true})} cancel=${leaveMeant} />`}
    ${offered.length > 0 && html`<${Offered} names=${offered} choice=${offer.choice} complete=${complete} />`}
    <div class="composer-line">
      <button type="button" class="icon-button" aria-label="Attach files" title="Attach files" onClick=${() => picker.current.click()}><${Icon} name="plus" /></button>
      <input type="file" multiple hidden ref=${picker} tabindex="-1" aria-label="Files to attach" onChange=${(event) => { attach(event.target.files); event.target.value = ""; }} />
      <textarea ref=${field} rows="1" dir="auto" placeholder=${goal?.kind === "edit" ? "Edit your message" : "Write a message"} aria-label="Message" value=${text} spellcheck
        aria-autocomplete="list" aria-haspopup="listbox" aria-controls=${offered.length ? "offer" : undefined} aria-activedescendant=${offered.length ? `offer-${offer.choice}` : undefined}
        onInput=${type} onKeyDown=${press} onPaste=${paste} onClick=${(event) => updateOffer(event.target)} onBlur=${() => setOffer(null)} />
      <button type="submit" class="button primary" disabled=${!text.trim() && !files.length}>Send</button>
    </div>
    ${asked.length > 0 && html`<p class="asks faint">Asks ${asked.map((id) => html`<${Agent} key=${id} id=${id} /> `)}for an answer. Other agents read it later.</p>`}
  </form>`;
}

/** The files to send, with the ways to add files: choose, paste or drag them. */
function useAttachments(field, setProblem) {
  const [files, setFiles] = useState([]);
  const [isOver, setOver] = useState(false);
  const attach = async (list) => {
    const most = state.value.limits.max_frame_bytes ?? 262_144;
    try {
      const read = await Promise.all([...list].map((item) => readFile(item, most)));
      setFiles((before) => [...before, ...read]);
      setProblem("");
    } catch (error) {
      setProblem(error.message);
    }
    field.current?.focus();
  };
  const paste = (event) => {
    if (!event.clipboardData?.files.length) return;
    event.preventDefault();
    attach(event.clipboardData.files);
  };
  const drag = (isDragged) => (event) => {
    if (![...(event.dataTransfer?.types ?? [])].includes("Files")) return;
    event.preventDefault();
    setOver(isDragged);
    if (event.type === "drop") attach(event.dataTransfer.files);
  };
  return {files, setFiles, isOver, attach, paste, drag};
}

/** The message that the text replies to or replaces. */
function Goal({goal, leave}) {
  const {kind, message} = goal;
  return html`<p class="chip">
    <span class="cut">${kind === "edit" ? "Editing: " : html`Replying to <${Agent} id=${message.sender_id} />: `}
      <bdi>${textOf(message).replace(/\s+/g, " ").slice(0, 120)}</bdi></span>
    <button type="button" class="icon-button" aria-label="Cancel" onClick=${leave}><${Icon} name="close" /></button></p>`;
}

function Attached({files, leaveOut}) {
  return html`<ul class="files" aria-label="Attachments">${files.map((file) => html`<li key=${file.id}>
    ${file.isImage && file.url && html`<img src=${file.url} alt="" />`}<bdi class="cut">${file.name}</bdi> <span class="faint">${writeSize(file.size)}</span>
    <button type="button" class="icon-button" aria-label=${`Remove ${file.name}`} onClick=${() => leaveOut(file)}><${Icon} name="close" /></button>
  </li>`)}</ul>`;
}

/** A list of participants whose ids start with the text after the `@`. */
function Offered({names, choice, complete}) {
  const press = (name) => (event) => {
    event.preventDefault();
    complete(name);
  };
  const describeParticipant = ({kind, state: session} = {}) => `${kind ?? ""}${session === "online" ? "" : ", offline"}`;
  return html`<ul class="offer" id="offer" role="listbox" aria-label="Participants">${names.map((name, index) => html`
    <li key=${name} id=${`offer-${index}`} role="option" aria-selected=${index === choice} onPointerDown=${press(name)}>
      <${Agent} id=${name} /> <span class="faint">${describeParticipant(agents.value[name])}</span></li>`)}</ul>`;
}

const withChoice = (mention) => mention && {...mention, choice: 0};

/** Return the participants with which a mention can be completed. Readers of the thread come first, and agents come
 * before people. */
function offerFor(word, agents, readers, me) {
  const rank = (agent) => (readers.includes(agent.agent_id) ? 0 : 2) + (agent.kind === "agent" ? 0 : 1);
  const fitting = agents.filter((agent) => agent.agent_id !== me && agent.agent_id.startsWith(word));
  fitting.sort((one, other) => rank(one) - rank(other) || one.agent_id.localeCompare(other.agent_id));
  return fitting.slice(0, MAX_OFFERED).map((agent) => agent.agent_id);
}

let fileCount = 0;

/** Read a file to attach. An image stays an image, a text file becomes text, and any other file becomes bytes. A file
 * that is too large for a message is uploaded, if the node stores files. */
async function readFile(file, most) {
  const isImage = /^image\/(png|jpeg|gif|webp|avif)$/.test(file.type);
  const attachment = {id: ++fileCount, isImage, name: file.name || "file", media_type: file.type || "application/octet-stream", size: file.size};
  if (file.size > Math.min(most / 2, MAX_TEXT_FILE)) {
    try {
      return {...attachment, ...await uploadFile(file)};
    } catch (error) {
      if (error?.code !== "unknown_operation") throw error;
      if (file.size > most) throw new Error(`${file.name} has ${writeSize(file.size)}, and the limit of this network is ${writeSize(most)}.`);
    }
  }
  const isText = /^text\/|json|xml|yaml|javascript|csv/.test(file.type) || /\.(md|txt|py|js|ts|json|ya?ml|toml|csv|log|sh|rs|go|c|h|java|css|sql)$/i.test(file.name);
  if (isText && file.size <= MAX_TEXT_FILE) return {...attachment, text: await file.text()};
  const url = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read. Check its permissions, or choose another file.`));
    reader.readAsDataURL(file);
  });
  return {...attachment, url};
}
