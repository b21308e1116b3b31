/**
 * The timeline has a row for each reaction, with a bar for each model call, tool call, wait and approval. Selecting a
 * row shows the steps of the reaction.
 */
import {useMemo, useState} from "#vendor/hooks.js";
import {formatCount} from "#core/text.js";
import {createScale, endOf, readTimeline} from "#core/timeline.js";
import {Agent, Badge, Empty, ErrorBox, Head, html, Loading, formatMoment, Time, useFetched} from "#ui/parts.js";
import {go, linkTo} from "#ui/router.js";
import {actions, isOver} from "#ui/store.js";
import {STATUS, Steps as StepList, formatDuration} from "#ui/why.js";

const PAGE = 60; // number of reactions that share one scale
const ZOOMS = [1, 2, 4, 8, 16, 32];
const KINDS = {model: "Model", tool: "Tool", wait: "Waiting for agents", approval: "Waiting for approval", review: "Review", failed: "Failed"};

/** The timeline screen. The fields of `query` are `agent`, `thread`, and `reaction`, which is the selected reaction. */
export function Timeline({query}) {
  const isWhole = isOver.value;
  const {value, error, isLoading, again} = useFetched(() => readTimeline(actions.call, {isWhole, most: isWhole ? 20_000 : 300}), []);
  const {agent, thread, reaction} = query;
  const shown = useMemo(() => value?.reactions.filter((reaction) => (!agent || reaction.agent_id === agent) && (!thread || reaction.thread_id === thread)), [value, agent, thread]);
  const chosen = shown?.find((item) => item.reaction === reaction);
  const set = (changed) => go(linkTo.timeline({...query, ...changed}), {replace: true});
  const ids = [...new Set(value?.reactions.map((reaction) => reaction.agent_id))].sort();
  return html`<div class="timeline"><${Head} title="Timeline">
      ${ids.length > 1 && html`<label class="field bare"><span class="unseen">Agent</span><select value=${agent ?? ""} onChange=${(event) => set({agent: event.target.value})}>
        <option value="">All agents</option>${ids.map((id) => html`<option value=${id}>${id}</option>`)}</select></label>`}
      ${!isWhole && html`<button type="button" class="button" onClick=${again}>Refresh</button>`}<//>
    ${thread && html`<p class="tools"><span>Filtered by <b dir="auto">${thread}</b></span> <button type="button" class="button" onClick=${() => set({thread: ""})}>Show all</button></p>`}
    ${error ? html`<${ErrorBox} error=${error} retry=${again} />` : !shown ? isLoading && html`<${Loading} what="Reading what agents did…" />`
      : !shown.length ? html`<${Empty} title="No reactions to show">Records of reactions are visible to their agent and to operators.<//>`
      : html`<${Legend} /><${Rows} key=${`${agent} ${thread}`} reactions=${shown} chosen=${reaction} choose=${(reaction) => set({reaction: reaction})} />
        ${value.isCut && html`<p class="faint">Older reactions are not shown.</p>`}`}
    ${chosen && html`<${Steps} key=${reaction} reaction=${chosen} close=${() => set({reaction: ""})} />`}</div>`;
}

const Legend = () => html`<ul class="legend" aria-label="Colours">${Object.entries(KINDS).map(([kind, text]) => html`<li><span class=${`piece piece-${kind}`} aria-hidden="true"></span>${text}</li>`)}</ul>`;

/** One page of reactions, newest first. Each page has its own scale. */
function Rows({reactions, chosen, choose}) {
  const pages = Math.ceil(reactions.length / PAGE);
  const [back, setBack] = useState(() => pageOf(reactions, chosen));
  const [zoom, setZoom] = useState(1);
  const end = reactions.length - Math.min(back, pages - 1) * PAGE;
  const rows = reactions.slice(Math.max(0, end - PAGE), end);
  const scale = useMemo(() => createScale(rows), [reactions, back]);
  const step = (text, isOff, run) => html`<button type="button" class="button" disabled=${isOff} onClick=${run}>${text}</button>`;
  const change = (by) => () => setZoom(ZOOMS[ZOOMS.indexOf(zoom) + by]);
  const idle = scale.gaps.length;
  return html`<p class="timeline-scale faint"><span>${pages > 1 && step("Earlier", back >= pages - 1, () => setBack(back + 1))} ${formatMoment(rows[0].started_at)}</span>
      <span>${rows.length < reactions.length ? `${rows.length} of ` : ""}${formatCount(reactions.length, "reaction")}${idle > 0 && `, ${formatCount(idle, "idle time")} cut`}
        ${step("Zoom out", zoom === ZOOMS[0], change(-1))} ${step("Zoom in", zoom === ZOOMS.at(-1), change(1))}</span>
      <span>${formatMoment(endOf(rows.at(-1)))} ${pages > 1 && step("Later", back === 0, () => setBack(back - 1))}</span></p>
    <div class="timeline-place card" tabindex="0" role="region" aria-label="Reactions"><ol class="timeline-rows" style=${{"--zoom": zoom}}>
      ${rows.map((row) => html`<${Row} key=${`${row.agent_id} ${row.reaction}`} reaction=${row} scale=${scale} isChosen=${row.reaction === chosen} choose=${choose} />`)}</ol></div>`;
}

/** Return the number of the page that contains a reaction, counted from the end. */
function pageOf(reactions, chosen) {
  const at = reactions.findIndex((reaction) => reaction.reaction === chosen);
  return at < 0 ? 0 : Math.floor((reactions.length - 1 - at) / PAGE);
}

function Row({reaction, scale, isChosen, choose}) {
  const [from, width] = scale.stretch(reaction.started_at, endOf(reaction));
  const took = formatDuration(endOf(reaction) - reaction.started_at);
  const spans = reaction.steps.filter((step) => step.kind in KINDS && !step.path).map((step) => ({...step, at: scale.stretch(step.started_at, step.ended_at ?? endOf(reaction))}));
  return html`<li class=${`timeline-row${isChosen ? " is-chosen" : ""}`}><button type="button" aria-pressed=${isChosen} onClick=${() => choose(isChosen ? "" : reaction.reaction)}>
      <${Agent} id=${reaction.agent_id} /> <span class="faint">#${reaction.trigger} ${took}</span><span class="unseen">, ${reaction.state}</span>${["failed", "stopped"].includes(reaction.state) && html` <${Badge} kind=${STATUS[reaction.state]}>${reaction.state}<//>`}</button>
    <span class="timeline-lane" aria-hidden="true"><span class=${`work-span work-span-${reaction.state}`} style=${lay(from, width)}></span>
      ${spans.map((span) => html`<span class=${`piece piece-${span.kind === "tool" && span.ended_at && !span.is_ok ? "failed" : span.kind}`} style=${lay(...span.at)} title=${nameStep(span)}></span>`)}</span></li>`;
}

const lay = (from, width) => ({insetInlineStart: `${from * 100}%`, inlineSize: `${width * 100}%`});
const nameStep = (step) => `${step.tool ?? step.model ?? KINDS[step.kind]}, ${step.ended_at === null ? "not over" : formatDuration(step.ended_at - step.started_at)}`;

/** The steps of the selected reaction. */
function Steps({reaction, close}) {
  return html`<section class="section card timeline-steps" aria-label="The chosen reaction"><p class="row-line"><${Agent} id=${reaction.agent_id} link /> <span>on <a href=${linkTo.why(reaction.trigger)}>#${reaction.trigger}</a> in <a dir="auto" href=${linkTo.thread(reaction.thread_id, reaction.trigger)}>${reaction.thread_id}</a></span>
      <${Badge} kind=${STATUS[reaction.state]}>${reaction.state}<//> <${Time} at=${reaction.started_at} /> <button type="button" class="button" onClick=${close}>Close</button></p>
    ${reaction.reason && html`<p class="faint" dir="auto">${reaction.reason}</p>`}
    <${StepList} steps=${reaction.steps} hasPrices=${reaction.has_prices} /></section>`;
}
