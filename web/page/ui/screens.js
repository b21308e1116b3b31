/**
 * Screens that mods describe as data (docs/mods.md): a list, a board, a document or a timeline. This module can draw
 * all of them, and does not depend on any mod. The text of items is untrusted. Item text is drawn as text, or as
 * Markdown by the page's own renderer.
 */
import {signal} from "#vendor/signals.js";
import {useEffect, useId, useRef} from "#vendor/hooks.js";
import {writeSize} from "#core/text.js";
import {StoredFile} from "#ui/files.js";
import {Markdown} from "#ui/markdown.js";
import {Agent, Button, Dialog, Empty, ErrorBox, Field, Head, html, Loading, now, Time, useFetched} from "#ui/parts.js";
import {linkTo} from "#ui/router.js";
import {actions, isReadOnly, nameHere, state} from "#ui/store.js";

const PERIOD_MS = 10_000; // interval at which an open screen is read again
const MAX_TIME_MS = 8.64e15; // the largest time that a Date can represent
const MAX_PAGES = 10; // maximum number of pages of one screen, about 1,000 items

/** The screens of this network's mods. The list is empty until the screens are fetched, and on nodes without screens.
 */
export const modScreens = signal([]);

/** Fetch the screens each time the page joins a hub. */
export function useModScreens() {
  const isConnected = state.value.connection === "online" && !isReadOnly.value;
  useEffect(() => {
    if (isConnected) actions.call("network.screens").then(({screens}) => { modScreens.value = screens; }, () => { modScreens.value = []; });
  }, [isConnected]);
}

export const idOf = (screen) => `${screen.mod}/${screen.id}`;
const shown = signal(null); // {screen, item, action?} of the open dialog

const take = (names, ...sources) => Object.fromEntries(Object.entries(names ?? {}).map(([name, field]) => [name, sources.find((source) => source?.[field] !== undefined)?.[field]]));

async function readItems(screen) {
  const items = [];
  let more = {};
  for (let page = 0; page < MAX_PAGES; page += 1) {
    const value = await actions.call(screen.op, {...screen.args, ...more});
    items.push(...value[screen.items]);
    if (!value.has_more || !screen.more) return {items, isCut: Boolean(value.has_more)};
    more = Object.fromEntries(Object.entries(screen.more).map(([name, field]) => [name, field.startsWith(".") ? value[field.slice(1)] : items.at(-1)?.[field]]));
  }
  return {items, isCut: true};
}

/** One screen of a mod, by its id `MOD/SCREEN`. */
export function ModScreen({id}) {
  const screen = modScreens.value.find((one) => idOf(one) === id);
  const round = Math.floor(now.value / PERIOD_MS);
  const {value, error, again} = useFetched(() => screen && readItems(screen), [id, Boolean(screen), round]);
  useEffect(() => () => { shown.value = null; }, [id]); // close the dialog, which would open again on the next screen
  if (!screen) return html`<div class="screen"><${Empty} title="This network has no such screen" /></div>`;
  const views = {board: Board, timeline: Timeline};
  return html`<div class="screen wide"><${Head} title=${screen.title}>
      ${screen.create && html`<${Button} kind="primary" icon="plus" run=${() => start(screen, {}, screen.create, again)}>${screen.create.label}<//>`}<//>
    ${error ? html`<${ErrorBox} error=${error} retry=${again} />` : !value ? html`<${Loading} />`
      : value.items.length ? html`<${views[screen.view] ?? List} screen=${screen} items=${value.items} again=${again} />` : html`<${Empty} title="Nothing here yet" />`}
    ${value?.isCut && html`<p class="faint">Only the first ${value.items.length.toLocaleString()} are shown.</p>`}
    ${shown.value && html`<${Opened} key=${`${shown.value.item[screen.key]} ${shown.value.action?.label}`} ...${shown.value} />`}</div>`;
}

function List({screen, items, again}) {
  return html`<ul class="card card-list">${items.map((item) => html`<li class="row" key=${item[screen.key]}><${Item} screen=${screen} item=${item} again=${again} /></li>`)}</ul>`;
}

function Board({screen, items, again}) {
  return html`<div class="board" tabindex="0" role="region" aria-label=${screen.title}>${screen.columns.map((column) => {
    const inside = items.filter((item) => String(item[screen.column]) === column);
    return html`<section class=${`board-column${inside.length ? "" : " empty-column"}`} key=${column}><h2>${column} <span class="faint">${inside.length}</span></h2>
      ${inside.map((item) => html`<div class="card row" key=${item[screen.key]}><${Item} screen=${screen} item=${item} again=${again} /></div>`)}</section>`;
  })}</div>`;
}

function Timeline({screen, items, again}) {
  const sorted = [...items].sort((one, other) => one[screen.at] - other[screen.at]);
  return html`<ol class="card card-list">${sorted.map((item) => html`<li class="row" key=${item[screen.key]}>
    <span class="board-time"><${Value} fact=${{kind: "time"}} value=${item[screen.at]} /></span><${Item} screen=${screen} item=${item} again=${again} /></li>`)}</ol>`;
}

function Item({screen, item, again}) {
  const heading = String(item[screen.heading] ?? item[screen.key]);
  return html`<div class="row-main"><p class="row-line">${screen.detail
      ? html`<button type="button" class="link-button" dir="auto" onClick=${() => { shown.value = {screen, item, again}; }}>${heading}</button>` : html`<b dir="auto">${heading}</b>`}</p>
    <${Facts} facts=${screen.facts} item=${item} />
    ${!screen.detail && html`<${Actions} screen=${screen} item=${item} again=${again} />`}</div>`;
}

function Actions({screen, item, again}) {
  const possible = (screen.actions ?? []).filter(({when = {}}) => Object.entries(when).every(([field, values]) => values.includes(String(item[field]))));
  return possible.length > 0 && html`<p class="tools">${possible.map((action) => html`<${Button} key=${action.label} run=${() => start(screen, item, action, again)}>${action.label}<//>`)}</p>`;
}

/** Run an action at once, or open the form of the action. */
async function start(screen, item, action, again) {
  if (action.inputs?.length) {
    shown.value = {screen, item, action, again};
    return;
  }
  await actions.call(action.op, take(action.args, item));
  shown.value = null;
  again();
}

const isEmpty = (value) => value === undefined || value === null || value === "" || value === 0 || (Array.isArray(value) && !value.length);

function Facts({facts = [], item}) {
  const given = facts.filter(({field}) => !isEmpty(item[field]));
  return given.length > 0 && html`<p class="facts">${given.map((fact) => html`<span key=${fact.field}>${fact.label && html`<span class="faint">${fact.label} </span>`}<${Value} fact=${fact} value=${item[fact.field]} item=${item} /></span>`)}</p>`;
}

function Value({fact, value, item}) {
  if (Array.isArray(value)) return value.map((one, at) => html`${at > 0 && ", "}<${Value} fact=${fact} value=${one} item=${item} />`);
  switch (fact.kind) {
    case "people": return html`<${Agent} id=${String(value)} />`;
    case "time": return Math.abs(value) <= MAX_TIME_MS ? html`<${Time} at=${Number(value)} />` : String(value);
    case "size": return writeSize(Number(value));
    case "thread": return html`<a dir="auto" href=${linkTo.thread(String(value))}>${nameHere(String(value))}</a>`;
    case "message": return html`<a href=${linkTo.why(Number(value))}>#${Number(value)}</a>`;
    case "file": return html`<${StoredFile} given=${{...item, file: String(value)}} />`;
    default: return html`<bdi>${value === true ? "yes" : value === false ? "no" : value && typeof value === "object" ? Object.values(value).flat().join(" ") : String(value)}</bdi>`;
  }
}

/** An opened item with its actions, or the form of one action. */
function Opened({screen, item, action, again}) {
  const {detail} = screen;
  const {value, error} = useFetched(() => (detail && item[screen.key] !== undefined ? actions.call(detail.op, take(detail.args, item)) : {}), []);
  const whole = {...item, ...value};
  const close = () => { shown.value = null; };
  const title = action ? action.label : String(item[screen.heading] ?? "");
  return html`<${Dialog} title=${title} onClose=${close}>${error ? html`<${ErrorBox} error=${error} />` : !value ? html`<${Loading} />`
    : action ? html`<${Form} action=${action} item=${whole} onDone=${() => { close(); again(); }} />` : html`
      <${Facts} facts=${detail.facts} item=${whole} />
      ${detail.text && whole[detail.text] && html`<div class="section"><${Markdown} text=${String(whole[detail.text])} /></div>`}
      <${Actions} screen=${screen} item=${whole} again=${again} />
      ${detail.parts?.map((part) => html`<${Part} key=${part.title} part=${part} item=${whole} />`)}`}<//>`;
}

function Part({part, item}) {
  const {value, error} = useFetched(() => (part.op ? actions.call(part.op, take(part.args, item)) : item), []);
  const text = useRef(signal({})).current;
  const entries = value?.[part.items] ?? [];
  const open = async (entry, at) => { text.value = {at, text: (await actions.call(part.open_op, take(part.open_args, entry, item)))[part.open_text]}; };
  if (error || !entries.length) return error && html`<${ErrorBox} error=${error} />`;
  return html`<section class="section"><h3>${part.title}</h3><ul class="plain-list">${entries.map((entry, at) => html`<li key=${at}><${Facts} facts=${part.facts} item=${entry} />
    ${part.open_op && html`<${Button} kind="small" run=${() => open(entry, at)}>Changes since<//>`}
    ${text.value.at === at && html`<pre dir="auto">${String(text.value.text || "None")}</pre>`}</li>`)}</ul></section>`;
}

function Form({action, item, onDone}) {
  const place = useRef(null);
  const send = async () => {
    const entered = Object.fromEntries([...new FormData(place.current)].filter(([, text]) => text !== ""));
    await actions.call(action.op, {...take(action.args, item), ...entered});
    onDone();
  };
  return html`<form ref=${place} onSubmit=${(event) => { event.preventDefault(); place.current.querySelector(".dialog-tools .button").click(); }}>
    ${action.inputs.map((input) => html`<${Entry} key=${input.argument} input=${input} item=${item} />`)}
    <div class="dialog-tools"><${Button} kind="primary" run=${send}>${action.label}<//></div></form>`;
}

function Entry({input, item}) {
  const id = useId();
  const [list, field] = (input.choices_from ?? "").split(".");
  const choices = list ? (item[list] ?? []).map((one) => one[field]) : input.choices;
  const value = input.field ? String(item[input.field] ?? "") : "";
  if (!input.is_long && !choices?.length) return html`<${Field} isLabelSeen label=${input.label} name=${input.argument} defaultValue=${value} />`;
  return html`<label class="field" for=${id}><span>${input.label}</span>${choices?.length
    ? html`<select id=${id} name=${input.argument}>${choices.map((choice) => html`<option value=${choice}>${choice}</option>`)}</select>`
    : html`<textarea id=${id} name=${input.argument} dir="auto" rows="8" defaultValue=${value}></textarea>`}</label>`;
}
