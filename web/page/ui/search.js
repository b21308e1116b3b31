/** Finds messages by their words (`network.search`) and leads to each in its thread. What was found is drawn as text, never as HTML. */
import {useEffect, useRef, useState} from "#vendor/hooks.js";
import {fits, readQuery} from "#core/query.js";
import {fold, textOf} from "#core/text.js";
import {useRows} from "#ui/keys.js";
import {Agent, Button, Empty, ErrorBox, Face, Field, Head, html, Loading, Time, useFetched} from "#ui/parts.js";
import {go, linkTo} from "#ui/router.js";
import {actions, agents, nameHere} from "#ui/store.js";

const PAUSE_MS = 250;
const AROUND = 140;

/** The screen; `query` is the address's. */
export function Search({query}) {
  const [typed, setTyped] = useState(query);
  const field = useRef(null);
  useEffect(() => field.current.querySelector("input").focus(), []);
  const shown = useRef(query);
  useEffect(() => {
    if (shown.current === query) return; // as at the beginning: what was typed before this ran stays
    shown.current = query;
    setTyped((before) => (before.trim() === query ? before : query));
  }, [query]);
  useEffect(() => {
    const wait = setTimeout(() => typed.trim() !== query && go(linkTo.search(typed.trim()), {replace: true}), PAUSE_MS);
    return () => clearTimeout(wait);
  }, [typed]);
  return html`<div class="screen"><${Head} title="Search" />
    <form role="search" ref=${field} onSubmit=${(event) => { event.preventDefault(); go(linkTo.search(typed.trim()), {replace: true}); }}>
      <${Field} label="Words that the message has" type="search" placeholder="Words of a message" value=${typed} onInput=${(event) => setTyped(event.target.value)} />
      <${Filters} typed=${typed} onType=${setTyped} /></form>
    ${query ? html`<${Found} key=${query} query=${query} />` : html`<${Empty} icon="search" title="Everything that you may read">Case, accents, endings and the order of the words do not count; “in quotation marks” a word stands for itself.<//>`}</div>`;
}

/** Who said it, and when: each is a part of what is typed, so that an address holds it too. */
function Filters({typed, onType}) {
  const people = Object.keys(agents.value).sort();
  const {sender_id: sender = ""} = readQuery(typed);
  const day = (name) => new RegExp(`(?:^|\\s)${name}:(\\d{4}-\\d{2}-\\d{2})(?!\\S)`, "i").exec(typed)?.[1] ?? "";
  const set = (name) => (event) => {
    const rest = typed.replace(new RegExp(`(^|\\s)${name}:\\S*`, "gi"), "").trim();
    onType(event.target.value ? `${rest} ${name}:${event.target.value}`.trim() : rest);
  };
  return html`<div class="tools filters"><label class="field">From<select value=${sender} onChange=${set("from")}><option value="">anybody</option>
      ${people.map((it) => html`<option key=${it} value=${it}>${it}</option>`)}</select></label>
    <${Field} label="On or after" isLabelSeen type="date" value=${day("after")} onChange=${set("after")} />
    <${Field} label="Before" isLabelSeen type="date" value=${day("before")} onChange=${set("before")} /></div>`;
}

function Found({query}) {
  const list = useRef(null);
  const [older, setOlder] = useState([]);
  const [next, setNext] = useState(undefined);
  useRows(list);
  const {value, error, isLoading, again} = useFetched(() => actions.call("network.search", {query, limit: 30}), [query]);
  if (error) return html`<${ErrorBox} error=${error} retry=${again} />`;
  if (isLoading && !value) return html`<${Loading} what="Searching…" />`;
  const before = next === undefined ? value.next : next;
  const more = async () => {
    const page = await actions.call("network.search", {query, limit: 30, before});
    setOlder([...older, ...page.messages.toReversed()]);
    setNext(page.has_more ? page.next ?? null : null);
  };
  const hits = [...value.messages.toReversed(), ...older];
  return html`<div class="section">${hits.length ? html`<ul class="card card-list" ref=${list} aria-label=${`Messages with ${query}`}>
      ${hits.map((it) => html`<${Hit} key=${it.seq} message=${it} query=${query} />`)}</ul>`
      : html`<${Empty} icon="search" title="No message has these words">${before ? "There may be some further back." : ""}<//>`}
    ${before && html`<div class="tools more"><${Button} run=${more}>Search further back<//></div>`}</div>`;
}

function Hit({message, query}) {
  const {seq, sender_id: sender, thread_id: thread} = message;
  return html`<li><a class="row" data-row href=${linkTo.thread(thread, seq)}><${Face} id=${sender} isSmall /><span class="row-main">
    <span class="row-line"><${Agent} id=${sender} /><span class="faint cut" dir="auto">${nameHere(thread)} · #${seq}</span><${Time} at=${message.sent_at} /></span>
    <span class="said" dir="auto">${markWords(textOf(message), query)}</span></span></a></li>`;
}

/** A part of a text around the first of these words, as pieces of text and `mark`. */
function markWords(text, query) {
  const {terms} = readQuery(query);
  const spans = [...text.matchAll(/[\p{L}\p{N}\p{M}]+/gu)].filter((it) => terms.some((term) => fits(fold(it[0]), term)));
  const from = Math.max(0, (spans[0]?.index ?? 0) - AROUND / 2);
  const to = Math.min(text.length, from + 3 * AROUND);
  const pieces = [from > 0 ? "…" : ""];
  let at = from;
  for (const span of spans.filter((it) => it.index + it[0].length <= to)) {
    pieces.push(text.slice(at, span.index), html`<mark>${span[0]}</mark>`);
    at = span.index + span[0].length;
  }
  return [...pieces, text.slice(at, to), to < text.length ? "…" : ""];
}
