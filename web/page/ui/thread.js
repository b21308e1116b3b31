/**
 * One thread: its header, its messages with live activity, and the composer. This module owns the reader's state: the
 * messages that are new or were read, and the signal that this person views the thread. Other modules draw these parts.
 */
import {useComputed, useSignal} from "#vendor/signals.js";
import {useEffect, useMemo, useRef, useState} from "#vendor/hooks.js";
import {namePlace, nameThread, partiesOf, formatCount, textOf} from "#core/text.js";
import {isAwaited} from "#core/state.js";
import {isAsking, listThinking, listTyping, listViewing, listWorks} from "#core/live_activity.js";
import {describeLine} from "#ui/approvals.js";
import {Composer} from "#ui/composer.js";
import {chooseRow, useConversation, useKeys} from "#ui/keys.js";
import {Work} from "#ui/live.js";
import {listRows, Message, Outgoing} from "#ui/messages.js";
import {OpenItems} from "#ui/open_items.js";
import {Agent, Badge, Button, Choice, Dialog, Empty, ErrorBox, html, Icon, Loading, formatClock, formatMoment, useFetched} from "#ui/parts.js";
import {go, linkTo} from "#ui/router.js";
import {actions, fetchMessage, state} from "#ui/store.js";
import {ThreadMenu} from "#ui/thread_menu.js";
import {Windowed} from "#ui/windowed.js";

const VIEWING_EVERY_MS = 20_000;
const MARKED_MS = 2_500;
const RETRY_MS = 2_000;

/** Ignore a refusal that a person can do nothing about. The next draw or the next connection tries again. */
const quietly = (promise) => void promise?.catch(() => {});

/** The screen of a thread. @param {{id: string, at?: number}} props `at`: the seq of the message at which to start */
export function Thread({id, at}) {
  const me = useComputed(() => state.value.me).value;
  const row = useComputed(() => state.value.threads[id]).value;
  const thread = row ?? {thread_id: id, readers: [], mark: {read_upto: 0}};
  const isReadOnly = useComputed(() => Boolean(state.value.is_read_only)).value;
  const target = useSignal(null);
  const field = useRef(null);
  const list = useRef(null);
  const mayWrite = !isReadOnly && Boolean(me.agent_id) && mayWriteIn(id, thread, me);
  useEffect(() => {
    quietly(actions.openThread(id, at));
    return () => actions.closeThread(id);
  }, [id]);
  const sent = (goal) => {
    if (goal?.kind === "reply" && /^(channel:|broadcast$)/.test(id)) go(linkTo.thread(`thread:${goal.message.seq}`));
    else list.current?.toEnd();
  };
  const isLoaded = Boolean(thread.loaded) && !thread.loaded.is_loading;
  const error = thread.loaded?.error;
  const isMissing = error?.code === "unknown_message";
  const isWaiting = useComputed(() => Object.values(state.value.outbox).some((entry) => entry.thread_id === id)).value;
  const isBegun = isMissing && isWaiting && id.startsWith("thread:"); // the unsent reply creates the thread
  const isThere = !isMissing || isBegun;
  const working = useComputed(() => listWorks(state.value.live_activity, id).map((work) => work.agent_id).join(" ")).value;
  useViewing(id, mayWrite && isThere);
  useConversation(field, isReadOnly || (isLoaded && !(mayWrite && isThere)));
  return html`<section class="thread" aria-label=${nameThread(thread, me.agent_id)}>
    <${ThreadHead} id=${id} thread=${thread} me=${me} isReadOnly=${isReadOnly} mayWrite=${mayWrite} isThere=${isThere} />
    ${!isThere && html`<${Missing} id=${id} me=${me} isReadOnly=${isReadOnly} retry=${() => actions.openThread(id, at)} />`}
    ${!isThere && !isWaiting ? null
    : error && !isMissing ? html`<${ErrorBox} error=${error} retry=${() => actions.openThread(id, at)} />`
    : !isLoaded && !thread.loaded?.seqs.length ? html`<div class="scroller"><${Loading} /></div>`
    : html`<${Messages} id=${id} at=${at} thread=${thread} me=${me} isReadOnly=${isReadOnly} mayWrite=${mayWrite} target=${target} field=${field} list=${list} />`}
    ${isLoaded && !isReadOnly && html`<${OpenItems} seqs=${thread.loaded.seqs} working=${working} />`}
    <${Typing} id=${id} me=${me} />
    ${mayWrite && isThere && html`<${Composer} key=${id} thread=${thread} me=${me} target=${target} field=${field} onSent=${sent} />`}
  </section>`;
}

/** Return whether the hub would accept a message from this participant in the thread, as far as the page knows. */
function mayWriteIn(id, thread, me) {
  const [kind, name = ""] = id.split(/:(.*)/s);
  if (kind === "direct") return partiesOf(id).includes(me.agent_id);
  if (kind === "mod") return name.endsWith(`~${me.agent_id}`) && !name.startsWith("network~");
  return !me.is_operator || !thread.readers?.length || thread.readers.includes(me.agent_id);
}

// --- head

function ThreadHead({id, thread, me, isReadOnly, mayWrite, isThere}) {
  const works = useComputed(() => listWorks(state.value.live_activity, id).length).value;
  const lookers = useComputed(() => listViewing(state.value.live_activity, id).filter((id) => id !== state.value.me.agent_id).join(" ")).value;
  const {held, readers = []} = thread;
  const [isTaking, setTaking] = useState(false);
  const isPerson = isThere && !isReadOnly && (me.kind === "human" || me.is_operator) && (mayWrite || me.is_operator);
  return html`<header class="thread-head">
    <a class="icon-button" href=${linkTo.threads()} aria-label="To the threads"><${Icon} name="back" /></a>
    <div class="thread-title"><h1 tabindex="-1" dir="auto">${nameThread(thread, me.agent_id)}</h1>
      <p class="faint cut" title=${readers.join(", ")}>${isThere && html`<${Readers} id=${id} readers=${readers} me=${me.agent_id} />`}</p></div>
    <div class="head-tools">
      ${lookers && html`<${Badge} kind="good" title="They have this thread open">${lookers.split(" ").slice(0, 3).join(", ")} viewing<//>`}
      ${works > 0 && !isReadOnly && html`<${Button} kind="danger" icon="stop" title="Stop all agents in this thread" run=${() => actions.stop({thread_id: id})}>Stop<//>`}
      ${isPerson && thread.may_take && !held && html`<${Button} icon="hold" title="Answer here yourself; agents stay silent meanwhile" run=${() => setTaking(true)}>Take over<//>`}
      ${isThere && !isReadOnly && html`<${ThreadMenu} thread=${thread} label="This thread" />`}
    </div>
    ${held && html`<p class="held" role="status"><${Icon} name="hold" /><span>${held.by === me.agent_id ? "You have" : html`<${Agent} id=${held.by} /> has`} taken over this thread
      <span class="faint"> since ${formatMoment(held.at)}</span>. Agents do not answer here${held.until ? html` until <b>${formatClock(held.until)}</b>` : ""}.</span>${isPerson && html`<${Button} run=${() => actions.give(id)}>Give back<//>`}</p>`}
    ${isTaking && html`<${TakeOver} thread=${thread} me=${me} onClose=${() => setTaking(false)} />`}
  </header>`;
}

const SPANS = [["15", "15 minutes"], ["60", "1 hour"], ["480", "8 hours"]];

/** A dialog that confirms a takeover. The dialog lists the agents that become silent, and asks for how long. */
function TakeOver({thread, me, onClose}) {
  const agents = useComputed(() => state.value.agents).value;
  const [minutes, setMinutes] = useState("60");
  const {thread_id: id, readers = []} = thread;
  const silent = readers.filter((id) => agents[id]?.kind === "agent");
  const isForMany = !id.startsWith("direct:");
  const names = silent.length > 4 ? `${silent.length} agents` : silent.join(", ") || "Agents";
  const take = async () => {
    await actions.take(id, Number(minutes) * 60_000);
    onClose();
  };
  return html`<${Dialog} title=${`Take over ${namePlace(id, me.agent_id)}?`} onClose=${onClose}>
    <p><b dir="auto">${names}</b> will not answer here${isForMany ? ", to anybody," : ""} until you give the thread back or the time is over. Their current work stops. Afterwards they read what was said meanwhile.</p>
    <div class="tools"><${Choice} label="For how long" value=${minutes} options=${SPANS} onChoose=${setMinutes} /></div>
    <div class="dialog-tools"><${Button} run=${onClose}>Cancel<//><${Button} kind="primary" run=${take}>Take over<//></div><//>`;
}

/** The other readers of the thread. A single other reader is shown with its kind, activity and description. */
function Readers({id, readers, me}) {
  const others = readers.filter((id) => id !== me);
  const [only] = id.startsWith("direct:") ? partiesOf(id).filter((id) => id !== me) : [];
  const agent = useComputed(() => state.value.agents[only]).value;
  const isAtWork = useComputed(() => listThinking(state.value.live_activity).includes(only)).value;
  if (only && others.length < 2) {
    const activity = agent?.activity && agent.activity !== "gone" ? agent.activity : agent?.state;
    return [agent?.kind, isAtWork ? "working…" : ({works: "working…", waits: "waiting", held: "taken over"})[activity] ?? activity, agent?.card?.description].filter((value) => typeof value === "string").join(" · ") || "…";
  }
  if (!others.length) return readers.length ? "only you" : "";
  return others.length > 6 ? `${others.slice(0, 5).join(", ")} and ${others.length - 5} more` : others.join(", ");
}

// --- missing threads

/** A screen for an address without a thread that this reader may see. The screen explains what is missing, if known,
 * and what to do. */
function Missing({id, me, isReadOnly, retry}) {
  const [kind, name = ""] = id.split(/:(.*)/s);
  const isChannel = kind === "channel" && !isReadOnly;
  const {value, isLoading} = useFetched(async () => isChannel && (await actions.call("channels.list", {})).channels.find((channel) => channel.name === name), [id]);
  const agents = useComputed(() => state.value.agents).value;
  if (isLoading) return html`<${Loading} />`;
  const join = async () => {
    await actions.call("channels.join", {name});
    await retry();
  };
  const mayJoin = value && (value.access === "open" || value.is_invited);
  const unknown = kind === "direct" ? partiesOf(id).filter((id) => id !== me.agent_id && !agents[id]) : [];
  const [title, hint] = value ? [`You are not a member of #${name}`, mayJoin ? value.topic : "Ask a member to invite you."]
    : isChannel ? [`There is no channel #${name}`, "You may not be allowed to see it."]
    : unknown.length ? [`There is no participant ${unknown.join(" or ")}`, "Agents lists everybody here."]
    : ["There is no such conversation", "You may not be allowed to read it."];
  return html`<${Empty} title=${title} icon="threads">${hint}<//>
    <div class="tools">${mayJoin && html`<${Button} kind="primary" run=${join}>Join #${name}<//>`}
      ${!isReadOnly && html`<${Button} run=${retry}>Try again<//>`}<a class="button" href=${linkTo.threads()}>Threads</a></div>`;
}

// --- messages

/** Return a text for the beginning of a conversation. */
function describeBeginning(id, me) {
  if (id.startsWith("direct:") && partiesOf(id).includes(me)) return `This is the beginning of your conversation with ${namePlace(id, me)}`;
  return id.startsWith("channel:") ? `This is the beginning of ${namePlace(id, me)}` : "This is the beginning of the conversation";
}

function Messages({id, at, thread, me, isReadOnly, mayWrite, target, field, list}) {
  const messages = useComputed(() => state.value.messages).value;
  const threads = useComputed(() => state.value.threads).value;
  const outbox = useComputed(() => state.value.outbox).value;
  const liveActivity = useComputed(() => state.value.live_activity).value;
  const unread = useUnread(id, thread);
  const [view, setView] = useState({isAtEnd: true});
  const [marked, setMarked] = useState(at);
  const seen = useRef(0);
  const wanted = useRef(at);
  const isReader = !thread.readers?.length || thread.readers.includes(me.agent_id);
  const mayDecide = !isReadOnly && me.kind === "human" && isReader;
  const inbox = useComputed(() => state.value.inbox).value;
  const agents = useComputed(() => state.value.agents).value;
  const rows = useMemo(() => listRows({
    thread, messages, me: me.agent_id, unread, awaits: (message) => isAwaited(state.value, message, mayDecide), works: listWorks(liveActivity, id), silent: liveActivity.silent[id],
    outbox: Object.values(outbox).filter((entry) => entry.thread_id === id),
  }), [thread.loaded, messages, outbox, liveActivity.works, liveActivity.undecided, liveActivity.silent, unread, mayDecide, inbox, mayDecide || agents]);
  const jump = (seq) => {
    const row = rows.find((row) => row.message?.seq === seq);
    setMarked(seq);
    wanted.current = row ? undefined : seq;
    if (row) list.current.jumpTo(row.key);
    else quietly(actions.openThread(id, seq));
  };
  const jumping = useRef(jump);
  jumping.current = jump;
  useEffect(() => { if (at) jumping.current(at); }, [at]);
  useEffect(() => { if (wanted.current && messages[wanted.current]) jumping.current(wanted.current); }, [messages]);
  useEffect(() => {
    if (!marked) return undefined;
    const timer = setTimeout(() => setMarked(undefined), MARKED_MS);
    return () => clearTimeout(timer);
  }, [marked]);
  const desk = useMemo(() => ({
    me, isReadOnly, mayWrite, marked, mayDecide,
    reply: (message) => { target.value = {kind: "reply", message}; field.current?.focus(); },
    edit: (message) => { target.value = {kind: "edit", message}; field.current?.focus(); },
    jump: (seq) => jumping.current(seq),
    go: (place, seq) => go(linkTo.thread(place, seq)),
  }), [me, isReadOnly, mayWrite, mayDecide, marked]);
  const move = (step) => {
    chooseRow();
    list.current?.move(step);
  };
  useKeys({
    j: {text: "Next message", run: () => move(1)},
    k: {text: "Message before", run: () => move(-1)},
    r: {text: "Reply to the message", run: () => {
      const seq = Number(document.activeElement?.closest?.("[data-seq]")?.dataset.seq);
      if (!mayWrite) return false;
      return seq ? desk.reply(messages[seq]) : field.current?.focus();
    }},
  });
  const end = view.isAtEnd ? rows.length : rows.findIndex(({key}) => key === view.lastSeen) + 1;
  const lastSeen = rows[rows.findLastIndex((row, index) => row.message && index < end)]?.message.seq ?? 0;
  seen.current = Math.max(seen.current, lastSeen);
  useRead(id, seen.current, isReadOnly);
  const {has_before: isMore, is_loading: isLoading, error, damaged} = thread.loaded ?? {};
  const hasBefore = isMore && !isLoading && !error;
  const [tries, setTries] = useState(0);
  useEffect(() => { // run also when the reader has reached the top while a page was loading
    if (!view.isNearTop || !hasBefore) return undefined;
    let later;
    actions.loadEarlier(id).catch(() => { later = setTimeout(() => setTries((before) => before + 1), RETRY_MS); });
    return () => clearTimeout(later);
  }, [view.isNearTop, view.first, thread.loaded, hasBefore, id, tries]);
  const draw = (row) => {
    if (row.kind === "silent") return html`<p class="message faint" role="status"><${Agent} id=${row.id} link /> finished without an answer.</p>`;
    if (row.kind === "work") return html`<${Work} work=${row.work} isWaiting=${isAsking(liveActivity, row.work)} mayStop=${mayWrite || me.is_operator} />`;
    if (row.kind === "outbox") return html`<${Outgoing} entry=${row.entry} me=${me.agent_id} />`;
    return html`<${Message} row=${row} replies=${threads[`thread:${row.message.seq}`]?.messages ?? 0} desk=${desk} />`;
  };
  const fresh = rows.filter((row) => row.message && row.message.seq > seen.current && row.message.sender_id !== me.agent_id);
  const begin = rows.find((row) => (at ? row.message?.seq === at : row.isUnread && unread.from > 0))?.key;
  return html`<div class="messages">
    ${rows.length === 0 ? html`<div class="scroller"><${Empty} title=${describeBeginning(id, me.agent_id)} icon="threads" /></div>`
    : html`<${Windowed} api=${list} rows=${rows} draw=${draw} begin=${begin} label="Messages" onScroll=${setView}
      head=${html`${id.startsWith("thread:") && !hasBefore && html`<${Root} seq=${Number(id.slice(7))} place=${rows[0].message?.to} desk=${desk} />`}<p class="earlier faint">${hasBefore ? "Loading earlier messages…" : `${describeBeginning(id, me.agent_id)}.`}${damaged?.length ? ` ${formatCount(damaged.length, "message")} can no longer be read.` : ""}</p>`} />`}
    ${!view.isAtEnd && html`<button type="button" class="button to-end" onClick=${() => list.current.toEnd()}>${fresh.length ? `${fresh.length} new ↓` : "Jump to the end ↓"}</button>`}
    <${Announcer} rows=${rows} me=${me.agent_id} /></div>`;
}

/** The message that started a reply thread, with a link to the thread in which the message was sent. */
function Root({seq, place, desk}) {
  const loaded = useComputed(() => state.value.messages[seq]).value;
  const fetched = useFetched(async () => loaded ?? (place && fetchMessage(place, seq)), [seq, place, loaded]).value;
  if (fetched?.seq !== seq) return null;
  const row = {message: fetched, isFirst: true};
  return html`<div class="root"><a class="link-button" href=${linkTo.thread(fetched.thread_id, seq)}>In ${nameThread({thread_id: fetched.thread_id}, desk.me.agent_id)}</a><${Message} row=${row} replies=${0} desk=${desk} /></div>`;
}

/** Announces new messages of others to screen readers. Messages that were already loaded are not announced. */
function Announcer({rows, me}) {
  const announced = useRef(Infinity);
  const last = rows.findLast((row) => row.message)?.message;
  const isNew = last !== undefined && last.seq > announced.current && last.sender_id !== me;
  const text = useRef("");
  if (isNew) text.current = `${last.sender_id}: ${describeLine(textOf(last)).slice(0, 300)}`;
  announced.current = last?.seq ?? 0;
  return html`<p class="unseen" role="status" aria-live="polite">${text.current}</p>`;
}

function Typing({id, me}) {
  const names = useComputed(() => listTyping(state.value.live_activity, id).filter((id) => id !== me.agent_id).join(", ")).value;
  return html`<p class="typing faint" aria-live="polite">${names && `${names} ${names.includes(",") ? "are" : "is"} typing…`}</p>`;
}

// --- signals and read state

/** Return the range of new messages: those that were unread when the thread was opened, and those that arrived while
 * the page was hidden. */
function useUnread(id, thread) {
  const last = () => state.peek().threads[id]?.last_seq ?? 0;
  const [unread, setUnread] = useState(() => ({from: thread.mark?.read_upto ?? 0, upto: last()}));
  useEffect(() => {
    const turn = () => setUnread((before) => (document.hidden ? {from: last(), upto: Infinity} : {...before, upto: last()}));
    document.addEventListener("visibilitychange", turn);
    return () => document.removeEventListener("visibilitychange", turn);
  }, [id]);
  return unread;
}

/** Mark the visible messages as read while the page is visible. */
function useRead(id, seq, isReadOnly) {
  const sent = useRef(0);
  useEffect(() => {
    if (isReadOnly) return undefined;
    const markRead = () => {
      const upto = state.peek().threads[id]?.mark?.read_upto ?? 0;
      if (document.hidden || seq <= Math.max(upto, sent.current)) return;
      sent.current = seq;
      quietly(actions.markRead(id, seq));
    };
    markRead();
    document.addEventListener("visibilitychange", markRead);
    return () => document.removeEventListener("visibilitychange", markRead);
  }, [id, seq, isReadOnly]);
}

/** Signal to the other readers that this person views the thread. */
function useViewing(id, isTold) {
  useEffect(() => {
    if (!isTold) return undefined;
    const sendViewing = () => actions.viewing(id, !document.hidden);
    sendViewing();
    const timer = setInterval(() => document.hidden || sendViewing(), VIEWING_EVERY_MS);
    document.addEventListener("visibilitychange", sendViewing);
    return () => {
      clearInterval(timer);
      document.removeEventListener("visibilitychange", sendViewing);
      actions.viewing(id, false);
    };
  }, [id, isTold]);
}
