/**
 * What tokens cost. No price comes along: a person says what a million tokens of a model cost, and this browser keeps
 * that. Scripts and rules, which ask no model, cost nothing. The sums are those of agents/models/tokens.py.
 */
import {signal} from "#vendor/signals.js";
import {keep, load} from "#ui/storage.js";

const KEY = "roundelay.prices";
const SCRIPT = /^(rules|scripted|script .+)$/;
const VERSION = /[-@:](\d{4}-\d{2}-\d{2}|\d{8}|\d{4}|latest)$/;

/** Dollars for a million tokens, by the model. @type {{value: Record<string, {input: number, output: number, cached?: number}>}} */
export const prices = signal(load(KEY) ?? {});

/** Say what a model costs; one without `input` and `output` is forgotten. */
export function setPrice(model, price) {
  const {[model]: before, ...others} = prices.value;
  prices.value = price.input >= 0 && price.output >= 0 ? {...others, [model]: price} : others;
  keep(KEY, prices.value);
}

let known = () => null;

/** Take what a recording says that usage cost, where nobody says it here. */
export function knowPrices(find) {
  known = find;
}

/** What this usage cost in dollars; null where no price is known. */
export function priceOf(model, usage) {
  const price = prices.value[model] ?? prices.value[model.replace(VERSION, "")];
  if (!price) return SCRIPT.test(model) ? 0 : known(model, usage);
  const cached = Math.min(usage.prompt_tokens, usage.cached_tokens);
  return (price.input * (usage.prompt_tokens - cached) + (price.cached ?? price.input) * cached + price.output * usage.completion_tokens) / 1e6;
}

/** Whether a model is one whose price somebody has to say. */
export const needsPrice = (model) => Boolean(model) && !SCRIPT.test(model);

/** An amount as a person reads it: cents, and of less than a dollar as many digits as say something. */
export function writeDollars(usd) {
  if (usd >= 1 || !usd) return `$${usd.toFixed(2)}`;
  return usd >= 0.001 ? `$${usd.toFixed(4)}` : `$${Number(usd.toPrecision(2))}`;
}
