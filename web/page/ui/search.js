/** Searches messages (`network.search`), and links to each result in its thread. Results are drawn as text, never as
 * HTML. */
import {useEffect, useRef, useState} from "#vendor/hooks.js";
import {fits, readQuery} from "#core/query.js";
import {fold, textOf} from "#core/text.js";
import {useRows} from "#ui/keys.js";
import {Agent, Button, Empty, ErrorBox, Face, Field, Head, html, Loading, Time, useFetched} from "#ui/parts.js";
import {go, linkTo} from "#ui/router.js";
import {actions, agents, nameHere} from "#ui/store.js";

const PAUSE_MS = 250;
const AROUND = 140;

/** The search screen. `query` comes from the page's address. */
export function Search({query}) {
  const [typed, setTyped] = useState(query);
  const field = useRef(null);
  useEffect(() => field.current.querySelector("input").focus(), []);
  const shown = useRef(query);
  useEffect(() => {
    if (shown.current === query) return; // skip the first run, to keep a text that was typed before
    shown.current = query;
    setTyped((before) => (before.trim() === query ? before : query));
  }, [query]);
  useEffect(() => {
    const wait = setTimeout(() => typed.trim() !== query && go(linkTo.search(typed.trim()), {replace: true}), PAUSE_MS);
    return () => clearTimeout(wait);
  }, [typed]);
  return html`<div class="screen"><${Head} title="Search" />
    <form role="search" ref=${field} onSubmit=${(event) => { event.preventDefault(); go(linkTo.search(typed.trim()), {replace: true}); }}>
      <${Field} label="Words to search for" type="search" placeholder="Search messages" value=${typed} onInput=${(event) => setTyped(event.target.value)} />
      <${Filters} typed=${typed} onType=${setTyped} /></form>
    ${query ? html`<${Found} key=${query} query=${query} />` : html`<${Empty} icon="search" title="Search all messages that you may read">Case, accents, word endings and order do not matter. Use “quotation marks” for an exact word.<//>`}</div>`;
}

/** Filters by sender and date. The filters are part of the query text, so that a link to the search contains them. */
function Filters({typed, onType}) {
  const people = Object.keys(agents.value).sort();
  const {sender_id: sender = ""} = readQuery(typed);
  const day = (name) => new RegExp(`(?:^|\\s)${name}:(\\d{4}-\\d{2}-\\d{2})(?!\\S)`, "i").exec(typed)?.[1] ?? "";
  const set = (name) => (event) => {
    const rest = typed.replace(new RegExp(`(^|\\s)${name}:\\S*`, "gi"), "").trim();
    onType(event.target.value ? `${rest} ${name}:${event.target.value}`.trim() : rest);
  };
  return html`<div class="tools filters"><label class="field">From<select value=${sender} onChange=${set("from")}><option value="">anyone</option>
      ${people.map((person) => html`<option key=${person} value=${person}>${person}</option>`)}</select></label>
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
  const loadMore = async () => {
    const page = await actions.call("network.search", {query, limit: 30, before});
    setOlder([...older, ...page.messages.toReversed()]);
    setNext(page.has_more ? page.next ?? null : null);
  };
  const hits = [...value.messages.toReversed(), ...older];
  return html`<div class="section">${hits.length ? html`<ul class="card card-list" ref=${list} aria-label=${`Messages with ${query}`}>
      ${hits.map((message) => html`<${Hit} key=${message.seq} message=${message} query=${query} />`)}</ul>`
      : html`<${Empty} icon="search" title="No messages found">${before ? "There may be older ones." : ""}<//>`}
    ${before && html`<div class="tools more"><${Button} run=${loadMore}>Search older messages<//></div>`}</div>`;
}

function Hit({message, query}) {
  const {seq, sender_id: sender, thread_id: thread} = message;
  return html`<li><a class="row" data-row href=${linkTo.thread(thread, seq)}><${Face} id=${sender} isSmall /><span class="row-main">
    <span class="row-line"><${Agent} id=${sender} /><span class="faint cut" dir="auto">${nameHere(thread)} · #${seq}</span><${Time} at=${message.sent_at} /></span>
    <span class="said" dir="auto">${markWords(textOf(message), query)}</span></span></a></li>`;
}

/** Return the part of a text around the first match, as a list of strings and `mark` elements. */
function markWords(text, query) {
  const {terms} = readQuery(query);
  const spans = [...text.matchAll(/[\p{L}\p{N}\p{M}]+/gu)].filter((match) => terms.some((term) => fits(fold(match[0]), term)));
  const from = Math.max(0, (spans[0]?.index ?? 0) - AROUND / 2);
  const to = Math.min(text.length, from + 3 * AROUND);
  const pieces = [from > 0 ? "…" : ""];
  let at = from;
  for (const span of spans.filter((span) => span.index + span[0].length <= to)) {
    pieces.push(text.slice(at, span.index), html`<mark>${span[0]}</mark>`);
    at = span.index + span[0].length;
  }
  return [...pieces, text.slice(at, to), to < text.length ? "…" : ""];
}
