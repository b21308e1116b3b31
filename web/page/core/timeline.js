// Data for the timeline: the newest reactions with their steps, and a time scale that shortens periods without work.
// The data is read with a `call` function of a hub or a recording. This module uses neither the DOM nor a clock.

const LOOKED_BACK = 5000; // number of seqs of a hub's log to search; a recording is searched completely
const READS_AT_ONCE = 8;
const IDLE_MS = 2000; // longer periods without work are shortened
const SHARE = 0.004; // minimum width of a bar, as a share of the whole width

/**
 * Return the newest reactions that the caller may see, in the form of `network.work`, sorted by their start.
 * @param {(op: string, args: object) => Promise<any>} call
 * @param {{most?: number, isWhole?: boolean}} wanted
 * @returns {Promise<{reactions: any[], isCut: boolean}>}
 */
export async function readTimeline(call, { most = 300, isWhole = false } = {}) {
  const { head } = await call("network.info", {});
  const named = await listNamed(call, isWhole ? 0 : Math.max(0, head - LOOKED_BACK));
  const newest = [...named.values()].sort((one, other) => other.seq - one.seq).slice(0, most);
  const reactions = [];
  const readNext = async () => {
    for (let name = newest.pop(); name; name = newest.pop()) {
      const { reaction, agent_id } = name;
      const work = await call("network.work", { reaction, agent_id });
      if (work.trigger > 0) reactions.push({ reaction, agent_id, ...work });
    }
  };
  await Promise.all(Array.from({ length: READS_AT_ONCE }, readNext));
  reactions.sort((one, other) => one.started_at - other.started_at || one.trigger - other.trigger);
  return { reactions, isCut: named.size > most || (!isWhole && head > LOOKED_BACK) };
}

/** Return the ids of the reactions that have a record above the seq `after`, and of all open reactions. */
async function listNamed(call, after) {
  const named = new Map();
  const add = ({ agent_id, reaction, seq }) => named.set(`${agent_id} ${reaction}`, { agent_id, reaction, seq });
  for (let args = { after, limit: 500 }; args; ) {
    const page = await call("network.usage", args);
    for (const entry of page.calls) add({ ...entry, agent_id: page.agent_id });
    if (page.has_more) args = { ...args, agent_id: page.agent_id, after: page.calls.at(-1)?.seq ?? args.after };
    else args = page.next_agent ? { after, limit: 500, agent_id: page.next_agent } : null;
  }
  const open = await call("network.open_reactions", { limit: 500 });
  for (const reaction of open.reactions) if (!named.has(`${reaction.agent_id} ${reaction.reaction}`)) add(reaction);
  return named;
}

/** Return the time of the last recorded event of a reaction. */
export const endOf = (reaction) => reaction.ended_at ?? Math.max(reaction.started_at, ...reaction.steps.map((step) => step.ended_at ?? step.started_at));

/**
 * Return the time scale of these reactions. `place(at)` converts a time to a share of the width, from 0 to 1. `gaps`
 * contains the shortened periods without work, with their position and duration.
 */
export function createScale(reactions) {
  const spans = [];
  for (const reaction of reactions) { // sorted by their start
    const [from, to] = [reaction.started_at, endOf(reaction)];
    if (spans.length && from <= spans.at(-1).to + IDLE_MS) spans.at(-1).to = Math.max(spans.at(-1).to, to);
    else spans.push({ from, to });
  }
  let drawn = 0;
  const idle = Math.max(1, spans.reduce((sum, span) => sum + span.to - span.from, 0)) * 0.02;
  for (const span of spans) {
    span.start = drawn;
    drawn += Math.max(1, span.to - span.from) + idle;
  }
  const width = Math.max(1, drawn - idle);
  const place = (at) => {
    let [low, high] = [0, spans.length - 1];
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      if (spans[middle].from <= at) low = middle;
      else high = middle - 1;
    }
    const span = spans[low];
    return span ? (span.start + Math.min(Math.max(0, at - span.from), span.to - span.from)) / width : 0;
  };
  const gaps = spans.slice(1).map((span, at) => ({ place: span.start / width, ms: span.from - spans[at].to }));
  const stretch = (from, to) => [place(from), Math.max(SHARE, place(to) - place(from))];
  return { place, stretch, gaps };
}
