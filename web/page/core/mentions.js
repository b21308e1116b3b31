// Finds mentions of participants in a text, by the rules of agents/mentions.py. An @ in code, quoted lines, links and
// addresses is not a mention. This module does not use the DOM.

const NAME = /@([a-z0-9][a-z0-9._-]*)/gi;
const PART_OF_A_WORD = /[A-Za-z0-9._%+@\\-]/;
const BEFORE_A_SLASH = /@[a-z0-9._-]+\/$/i;
const GOES_ON = /(?:\/[A-Za-z0-9_.-]|@[a-z0-9]|:[a-z0-9-]+(?:\.[a-z0-9-]+)+)/iy;
const FENCE = /^ {0,3}(`{3,}|~{3,})(.*)/;
const QUOTED = /^\s*(?:(?:[-*+]|\d{1,9}[.)])\s+)*>/;
const LISTED = /^\s*(?:[-*+]|\d{1,9}[.)])\s/;
const LINK = /!?\[[^[\]]*\]\([^()\s]*(?:\([^()\s]*\)[^()\s]*)?(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/g;
const URL_ = /(?:\b[a-z][a-z0-9+.-]{0,30}:\/\/|\bwww\.|\bmailto:)[^\s<>]*/gi;
const NOTHING = "\ufffc"; // placeholder for removed text; it cannot be part of an id or a space

/** Return the names after each `@` that mentions a participant, in lower case. The names may include trailing
 * punctuation.
 */
function listNames(text) {
  const plain = leaveOut(text);
  const names = [];
  for (const match of plain.matchAll(NAME)) {
    let begin = match.index;
    while (begin && "_*~".includes(plain[begin - 1])) begin -= 1; // skip emphasis around the name
    const before = begin ? plain[begin - 1] : "";
    if (PART_OF_A_WORD.test(before)) continue;
    if (before === "/" && !BEFORE_A_SLASH.test(plain.slice(Math.max(0, begin - 66), begin))) continue;
    GOES_ON.lastIndex = match.index + match[0].length;
    if (!GOES_ON.test(plain)) names.push(match[1].toLowerCase());
  }
  return names;
}

/** Return the ids that a text mentions. `@bob.` at the end of a sentence mentions bob, but `@bob.smith` is a different
 * id. */
export function listMentioned(text, ids) {
  const names = listNames(text);
  return ids.filter((id) => names.some((name) => name === id || (name.startsWith(id) && /^[._-]+$/.test(name.slice(id.length)))));
}

function leaveOut(text) {
  const lines = listSaid(text.replaceAll("\r\n", "\n").replaceAll("\r", "\n").split("\n"));
  return leaveOutCode(lines.join("\n")).replaceAll(LINK, NOTHING).replaceAll(URL_, NOTHING);
}

/** Return the lines of a text. Quoted lines and lines of code blocks are replaced by empty lines. */
function listSaid(lines) {
  let [fence, isApart, isListed] = ["", true, false]; // isApart: after an empty line, four spaces start a code block
  return lines.map((line) => {
    const opened = FENCE.exec(line);
    if (fence) {
      if (opened?.[1].startsWith(fence) && !opened[2].trim()) fence = "";
      return "";
    }
    if (opened && !(opened[1][0] === "`" && opened[2].includes("`"))) {
      [fence, isApart] = [opened[1], true];
      return "";
    }
    if (QUOTED.test(line)) {
      isApart = true;
      return "";
    }
    if (isApart && !isListed && line.trim() && /^(?: {4}|\t)/.test(line)) return "";
    isApart = !line.trim();
    if (!isApart) isListed = LISTED.test(line) || (isListed && /^[ \t]/.test(line));
    return line;
  });
}

/** Remove inline code, which is the text between two runs of backticks of the same length in one paragraph. */
function leaveOutCode(text) {
  return text.split(/(\n\s*\n)/).map((paragraph) => {
    const runs = [...paragraph.matchAll(/`+/g)].map((match) => ({ begin: match.index, end: match.index + match[0].length }));
    const closing = new Map(); // maps a run length to the indexes of these runs, last first
    for (let place = runs.length - 1; place >= 0; place -= 1) {
      const length = runs[place].end - runs[place].begin;
      if (!closing.has(length)) closing.set(length, []);
      closing.get(length).push(place);
    }
    let [result, at] = ["", 0];
    for (let place = 0; place < runs.length; place += 1) {
      const { begin, end } = runs[place];
      const later = closing.get(end - begin);
      while (later.length && later.at(-1) <= place) later.pop();
      if (!later.length) continue;
      result += paragraph.slice(at, begin) + NOTHING;
      place = later.at(-1);
      at = runs[place].end;
    }
    return result + paragraph.slice(at);
  }).join("");
}
