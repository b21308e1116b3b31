/**
 * Parses search queries: the words to find, the sender, and the time. The syntax is that of network/core/queries.py.
 * This module uses neither the DOM nor a clock.
 */

import { fold } from "#core/text.js";

const MIN_STEM_CHARS = 4;
const ENDINGS = ["ings", "ing", "ies", "ed", "es", "s"];
const CJK = "\\u3040-\\u30ff\\u3400-\\u9fff\\uf900-\\ufaff"; // scripts without spaces between words: each character is a word
const WORD = new RegExp(`[${CJK}]|(?:(?![${CJK}])[\\p{L}\\p{N}])+`, "gu");

/** Parse a query into {terms, sender_id?, said_after?, said_before?}. A term that ends in `*` matches all words that
 * start with it. */
export function readQuery(text) {
  const query = { terms: [] };
  const add = (terms) => { query.terms = [...new Set([...query.terms, ...terms])]; };
  for (const [, quoted, part] of text.matchAll(/"([^"]*)"|(\S+)/g)) {
    const [, name, value] = /^(from|before|after):(\S+)$/i.exec(part ?? "") ?? [];
    if (name === undefined) add(part === undefined ? listWords(quoted) : readWords(part));
    else if (/^from$/i.test(name)) query.sender_id = value.toLowerCase().replace(/^@|^agent:/, "");
    else query[name.toLowerCase() === "after" ? "said_after" : "said_before"] = readDate(value);
  }
  return query;
}

/** Return whether a word matches a term. */
export const fits = (word, term) => (term.endsWith("*") ? word.startsWith(term.slice(0, -1)) : word === term);

/** Return the words of a text, in lower case and without accents. */
export const listWords = (text) => fold(text).match(WORD) ?? [];

function readWords(part) {
  const words = listWords(part);
  const stems = words.map(stem);
  return words.length && part.endsWith("*") ? [...stems.slice(0, -1), `${words.at(-1)}*`] : stems;
}

/** Return a search term that also matches the other forms of a word. */
function stem(word) {
  if (word.length < 3 || !/^\p{L}+$/u.test(word) || /[\u3040-\u9fff]/.test(word)) return word;
  const ending = /^[a-z]+$/.test(word) ? ENDINGS.find((suffix) => word.endsWith(suffix)) ?? "" : "";
  let root = ending ? word.slice(0, -ending.length) : word;
  if (["ing", "ings", "ed"].includes(ending) && root.at(-2) === root.at(-1) && !"lsz".includes(root.at(-1))) root = root.slice(0, -1);
  const isKept = ending && root.length >= MIN_STEM_CHARS - (ending === "s") && !/[seui]$/.test(root);
  return isKept ? `${root}*` : `${word}*`;
}

/** Return the time (ms) of a date in UTC, or NaN for an invalid date. */
const readDate = (text) => (/^\d{4}-\d{2}-\d{2}(T\d{2}:\d{2}(:\d{2})?)?$/.test(text) ? Date.parse(text.length > 10 ? `${text}Z` : text) : NaN);
