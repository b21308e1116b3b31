// When agents were at work: the newest reactions with their steps, and a scale on which times when nobody worked are
// short. It asks by the `call` that it is given, of a hub or of a recording; no DOM, no clock.

import { readUsage } from "#core/cost.js";
import { readReaction } from "#core/reading.js";
import { readRecords } from "#core/why.js";

const LOOKED_BACK = 5000; // seqs of a hub's log; a recording is looked through whole
const READS_AT_ONCE = 8;
const IDLE_MS = 2000; // what is longer without work is drawn as so long
const SHARE = 0.004; // and nothing that takes time is narrower than this share of the whole

/**
 * Give the newest reactions that the caller may see, by when they began.
 * @param {(op: string, args: object) => Promise<any>} call
 * @param {{most?: number, isWhole?: boolean}} wanted
 * @returns {Promise<{reactions: ReturnType<typeof readReaction>[], isCut: boolean}>}
 */
export async function readTimeline(call, { most = 300, isWhole = false } = {}) {
  const { head } = await call("network.info", {});
  const named = await listNamed(call, isWhole ? 0 : Math.max(0, head - LOOKED_BACK));
  const newest = [...named.values()].sort((one, other) => other.seq - one.seq).slice(0, most);
  const found = [];
  const take = async () => {
    for (let it = newest.pop(); it; it = newest.pop()) {
      const records = await readRecords(call, it.reaction, it.agent_id);
      if (records.some((record) => record.kind === "started")) found.push(readReaction(it.reaction, it.agent_id, records));
    }
  };
  await Promise.all(Array.from({ length: READS_AT_ONCE }, take));
  found.sort((one, other) => one.started_at - other.started_at || one.trigger - other.trigger);
  return { reactions: found, isCut: named.size > most || (!isWhole && head > LOOKED_BACK) };
}

/** The reactions of which something is recorded above a seq, and those that are open. */
async function listNamed(call, after) {
  const named = new Map();
  const add = ({ agent_id, reaction, seq }) => named.set(`${agent_id} ${reaction}`, { agent_id, reaction, seq });
  for await (const page of readUsage(call, undefined, after)) {
    for (const it of page.calls) add({ ...it, agent_id: page.agent_id });
  }
  const open = await call("network.open_reactions", { limit: 500 });
  for (const it of open.reactions) if (!named.has(`${it.agent_id} ${it.reaction}`)) add(it);
  return named;
}

/** When the last of it was recorded. */
export const endOf = (it) => it.ended_at ?? Math.max(it.started_at, ...it.steps.map((step) => step.ended_at ?? step.started_at));

/**
 * Give the scale of these reactions: `place(at)` is the share of the width, 0 to 1, at which a time stands; `gaps` are
 * the places where time without work is cut, with how long that was.
 */
export function createScale(reactions) {
  const spans = [];
  for (const it of reactions) { // by when they began
    const [from, to] = [it.started_at, endOf(it)];
    if (spans.length && from <= spans.at(-1).to + IDLE_MS) spans.at(-1).to = Math.max(spans.at(-1).to, to);
    else spans.push({ from, to });
  }
  let drawn = 0;
  const idle = Math.max(1, spans.reduce((sum, it) => sum + it.to - it.from, 0)) * 0.02;
  for (const it of spans) {
    it.start = drawn;
    drawn += Math.max(1, it.to - it.from) + idle;
  }
  const width = Math.max(1, drawn - idle);
  const place = (at) => {
    let [low, high] = [0, spans.length - 1];
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      if (spans[middle].from <= at) low = middle;
      else high = middle - 1;
    }
    const it = spans[low];
    return it ? (it.start + Math.min(Math.max(0, at - it.from), it.to - it.from)) / width : 0;
  };
  const gaps = spans.slice(1).map((it, at) => ({ place: it.start / width, ms: it.from - spans[at].to }));
  const stretch = (from, to) => [place(from), Math.max(SHARE, place(to) - place(from))];
  return { place, stretch, gaps };
}
