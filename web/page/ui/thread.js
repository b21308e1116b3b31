/**
 * One thread: its head, its messages with what is under way, and where one writes. It owns what the reader has seen (the
 * line of what is new, the mark of what was read) and who is told that somebody looks; the parts draw themselves.
 */
import {useComputed, useSignal} from "#vendor/signals.js";
import {useEffect, useMemo, useRef, useState} from "#vendor/hooks.js";
import {namePlace, nameThread, partiesOf, textOf} from "#core/text.js";
import {isAwaited} from "#core/state.js";
import {isAsking, listThinking, listTyping, listViewing, listWorks} from "#core/under_way.js";
import {tellLine} from "#ui/approvals.js";
import {Composer} from "#ui/composer.js";
import {chooseRow, useConversation, useKeys} from "#ui/keys.js";
import {Work} from "#ui/live.js";
import {listRows, Message, Outgoing} from "#ui/messages.js";
import {Agent, Badge, Button, Choice, Dialog, Empty, ErrorBox, html, Icon, Loading, tellClock, tellMoment, useFetched} from "#ui/parts.js";
import {go, linkTo} from "#ui/router.js";
import {actions, fetchMessage, state} from "#ui/store.js";
import {ThreadMenu} from "#ui/thread_menu.js";
import {Windowed} from "#ui/windowed.js";

const VIEWING_EVERY_MS = 20_000;
const MARKED_MS = 2_500;
const RETRY_MS = 2_000;

/** What is refused here is nobody's to act on: the next look, or the connection's return, asks again. */
const quietly = (promise) => void promise?.catch(() => {});

/** The screen of a thread. @param {{id: string, at?: number}} props `at`: the seq of a message to begin at */
export function Thread({id, at}) {
  const me = useComputed(() => state.value.me).value;
  const known = useComputed(() => state.value.threads[id]).value;
  const thread = known ?? {thread_id: id, readers: [], mark: {read_upto: 0}};
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
  const isWaiting = useComputed(() => Object.values(state.value.outbox).some((it) => it.thread_id === id)).value;
  const isBegun = isMissing && isWaiting && id.startsWith("thread:"); // by the reply that is on its way
  const isThere = !isMissing || isBegun;
  useViewing(id, mayWrite && isThere);
  useConversation(field, isReadOnly || (isLoaded && !(mayWrite && isThere)));
  return html`<section class="thread" aria-label=${nameThread(thread, me.agent_id)}>
    <${ThreadHead} id=${id} thread=${thread} me=${me} isReadOnly=${isReadOnly} mayWrite=${mayWrite} isThere=${isThere} />
    ${!isThere && html`<${Missing} id=${id} me=${me} isReadOnly=${isReadOnly} retry=${() => actions.openThread(id, at)} />`}
    ${!isThere && !isWaiting ? null
    : error && !isMissing ? html`<${ErrorBox} error=${error} retry=${() => actions.openThread(id, at)} />`
    : !isLoaded && !thread.loaded?.seqs.length ? html`<div class="scroller"><${Loading} /></div>`
    : html`<${Messages} id=${id} at=${at} thread=${thread} me=${me} isReadOnly=${isReadOnly} mayWrite=${mayWrite} target=${target} field=${field} list=${list} />`}
    <${Typing} id=${id} me=${me} />
    ${mayWrite && isThere && html`<${Composer} key=${id} thread=${thread} me=${me} target=${target} field=${field} onSent=${sent} />`}
  </section>`;
}

/** Whether a message of this participant would be taken there, as far as a screen can tell. */
function mayWriteIn(id, thread, me) {
  const [kind, name = ""] = id.split(/:(.*)/s);
  if (kind === "direct") return partiesOf(id).includes(me.agent_id);
  if (kind === "mod") return name.endsWith(`~${me.agent_id}`) && !name.startsWith("network~");
  return !me.is_operator || !thread.readers?.length || thread.readers.includes(me.agent_id);
}

// --- the head

function ThreadHead({id, thread, me, isReadOnly, mayWrite, isThere}) {
  const works = useComputed(() => listWorks(state.value.under_way, id).length).value;
  const lookers = useComputed(() => listViewing(state.value.under_way, id).filter((it) => it !== state.value.me.agent_id).join(" ")).value;
  const {held, readers = []} = thread;
  const [isTaking, setTaking] = useState(false);
  const isPerson = isThere && !isReadOnly && (me.kind === "human" || me.is_operator) && (mayWrite || me.is_operator);
  return html`<header class="thread-head">
    <a class="icon-button" href=${linkTo.threads()} aria-label="To the threads"><${Icon} name="back" /></a>
    <div class="thread-title"><h1 tabindex="-1" dir="auto">${nameThread(thread, me.agent_id)}</h1>
      <p class="faint cut" title=${readers.join(", ")}>${isThere && html`<${Readers} id=${id} readers=${readers} me=${me.agent_id} />`}</p></div>
    <div class="head-tools">
      ${lookers && html`<${Badge} kind="good" title="They have this thread open">${lookers.split(" ").slice(0, 3).join(", ")} ${lookers.includes(" ") ? "look" : "looks"}<//>`}
      ${works > 0 && !isReadOnly && html`<${Button} kind="danger" icon="stop" title="Stop every reaction in this thread that you may stop" run=${() => actions.stop({thread_id: id})}>Stop<//>`}
      ${isPerson && thread.may_take && !held && html`<${Button} icon="hold" title="Answer here yourself: agents are silent meanwhile" run=${() => setTaking(true)}>Take over<//>`}
      ${isThere && !isReadOnly && html`<${ThreadMenu} thread=${thread} label="This thread" />`}
    </div>
    ${held && html`<p class="held" role="status"><${Icon} name="hold" /><span>${held.by === me.agent_id ? "You have" : html`<${Agent} id=${held.by} /> has`} taken this thread over
      <span class="faint"> since ${tellMoment(held.at)}</span>. Agents do not answer here${held.until ? html` until <b>${tellClock(held.until)}</b>` : ""}.</span>${isPerson && html`<${Button} run=${() => actions.give(id)}>Give back<//>`}</p>`}
    ${isTaking && html`<${TakeOver} thread=${thread} me=${me} onClose=${() => setTaking(false)} />`}
  </header>`;
}

const SPANS = [["15", "15 minutes"], ["60", "1 hour"], ["480", "8 hours"]];

/** Asks before agents are silenced, and says whom that concerns. */
function TakeOver({thread, me, onClose}) {
  const agents = useComputed(() => state.value.agents).value;
  const [minutes, setMinutes] = useState("60");
  const {thread_id: id, readers = []} = thread;
  const silent = readers.filter((it) => agents[it]?.kind === "agent");
  const isForMany = !id.startsWith("direct:");
  const who = silent.length > 4 ? `${silent.length} agents` : silent.join(", ") || "Agents";
  const take = async () => {
    await actions.take(id, Number(minutes) * 60_000);
    onClose();
  };
  return html`<${Dialog} title=${`Take over ${namePlace(id, me.agent_id)}?`} onClose=${onClose}>
    <p><b dir="auto">${who}</b> will not answer here${isForMany ? ", to anybody," : ""} until you give it back or the time is over. Their current work stops. Afterwards they read what was said meanwhile.</p>
    <div class="tools"><${Choice} label="For how long" value=${minutes} options=${SPANS} onChoose=${setMinutes} /></div>
    <div class="dialog-tools"><${Button} run=${onClose}>Cancel<//><${Button} kind="primary" run=${take}>Take over<//></div><//>`;
}

/** Who reads along; of the only other one, what is known of it. */
function Readers({id, readers, me}) {
  const others = readers.filter((it) => it !== me);
  const [only] = id.startsWith("direct:") ? partiesOf(id).filter((it) => it !== me) : [];
  const agent = useComputed(() => state.value.agents[only]).value;
  const isAtWork = useComputed(() => listThinking(state.value.under_way).includes(only)).value;
  if (only && others.length < 2) {
    const told = agent?.activity && agent.activity !== "gone" ? agent.activity : agent?.state;
    return [agent?.kind, isAtWork ? "working" : ({works: "working", waits: "waiting"})[told] ?? told, agent?.card?.description].filter((it) => typeof it === "string").join(" · ") || "…";
  }
  if (!others.length) return readers.length ? "only you" : "";
  return others.length > 6 ? `${others.slice(0, 5).join(", ")} and ${others.length - 5} more` : others.join(", ");
}

// --- what is not there

/** What this address leads to is not there, or not this reader's: which of it, where that can be told, and the way in. */
function Missing({id, me, isReadOnly, retry}) {
  const [kind, name = ""] = id.split(/:(.*)/s);
  const isChannel = kind === "channel" && !isReadOnly;
  const {value, isLoading} = useFetched(async () => isChannel && (await actions.call("channels.list", {})).channels.find((it) => it.name === name), [id]);
  const agents = useComputed(() => state.value.agents).value;
  if (isLoading) return html`<${Loading} />`;
  const join = async () => {
    await actions.call("channels.join", {name});
    await retry();
  };
  const mayJoin = value && (value.access === "open" || value.is_invited);
  const unknown = kind === "direct" ? partiesOf(id).filter((it) => it !== me.agent_id && !agents[it]) : [];
  const [title, told] = value ? [`You are not in #${name}`, mayJoin ? value.topic : "Somebody who is in it can invite you."]
    : isChannel ? [`There is no channel #${name}`, "Or none that you may see."]
    : unknown.length ? [`Nobody here is called ${unknown.join(" or ")}`, "The screen Agents lists who is here."]
    : ["There is no such conversation", "Or none that you may read."];
  return html`<${Empty} title=${title} icon="threads">${told}<//>
    <div class="tools">${mayJoin && html`<${Button} kind="primary" run=${join}>Join #${name}<//>`}
      ${!isReadOnly && html`<${Button} run=${retry}>Look again<//>`}<a class="button" href=${linkTo.threads()}>Threads</a></div>`;
}

// --- the messages

function Messages({id, at, thread, me, isReadOnly, mayWrite, target, field, list}) {
  const messages = useComputed(() => state.value.messages).value;
  const threads = useComputed(() => state.value.threads).value;
  const outbox = useComputed(() => state.value.outbox).value;
  const underWay = useComputed(() => state.value.under_way).value;
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
    thread, messages, me: me.agent_id, unread, awaits: (message) => isAwaited(state.value, message, mayDecide), works: listWorks(underWay, id), silent: underWay.silent[id],
    outbox: Object.values(outbox).filter((it) => it.thread_id === id),
  }), [thread.loaded, messages, outbox, underWay.works, underWay.undecided, underWay.silent, unread, mayDecide, inbox, mayDecide || agents]);
  const jump = (seq) => {
    const row = rows.find((it) => it.message?.seq === seq);
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
  const lastSeen = rows[rows.findLastIndex((it, index) => it.message && index < end)]?.message.seq ?? 0;
  seen.current = Math.max(seen.current, lastSeen);
  useRead(id, seen.current, isReadOnly);
  const {has_before: isMore, is_loading: isLoading, error, damaged} = thread.loaded ?? {};
  const hasBefore = isMore && !isLoading && !error;
  const [tries, setTries] = useState(0);
  useEffect(() => { // also where the top was reached while a page was still being fetched, or as soon as one had come
    if (!view.isNearTop || !hasBefore) return undefined;
    let later;
    actions.loadEarlier(id).catch(() => { later = setTimeout(() => setTries((it) => it + 1), RETRY_MS); });
    return () => clearTimeout(later);
  }, [view.isNearTop, view.first, thread.loaded, hasBefore, id, tries]);
  const draw = (row) => {
    if (row.kind === "silent") return html`<p class="message faint" role="status"><${Agent} id=${row.id} link /> finished without an answer.</p>`;
    if (row.kind === "work") return html`<${Work} work=${row.work} isWaiting=${isAsking(underWay, row.work)} mayStop=${mayWrite || me.is_operator} />`;
    if (row.kind === "outbox") return html`<${Outgoing} entry=${row.entry} me=${me.agent_id} />`;
    return html`<${Message} row=${row} replies=${threads[`thread:${row.message.seq}`]?.messages ?? 0} desk=${desk} />`;
  };
  const fresh = rows.filter((it) => it.message && it.message.seq > seen.current && it.message.sender_id !== me.agent_id);
  const begin = rows.find((it) => (at ? it.message?.seq === at : it.isUnread && unread.from > 0))?.key;
  return html`<div class="messages">
    ${rows.length === 0 ? html`<div class="scroller"><${Empty} title="Nothing was said here yet" icon="threads" /></div>`
    : html`<${Windowed} api=${list} rows=${rows} draw=${draw} begin=${begin} label="Messages" onScroll=${setView}
      head=${html`${id.startsWith("thread:") && !hasBefore && html`<${Root} seq=${Number(id.slice(7))} place=${rows[0].message?.to} desk=${desk} />`}<p class="earlier faint">${hasBefore ? "Earlier messages are loaded as you scroll up…" : "Beginning of the conversation."}${damaged?.length ? ` ${damaged.length} can no longer be read.` : ""}</p>`} />`}
    ${!view.isAtEnd && html`<button type="button" class="button to-end" onClick=${() => list.current.toEnd()}>${fresh.length ? `${fresh.length} new ↓` : "To the end ↓"}</button>`}
    <${Announcer} rows=${rows} me=${me.agent_id} /></div>`;
}

/** The message that the replies answer: it stands in the thread above. */
function Root({seq, place, desk}) {
  const known = useComputed(() => state.value.messages[seq]).value;
  const fetched = useFetched(async () => known ?? (place && fetchMessage(place, seq)), [seq, place, known]).value;
  if (fetched?.seq !== seq) return null;
  const row = {message: fetched, isFirst: true};
  return html`<div class="root"><a class="link-button" href=${linkTo.thread(fetched.thread_id, seq)}>In ${nameThread({thread_id: fetched.thread_id}, desk.me.agent_id)}</a><${Message} row=${row} replies=${0} desk=${desk} /></div>`;
}

/** Say new messages of others to those who do not see them; not what was there before. */
function Announcer({rows, me}) {
  const told = useRef(Infinity);
  const last = rows.findLast((it) => it.message)?.message;
  const isNew = last !== undefined && last.seq > told.current && last.sender_id !== me;
  const text = useRef("");
  if (isNew) text.current = `${last.sender_id}: ${tellLine(textOf(last)).slice(0, 300)}`;
  told.current = last?.seq ?? 0;
  return html`<p class="unseen" role="status" aria-live="polite">${text.current}</p>`;
}

function Typing({id, me}) {
  const names = useComputed(() => listTyping(state.value.under_way, id).filter((it) => it !== me.agent_id).join(", ")).value;
  return html`<p class="typing faint" aria-live="polite">${names && `${names} ${names.includes(",") ? "are" : "is"} typing…`}</p>`;
}

// --- what others learn of the reader

/** What is new: what was unread when the thread was opened, or has come since the page was last in front. */
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

/** Mark what was seen as read, while the page is in front. */
function useRead(id, seq, isReadOnly) {
  const sent = useRef(0);
  useEffect(() => {
    if (isReadOnly) return undefined;
    const tell = () => {
      const upto = state.peek().threads[id]?.mark?.read_upto ?? 0;
      if (document.hidden || seq <= Math.max(upto, sent.current)) return;
      sent.current = seq;
      quietly(actions.markRead(id, seq));
    };
    tell();
    document.addEventListener("visibilitychange", tell);
    return () => document.removeEventListener("visibilitychange", tell);
  }, [id, seq, isReadOnly]);
}

/** Tell the others in the thread that somebody looks at it, as long as that is so. */
function useViewing(id, isTold) {
  useEffect(() => {
    if (!isTold) return undefined;
    const tell = () => actions.viewing(id, !document.hidden);
    tell();
    const timer = setInterval(() => document.hidden || tell(), VIEWING_EVERY_MS);
    document.addEventListener("visibilitychange", tell);
    return () => {
      clearInterval(timer);
      document.removeEventListener("visibilitychange", tell);
      actions.viewing(id, false);
    };
  }, [id, isTold]);
}
