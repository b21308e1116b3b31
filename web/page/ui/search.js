/** Finds messages by their words (`network.search`) and leads to each in its thread. What was found is drawn as text, never as HTML. */
import {useEffect, useRef, useState} from "#vendor/hooks.js";
import {fold, textOf} from "#core/text.js";
import {useRows} from "#ui/keys.js";
import {Agent, Button, Empty, ErrorBox, Face, Field, Head, html, Loading, Time, useFetched} from "#ui/parts.js";
import {go, linkTo} from "#ui/router.js";
import {actions, nameHere} from "#ui/store.js";

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
      <${Field} label="Words that the message has" type="search" placeholder="Words of a message; deploy* finds deployed too" value=${typed} onInput=${(event) => setTyped(event.target.value)} /></form>
    ${query ? html`<${Found} key=${query} query=${query} />` : html`<${Empty} icon="search" title="Everything that you may read">Case, accents and the order of the words do not count.<//>`}</div>`;
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
  const words = (query.match(/[\p{L}\p{N}]+\*?/gu) ?? []).map((it) => fold(it.replace("*", "")));
  const spans = [...text.matchAll(/[\p{L}\p{N}\p{M}]+/gu)].filter((it) => words.some((word) => fold(it[0]).startsWith(word)));
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
