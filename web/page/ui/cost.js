/** The screen with model usage by agent, model, thread, conversation or day, and with the used share of each
 * participant's daily quota. */
import {signal} from "#vendor/signals.js";
import {writeSize} from "#core/text.js";
import {Agent, Bar, Button, Choice, Empty, ErrorBox, Head, html, Loading, now, formatSpan, useFetched} from "#ui/parts.js";
import {adviseOnPrices, writeCost} from "#ui/prices.js";
import {go, linkTo} from "#ui/router.js";
import {actions, isReadOnly, nameHere} from "#ui/store.js";

const GROUPS = [["agent", "Agent"], ["model", "Model"], ["thread", "Thread"], ["root", "Conversation"], ["day", "Day"]];
const SPANS = [["", "All"], ["1", "24 h"], ["7", "7 days"], ["30", "30 days"]];
const DAY_MS = 86_400_000;
const FIGURES = [["calls", "Calls"], ["prompt_tokens", "Tokens in"], ["cached_tokens", "Cached"], ["completion_tokens", "Tokens out"], ["tools", "Tools"], ["usd", "Cost"]];
const TITLES = {agent: "Agent", model: "Model", thread: "Thread", root: "Conversation", day: "Day (UTC)"};
const HEADS = {agent: ["agent", "model"], model: ["model"], thread: ["thread", "agent", "model"], root: ["root", "agent", "model"], day: ["day", "agent", "model"]}; // the columns that name a group
const order = signal({by: "", isUp: false});

/** The cost screen. The fields of `query` are `by`, `days`, `agent` and `thread`. */
export function Cost({query}) {
  const {days = "", agent, thread} = query;
  const by = GROUPS.some(([value]) => value === query.by) ? query.by : "agent";
  const wanted = {by, ...(agent && {agent_id: agent}), ...(thread && {thread_id: thread}), ...(Number(days) && {since: Date.now() - Number(days) * DAY_MS})};
  const {value, error, isLoading, again} = useFetched(() => actions.call("network.cost_report", wanted), [by, days, agent, thread]);
  const set = (changed) => go(linkTo.cost({...query, ...changed}), {replace: true});
  const only = agent ?? (thread && nameHere(thread));
  return html`<div class="screen wide"><${Head} title="Cost">
      <${Choice} label="Group by" value=${by} options=${GROUPS} onChoose=${(choice) => set({by: choice})} />
      <${Choice} label="Since when" value=${days} options=${SPANS} onChoose=${(choice) => set({days: choice})} /><//>
    ${only && html`<p class="tools"><span>Filtered by <b dir="auto">${only}</b></span><${Button} run=${() => set({agent: "", thread: ""})}>Show all<//></p>`}
    ${error ? html`<${ErrorBox} error=${error} retry=${again} />` : !value ? isLoading && html`<${Loading} what="Adding up…" />`
      : value.groups.length ? html`<${Sums} report=${value} />${value.has_more && html`<p class="faint">Only the ${value.groups.length.toLocaleString()} most expensive rows are shown.</p>`}<${Unpriced} report=${value} />`
      : html`<${Empty} icon="cost" title="No model calls to show">Records of model calls are visible to their agent and to operators.<//>`}
    <${Quotas} /></div>`;
}

function Sums({report}) {
  const {by, groups, total} = report;
  const heads = HEADS[by];
  const name = order.value.by || (total.usd ? "usd" : "prompt_tokens");
  const sorted = [...groups].sort((a, b) => (a[name] < b[name] ? -1 : a[name] > b[name] ? 1 : 0) * (order.value.isUp ? 1 : -1));
  const sort = (column) => { order.value = {by: column, isUp: name === column && !order.value.isUp}; };
  const column = (key, text, isNumber) => html`<th scope="col" class=${isNumber ? "number" : ""} aria-sort=${key === name ? (order.value.isUp ? "ascending" : "descending") : undefined}>
    <button type="button" onClick=${() => sort(key)}>${text}<span aria-hidden="true">${key === name ? (order.value.isUp ? " ↑" : " ↓") : ""}</span></button></th>`;
  const weigh = (sum) => (total.usd ? sum.usd / total.usd : (sum.prompt_tokens + sum.completion_tokens) / (total.prompt_tokens + total.completion_tokens || 1));
  return html`<div class="card table-place" tabindex="0" role="region" aria-label="Sums"><table><thead><tr>${heads.map((head) => column(head, TITLES[head]))}<th scope="col" class="share"><span class="unseen">Share</span></th>
      ${FIGURES.map(([name, text]) => column(name, text, true))}</tr></thead>
    <tbody>${sorted.map((item) => html`<tr key=${heads.map((head) => item[head]).join(" ")}>${heads.map((head, at) => html`<${at ? "td" : "th"} scope=${at ? undefined : "row"}><${Name} head=${head} name=${item[head]} /><//>`)}
      <td class="share"><${Bar} share=${weigh(item)} text=${`${Math.round(weigh(item) * 100)}% of all`} /></td><${Figures} sum=${item} /></tr>`)}</tbody>
    ${groups.length > 1 && html`<tfoot><tr><th scope="row" colspan=${heads.length}>All</th><td class="share"></td><${Figures} sum=${total} /></tr></tfoot>`}</table></div>`;
}

const Figures = ({sum}) => FIGURES.map(([name]) => html`<td class="number">${name === "usd" ? writeCost(sum) : sum[name].toLocaleString()}</td>`);

function Name({head, name}) {
  if (head === "agent") return html`<${Agent} id=${name} link />`;
  if (head === "thread" && name !== "-") return html`<a dir="auto" href=${linkTo.thread(name)}>${nameHere(name)}</a>`;
  if (head === "root" && name !== "-") return html`<a href=${linkTo.why(name.slice(1))}>${name}</a>`;
  return html`<bdi>${name}</bdi>`;
}

/** A note that lists the models without a known price, and explains what to do. */
function Unpriced({report}) {
  const {total: {unpriced}, has_prices: hasPrices} = report;
  if (!unpriced.length) return null;
  const names = unpriced.filter(Boolean);
  return html`<p class="section faint">${names.length > 0 && html`No price is known for <bdi>${names.join(", ")}</bdi>. ${adviseOnPrices(hasPrices, isReadOnly.value)} `}
    ${names.length < unpriced.length && "Some calls name no model, so they have no price."}</p>`;
}

// --- quotas

const writeMuch = (bytes) => (bytes >= 1e9 ? `${(bytes / 1e9).toFixed(1)} GB` : writeSize(bytes));

function Quotas() {
  const {value, error} = useFetched(() => actions.call("network.quotas", {limit: 100}), []);
  const limited = value?.quotas.filter((quota) => quota.bytes_per_day !== null || quota.messages_per_day !== null) ?? [];
  if (error || !limited.length) return null;
  return html`<section class="section"><h2>Stored today</h2>
    <p class="faint">Daily quotas. They reset in ${formatSpan(value.next_day_at - now.value)}.</p>
    <ul class="card card-list">${limited.map((quota) => html`<li class="row quota" key=${quota.agent_id}><${Agent} id=${quota.agent_id} link />
      <${Quota} used=${quota.messages} limit=${quota.messages_per_day} write=${(n) => n.toLocaleString()} what="messages" />
      <${Quota} used=${quota.bytes} limit=${quota.bytes_per_day} write=${writeMuch} what="" /></li>`)}</ul></section>`;
}

function Quota({used, limit, write, what}) {
  if (limit === null) return html`<span class="faint">${write(used)} ${what}</span>`;
  const share = used / (limit || 1);
  const text = `${write(used)} of ${write(limit)} ${what}`;
  return html`<span><span class="faint">${text}</span><${Bar} share=${share} text=${text} kind=${share >= 1 ? "bad" : share >= 0.9 ? "warn" : ""} /></span>`;
}
