// Which participants a text mentions, by the rule of agents/mentions.py: code, quoted lines, links and addresses mention
// nobody. No DOM.

const NAME = /@([a-z0-9][a-z0-9._-]*)/gi;
const PART_OF_A_WORD = /[A-Za-z0-9._%+@\\-]/;
const BEFORE_A_SLASH = /@[a-z0-9._-]+\/$/i;
const GOES_ON = /(?:\/[A-Za-z0-9_.-]|@[a-z0-9]|:[a-z0-9-]+(?:\.[a-z0-9-]+)+)/iy;
const FENCE = /^ {0,3}(`{3,}|~{3,})(.*)/;
const QUOTED = /^\s*(?:(?:[-*+]|\d{1,9}[.)])\s+)*>/;
const LISTED = /^\s*(?:[-*+]|\d{1,9}[.)])\s/;
const LINK = /!?\[[^[\]]*\]\([^()\s]*(?:\([^()\s]*\)[^()\s]*)?(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/g;
const URL_ = /(?:\b[a-z][a-z0-9+.-]{0,30}:\/\/|\bwww\.|\bmailto:)[^\s<>]*/gi;
const NOTHING = "\ufffc"; // in place of what is left out: no letter of an id, and no space

/** What stands behind each `@` that mentions somebody, in lower case, with the points that may end its sentence. */
function listNames(text) {
  const said = leaveOut(text);
  const names = [];
  for (const found of said.matchAll(NAME)) {
    let begin = found.index;
    while (begin && "_*~".includes(said[begin - 1])) begin -= 1; // emphasis around the name
    const before = begin ? said[begin - 1] : "";
    if (PART_OF_A_WORD.test(before)) continue;
    if (before === "/" && !BEFORE_A_SLASH.test(said.slice(Math.max(0, begin - 66), begin))) continue;
    GOES_ON.lastIndex = found.index + found[0].length;
    if (!GOES_ON.test(said)) names.push(found[1].toLowerCase());
  }
  return names;
}

/** Which of these ids a text mentions. `@bob.` ends a sentence, `@bob.smith` is another one. */
export function listMentioned(text, ids) {
  const names = listNames(text);
  return ids.filter((id) => names.some((it) => it === id || (it.startsWith(id) && /^[._-]+$/.test(it.slice(id.length)))));
}

function leaveOut(text) {
  const lines = listSaid(text.replaceAll("\r\n", "\n").replaceAll("\r", "\n").split("\n"));
  return leaveOutCode(lines.join("\n")).replaceAll(LINK, NOTHING).replaceAll(URL_, NOTHING);
}

/** The lines that are neither quoted nor in a code block; an empty one for each other. */
function listSaid(lines) {
  let [fence, isApart, isListed] = ["", true, false]; // apart: behind an empty line, where four spaces begin a code block
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

/** A text without inline code: what stands between two equal numbers of backticks in one paragraph. */
function leaveOutCode(text) {
  return text.split(/(\n\s*\n)/).map((paragraph) => {
    const runs = [...paragraph.matchAll(/`+/g)].map((it) => ({ begin: it.index, end: it.index + it[0].length }));
    const closing = new Map(); // by length, the places of the runs, the last one first
    for (let place = runs.length - 1; place >= 0; place -= 1) {
      const length = runs[place].end - runs[place].begin;
      if (!closing.has(length)) closing.set(length, []);
      closing.get(length).push(place);
    }
    let [kept, at] = ["", 0];
    for (let place = 0; place < runs.length; place += 1) {
      const { begin, end } = runs[place];
      const later = closing.get(end - begin);
      while (later.length && later.at(-1) <= place) later.pop();
      if (!later.length) continue;
      kept += paragraph.slice(at, begin) + NOTHING;
      place = later.at(-1);
      at = runs[place].end;
    }
    return kept + paragraph.slice(at);
  }).join("");
}
