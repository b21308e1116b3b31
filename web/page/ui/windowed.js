/**
 * A long list of rows of which only those near the viewport are drawn. It owns the scrolling: what the reader looks at
 * stays where it is while rows above it come, grow or go; at the end it follows what is written; it knows no messages.
 *
 * What is seen is held by an anchor: a row and how far its top is from the viewport's. No anchor is the end of the list.
 * Heights are measured when a row is drawn; before that its `guess` counts. `chooseRange` is pure.
 */
import {Component, createRef, h} from "#vendor/preact.js";

const MARGIN = 900;
const END = 12;

/**
 * Which rows are drawn, and how much room those above and below them take.
 * @param {{key: string}[]} rows
 * @param {(row: object) => number} heightOf
 * @param {{key: string, offset: number}|null} anchor
 * @param {number} view the viewport's height
 */
function chooseRange(rows, heightOf, anchor, view) {
  const found = anchor === null ? -1 : rows.findIndex((it) => it.key === anchor.key);
  let first = found < 0 ? rows.length : found;
  let last = first;
  let over = found < 0 ? view + MARGIN : anchor.offset + MARGIN;
  for (; first > 0 && over > 0; first -= 1) over -= heightOf(rows[first - 1]);
  let under = found < 0 ? 0 : view + MARGIN - anchor.offset;
  for (; last < rows.length && under > 0; last += 1) under -= heightOf(rows[last]);
  const sum = (part) => part.reduce((height, it) => height + heightOf(it), 0);
  return {first, last, above: sum(rows.slice(0, first)), below: sum(rows.slice(last))};
}

/**
 * props: `rows` [{key, guess}], `draw(row)`, `begin` (the key to begin at, else the end), `onScroll({isAtEnd, isNearTop,
 * first, lastSeen})` (`first`: the key of the first row there is), `head`, `label`, `api` (a ref that is given this
 * component). Methods: `jumpTo(key)`, `toEnd()`, `move(step)`.
 */
export class Windowed extends Component {
  constructor(props) {
    super(props);
    this.box = createRef();
    this.list = createRef();
    this.heights = new Map();
    this.anchor = props.begin ? {key: props.begin, offset: 80} : null;
    this.tops = []; // of what was seen last: [key, offset]
    this.told = "";
    this.view = 800;
    this.top = 0; // where it was scrolled to, as far as is known here
  }

  componentDidMount() {
    this.props.api.current = this;
    this.sizes = new ResizeObserver(() => {
      this.catchUp();
      this.settle();
    });
    this.sizes.observe(this.box.current);
    this.sizes.observe(this.list.current);
    this.settle();
  }

  componentWillUnmount() {
    this.sizes.disconnect();
    if (this.props.api.current === this) this.props.api.current = null;
  }

  componentDidUpdate() {
    this.settle();
  }

  heightOf = (row) => this.heights.get(row.key) ?? row.guess;

  /** Begin at the end, and follow it. */
  toEnd() {
    this.goTo(null);
  }

  goTo(anchor, then) {
    this.anchor = anchor;
    this.top = this.box.current.scrollTop;
    this.setState({}, then);
  }

  /** Show a row a little below the top; false if there is none with that key. */
  jumpTo(key) {
    if (!this.props.rows.some((it) => it.key === key)) return false;
    this.goTo({key, offset: Math.min(120, this.view / 4)}, () => this.focusRow(key));
    return true;
  }

  /** Move the focus to the next row, or the one before. */
  move(step) {
    const {rows} = this.props;
    const here = document.activeElement?.closest?.("[data-key]")?.dataset.key;
    const seen = here ?? this.tops.at(step > 0 ? 0 : -1)?.[0];
    const index = Math.max(0, Math.min(rows.length - 1, rows.findIndex((it) => it.key === seen) + (here ? step : 0)));
    const row = rows[index];
    if (row && !this.focusRow(row.key)) this.jumpTo(row.key);
  }

  focusRow(key) {
    const row = this.find(key)?.querySelector("[tabindex]");
    row?.focus({preventScroll: true});
    row?.scrollIntoView({block: "nearest"});
    return Boolean(row);
  }

  find(key) {
    return [...(this.list.current?.children ?? [])].find((it) => it.dataset.key === key);
  }

  /** Measure what is drawn, put the anchor back to its place, and draw more where there is a gap. */
  settle() {
    const box = this.box.current;
    if (!box) return;
    this.view = box.clientHeight || this.view;
    for (const row of this.list.current.children) this.heights.set(row.dataset.key, row.getBoundingClientRect().height);
    if (this.anchor !== null && !this.props.rows.some((it) => it.key === this.anchor.key)) this.anchor = this.findOther();
    if (this.anchor === null) box.scrollTop = box.scrollHeight;
    else {
      const row = this.find(this.anchor.key);
      if (row) {
        const moved = this.topOf(row) - this.anchor.offset;
        if (Math.abs(moved) >= 1) box.scrollTop += moved;
      }
    }
    this.top = box.scrollTop;
    this.look();
    if (this.hasGap()) this.setState({});
    else if (box.clientHeight && this.isAtEnd()) this.anchor = null; // where nothing has to move, no scroll is told
    this.tell();
  }

  topOf(row) {
    return row.getBoundingClientRect().top - this.box.current.getBoundingClientRect().top;
  }

  findOther() {
    const known = new Set(this.props.rows.map((it) => it.key));
    const [key, offset] = this.tops.find(([it]) => known.has(it)) ?? [];
    return key === undefined ? null : {key, offset};
  }

  look() {
    const top = this.box.current.getBoundingClientRect().top;
    this.tops = [...this.list.current.children].flatMap((it) => {
      const rect = it.getBoundingClientRect();
      return rect.bottom > top && rect.top < top + this.view ? [[it.dataset.key, rect.top - top]] : [];
    });
  }

  hasGap() {
    const range = this.choose();
    return range.first < this.range.first || range.last > this.range.last;
  }

  choose() {
    return chooseRange(this.props.rows, this.heightOf, this.anchor, this.view);
  }

  isAtEnd() {
    const {scrollHeight, scrollTop, clientHeight} = this.box.current;
    return scrollHeight - scrollTop - clientHeight <= END;
  }

  /** What is at the top now is the anchor; at the end there is none. */
  readAnchor() {
    const box = this.box.current;
    this.top = box.scrollTop;
    this.look();
    if (this.isAtEnd()) this.anchor = null;
    else if (this.tops.length) this.anchor = {key: this.tops[0][0], offset: this.tops[0][1]};
    else this.anchor = this.guessAnchor(box.scrollTop);
  }

  /** A scroll of which the event is still to come is not undone by what comes meanwhile. */
  catchUp() {
    if (this.box.current && Math.abs(this.box.current.scrollTop - this.top) >= 1) this.readAnchor();
  }

  scrolled = () => {
    if (!this.box.current) return; // the browser tells a scroll of the last frame after the screen was left
    this.readAnchor();
    const range = this.choose();
    if (range.first !== this.range.first || range.last !== this.range.last) this.setState({});
    this.tell();
  };

  /** The row that has to be at the top of the viewport, where the reader has gone beyond all that is drawn. */
  guessAnchor(top) {
    let offset = -top + (this.list.current.offsetTop - this.range.above);
    for (const row of this.props.rows) {
      const height = this.heightOf(row);
      if (offset + height > 0) return {key: row.key, offset};
      offset += height;
    }
    return null;
  }

  tell() {
    const {rows, onScroll} = this.props;
    const isNearTop = this.range.first === 0 && this.box.current.scrollTop < 2 * this.view;
    const lastSeen = this.anchor === null ? rows.at(-1)?.key : this.tops.at(-1)?.[0];
    const news = JSON.stringify([this.anchor === null, isNearTop, lastSeen, rows[0]?.key]);
    if (news === this.told) return;
    this.told = news;
    onScroll?.({isAtEnd: this.anchor === null, isNearTop, first: rows[0]?.key, lastSeen});
  }

  render({rows, draw, head, label}) {
    this.catchUp();
    if (this.anchor !== null && !rows.some((it) => it.key === this.anchor.key)) this.anchor = this.findOther();
    this.range = this.choose();
    const {first, last, above, below} = this.range;
    return h("div", {class: "scroller", ref: this.box, onScroll: this.scrolled, tabIndex: 0, role: "log", "aria-live": "off", "aria-label": label},
      head,
      h("div", {style: {height: `${above}px`}}),
      h("div", {ref: this.list}, rows.slice(first, last).map((row) => h("div", {key: row.key, "data-key": row.key, class: "log-item"}, draw(row)))),
      h("div", {style: {height: `${below}px`}}));
  }
}
