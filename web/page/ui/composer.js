/**
 * Where a person writes: the text with its draft, whom it answers or replaces, whom it asks, and what is attached. It
 * owns the drafts (localStorage, one for each participant and thread) and decides what is sent; sending, and waiting for
 * the hub, is the store's. `readMention` and `makeContent` are pure.
 */
import {useEffect, useLayoutEffect, useRef, useState} from "#vendor/hooks.js";
import {isObject, listOf} from "#core/json.js";
import {listMentioned} from "#core/mentions.js";
import {textOf, writeSize} from "#core/text.js";
import {listOpen, Meant, readYesOrNo} from "#ui/approvals.js";
import {mayFocusField} from "#ui/keys.js";
import {Agent, html, Icon} from "#ui/parts.js";
import {keep, load} from "#ui/storage.js";
import {actions, agents, state} from "#ui/store.js";

const MAX_OFFERED = 8;
const MAX_TEXT_FILE = 100_000;
const ROOM = 2_048; // of a frame, for all but the content
const TYPING_EVERY_MS = 3_000;

/** The beginning of a mention that ends at the caret: {begin, word}; null if there is none. */
function readMention(text, caret) {
  const found = /(?<![A-Za-z0-9._%+@-])@([a-z0-9._-]*)$/i.exec(text.slice(0, caret));
  return found && {begin: found.index, word: found[1].toLowerCase()};
}

/** A message's content: the text alone, or with what is attached; `before`: the content that it replaces, of which all
 * but the text stays. */
function makeContent(text, files, before) {
  const kept = isObject(before) && typeof before.text === "string" ? before : {};
  const list = (name, isImage) => [...listOf(kept[name]),
    ...files.filter((it) => it.isImage === isImage).map(({isImage: _, id: __, ...it}) => it)];
  const parts = Object.entries({images: list("images", true), files: list("files", false)}).filter(([, it]) => it.length);
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
  const [draft, setDraft] = useState(() => ({text: "", ...load(place)}));
  const [problem, setProblem] = useState("");
  const [offer, setOffer] = useState(null);
  const [meant, setMeant] = useState(null); // a yes or no that may be a decision
  const caret = useRef(null); // where it goes when the text is drawn
  const typedAt = useRef(0);
  const picker = useRef(null);
  const {files, setFiles, isOver, attach, paste, drag} = useAttachments(field, setProblem);
  const {text} = draft;
  const goal = target.value;

  const latest = useRef(draft); // an effect runs later than it was asked for: the person may have left the target since
  const write = (next) => {
    latest.current = next;
    setDraft(next);
    keep(place, next.text || next.target ? next : null);
  };
  const drafted = state.value.messages[draft.target?.seq];
  useEffect(() => { // a draft that answered something goes on doing so, once that is there
    if (drafted && !target.peek() && latest.current.target?.seq === drafted.seq) target.value = {kind: draft.target.kind, message: drafted};
  }, [drafted]);
  useLayoutEffect(() => { // in the same turn as the conversation opens: the next key belongs here
    if (mayFocusField() && !document.querySelector("dialog[open]")) field.current.focus({preventScroll: true});
  }, []);
  useLayoutEffect(() => { // before the next key, which this would take back
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
  const known = Object.values(agents.value);
  const isForMany = !id.startsWith("direct:") && !id.startsWith("mod:");
  const asked = isForMany ? listMentioned(text, known.filter((it) => it.kind === "agent").map((it) => it.agent_id)) : [];
  const offered = offer ? offerFor(offer.word, known, thread.readers ?? [], me.agent_id) : [];

  const look = (box) => setOffer(box.selectionStart === box.selectionEnd ? withChoice(readMention(box.value, box.selectionStart)) : null);
  const type = (event) => {
    write({...draft, text: event.target.value});
    setProblem("");
    setMeant(null);
    look(event.target);
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
    const said = text.trim();
    if (!said && !files.length) return;
    const how = isMeant || files.length || goal?.kind === "edit" ? null : readYesOrNo(said);
    const open = how ? listOpen(state.value, thread, me).filter((it) => goal === null || goal === undefined || it.message.seq === goal.message.seq) : [];
    if (open.length) return setMeant({how, text: said, requests: open});
    setMeant(null);
    const content = makeContent(said, files, goal?.kind === "edit" ? goal.message.content : undefined);
    const size = new TextEncoder().encode(JSON.stringify(content)).length;
    const most = (state.value.limits.max_frame_bytes ?? 262_144) - ROOM;
    if (size > most) {
      setProblem(`This comes to ${writeSize(size)}, and one message of this network takes ${writeSize(most)}. ${files.length ? "Leave an attachment out, or make it smaller." : "Send it in parts."}`);
      return;
    }
    const refuse = (error) => {
      setProblem(String(error?.message ?? error));
      if (!field.current?.value) write({text: said});
    };
    const give = async () => (goal?.kind === "edit" ? actions.resend(goal.message.seq, content)
      : actions.send({thread_id: id, content, reply_to: goal?.message.seq, requires_response: asked.length ? asked : undefined}));
    give().catch(refuse);
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
    if (event.isComposing || event.keyCode === 229) return; // a letter is being chosen, not sent
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
    ${files.length > 0 && html`<${Attached} files=${files} leaveOut=${(it) => setFiles(files.filter((other) => other !== it))} />`}
    ${problem && html`<p class="refused" role="alert">${problem}</p>`}
    ${meant && html`<${Meant} ...${meant} decide=${decide} send=${() => send({isMeant: true})} cancel=${leaveMeant} />`}
    ${offered.length > 0 && html`<${Offered} names=${offered} choice=${offer.choice} complete=${complete} />`}
    <div class="composer-line">
      <button type="button" class="icon-button" aria-label="Attach files" title="Attach files" onClick=${() => picker.current.click()}><${Icon} name="plus" /></button>
      <input type="file" multiple hidden ref=${picker} tabindex="-1" aria-label="Files to attach" onChange=${(event) => { attach(event.target.files); event.target.value = ""; }} />
      <textarea ref=${field} rows="1" dir="auto" placeholder=${goal?.kind === "edit" ? "Write it anew" : "Write a message"} aria-label="Message" value=${text} spellcheck
        aria-autocomplete="list" aria-haspopup="listbox" aria-controls=${offered.length ? "offer" : undefined} aria-activedescendant=${offered.length ? `offer-${offer.choice}` : undefined}
        onInput=${type} onKeyDown=${press} onPaste=${paste} onClick=${(event) => look(event.target)} onBlur=${() => setOffer(null)} />
      <button type="submit" class="button primary" disabled=${!text.trim() && !files.length}>Send</button>
    </div>
    ${asked.length > 0 && html`<p class="asks faint">Asks ${asked.map((it) => html`<${Agent} key=${it} id=${it} /> `)}for an answer; other agents read it later.</p>`}
  </form>`;
}

/** The files that are to be sent, and the ways in which they come: chosen, pasted, dragged. */
function useAttachments(field, setProblem) {
  const [files, setFiles] = useState([]);
  const [isOver, setOver] = useState(false);
  const attach = async (list) => {
    const most = state.value.limits.max_frame_bytes ?? 262_144;
    try {
      const read = await Promise.all([...list].map((it) => readFile(it, most)));
      setFiles((known) => [...known, ...read]);
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
  const drag = (is) => (event) => {
    if (![...(event.dataTransfer?.types ?? [])].includes("Files")) return;
    event.preventDefault();
    setOver(is);
    if (event.type === "drop") attach(event.dataTransfer.files);
  };
  return {files, setFiles, isOver, attach, paste, drag};
}

/** What is answered, or replaced. */
function Goal({goal, leave}) {
  const {kind, message} = goal;
  return html`<p class="chip">
    <span class="cut">${kind === "edit" ? "In place of: " : html`In answer to <${Agent} id=${message.sender_id} />: `}
      <bdi>${textOf(message).replace(/\s+/g, " ").slice(0, 120)}</bdi></span>
    <button type="button" class="icon-button" aria-label="Answer nothing in particular" onClick=${leave}><${Icon} name="close" /></button></p>`;
}

function Attached({files, leaveOut}) {
  return html`<ul class="files" aria-label="Attachments">${files.map((it) => html`<li key=${it.id}>
    ${it.isImage && html`<img src=${it.url} alt="" />`}<bdi class="cut">${it.name}</bdi> <span class="faint">${writeSize(it.size)}</span>
    <button type="button" class="icon-button" aria-label=${`Leave out ${it.name}`} onClick=${() => leaveOut(it)}><${Icon} name="close" /></button>
  </li>`)}</ul>`;
}

/** Participants whose ids begin with what stands behind the `@`. */
function Offered({names, choice, complete}) {
  const press = (name) => (event) => {
    event.preventDefault();
    complete(name);
  };
  const tell = ({kind, state: session} = {}) => `${kind ?? ""}${session === "online" ? "" : ", away"}`;
  return html`<ul class="offer" id="offer" role="listbox" aria-label="Participants">${names.map((name, index) => html`
    <li key=${name} id=${`offer-${index}`} role="option" aria-selected=${index === choice} onPointerDown=${press(name)}>
      <${Agent} id=${name} /> <span class="faint">${tell(agents.value[name])}</span></li>`)}</ul>`;
}

const withChoice = (found) => found && {...found, choice: 0};

/** Who may be meant: first those who read the thread, agents before people. */
function offerFor(word, agents, readers, me) {
  const rank = (it) => (readers.includes(it.agent_id) ? 0 : 2) + (it.kind === "agent" ? 0 : 1);
  const fitting = agents.filter((it) => it.agent_id !== me && it.agent_id.startsWith(word));
  fitting.sort((one, other) => rank(one) - rank(other) || one.agent_id.localeCompare(other.agent_id));
  return fitting.slice(0, MAX_OFFERED).map((it) => it.agent_id);
}

let fileCount = 0;

/** Read a file to be attached: an image as it is, a text as text, anything else as its bytes. */
async function readFile(file, most) {
  if (file.size > most) throw new Error(`${file.name} has ${writeSize(file.size)}, and one message of this network takes ${writeSize(most)}.`);
  const isImage = /^image\/(png|jpeg|gif|webp|avif)$/.test(file.type);
  const made = {id: ++fileCount, isImage, name: file.name || "file", media_type: file.type || "application/octet-stream", size: file.size};
  const isText = /^text\/|json|xml|yaml|javascript|csv/.test(file.type) || /\.(md|txt|py|js|ts|json|ya?ml|toml|csv|log|sh|rs|go|c|h|java|css|sql)$/i.test(file.name);
  if (isText && file.size <= MAX_TEXT_FILE) return {...made, text: await file.text()};
  const url = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
  return {...made, url};
}
