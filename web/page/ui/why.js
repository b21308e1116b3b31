/**
 * Explains why a message was sent. The left column shows what led to the message. The middle shows the message, the
 * steps of its reaction, and the messages in its prompt. The right column shows what followed. Parts that the reader
 * may not see are named.
 */
import {writeArguments} from "#core/json.js";
import {explain, follow} from "#core/why.js";
import {textOf} from "#core/text.js";
import {Agent, Badge, Empty, ErrorBox, Face, Head, html, Loading, formatSpan, Time, useFetched} from "#ui/parts.js";
import {adviseOnPrices, writeDollars} from "#ui/prices.js";
import {linkTo} from "#ui/router.js";
import {actions, isReadOnly, nameHere} from "#ui/store.js";

export const STATUS = {finished: "good", open: "accent", stopped: "warn", cancelled: "warn", failed: "bad"};

/** The screen that explains one message. */
export function Why({seq}) {
  const {value, error, isLoading, again} = useFetched(() => explain(actions.call, seq), [seq]);
  if (error?.code === "unknown_message" || !Number.isSafeInteger(seq)) {
    return html`<div class="screen"><${Head} title="Why" /><${Empty} icon="why" title="There is no such message">You may not be allowed to read it.<//>
      <div class="tools"><a class="button" href=${linkTo.threads()}>Threads</a><a class="button" href=${linkTo.search()}>Search</a></div></div>`;
  }
  if (error) return html`<div class="screen"><${Head} title=${`Why #${seq}`} /><${ErrorBox} error=${error} retry=${again}><a class="button" href=${linkTo.threads()}>Threads</a><a class="button" href=${linkTo.search()}>Search</a><//></div>`;
  if (!value) return html`<div class="screen"><${Head} title=${`Why #${seq}`} />${isLoading && html`<${Loading} />`}</div>`;
  const chain = value.steps;
  const [step] = chain;
  return html`<div class="why"><section class="why-side" aria-label="Led to it"><h2>Led to it</h2><${Chain} chain=${chain} /></section>
    <article class="why-middle"><${Head} title=${`Why #${seq}`}><a class="button" href=${linkTo.thread(step.message.thread_id, seq)}>Open thread</a><//>
      <${Message} message=${step.message} isWhole /><${Made} step=${step} before=${chain[1]} hasPrices=${value.has_prices} /></article>
    <section class="why-side" aria-label="What followed"><h2>What followed</h2><${Impact} seq=${seq} /></section></div>`;
}

function Message({message, isWhole = false}) {
  const {seq, sender_id: sender} = message;
  const body = html`<${Face} id=${sender} isSmall /><span class="row-main"><span class="row-line"><${Agent} id=${sender} /><span class="faint cut" dir="auto">${isWhole ? nameHere(message.thread_id) : `#${seq}`}</span><${Time} at=${message.sent_at} /></span>
    <span class=${isWhole ? "said whole" : "said clamp"} dir="auto">${textOf(message)}</span></span>`;
  return isWhole ? html`<div class="card row">${body}</div>` : html`<a class="row" href=${linkTo.why(seq)}>${body}</a>`;
}

/** A list of the messages from the root to the selected message. */
function Chain({chain}) {
  const above = chain.slice(1).reverse();
  const last = chain.at(-1).message;
  return html`<ol class="chain">${last.seq !== last.root && html`<li class="faint hidden-part">Earlier messages, up to #${last.root}, are hidden from you.</li>`}
    ${above.map(({message, reaction}) => html`<li key=${message.seq}><${Message} message=${message} />${reaction && html`<${Reacted} ...${reaction} />`}</li>`)}
    <li class="chain-here">${above.length || last.seq !== last.root ? "This message" : "Starts the conversation"}</li></ol>`;
}

const Reacted = ({status, trigger}) => html`<p class="faint reacted">sent in the reaction to #${trigger} ${status && status !== "finished" && html`<${Badge} kind=${STATUS[status]}>${status}<//>`}</p>`;

/** A summary of the reaction that sent the message. */
function Made({step, before, hasPrices}) {
  const {message, reaction} = step;
  if (!reaction && message.cause === undefined) return html`<p class="made">This message starts the conversation. No reaction sent it.</p>`;
  if (!reaction && before?.message.seq !== message.cause) return html`<p class="made">Its cause, #${message.cause}, is hidden from you, and so is the reaction to it.</p>`;
  if (!reaction) return html`<p class="made">Its cause is <a href=${linkTo.why(message.cause)}>#${message.cause}</a>, but its sender had no open reaction to that.</p>`;
  const head = html`Sent by <${Agent} id=${reaction.agent_id} link /> in the reaction to <a href=${linkTo.why(reaction.trigger)}>#${reaction.trigger}</a>`;
  if (reaction.is_hidden) return html`<p class="made">${head}. The records of this reaction are visible only to its agent and to operators.</p>`;
  const {sent, manifest} = reaction;
  const how = !sent ? "The records do not say which call sent it." : sent.tool_call ? html`The message is ${sent.how} <code dir="auto">${sent.tool_call.name}</code> in turn ${sent.turn}.` : `The message is ${sent.how}, after turn ${sent.turn}.`;
  return html`<p class="made">${head} <${Badge} kind=${STATUS[reaction.status]}>${reaction.status}<//> ${how}</p>
    <section class="section"><h2>Steps of the reaction</h2><${Steps} steps=${reaction.steps} sent=${sent} hasPrices=${hasPrices} look="card card-list" /></section>
    <section class="section"><h2>Messages in the prompt</h2>${manifest.length ? html`<ul class="card card-list">${manifest.map((seq) => html`<li key=${seq}>${step.messages[seq] ? html`<${Message} message=${step.messages[seq]} />`
      : html`<p class="row faint">#${seq} is hidden from you, or was deleted.</p>`}</li>`)}</ul>` : html`<p class="faint">None</p>`}</section>`;
}

const isOf = (sent, step) => Boolean(sent) && step.kind === (sent.tool_call ? "tool" : "model") && step.path === sent.path && step.turn === sent.turn && (!sent.tool_call || step.call === sent.call);

const STEP_NAMES = {model: "Model", tool: "Tool", approval: "Approval", wait: "Waited", review: "Review", handoff: "Handoff", failed: "Failed"};

/** The steps of a reaction, with the cost of each model call. */
export function Steps({steps, sent, hasPrices, look = ""}) {
  const advice = adviseOnPrices(hasPrices, isReadOnly.value);
  return html`<ol class=${`${look} steps`}>${steps.map((step) => html`<${Step} key=${`${step.seq} ${step.kind}`} step=${step} isSender=${isOf(sent, step)} advice=${advice} />`)}</ol>`;
}

/** One step of a reaction. The `usd` of a model call is null if the price of the model is unknown. */
function Step({step, isSender, advice}) {
  const {kind, path, turn, started_at: from, ended_at: to} = step;
  const parts = {
    model: () => [html`<b dir="auto">${step.model || "unknown model"}</b>`, step.text, step.calls.length && `Called ${step.calls.join(", ")}.`],
    tool: () => [html`<code dir="auto">${step.tool}</code>`],
    approval: () => ["", step.by ? `${step.is_approved ? "Approved" : "Denied"} by ${step.by}${step.said ? ` (${step.said})` : ""}` : "No decision yet"],
    wait: () => [`for ${step.asked.join(", ")}`],
    review: () => [step.is_accepted ? "accepted" : "sent back", step.notes.join("; ")],
    failed: () => [step.failure, step.reason],
  };
  const [what, ...notes] = parts[kind]?.() ?? [kind];
  const links = [...(step.questions ?? []), step.decision].filter(Boolean);
  return html`<li class=${`row step step-${kind}`}><span class="step-place faint">${path && `${path} · `}${turn}</span><div class="row-main">
    <p class="row-line"><span>${STEP_NAMES[kind] ?? kind} ${what}</span>${kind === "tool" && to !== null && !step.is_ok && html`<${Badge} kind="bad">failed<//>`}${isSender && html`<${Badge} kind="accent">sent the message<//>`}
      <span class="age">${to === null ? "running" : formatDuration(to - from)}</span></p>
    ${kind === "model" && html`<${Tokens} usage=${step.usage} usd=${step.usd} advice=${advice} />`}
    ${notes.filter(Boolean).map((text) => html`<p class="said clamp" dir="auto">${text}</p>`)}
    ${links.length > 0 && html`<p class="faint">${links.map((link) => html`<a href=${linkTo.why(link)}>#${link}</a> `)}</p>`}
    ${kind === "tool" && html`<details><summary>Arguments and result</summary><pre dir="auto">${writeArguments(step.arguments)}</pre><pre dir="auto" class="result">${step.result ?? "No result."}</pre></details>`}
    ${step.prompt && html`<details><summary>Exact prompt</summary><pre dir="auto">${writePrompt(step.prompt)}</pre></details>`}
    ${step.thinking && html`<details><summary>Reasoning</summary><pre dir="auto">${step.thinking}</pre></details>`}
  </div></li>`;
}

/** Format a stored prompt, one message after the other. */
function writePrompt({parts, tools, is_cut: isCut}) {
  const lines = isCut ? ["(long messages are cut)"] : [];
  for (const {role, text, tool = "", calls = []} of parts) lines.push(`[${`${role} ${tool}`.trim()}]`, String(text), ...calls.map(([name, args]) => `calls ${name} ${args}`));
  return [...lines, `[tools] ${tools.join(", ") || "none"}`].join("\n");
}

export const formatDuration = (ms) => (ms < 1000 ? `${ms} ms` : ms < 10_000 ? `${(ms / 1000).toFixed(1)} s` : formatSpan(ms));

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
  return value.reactions.length || value.followers.length ? html`<${Effects} effect=${value} />${value.has_more && html`<p class="faint">More messages followed than are shown.</p>`}` : html`<p class="faint">Nothing that you may see.</p>`;
}

function Effects({effect}) {
  const {reactions, followers, more, message} = effect;
  return html`<ul class="effects">${reactions.map((reaction) => html`<li key=${reaction.reaction} class="faint reacted"><${Agent} id=${reaction.agent_id} link /> reacted${reaction.status ? `: ${reaction.status}` : ""}</li>`)}
    ${followers.map((follower) => html`<li key=${follower.message.seq}><${Message} message=${follower.message} />${(follower.reactions.length > 0 || follower.followers.length > 0 || follower.more) && html`<${Effects} effect=${follower} />`}</li>`)}
    ${more && html`<li><a href=${linkTo.why(message.seq)}>${more} more after #${message.seq}</a></li>`}</ul>`;
}
