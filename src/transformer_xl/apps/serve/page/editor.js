// The text as it is shown and edited. Its lines are in the document, but only those in view are laid out
// (content-visibility) and painted (CSS highlights, which leave the document as it is). Offsets count UTF-16 units of `text`.

const CHUNK_LINES = 32; // that are laid out together

const HUES = { high: "255 120 0", saves: "0 114 178", looks: "204 80 150" };
export const NUM_LEVELS = 12;
export const PAINTS = Object.keys(HUES).flatMap((hue) => Array.from({ length: NUM_LEVELS }, (_, level) => `${hue}-${level + 1}`));

/** Background of a paint such as "high-12": text stays at 4.5:1 or more on it, on both backgrounds. */
export function colourOf(paint) {
  const [hue, level] = paint.split("-");
  return `rgb(${HUES[hue]} / ${(0.65 * Number(level) / NUM_LEVELS).toFixed(3)})`;
}

/** The paint of a hue whose strength is a fraction of the strongest, or "". */
export function paintOf(hue, fraction) {
  const level = Math.round(NUM_LEVELS * Math.min(1, Math.max(0, fraction)));
  return level ? `${hue}-${level}` : "";
}

const sheet = new CSSStyleSheet();
for (const paint of PAINTS) {
  const declaration = `{ background-color: ${colourOf(paint)} }`;
  sheet.insertRule(`::highlight(${paint}) ${declaration}`);
  sheet.insertRule(`.line[data-paint="${paint}"]::after, .swatch.${paint} ${declaration}`);
}
document.adoptedStyleSheets = [sheet];

// What is not seen, or changes the order of what is; but for what makes an emoji, and what joins letters or keeps them apart.
const HIDDEN = /[\0-\x08\x0b-\x1f\x7f-\x9f\p{DI}\p{NChar}\p{Zl}\p{Zp}\ufff9-\ufffb]/u;
const SEEN = /(?=\p{Emoji}\p{EMod}?\p{DI})(?:\p{RGI_Emoji}|\p{Extended_Pictographic}\ufe0e)|(?<=[[\p{M}\p{sc=Arab}\p{sc=Mong}]--\p{DI}])[\u180b-\u180f\u200c\u200d]/v;
const EITHER = new RegExp(`${SEEN.source}|(${HIDDEN.source})`, "gv");

/** Replace what is not seen, or changes the order of what is, by signs of the same length. */
export const visible = (text) => !HIDDEN.test(text) ? text : text.replace(EITHER, (found, hidden) => !hidden ? found
  : found < " " ? String.fromCharCode(0x2400 + found.charCodeAt(0))
    : (/[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/.test(found) ? "\u21c4" : "\u25af").repeat(found.length));

/** The first index below a length of which something holds that holds of all after it too, or the length. */
export function firstIndex(length, holds) {
  let [low, high] = [0, length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (holds(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

const encoder = new TextEncoder();

// Whether bytes end within a character.
function isIncomplete(bytes) {
  for (let back = 1; back <= Math.min(3, bytes.length); back++) {
    const byte = bytes[bytes.length - back];
    if ((byte & 0xc0) !== 0x80) return byte >= 0xc2 && byte < 0xf5 && back < (byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : 2);
  }
  return false;
}

export function bytesOf(name) {
  if (!/^bytes:(\\x[0-9a-f]{2})+$/.test(name)) return encoder.encode(name);
  return Uint8Array.from(name.slice(6).match(/[0-9a-f]{2}/g), (digits) => parseInt(digits, 16));
}

/** Return the text of tokens of these names. @param {string[]} names */
export function joined(names) {
  const decoder = new TextDecoder();
  return names.map((name) => decoder.decode(bytesOf(name), { stream: true })).join("") + decoder.decode();
}

export class Editor {
  text = "";
  /** @type {number[]} */ ends = []; // offset after each token; that of a character of several tokens is the last one's
  composing = false;
  inPlace = false; // whether names are parts of the text as they are: those with nothing belong to the next one
  last = [0, 0]; // the last selection
  #raw = ""; // the text with what is not seen
  #lines = [""];
  /** @type {HTMLElement[]} */ #divs = [];
  #starts = [0];
  #painted = [0, 0];

  /** @param {HTMLElement} root @param {HTMLElement} scroller @param {HTMLElement} boxes */
  constructor(root, scroller, boxes) {
    this.root = root;
    this.scroller = scroller;
    this.boxes = boxes;
    this.#insertLines(0, [""]);
  }

  /** Show tokens with these names, which are as before up to `from`. @param {string[]} names */
  show(names, from = 0) {
    const { ends } = this;
    from = Math.min(from, ends.length, names.length);
    for (let back = 0; back < 4 && names[from - 1]?.startsWith("bytes:"); back++) from--; // which may be completed now
    while (this.inPlace && names[from - 1] === "") from--;
    from = this.firstOf(from);
    const start = from ? ends[from - 1] : 0;
    const parts = [];
    let [pending, at] = [/** @type {Uint8Array|null} */ (null), start];
    ends.length = from;
    for (let index = from; index < names.length; index++) {
      const name = names[index];
      let shown = name;
      if (this.inPlace) shown = name || (index < names.length - 1 ? "" : "\u2205");
      else if (pending || name.startsWith("bytes:")) {
        const bytes = pending ? Uint8Array.from([...pending, ...bytesOf(name)]) : bytesOf(name);
        pending = isIncomplete(bytes) && /^bytes:\\x[89ab]/.test(names[index + 1]) ? bytes : null;
        shown = pending ? "" : new TextDecoder("utf-8", { ignoreBOM: true }).decode(bytes);
      } else shown = name || "\u2205";
      parts.push(shown);
      ends.push(at += shown.length);
    }
    this.#raw = this.#raw.slice(0, start) + parts.join("");
    const line = start && this.#raw.lastIndexOf("\n", start - 1) + 1; // an emoji can be of several tokens
    this.text = this.text.slice(0, line) + visible(this.#raw.slice(line));
    if (!this.composing) this.#draw();
  }

  /** The first token of the characters of which a token is a part. */
  firstOf(index) {
    const begin = index ? this.ends[index - 1] : 0;
    while (index > 0 && begin === (index > 1 ? this.ends[index - 2] : 0)) index--;
    return index;
  }

  /** The token to which the character at an offset belongs: the last one of it. */
  tokenAt(offset) {
    return firstIndex(this.ends.length, (index) => this.ends[index] > offset);
  }

  startOf(index) { return index ? this.ends[index - 1] : 0; }

  // Lines

  #draw() {
    const lines = this.text.split("\n");
    const old = this.#lines;
    const shortest = Math.min(lines.length, old.length);
    let same = 0;
    while (same < shortest && lines[same] === old[same]) same++;
    let last = 0;
    while (last < shortest - same && lines.at(-1 - last) === old.at(-1 - last)) last++;
    if (same === old.length && same === lines.length) return;
    const selection = this.selected();
    for (const div of this.#divs.splice(same, old.length - last - same)) {
      const chunk = div.parentElement;
      div.remove();
      if (!chunk.childElementCount) chunk.remove();
    }
    this.#insertLines(same, lines.slice(same, lines.length - last));
    this.#lines = lines;
    this.#starts = [];
    let start = 0;
    for (const line of lines) {
      this.#starts.push(start);
      start += line.length + 1;
    }
    this.select(...selection);
  }

  #insertLines(at, lines) {
    const before = this.#divs[at - 1];
    let chunk = before?.parentElement;
    if (before && lines.length > CHUNK_LINES && before.nextSibling) { // what follows gets a chunk of its own
      const rest = this.#chunkAfter(chunk);
      while (before.nextSibling) rest.append(before.nextSibling);
    }
    let previous = before;
    const divs = lines.map((line) => {
      const div = document.createElement("div");
      div.className = "line";
      div.dir = "auto";
      div.append(line || document.createElement("br"));
      if (!chunk || chunk.childElementCount >= CHUNK_LINES && !previous?.nextSibling) {
        chunk = this.#chunkAfter(chunk);
        previous = null;
      }
      if (previous) previous.after(div);
      else chunk.prepend(div);
      return previous = div;
    });
    this.#divs.splice(at, 0, ...divs);
  }

  #chunkAfter(chunk) {
    const made = document.createElement("div");
    made.className = "chunk";
    if (chunk) chunk.after(made);
    else this.root.prepend(made);
    return made;
  }

  lineOf(offset) {
    return Math.max(0, firstIndex(this.#starts.length, (line) => this.#starts[line] > offset) - 1);
  }

  /** Let a line be drawn again that the browser has changed; return it with its start. */
  changedLine(line) {
    const div = this.#divs[line];
    const changed = { start: this.#starts[line], before: this.#lines[line], after: div.textContent };
    div.replaceChildren(changed.before || document.createElement("br"));
    return changed;
  }

  // Places in the document

  /** @returns {[Node, number]} */
  position(offset) {
    const line = this.lineOf(offset);
    const node = this.#divs[line].firstChild;
    const inLine = Math.min(offset - this.#starts[line], this.#lines[line].length);
    return node?.nodeType === Node.TEXT_NODE ? [node, inLine] : [this.#divs[line], 0];
  }

  /** The offset of a place in the document, or null if it is not in the text. */
  offset(node, inNode) {
    if (!this.root.contains(node)) return null;
    if (node.nodeType !== Node.TEXT_NODE && !node.closest?.(".line")) { // between lines
      const next = node.childNodes[inNode];
      const div = next?.closest?.(".line") ?? next?.querySelector?.(".line");
      return div ? this.#starts[this.#divs.indexOf(div)] : this.text.length;
    }
    const line = this.#divs.indexOf((node.closest ? node : node.parentElement).closest(".line"));
    const length = node.nodeType === Node.TEXT_NODE ? inNode : inNode ? this.#lines[line].length : 0;
    return this.#starts[line] + length;
  }

  /** Offsets of anchor and focus of the selection, or of the last one if the text has not the focus. */
  selected() {
    const { anchorNode, anchorOffset, focusNode, focusOffset } = getSelection();
    if (!anchorNode || document.activeElement !== this.root) return this.last;
    const [anchor, focus] = [this.offset(anchorNode, anchorOffset), this.offset(focusNode, focusOffset)];
    return anchor === null || focus === null ? this.last : this.last = [anchor, focus];
  }

  /** Select what is between two offsets, now if the text has the focus, else when it gets it. */
  select(anchor, focus = anchor) {
    this.last = [Math.min(anchor, this.text.length), Math.min(focus, this.text.length)];
    if (document.activeElement !== this.root) return;
    getSelection().setBaseAndExtent(...this.position(this.last[0]), ...this.position(this.last[1]));
  }

  /** The offset nearest to a point of the window. */
  offsetNear(x, y) {
    const place = document.caretPositionFromPoint?.(x, y);
    if (place) return this.offset(place.offsetNode, place.offset);
    const range = document.caretRangeFromPoint?.(x, y);
    return range && this.offset(range.startContainer, range.startOffset);
  }

  /** The token under a point, or null. */
  tokenUnder(x, y) {
    const near = this.offsetNear(x, y);
    if (near === null) return null;
    for (const offset of [near, near - 1]) {
      if (offset < 0 || offset >= this.text.length) continue;
      const index = this.tokenAt(offset);
      const isIn = ({ left, right, top, bottom }) => x >= left - 1 && x <= right + 1 && y >= top - 4 && y <= bottom + 4;
      if (this.rectsOf(index).some(isIn)) return index;
    }
    return null;
  }

  /** @returns {Range} */
  range(start, end) {
    const range = document.createRange();
    range.setStart(...this.position(start));
    range.setEnd(...this.position(end));
    return range;
  }

  /** Where a token is in the window; a line end is as wide as its sign. */
  rectsOf(index) {
    const [start, end] = [this.startOf(this.firstOf(index)), this.ends[index]];
    const rects = [];
    for (let line = this.lineOf(start); line < this.#lines.length && this.#starts[line] < end; line++) {
      const [from, to] = [Math.max(start, this.#starts[line]), Math.min(end, this.#starts[line] + this.#lines[line].length)];
      if (from < to) rects.push(...this.range(from, to).getClientRects());
      if (end > this.#starts[line] + this.#lines[line].length) {
        const near = this.#lines[line] ? this.range(Math.max(this.#starts[line], to - 1), to).getBoundingClientRect()
          : this.#divs[line].getBoundingClientRect();
        rects.push(new DOMRect(this.#lines[line] ? near.right : near.left, near.top, 9, near.height));
      }
    }
    return rects.filter(({ width, height }) => width && height);
  }

  /** Offsets of the first and last character in view. */
  view() {
    const { left, right, top, bottom } = this.scroller.getBoundingClientRect();
    const [first, last] = [Math.max(0, top), Math.min(innerHeight, bottom)];
    return [this.offsetNear(left + 12, first + 12) ?? 0, this.offsetNear(right - 24, last - 3) ?? this.text.length];
  }

  // Painting

  /** Paint the tokens in view, and as many before and after. @param {(first: number, last: number) => string} paint
   * @param {(index: number) => boolean} isModels whether the model wrote a token; @param {boolean} isNew else after scrolling */
  paint(paint, isModels, isNew = true) {
    if (this.composing) return;
    const [begin, end] = this.view();
    if (!isNew && begin >= this.#painted[0] && end <= this.#painted[1]) return;
    const margin = end - begin + 200;
    this.#painted = [begin - margin, end + margin];
    const last = Math.min(this.ends.length - 1, this.tokenAt(end + margin));
    /** @type {Map<string, Range[]>} */
    const ranges = new Map();
    const add = (name, start, stop) => {
      if (!name) return;
      for (let line = this.lineOf(start); line < this.#lines.length && this.#starts[line] < stop; line++) {
        const [from, lineEnd] = [this.#starts[line], this.#starts[line] + this.#lines[line].length];
        if (name !== "model" && stop > lineEnd) this.#divs[line].dataset.paint = name;
        if (Math.max(start, from) >= Math.min(stop, lineEnd)) continue;
        if (!ranges.has(name)) ranges.set(name, []);
        ranges.get(name).push(this.range(Math.max(start, from), Math.min(stop, lineEnd)));
      }
    };
    const first = this.firstOf(this.tokenAt(Math.max(0, begin - margin)));
    for (let line = this.lineOf(this.startOf(first)); line <= this.lineOf(end + margin); line++) {
      delete this.#divs[line].dataset.paint;
    }
    let [run, runStart, models, modelStart, at] = ["", 0, false, 0, this.startOf(first)];
    for (let index = first, unit = first; index <= last; index++) {
      if (this.ends[index] === at) continue; // the next token has the rest of the character
      const name = paint(unit, index);
      if (name !== run) {
        add(run, runStart, at);
        [run, runStart] = [name, at];
      }
      if (isModels(index) !== models) {
        if (models) add("model", modelStart, at);
        [models, modelStart] = [!models, at];
      }
      [at, unit] = [this.ends[index], index + 1];
    }
    add(run, runStart, at);
    if (models) add("model", modelStart, at);
    for (const name of [...PAINTS, "model"]) {
      if (ranges.has(name)) CSS.highlights.set(name, new Highlight(...ranges.get(name)));
      else CSS.highlights.delete(name);
    }
  }

  /** Draw a box around a token, or none. */
  box(index) {
    const { left, top } = this.boxes.getBoundingClientRect();
    this.boxes.replaceChildren(...(index === null || index >= this.ends.length ? [] : this.rectsOf(index)).map((rect) => {
      const box = document.createElement("div");
      Object.assign(box.style, { left: `${rect.left - left}px`, top: `${rect.top - top}px`, width: `${rect.width}px`,
        height: `${rect.height}px` });
      return box;
    }));
  }

  /** Bring an offset into view. */
  reveal(offset) {
    const line = this.#divs[this.lineOf(offset)];
    line.scrollIntoView({ block: "nearest" });
    const rect = this.range(Math.max(0, offset - 1), offset).getBoundingClientRect();
    const view = this.scroller.getBoundingClientRect();
    if (rect.height && (rect.top < view.top || rect.bottom > view.bottom)) this.scroller.scrollTop += rect.top - view.top - view.height / 3;
  }
}
