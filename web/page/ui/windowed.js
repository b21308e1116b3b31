/**
 * A long list that draws only the rows near the viewport. The list owns the scroll position. Visible rows stay in place
 * while rows above them appear, grow or disappear. At the end of the list, the view follows new rows. This module does
 * not depend on messages.
 *
 * An anchor fixes the view. An anchor consists of a row, and the distance between the top of the row and the top of the
 * viewport. Without an anchor, the view is at the end of the list. The height of a row is measured after the row is
 * drawn. Until then, the row's `guess` is used. `chooseRange` is pure.
 */
import {Component, createRef, h} from "#vendor/preact.js";

const MARGIN = 900;
const END = 12;

/**
 * Return the rows to draw, and the height of the rows above and below them.
 * @param {{key: string}[]} rows
 * @param {(row: object) => number} heightOf
 * @param {{key: string, offset: number}|null} anchor
 * @param {number} view height of the viewport
 */
function chooseRange(rows, heightOf, anchor, view) {
  const index = anchor === null ? -1 : rows.findIndex((row) => row.key === anchor.key);
  let first = index < 0 ? rows.length : index;
  let last = first;
  let over = index < 0 ? view + MARGIN : anchor.offset + MARGIN;
  for (; first > 0 && over > 0; first -= 1) over -= heightOf(rows[first - 1]);
  let under = index < 0 ? 0 : view + MARGIN - anchor.offset;
  for (; last < rows.length && under > 0; last += 1) under -= heightOf(rows[last]);
  const sum = (part) => part.reduce((height, row) => height + heightOf(row), 0);
  return {first, last, above: sum(rows.slice(0, first)), below: sum(rows.slice(last))};
}

/**
 * props: `rows` [{key, guess}], `draw(row)`, `begin` (the key to start at, else the end), `onScroll({isAtEnd, isNearTop,
 * first, lastSeen})` (`first`: the key of the first row), `head`, `label`, `api` (a ref that gets this component). Methods:
 * `jumpTo(key)`, `toEnd()`, `move(step)`.
 */
export class Windowed extends Component {
  constructor(props) {
    super(props);
    this.box = createRef();
    this.list = createRef();
    this.heights = new Map();
    this.anchor = props.begin ? {key: props.begin, offset: 80} : null;
    this.tops = []; // the rows that were visible at the last update: [key, offset]
    this.lastUpdate = "";
    this.view = 800;
    this.top = 0; // the last known scroll position
  }

  componentDidMount() {
    this.props.api.current = this;
    this.sizes = new ResizeObserver(() => {
      this.catchUp();
      this.updateLayout();
    });
    this.sizes.observe(this.box.current);
    this.sizes.observe(this.list.current);
    this.updateLayout();
  }

  componentWillUnmount() {
    this.sizes.disconnect();
    if (this.props.api.current === this) this.props.api.current = null;
  }

  componentDidUpdate() {
    this.updateLayout();
  }

  heightOf = (row) => this.heights.get(row.key) ?? row.guess;

  /** Scroll to the end of the list, and follow new rows. */
  toEnd() {
    this.goTo(null);
  }

  goTo(anchor, then) {
    this.anchor = anchor;
    this.top = this.box.current.scrollTop;
    this.setState({}, then);
  }

  /** Scroll to a row, a little below the top. Return false if no row has this key. */
  jumpTo(key) {
    if (!this.props.rows.some((row) => row.key === key)) return false;
    this.goTo({key, offset: Math.min(120, this.view / 4)}, () => this.focusRow(key));
    return true;
  }

  /** Move the focus to the next or previous row. */
  move(step) {
    const {rows} = this.props;
    const here = document.activeElement?.closest?.("[data-key]")?.dataset.key;
    const seen = here ?? this.tops.at(step > 0 ? 0 : -1)?.[0];
    const index = Math.max(0, Math.min(rows.length - 1, rows.findIndex((row) => row.key === seen) + (here ? step : 0)));
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
    return [...(this.list.current?.children ?? [])].find((child) => child.dataset.key === key);
  }

  /** Measure the drawn rows, restore the position of the anchor, and draw more rows if there is a gap. */
  updateLayout() {
    const box = this.box.current;
    if (!box) return;
    this.view = box.clientHeight || this.view;
    for (const row of this.list.current.children) this.heights.set(row.dataset.key, row.getBoundingClientRect().height);
    if (this.anchor !== null && !this.props.rows.some((row) => row.key === this.anchor.key)) this.anchor = this.findOther();
    if (this.anchor === null) box.scrollTop = box.scrollHeight;
    else {
      const row = this.find(this.anchor.key);
      if (row) {
        const moved = this.topOf(row) - this.anchor.offset;
        if (Math.abs(moved) >= 1) box.scrollTop += moved;
      }
    }
    this.top = box.scrollTop;
    this.measureVisible();
    if (this.hasGap()) this.setState({});
    else if (box.clientHeight && this.isAtEnd()) this.anchor = null; // the browser sends no scroll event if nothing moves
    this.reportScroll();
  }

  topOf(row) {
    return row.getBoundingClientRect().top - this.box.current.getBoundingClientRect().top;
  }

  findOther() {
    const keys = new Set(this.props.rows.map((row) => row.key));
    const [key, offset] = this.tops.find(([value]) => keys.has(value)) ?? [];
    return key === undefined ? null : {key, offset};
  }

  measureVisible() {
    const top = this.box.current.getBoundingClientRect().top;
    this.tops = [...this.list.current.children].flatMap((child) => {
      const rect = child.getBoundingClientRect();
      return rect.bottom > top && rect.top < top + this.view ? [[child.dataset.key, rect.top - top]] : [];
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

  /** Use the row at the top as the anchor. At the end of the list, remove the anchor. */
  readAnchor() {
    const box = this.box.current;
    this.top = box.scrollTop;
    this.measureVisible();
    if (this.isAtEnd()) this.anchor = null;
    else if (this.tops.length) this.anchor = {key: this.tops[0][0], offset: this.tops[0][1]};
    else this.anchor = this.guessAnchor(box.scrollTop);
  }

  /** Process a scroll whose event has not arrived yet. Otherwise an update would undo the scroll. */
  catchUp() {
    if (this.box.current && Math.abs(this.box.current.scrollTop - this.top) >= 1) this.readAnchor();
  }

  scrolled = () => {
    if (!this.box.current) return; // the browser may send a scroll event after the screen was closed
    this.readAnchor();
    const range = this.choose();
    if (range.first !== this.range.first || range.last !== this.range.last) this.setState({});
    this.reportScroll();
  };

  /** Return the row at the top of the viewport after the reader has scrolled past all drawn rows. */
  guessAnchor(top) {
    let offset = -top + (this.list.current.offsetTop - this.range.above);
    for (const row of this.props.rows) {
      const height = this.heightOf(row);
      if (offset + height > 0) return {key: row.key, offset};
      offset += height;
    }
    return null;
  }

  reportScroll() {
    const {rows, onScroll} = this.props;
    const isNearTop = this.range.first === 0 && this.box.current.scrollTop < 2 * this.view;
    const lastSeen = this.anchor === null ? rows.at(-1)?.key : this.tops.at(-1)?.[0];
    const update = JSON.stringify([this.anchor === null, isNearTop, lastSeen, rows[0]?.key]);
    if (update === this.lastUpdate) return;
    this.lastUpdate = update;
    onScroll?.({isAtEnd: this.anchor === null, isNearTop, first: rows[0]?.key, lastSeen});
  }

  render({rows, draw, head, label}) {
    this.catchUp();
    if (this.anchor !== null && !rows.some((row) => row.key === this.anchor.key)) this.anchor = this.findOther();
    this.range = this.choose();
    const {first, last, above, below} = this.range;
    return h("div", {class: "scroller", ref: this.box, onScroll: this.scrolled, tabIndex: 0, role: "log", "aria-live": "off", "aria-label": label},
      head,
      h("div", {style: {height: `${above}px`}}),
      h("div", {ref: this.list}, rows.slice(first, last).map((row) => h("div", {key: row.key, "data-key": row.key, class: "log-item"}, draw(row)))),
      h("div", {style: {height: `${below}px`}}));
  }
}
