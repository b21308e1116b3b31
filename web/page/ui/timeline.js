/**
 * When which agent was at work: a row for each reaction, with a bar for each model call, tool, wait and approval in it.
 * A chosen row tells its steps.
 */
import {useMemo, useState} from "#vendor/hooks.js";
import {tellCount} from "#core/text.js";
import {createScale, endOf, readTimeline} from "#core/timeline.js";
import {Agent, Badge, Empty, ErrorBox, Head, html, Loading, tellMoment, Time, useFetched} from "#ui/parts.js";
import {go, linkTo} from "#ui/router.js";
import {actions, isOver, state} from "#ui/store.js";
import {STATUS, Steps as StepList, tellTook} from "#ui/why.js";

const PAGE = 60; // reactions that are drawn on one scale
const ZOOMS = [1, 2, 4, 8, 16, 32];
const KINDS = {model: "Model", tool: "Tool", wait: "Waits for agents", approval: "Waits for a person", review: "Review", failed: "Failed"};

/** The screen; `query` has `agent`, `thread` and `reaction`, the chosen one. */
export function Timeline({query}) {
  const isWhole = isOver.value;
  const {value, error, isLoading, again} = useFetched(() => readTimeline(actions.call, {isWhole, most: isWhole ? 20_000 : 300}), []);
  const {agent, thread, reaction} = query;
  const shown = useMemo(() => value?.reactions.filter((it) => (!agent || it.agent_id === agent) && (!thread || it.thread_id === thread)), [value, agent, thread]);
  const chosen = shown?.find((it) => it.reaction === reaction);
  const set = (more) => go(linkTo.timeline({...query, ...more}), {replace: true});
  const ids = [...new Set(value?.reactions.map((it) => it.agent_id))].sort();
  return html`<div class="timeline"><${Head} title="Timeline">
      ${ids.length > 1 && html`<label class="field bare"><span class="unseen">Agent</span><select value=${agent ?? ""} onChange=${(event) => set({agent: event.target.value})}>
        <option value="">All agents</option>${ids.map((it) => html`<option value=${it}>${it}</option>`)}</select></label>`}
      ${!isWhole && html`<button type="button" class="button" onClick=${again}>Refresh</button>`}<//>
    ${thread && html`<p class="tools"><span>Only what answers <b dir="auto">${thread}</b></span> <button type="button" class="button" onClick=${() => set({thread: ""})}>Show all</button></p>`}
    ${error ? html`<${ErrorBox} error=${error} retry=${again} />` : !shown ? isLoading && html`<${Loading} what="Reading what agents did…" />`
      : !shown.length ? html`<${Empty} title="No reaction, as far as you may see">What agents do stands in their records, which are for themselves and for operators.<//>`
      : html`<${Legend} /><${Rows} key=${`${agent} ${thread}`} reactions=${shown} chosen=${reaction} choose=${(it) => set({reaction: it})} />
        ${value.isCut && html`<p class="faint">Older reactions are not drawn.</p>`}`}
    ${chosen && html`<${Steps} key=${reaction} of=${chosen} close=${() => set({reaction: ""})} />`}</div>`;
}

const Legend = () => html`<ul class="legend" aria-label="Colours">${Object.entries(KINDS).map(([kind, text]) => html`<li><span class=${`piece piece-${kind}`} aria-hidden="true"></span>${text}</li>`)}</ul>`;

/** A page of reactions, the newest at first; the scale is theirs. */
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
  return html`<p class="timeline-scale faint"><span>${pages > 1 && step("Earlier", back >= pages - 1, () => setBack(back + 1))} ${tellMoment(rows[0].started_at)}</span>
      <span>${rows.length < reactions.length ? `${rows.length} of ` : ""}${tellCount(reactions.length, "reaction")}${idle > 0 && `, ${tellCount(idle, "idle time")} cut`}
        ${step("Zoom out", zoom === ZOOMS[0], change(-1))} ${step("Zoom in", zoom === ZOOMS.at(-1), change(1))}</span>
      <span>${tellMoment(endOf(rows.at(-1)))} ${pages > 1 && step("Later", back === 0, () => setBack(back - 1))}</span></p>
    <div class="timeline-place card" tabindex="0" role="region" aria-label="Reactions"><ol class="timeline-rows" style=${{"--zoom": zoom}}>
      ${rows.map((it) => html`<${Row} key=${`${it.agent_id} ${it.reaction}`} of=${it} scale=${scale} isChosen=${it.reaction === chosen} choose=${choose} />`)}</ol></div>`;
}

/** On which page from the end a reaction stands. */
function pageOf(reactions, chosen) {
  const at = reactions.findIndex((it) => it.reaction === chosen);
  return at < 0 ? 0 : Math.floor((reactions.length - 1 - at) / PAGE);
}

function Row({of, scale, isChosen, choose}) {
  const [from, width] = scale.stretch(of.started_at, endOf(of));
  const took = tellTook(endOf(of) - of.started_at);
  const spans = of.steps.filter((it) => it.kind in KINDS && !it.path).map((it) => ({...it, at: scale.stretch(it.started_at, it.ended_at ?? endOf(of))}));
  return html`<li class=${`timeline-row${isChosen ? " is-chosen" : ""}`}><button type="button" aria-pressed=${isChosen} onClick=${() => choose(isChosen ? "" : of.reaction)}>
      <${Agent} id=${of.agent_id} /> <span class="faint">#${of.trigger} ${took}</span><span class="unseen">, ${of.state}</span>${["failed", "stopped"].includes(of.state) && html` <${Badge} kind=${STATUS[of.state]}>${of.state}<//>`}</button>
    <span class="timeline-lane" aria-hidden="true"><span class=${`work-span work-span-${of.state}`} style=${lay(from, width)}></span>
      ${spans.map((it) => html`<span class=${`piece piece-${it.kind === "tool" && it.ended_at && !it.is_ok ? "failed" : it.kind}`} style=${lay(...it.at)} title=${nameStep(it)}></span>`)}</span></li>`;
}

const lay = (from, width) => ({insetInlineStart: `${from * 100}%`, inlineSize: `${width * 100}%`});
const nameStep = (it) => `${it.tool ?? it.model ?? KINDS[it.kind]}, ${it.ended_at === null ? "not over" : tellTook(it.ended_at - it.started_at)}`;

/** What a reaction did, step by step. */
function Steps({of, close}) {
  return html`<section class="section card timeline-steps" aria-label="The chosen reaction"><p class="row-line"><${Agent} id=${of.agent_id} link /> <span>on <a href=${linkTo.why(of.trigger)}>#${of.trigger}</a> in <a dir="auto" href=${linkTo.thread(of.thread_id, of.trigger)}>${of.thread_id}</a></span>
      <${Badge} kind=${STATUS[of.state]}>${of.state}<//> <${Time} at=${of.started_at} /> <button type="button" class="button" onClick=${close}>Close</button></p>
    ${of.reason && html`<p class="faint" dir="auto">${of.reason}</p>`}
    <${StepList} steps=${of.steps} /></section>`;
}
