/**
 * Why a message was said: what it followed from at the left, in the middle the message, what its reaction did and the
 * prompt it had, at the right what followed from it. What is not the reader's to see is said, not left out.
 */
import {writeArguments} from "#core/json.js";
import {readCosts} from "#core/pricing.js";
import {explain, follow} from "#core/why.js";
import {textOf} from "#core/text.js";
import {Agent, Badge, Empty, ErrorBox, Face, Head, html, Loading, tellSpan, Time, useFetched} from "#ui/parts.js";
import {adviseOnPrices, writeDollars} from "#ui/prices.js";
import {linkTo} from "#ui/router.js";
import {actions, isReadOnly, nameHere} from "#ui/store.js";

export const STATUS = {finished: "good", open: "accent", stopped: "warn", cancelled: "warn", failed: "bad"};

/** The screen of one message. */
export function Why({seq}) {
  const {value: chain, error, isLoading, again} = useFetched(() => explain(actions.call, seq), [seq]);
  if (error?.code === "unknown_message" || !Number.isSafeInteger(seq)) {
    return html`<div class="screen"><${Head} title="Why" /><${Empty} icon="why" title="There is no such message">Or none that you may read.<//>
      <div class="tools"><a class="button" href=${linkTo.threads()}>Threads</a><a class="button" href=${linkTo.search()}>Search</a></div></div>`;
  }
  if (error) return html`<div class="screen"><${Head} title=${`Why #${seq}`} /><${ErrorBox} error=${error} retry=${again}><a class="button" href=${linkTo.threads()}>Threads</a><a class="button" href=${linkTo.search()}>Search</a><//></div>`;
  if (!chain) return html`<div class="screen"><${Head} title=${`Why #${seq}`} />${isLoading && html`<${Loading} what="Reading what it rests on…" />`}</div>`;
  const [step] = chain;
  return html`<div class="why"><section class="why-side" aria-label="What it followed from"><h2>It followed from</h2><${Chain} chain=${chain} /></section>
    <article class="why-middle"><${Head} title=${`Why #${seq}`}><a class="button" href=${linkTo.thread(step.message.thread_id, seq)}>Open in its thread</a><//>
      <${Message} message=${step.message} isWhole /><${Made} step=${step} before=${chain[1]} /></article>
    <section class="why-side" aria-label="What followed from it"><h2>What followed</h2><${Impact} seq=${seq} /></section></div>`;
}

function Message({message, isWhole = false}) {
  const {seq, sender_id: sender} = message;
  const body = html`<${Face} id=${sender} isSmall /><span class="row-main"><span class="row-line"><${Agent} id=${sender} /><span class="faint cut" dir="auto">${isWhole ? nameHere(message.thread_id) : `#${seq}`}</span><${Time} at=${message.sent_at} /></span>
    <span class=${isWhole ? "said whole" : "said clamp"} dir="auto">${textOf(message)}</span></span>`;
  return isWhole ? html`<div class="card row">${body}</div>` : html`<a class="row" href=${linkTo.why(seq)}>${body}</a>`;
}

/** From the root down to what the chosen message answers. */
function Chain({chain}) {
  const above = chain.slice(1).reverse();
  const last = chain.at(-1).message;
  return html`<ol class="chain">${last.seq !== last.root && html`<li class="faint hidden-part">What it followed from, up to #${last.root}, is not yours to read.</li>`}
    ${above.map(({message, reaction}) => html`<li key=${message.seq}><${Message} message=${message} />${reaction && html`<${Reacted} ...${reaction} />`}</li>`)}
    <li class="chain-here">${above.length || last.seq !== last.root ? "The message in the middle" : "It begins the conversation."}</li></ol>`;
}

const Reacted = ({status, trigger}) => html`<p class="faint reacted">said in its reaction to #${trigger} ${status && status !== "finished" && html`<${Badge} kind=${STATUS[status]}>${status}<//>`}</p>`;

/** How the message came to be said. */
function Made({step, before}) {
  const {message, reaction} = step;
  if (!reaction && message.cause === undefined) return html`<p class="made">It begins the conversation: no reaction said it.</p>`;
  if (!reaction && before?.message.seq !== message.cause) return html`<p class="made">It followed from #${message.cause}, which is not yours to read; nor is what its reaction did.</p>`;
  if (!reaction) return html`<p class="made">It names <a href=${linkTo.why(message.cause)}>#${message.cause}</a> as its cause; no reaction of its sender's was open.</p>`;
  const head = html`Said by <${Agent} id=${reaction.agent_id} link /> in its reaction to <a href=${linkTo.why(reaction.trigger)}>#${reaction.trigger}</a>`;
  if (reaction.is_hidden) return html`<p class="made">${head}. What it did and what its prompt held stands in its records: they are for this agent and for operators, and you are neither.</p>`;
  const {sent, manifest} = reaction;
  const how = !sent ? "The records do not say by which call." : sent.tool_call ? html`It is ${sent.how} <code dir="auto">${sent.tool_call.name}</code> in turn ${sent.turn}.` : `It is ${sent.how}, after turn ${sent.turn}.`;
  return html`<p class="made">${head} <${Badge} kind=${STATUS[reaction.status]}>${reaction.status}<//> ${how}</p>
    <section class="section"><h2>What the reaction did</h2><${Steps} steps=${step.steps} sent=${sent} look="card card-list" /></section>
    <section class="section"><h2>What its prompt held</h2>${manifest.length ? html`<ul class="card card-list">${manifest.map((it) => html`<li key=${it}>${step.messages[it] ? html`<${Message} message=${step.messages[it]} />`
      : html`<p class="row faint">#${it} is not yours to read, or no longer kept.</p>`}</li>`)}</ul>` : html`<p class="faint">No message.</p>`}</section>`;
}

const isOf = (sent, step) => Boolean(sent) && step.kind === (sent.tool_call ? "tool" : "model") && step.path === sent.path && step.turn === sent.turn && (!sent.tool_call || step.call === sent.call);

const STEP_NAMES = {model: "Asked", tool: "Called", approval: "Approval", wait: "Waited", review: "Review", handoff: "Handed over", failed: "Failed"};

/** The steps of a reaction, with what each model call cost. */
export function Steps({steps, sent, look = ""}) {
  const asked = steps.filter(({kind}) => kind === "model");
  const {value} = useFetched(() => readCosts(actions.call, asked), [steps]);
  const costs = new Map(value && asked.map((it, place) => [it, value.usd[place]]));
  return html`<ol class=${`${look} steps`}>${steps.map((it) => html`<${Step} key=${`${it.seq} ${it.kind}`} step=${it} isSender=${isOf(sent, it)} usd=${costs.get(it)} advice=${value && adviseOnPrices(value.has_prices, isReadOnly.value)} />`)}</ol>`;
}

/** One step of a reaction. `usd` is undefined while the node is asked, null if no price is known. */
function Step({step, isSender, usd, advice}) {
  const {kind, path, turn, started_at: from, ended_at: to} = step;
  const parts = {
    model: () => [html`<b dir="auto">${step.model || "a model"}</b>`, step.text, step.calls.length && `It asked for ${step.calls.join(", ")}.`],
    tool: () => [html`<code dir="auto">${step.tool}</code>`],
    approval: () => ["", step.by ? `${step.is_approved ? "Approved" : "Denied"} by ${step.by}${step.said ? ` (${step.said})` : ""}` : "Nobody has decided yet"],
    wait: () => [`for ${step.asked.join(", ")}`],
    review: () => [step.is_accepted ? "found it good" : "sent it back", step.notes.join("; ")],
    failed: () => [step.failure, step.reason],
  };
  const [what, ...told] = parts[kind]?.() ?? [kind];
  const links = [...(step.questions ?? []), step.decision].filter(Boolean);
  return html`<li class=${`row step step-${kind}`}><span class="step-place faint">${path && `${path} · `}${turn}</span><div class="row-main">
    <p class="row-line"><span>${STEP_NAMES[kind] ?? kind} ${what}</span>${kind === "tool" && to !== null && !step.is_ok && html`<${Badge} kind="bad">failed<//>`}${isSender && html`<${Badge} kind="accent">said it<//>`}
      <span class="age">${to === null ? "not over" : tellTook(to - from)}</span></p>
    ${kind === "model" && html`<${Tokens} usage=${step.usage} usd=${usd} advice=${advice} />`}
    ${told.filter(Boolean).map((it) => html`<p class="said clamp" dir="auto">${it}</p>`)}
    ${links.length > 0 && html`<p class="faint">${links.map((it) => html`<a href=${linkTo.why(it)}>#${it}</a> `)}</p>`}
    ${kind === "tool" && html`<details><summary>Arguments and result</summary><pre dir="auto">${writeArguments(step.arguments)}</pre><pre dir="auto" class="result">${step.result ?? "No result."}</pre></details>`}
    ${step.prompt && html`<details><summary>Exact prompt</summary><pre dir="auto">${writePrompt(step.prompt)}</pre></details>`}
    ${step.thinking && html`<details><summary>What it thought</summary><pre dir="auto">${step.thinking}</pre></details>`}
  </div></li>`;
}

/** A prompt that is kept, message by message. */
function writePrompt({parts, tools, is_cut: isCut}) {
  const lines = isCut ? ["(its longest messages are cut)"] : [];
  for (const {role, text, tool = "", calls = []} of parts) lines.push(`[${`${role} ${tool}`.trim()}]`, String(text), ...calls.map(([name, args]) => `calls ${name} ${args}`));
  return [...lines, `[tools] ${tools.join(", ") || "none"}`].join("\n");
}

export const tellTook = (ms) => (ms < 1000 ? `${ms} ms` : ms < 10_000 ? `${(ms / 1000).toFixed(1)} s` : tellSpan(ms));

function Tokens({usage, usd, advice}) {
  const isUnknown = usd === null && usage.prompt_tokens + usage.completion_tokens > 0;
  const cached = usage.cached_tokens ? ` (${usage.cached_tokens.toLocaleString()} cached)` : "";
  return html`<p class="faint">${usage.prompt_tokens.toLocaleString()} tokens in${cached}, ${usage.completion_tokens.toLocaleString()} out${usd ? `, ${writeDollars(usd)}` : ""}${isUnknown && html`, <span title=${advice}>price unknown</span>`}</p>`;
}

// --- what followed

function Impact({seq}) {
  const {value, error, again} = useFetched(() => follow(actions.call, seq), [seq]);
  if (error) return html`<${ErrorBox} error=${error} retry=${again} />`;
  if (!value) return html`<${Loading} />`;
  return value.reactions.length || value.followers.length ? html`<${Effects} effect=${value} />` : html`<p class="faint">Nothing followed from it, as far as you may see.</p>`;
}

function Effects({effect}) {
  const {reactions, followers, more, message} = effect;
  return html`<ul class="effects">${reactions.map((it) => html`<li key=${it.reaction} class="faint reacted"><${Agent} id=${it.agent_id} link /> reacted${it.status ? `: ${it.status}` : ""}</li>`)}
    ${followers.map((it) => html`<li key=${it.message.seq}><${Message} message=${it.message} />${(it.reactions.length > 0 || it.followers.length > 0 || it.more) && html`<${Effects} effect=${it} />`}</li>`)}
    ${more && html`<li><a href=${linkTo.why(message.seq)}>${more} more followed from #${message.seq}</a></li>`}</ul>`;
}
