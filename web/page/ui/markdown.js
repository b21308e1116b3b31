/**
 * Converts Markdown from participants to preact nodes.
 *
 * The library marked only parses. The tokens of marked become nodes from a short list of elements. No text is ever
 * parsed as HTML, and the page never sets innerHTML. Raw HTML appears as text. Links lead only to http, https and
 * mailto, and show their host. An image is shown only if it is a data: bitmap. Any other image becomes a link, and
 * nothing is fetched.
 *
 * `renderMarkdown`, `readBlocks` and `growBlocks` are pure and run under Node. Text that is slow to parse appears as
 * plain text: inline text over 4,000 characters, a text over 64,000 characters, and nesting deeper than 24.
 */
import {Component, h} from "#vendor/preact.js";
import {useRef, useState} from "#vendor/hooks.js";
import {Lexer} from "#vendor/marked.js";

const MAX_CHARS = 64_000;
const MAX_INLINE_CHARS = 4_000;
const MAX_DEPTH = 24;
const OPTIONS = {gfm: true, breaks: true};
const BITMAP = /^data:image\/(png|jpeg|gif|webp|avif);base64,[a-z0-9+/=\s]*$/i;
const NAMED = {amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", hellip: "…", mdash: "—", ndash: "–"};

/** Render a complete text. @param {string} text */
export const renderMarkdown = (text) => readBlocks(text).map((block) => renderBlock(block, 0));

/** Parse a complete text into blocks, which are tokens of marked. @param {string} text */
export const readBlocks = (text) => lex(text, {}).blocks;

/**
 * Parse a text that has grown since the last call. All blocks except the last two stay the same objects.
 * @param {{text: string, blocks: object[], links: object}|null} before the result of the last call
 * @param {string} whole
 */
export function growBlocks(before, whole) {
  const text = whole.replace(/\r\n?/g, "\n");
  if (before === null || text.length > MAX_CHARS || !text.startsWith(before.text)) return {text, ...lex(text, {})};
  const written = before.blocks.flatMap((block, index) => (block.type === "space" ? [] : [index]));
  const unchanged = before.blocks.slice(0, written.at(-2) ?? 0);
  const begin = unchanged.reduce((sum, block) => sum + block.raw.length, 0);
  const {blocks, links} = lex(text.slice(begin), before.links);
  return {text, blocks: [...unchanged, ...blocks], links};
}

const plain = (text) => ({type: "plain", raw: text, text});

function lex(text, links) {
  const lexer = new Lexer(OPTIONS);
  lexer.tokens.links = {...links};
  if (text.length > MAX_CHARS || /^([ \t]*>){40}/m.test(text)) return {blocks: [plain(text)], links};
  const clean = text.replace(/\r\n?/g, "\n");
  try {
    lexer.blockTokens(clean, lexer.tokens);
    for (const {src, tokens} of lexer.inlineQueue) {
      if (src.length > MAX_INLINE_CHARS) tokens.push(plain(src));
      else lexer.inlineTokens(src, tokens);
    }
  } catch {
    return {blocks: [plain(text)], links}; // the nesting is too deep for the stack
  }
  return {blocks: [...lexer.tokens], links: lexer.tokens.links};
}

// --- blocks

function renderBlock(token, depth) {
  if (depth > MAX_DEPTH) return h("p", {class: "as-is"}, token.raw);
  const inner = () => renderInline(token.tokens, depth + 1);
  switch (token.type) {
    case "space": case "def": return null;
    case "paragraph": return h("p", null, inner());
    case "text": return token.tokens ? inner() : h("p", {class: "as-is"}, decode(token.text));
    case "heading": return h(`h${Math.min(token.depth + 2, 6)}`, null, inner());
    case "hr": return h("hr");
    case "blockquote": return h("blockquote", null, token.tokens.map((token) => renderBlock(token, depth + 1)));
    case "list": return renderList(token, depth);
    case "table": return renderTable(token, depth);
    case "code": return h(CodeBlock, {text: token.text, language: (token.lang ?? "").split(/\s/)[0].slice(0, 40)});
    case "checkbox": return h("span", {class: "box"}, token.checked ? "☑ " : "☐ ");
    default: return h("p", {class: "as-is"}, token.raw); // show raw HTML and unknown tokens as text
  }
}

function renderList(token, depth) {
  const items = token.items.map((item) => h("li", item.task ? {class: "task"} : null,
    item.tokens.map((token) => renderBlock(token, depth + 1))));
  const start = Number(token.start);
  return token.ordered ? h("ol", Number.isSafeInteger(start) && start !== 1 ? {start} : null, items) : h("ul", null, items);
}

function renderTable(token, depth) {
  const row = (cells, name) => h("tr", null, cells.map((cell) =>
    h(name, cell.align ? {class: `to-${cell.align}`} : null, renderInline(cell.tokens, depth + 1))));
  return h("div", {class: "wide-table", tabIndex: 0, role: "group", "aria-label": "Table"}, h("table", null,
    h("thead", null, row(token.header, "th")), h("tbody", null, token.rows.map((cells) => row(cells, "td")))));
}

// --- inline

function renderInline(tokens, depth) {
  return (tokens ?? []).map((token) => {
    if (depth > MAX_DEPTH) return token.raw;
    const inner = () => renderInline(token.tokens, depth + 1);
    switch (token.type) {
      case "text": return token.tokens ? inner() : decode(token.text);
      case "escape": return token.text;
      case "strong": case "em": case "del": return h(token.type, null, inner());
      case "codespan": return h("code", null, token.text);
      case "br": return h("br");
      case "checkbox": return renderBlock(token, depth);
      case "html": return /^<br\s*\/?>$/i.test(token.raw) ? h("br") : token.raw;
      case "link": return renderLink(token.href, inner(), token.text);
      case "image": return renderImage(token.href, decode(token.text));
      default: return token.raw;
    }
  });
}

/** Render a link with its host. A link that is not allowed becomes text. */
export function renderLink(href, inner, text) {
  const url = readUrl(href);
  if (url === null) return h("span", {class: "dead", title: "This page does not open links of this kind"}, inner);
  const host = url.protocol === "mailto:" ? url.pathname : url.host;
  const shown = String(text).replace(/^(https?|mailto):(\/\/)?/i, "");
  const isSaid = shown.startsWith(host) && /^([/?#]|$)/.test(shown.slice(host.length));
  const opened = {href: url.href, target: "_blank", rel: "noopener noreferrer nofollow", title: url.href};
  return [h("a", opened, inner), isSaid ? null : h("bdi", {class: "host"}, ` (${host})`)];
}

function readUrl(href) {
  try {
    const url = new URL(String(href).trim());
    return ["http:", "https:", "mailto:"].includes(url.protocol) && !url.username && !url.password ? url : null;
  } catch {
    return null;
  }
}

/** Render an image that the message contains. Any other image becomes a link. */
export function renderImage(href, alt) {
  if (BITMAP.test(String(href))) return h("img", {src: href, alt: alt || "Image without a description", class: "picture"});
  const url = readUrl(href);
  const label = `[image${alt ? `: ${alt}` : ""}]`;
  return url === null ? label : renderLink(url.href, label, "");
}

/** Decode the entities that marked leaves in its texts. */
function decode(text) {
  return String(text).replace(/&(#x[0-9a-f]{1,6}|#\d{1,7}|[a-z]{2,6});/gi, (whole, name) => {
    if (name[0] !== "#") return NAMED[name.toLowerCase()] ?? whole;
    const code = name[1].toLowerCase() === "x" ? parseInt(name.slice(2), 16) : parseInt(name.slice(1), 10);
    return code > 31 && code <= 0x10ffff && !(code >= 0xd800 && code < 0xe000) ? String.fromCodePoint(code) : whole;
  });
}

// --- components

/** A button that copies a text, and then confirms the copy. */
export function CopyButton({text, label = "Copy", children}) {
  const [isDone, setDone] = useState(false);
  const copy = () => navigator.clipboard?.writeText(text).then(() => {
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  }, () => {});
  const title = isDone ? "Copied" : label;
  return h("button", {type: "button", class: "tool-button", onClick: copy, "aria-label": title, title: title},
    isDone ? "✓ Copied" : children ?? label);
}

function CodeBlock({text, language}) {
  return h("figure", {class: "code"},
    h("figcaption", null, h("bdi", null, language || "text"), h(CopyButton, {text, label: "Copy code"}, "Copy")),
    h("pre", {tabIndex: 0, dir: "ltr"}, h("code", null, text)));
}

/** One block, which is drawn again only if its token has changed. */
class Block extends Component {
  shouldComponentUpdate(next) {
    return next.token !== this.props.token;
  }

  render({token}) {
    return renderBlock(token, 0);
  }
}

const parsed = new WeakMap();

/** A finished text. `of` is the object to which the text belongs. The blocks of the text are parsed once per object. */
export function Markdown({text, of}) {
  if (of !== undefined && parsed.get(of)?.text !== text) parsed.set(of, {text, blocks: readBlocks(text)});
  return showBlocks(of === undefined ? readBlocks(text) : parsed.get(of).blocks);
}

/** A text that is still being written. Only the last blocks of the text are parsed again. */
export function GrowingMarkdown({text}) {
  const before = useRef(null);
  before.current = growBlocks(before.current, text);
  return showBlocks(before.current.blocks);
}

const showBlocks = (blocks) =>
  h("div", {class: "markdown", dir: "auto"}, blocks.map((token, index) => h(Block, {token, key: index})));
