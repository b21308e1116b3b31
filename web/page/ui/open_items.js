/**
 * The line below a thread that says what its newest conversation waits for ("Waiting for bob (12 min)"), and "All done"
 * when nothing is open any more. Participants write ids and notes, so each becomes a text node.
 */
import {useEffect, useRef, useState} from "#vendor/hooks.js";
import {formatSpan, html} from "#ui/parts.js";
import {actions} from "#ui/store.js";

const SETTLE_MS = 500; // fast answers change nothing on the screen
const WAIT_MS = 15_000; // after this time the ages are read again
const SHOWN = 3;

/** @param {{seqs: number[], working: string}} props the messages of the thread, and the agents whose work it shows */
export function OpenItems({seqs, working}) {
  const seq = seqs.at(-1);
  const [found, setFound] = useState(null);
  const waited = useRef(0); // the conversation for which this page has shown something
  useEffect(() => {
    if (!seq) return undefined;
    let isWanted = true;
    let timer = 0;
    const read = async (wait_ms) => {
      // The rights of a network may deny this operation, and a recording does not have it.
      const value = await actions.call("network.open_items", {root: seq, limit: 20, wait_ms}).catch(() => null);
      if (!isWanted) return;
      setFound(value);
      if (value && !value.is_quiet) timer = setTimeout(read, SETTLE_MS, WAIT_MS);
    };
    timer = setTimeout(read, SETTLE_MS, 0);
    return () => {
      isWanted = false;
      clearTimeout(timer);
    };
  }, [seq, working]);
  const isShown = ({kind, agent_id: who, request}) => (kind === "reaction" && working.split(" ").includes(who)) || seqs.includes(request);
  const items = (found?.items ?? []).filter((item) => !isShown(item));
  const more = items.length - SHOWN + (found?.hidden ?? 0);
  if (items.length) waited.current = found.root;
  const text = items.length ? `Waiting for ${items.slice(0, SHOWN).map(describeItem).join(", ")}${more > 0 ? ` and ${more} more` : ""}`
    : found?.is_quiet && waited.current === found.root ? "All done" : "";
  return html`<p class="typing faint cut" role="status" dir="auto">${text}</p>`;
}

function describeItem({kind, agent_id: who, note, since}) {
  const what = kind === "approval" ? `a decision for ${who}` : kind === "delivery" || kind === "reaction" || kind === "question" ? who
    : [kind, note && `“${note}”`, who && `of ${who}`].filter(Boolean).join(" ");
  return since ? `${what} (${formatSpan(Date.now() - since)})` : what;
}
