"use strict";
// The script of the attention page, which attention_page.py fills with data. One query and one key are selected at a
// time. Scores and probabilities are computed when they are displayed; the page stores only the terms: (a) and (b) of
// every pair of query and key, (c) of every key, (d) of every distance.
const data = JSON.parse(document.getElementById("data").textContent);
const size = data.tokens.length;
const pairs = size * (size + 1) / 2;
const element = (id) => document.getElementById(id);

function decodeArray(base64, ArrayType) {
  const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  return new ArrayType(bytes.buffer);
}

const levels = decodeArray(data.levels, Uint16Array);
const ranges = decodeArray(data.ranges, Float64Array);
const keyTerm = decodeArray(data.content_bias, Float32Array);
const distanceTerm = decodeArray(data.position_bias, Float32Array);
const logDenominator = decodeArray(data.log_denominator, Float32Array); // of each query's softmax

// At first, the query is the first token that sees as many keys as any: it is near the start, with all its keys.
const keysOf = data.first_seen.map((first, query) => query - first + 1);
const first = keysOf.indexOf(Math.max(...keysOf));
const state = { layer: 0, head: 0, term: data.terms[0].name, query: first, key: first, pinned: false };

function seen(query, key) {
  return key <= query && key >= data.first_seen[query];
}

// All terms, the score and the probability of one query and key, by name.
function termsOf(query, key) {
  const head = state.layer * data.n_heads + state.head;
  const pair = query * (query + 1) / 2 + key;
  const [minA, stepA, minB, stepB] = ranges.subarray(4 * head, 4 * head + 4);
  const terms = {
    content: minA + stepA * levels[2 * head * pairs + pair],
    position: minB + stepB * levels[(2 * head + 1) * pairs + pair],
    content_bias: keyTerm[head * size + key],
    position_bias: distanceTerm[head * size + query - key],
  };
  terms.score = terms.content + terms.position + terms.content_bias + terms.position_bias;
  terms.probability = Math.exp(terms.score - logDenominator[head * size + query]);
  return terms;
}

// between Unicode isolates, so that a right-to-left name does not reorder the numbers next to it
const nameOf = (index) => `\u2068${data.tokens[index].name}\u2069`;
const value = (query, key) => termsOf(query, key)[state.term];
const format = (x, term = state.term) => term === "probability" ? x.toPrecision(4) : x.toFixed(4);

// Range of the selected term over the keys that some queries see.
function rangeOf(queries) {
  let low = Infinity, high = -Infinity;
  for (const query of queries) {
    for (let key = data.first_seen[query]; key <= query; key++) {
      const x = value(query, key);
      low = Math.min(low, x);
      high = Math.max(high, x);
    }
  }
  return state.term === "probability" ? [0, high] : [low, high];
}

function colour(x, [low, high]) {
  const fraction = high > low ? (x - low) / (high - low) : 1;
  return data.colours[Math.round(255 * Math.min(1, Math.max(0, fraction)))];
}

const cssColour = ([r, g, b]) => `rgb(${r},${g},${b})`;
// Text colour with the higher contrast to a background: black or white (relative luminance as defined by WCAG 2).
function textColour(rgb) {
  const [r, g, b] = rgb.map((c) => c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
}

const spans = data.tokens.map((token, index) => {
  const span = document.createElement("span");
  span.textContent = token.shown;
  span.tabIndex = index ? -1 : 0;
  span.dataset.index = index;
  span.setAttribute("role", "button");
  span.setAttribute("aria-label", `token ${index}: ${token.name}`);
  if (token.odd) span.className = "odd";
  else span.dataset.spaces = "\u00b7".repeat(token.shown.search(/[^ ]|$/)); // drawn over the spaces, not part of the text
  return span;
});

function paintText() {
  const range = rangeOf([state.query]);
  spans.forEach((span, index) => {
    const isSeen = seen(state.query, index);
    const rgb = isSeen ? colour(value(state.query, index), range) : null;
    span.style.background = rgb ? cssColour(rgb) : "";
    span.style.color = rgb ? textColour(rgb) : "";
    span.classList.toggle("unseen", !isSeen);
    span.classList.toggle("query", index === state.query);
    span.setAttribute("aria-pressed", String(state.pinned && index === state.query));
  });
  element("lowest").textContent = format(range[0]);
  element("highest").textContent = format(range[1]);
  element("meaning").textContent = "over the keys that the framed token sees";
  element("release").disabled = !state.pinned;
}

function paintTable() {
  const table = element("strongest");
  while (table.rows.length) table.deleteRow(0);
  element("chosen").textContent = `Token ${state.query}: ${nameOf(state.query)}`;
  const keys = [];
  for (let key = data.first_seen[state.query]; key <= state.query; key++) keys.push([key, termsOf(state.query, key)]);
  keys.sort((first, second) => second[1][state.term] - first[1][state.term]);
  const head = table.createTHead().insertRow();
  const { title } = data.terms.find((term) => term.name === state.term);
  for (const text of ["key", "tokens back", title]) {
    const cell = document.createElement("th");
    cell.scope = "col";
    cell.textContent = text;
    head.append(cell);
  }
  const body = table.tBodies[0] || table.createTBody();
  for (const [key, values] of keys.slice(0, 10)) {
    const row = body.insertRow();
    for (const text of [nameOf(key), state.query - key, format(values[state.term])]) {
      row.insertCell().textContent = text;
    }
  }
}

const map = element("map");
map.width = map.height = size;

// Most probabilities are small, so over all tokens they are coloured by their logarithm, down to 1/10,000.
const mapValue = (x) => state.term === "probability" ? Math.log10(Math.max(x, 1e-4)) : x;

function paintMap() {
  const range = state.term === "probability" ? [-4, 0] : rangeOf(spans.keys());
  const context = map.getContext("2d");
  const image = context.createImageData(size, size);
  for (let query = 0; query < size; query++) {
    for (let key = data.first_seen[query]; key <= query; key++) {
      image.data.set([...colour(mapValue(value(query, key)), range), 255], 4 * (query * size + key));
    }
  }
  context.putImageData(image, 0, 0);
}

function showTooltip(x, y) {
  const box = element("tip");
  const { query, key } = state;
  const lines = [`query ${query}: ${nameOf(query)}`];
  if (seen(query, key)) {
    lines.push(`key ${key}: ${nameOf(key)}, ${query - key} back`);
    const values = termsOf(query, key);
    for (const { name, title } of data.terms) {
      lines.push(`${title}: ${format(values[name], name)}`);
    }
  } else {
    lines.push(`key ${key}: ${nameOf(key)}, ${key > query ? "comes later" : "not visible"}`);
  }
  box.textContent = lines.join("\n");
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  box.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 8))}px`;
  box.style.top = `${y + 22 + height > innerHeight ? Math.max(4, y - height - 14) : y + 22}px`;
}

function select(query, key, x, y) {
  const isNewQuery = query !== state.query;
  state.query = query;
  state.key = key;
  if (isNewQuery) {
    paintText();
    paintTable();
  }
  showTooltip(x, y);
}

// Keep a token selected as the query while the pointer selects keys.
function pin(index) {
  state.pinned = true;
  state.query = state.key = index;
  paintText();
  paintTable();
}

function unpin() {
  state.pinned = false;
  paintText();
}

function selectSpan(span, x, y) {
  const index = Number(span.dataset.index);
  select(state.pinned ? state.query : index, index, x, y);
}

function focusOn(index) {
  const next = spans[Math.min(size - 1, Math.max(0, index))];
  for (const span of spans) span.tabIndex = span === next ? 0 : -1;
  next.focus();
}

const text = element("text");
text.classList.toggle("words", data.spaced);
// lines break between words; <wbr> allows that where the words have no space in the document
for (const span of spans) text.append(span, ...(data.spaced ? [document.createElement("wbr")] : []));
text.addEventListener("pointermove", (event) => {
  const span = event.target.closest("[data-index]");
  if (span) selectSpan(span, event.clientX, event.clientY);
});
text.addEventListener("pointerleave", () => { element("tip").hidden = true; });
text.addEventListener("focusin", (event) => {
  const box = event.target.getBoundingClientRect();
  if (event.target.matches(":focus-visible")) selectSpan(event.target, box.left, box.bottom - 14);
});
text.addEventListener("focusout", () => { element("tip").hidden = true; });
text.addEventListener("click", (event) => {
  const span = event.target.closest("[data-index]");
  if (!span) return;
  pin(Number(span.dataset.index));
  focusOn(state.query);
});
text.addEventListener("keydown", (event) => {
  const index = Number(event.target.dataset.index);
  const moves = { ArrowRight: index + 1, ArrowLeft: index - 1, ArrowDown: index + 10, ArrowUp: index - 10, Home: 0,
    End: size - 1 };
  if (event.key in moves) focusOn(moves[event.key]);
  else if (event.key === "Enter" || event.key === " ") pin(index);
  else return;
  event.preventDefault();
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") unpin(); });
element("release").addEventListener("click", unpin);
map.addEventListener("pointermove", (event) => {
  const box = map.getBoundingClientRect();
  const indexAt = (x, length) => Math.min(size - 1, Math.max(0, Math.floor(x * size / length)));
  const key = indexAt(event.clientX - box.left, box.width);
  select(state.pinned ? state.query : indexAt(event.clientY - box.top, box.height), key, event.clientX, event.clientY);
});
map.addEventListener("pointerleave", () => { element("tip").hidden = true; });

function fillSelect(id, options) {
  for (const [value, title] of options) element(id).add(new Option(title, value));
  element(id).addEventListener("change", (event) => {
    state[id] = id === "term" ? event.target.value : Number(event.target.value);
    paintText();
    paintTable();
    paintMap();
  });
}

fillSelect("layer", Array.from({ length: data.n_layers }, (_, layer) => [layer, String(layer)]));
fillSelect("head", Array.from({ length: data.n_heads }, (_, head) => [head, String(head)]));
fillSelect("term", data.terms.map((term) => [term.name, term.title]));
element("choice").reset();
const scale = element("scale").getContext("2d");
data.colours.forEach((rgb, index) => {
  scale.fillStyle = cssColour(rgb);
  scale.fillRect(index, 0, 1, 1);
});
paintText();
paintTable();
paintMap();
