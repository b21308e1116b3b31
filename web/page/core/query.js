/**
 * What a search asks for: words, and who said them when. The twin of network/core/queries.py. No DOM, no clock.
 */

import { fold } from "#core/text.js";

const MIN_STEM_CHARS = 4;
const ENDINGS = ["ings", "ing", "ies", "ed", "es", "s"];
const CJK = "\\u3040-\\u30ff\\u3400-\\u9fff\\uf900-\\ufaff"; // scripts that put no space between words: each character is one
const WORD = new RegExp(`[${CJK}]|(?:(?![${CJK}])[\\p{L}\\p{N}])+`, "gu");

/** Read what somebody typed: {terms, sender_id?, said_after?, said_before?}; a term that ends in `*` is a beginning. */
export function readQuery(text) {
  const found = { terms: [] };
  const add = (terms) => { found.terms = [...new Set([...found.terms, ...terms])]; };
  for (const [, quoted, part] of text.matchAll(/"([^"]*)"|(\S+)/g)) {
    const [, name, value] = /^(from|before|after):(\S+)$/i.exec(part ?? "") ?? [];
    if (name === undefined) add(part === undefined ? listWords(quoted) : readWords(part));
    else if (/^from$/i.test(name)) found.sender_id = value.toLowerCase().replace(/^@|^agent:/, "");
    else found[name.toLowerCase() === "after" ? "said_after" : "said_before"] = readDate(value);
  }
  return found;
}

/** Whether a word is one that a term asks for. */
export const fits = (word, term) => (term.endsWith("*") ? word.startsWith(term.slice(0, -1)) : word === term);

/** The words of a text. */
export const listWords = (text) => fold(text).match(WORD) ?? [];

function readWords(part) {
  const words = listWords(part);
  const stems = words.map(stem);
  return words.length && part.endsWith("*") ? [...stems.slice(0, -1), `${words.at(-1)}*`] : stems;
}

/** The term by which a word finds its other forms too. */
function stem(word) {
  if (word.length < 3 || !/^\p{L}+$/u.test(word) || /[\u3040-\u9fff]/.test(word)) return word;
  const ending = /^[a-z]+$/.test(word) ? ENDINGS.find((it) => word.endsWith(it)) ?? "" : "";
  let kept = ending ? word.slice(0, -ending.length) : word;
  if (["ing", "ings", "ed"].includes(ending) && kept.at(-2) === kept.at(-1) && !"lsz".includes(kept.at(-1))) kept = kept.slice(0, -1);
  const isKept = ending && kept.length >= MIN_STEM_CHARS - (ending === "s") && !/[seui]$/.test(kept);
  return isKept ? `${kept}*` : `${word}*`;
}

/** The moment (ms) of a date in UTC; NaN for what is none. */
const readDate = (text) => (/^\d{4}-\d{2}-\d{2}(T\d{2}:\d{2}(:\d{2})?)?$/.test(text) ? Date.parse(text.length > 10 ? `${text}Z` : text) : NaN);
