/** Formats costs in dollars. The node computes the costs. */

/** Format an amount in dollars and cents. An amount below a dollar gets as many digits as it needs. */
export function writeDollars(usd) {
  if (usd >= 1 || !usd) return `$${usd.toFixed(2)}`;
  return usd >= 0.001 ? `$${usd.toFixed(4)}` : `$${Number(usd.toPrecision(2))}`;
}

/** Format a cost, with a note if models without a known price are missing from it. */
export function writeCost({usd, unpriced}) {
  if (!unpriced.length) return writeDollars(usd);
  return usd ? `${writeDollars(usd)} + unknown` : "price unknown";
}

/** Explain why prices are unknown, and how to get prices. */
export function adviseOnPrices(hasPrices, isRecorded) {
  if (isRecorded) return "The prices in this recording are those that were known when it was written.";
  if (!hasPrices) return "The node has no price table. Install it where the node runs (pip install 'roundelay[prices]'), then restart the node.";
  return "The node's price table (genai-prices) has no price for them.";
}
