"use strict";
// One query and one key are selected at a time. Scores and probabilities are computed when they are shown; the page
// stores only the terms: terms (a) and (b) of every pair, (c) of every key, (d) of every distance.
const data = JSON.parse(document.getElementById("data").textContent);
const size = data.tokens.length;
const pairs = size * (size + 1) / 2;
const part = (id) => document.getElementById(id);

function numbers(text, Kind) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Kind(bytes.buffer);
}

const levels = numbers(data.levels, Uint16Array);
const ranges = numbers(data.ranges, Float64Array);
const keyTerm = numbers(data.content_bias, Float32Array);
const distanceTerm = numbers(data.position_bias, Float32Array);
const logTotal = numbers(data.log_total, Float32Array);

const state = { layer: 0, head: 0, term: data.terms[0].name, query: -1, key: -1, held: false };

function seen(query, key) {
  return key <= query && key >= data.first_seen[query];
}

// All values of one query and key, by the name of the term.
function all(query, key) {
  const head = state.layer * data.n_heads + state.head;
  const pair = query * (query + 1) / 2 + key;
  const [low, step, lowB, stepB] = ranges.subarray(4 * head, 4 * head + 4);
  const found = {
    content: low + step * levels[2 * head * pairs + pair],
    position: lowB + stepB * levels[(2 * head + 1) * pairs + pair],
    content_bias: keyTerm[head * size + key],
    position_bias: distanceTerm[head * size + query - key],
  };
  found.score = found.content + found.position + found.content_bias + found.position_bias;
  found.probability = Math.exp(found.score - logTotal[head * size + query]);
  return found;
}

// isolated, so that a right-to-left name does not reorder the numbers beside it
const nameOf = (index) => `\u2068${data.tokens[index].name}\u2069`;
const value = (query, key) => all(query, key)[state.term];
const shown = (x) => state.term === "probability" ? x.toPrecision(4) : x.toFixed(4);

function extent(queries) {
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
  const share = high > low ? (x - low) / (high - low) : 1;
  return data.colours[Math.round(255 * Math.min(1, Math.max(0, share)))];
}

const css = ([r, g, b]) => `rgb(${r},${g},${b})`;
// black or white, whichever stands out more (relative luminance of WCAG)
function ink(rgb) {
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
  return span;
});

function paintText() {
  const range = state.query < 0 ? [0, 1] : extent([state.query]);
  spans.forEach((span, index) => {
    const lit = state.query >= 0 && seen(state.query, index);
    const rgb = lit ? colour(value(state.query, index), range) : null;
    span.style.background = rgb ? css(rgb) : "";
    span.style.color = rgb ? ink(rgb) : "";
    span.classList.toggle("unseen", state.query >= 0 && !lit);
    span.classList.toggle("query", index === state.query);
    span.setAttribute("aria-pressed", String(state.held && index === state.query));
  });
  part("lowest").textContent = state.query < 0 ? "lowest" : shown(range[0]);
  part("highest").textContent = state.query < 0 ? "highest" : shown(range[1]);
  part("meaning").textContent = state.query < 0 ? "" : "over the keys that the framed token sees";
  part("release").disabled = !state.held;
}

function paintTable() {
  const table = part("strongest");
  while (table.rows.length) table.deleteRow(0);
  if (state.query < 0) return;
  part("chosen").textContent = `Token ${state.query}: ${nameOf(state.query)}`;
  const found = [];
  for (let key = data.first_seen[state.query]; key <= state.query; key++) found.push([key, all(state.query, key)]);
  found.sort((one, other) => other[1][state.term] - one[1][state.term]);
  const head = table.createTHead().insertRow();
  const term = data.terms.find((each) => each.name === state.term).words;
  for (const words of ["key", "tokens back", term]) {
    const cell = document.createElement("th");
    cell.scope = "col";
    cell.textContent = words;
    head.append(cell);
  }
  const body = table.tBodies[0] || table.createTBody();
  for (const [key, values] of found.slice(0, 10)) {
    const row = body.insertRow();
    for (const words of [nameOf(key), state.query - key, shown(values[state.term])]) {
      row.insertCell().textContent = words;
    }
  }
}

const map = part("map");
map.width = map.height = size;

// Most probabilities are small, so over all tokens they are coloured by their logarithm, down to 1/10,000.
const onMap = (x) => state.term === "probability" ? Math.log10(Math.max(x, 1e-4)) : x;

function paintMap() {
  const range = state.term === "probability" ? [-4, 0] : extent(spans.keys());
  const context = map.getContext("2d");
  const image = context.createImageData(size, size);
  for (let query = 0; query < size; query++) {
    for (let key = data.first_seen[query]; key <= query; key++) {
      image.data.set([...colour(onMap(value(query, key)), range), 255], 4 * (query * size + key));
    }
  }
  context.putImageData(image, 0, 0);
}

function tip(x, y) {
  const box = part("tip");
  const { query, key } = state;
  const lines = [`query ${query}: ${nameOf(query)}`];
  if (seen(query, key)) {
    lines.push(`key ${key}: ${nameOf(key)}, ${query - key} back`);
    const values = all(query, key);
    for (const { name, words } of data.terms) {
      lines.push(`${words}: ${name === "probability" ? values[name].toPrecision(4) : values[name].toFixed(4)}`);
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

function choose(query, key, x, y) {
  const moved = query !== state.query;
  state.query = query;
  state.key = key;
  if (moved) {
    paintText();
    paintTable();
  }
  tip(x, y);
}

function hold(index) {
  state.held = true;
  state.query = state.key = index;
  paintText();
  paintTable();
}

function release() {
  state.held = false;
  paintText();
}

function reach(span, x, y) {
  const index = Number(span.dataset.index);
  choose(state.held ? state.query : index, index, x, y);
}

function focusOn(index) {
  const next = spans[Math.min(size - 1, Math.max(0, index))];
  for (const span of spans) span.tabIndex = span === next ? 0 : -1;
  next.focus();
}

const text = part("text");
text.classList.toggle("words", data.apart);
text.append(...spans);
text.addEventListener("pointermove", (event) => {
  const span = event.target.closest("[data-index]");
  if (span) reach(span, event.clientX, event.clientY);
});
text.addEventListener("pointerleave", () => { part("tip").hidden = true; });
text.addEventListener("focusin", (event) => {
  const box = event.target.getBoundingClientRect();
  if (event.target.matches(":focus-visible")) reach(event.target, box.left, box.bottom - 14);
});
text.addEventListener("focusout", () => { part("tip").hidden = true; });
text.addEventListener("click", (event) => {
  const span = event.target.closest("[data-index]");
  if (!span) return;
  hold(Number(span.dataset.index));
  focusOn(state.query);
});
text.addEventListener("keydown", (event) => {
  const index = Number(event.target.dataset.index);
  const moves = { ArrowRight: index + 1, ArrowLeft: index - 1, ArrowDown: index + 10, ArrowUp: index - 10, Home: 0,
    End: size - 1 };
  if (event.key in moves) focusOn(moves[event.key]);
  else if (event.key === "Enter" || event.key === " ") hold(index);
  else return;
  event.preventDefault();
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") release(); });
part("release").addEventListener("click", release);
map.addEventListener("pointermove", (event) => {
  const box = map.getBoundingClientRect();
  const at = (x, length) => Math.min(size - 1, Math.max(0, Math.floor(x * size / length)));
  const key = at(event.clientX - box.left, box.width);
  choose(state.held ? state.query : at(event.clientY - box.top, box.height), key, event.clientX, event.clientY);
});
map.addEventListener("pointerleave", () => { part("tip").hidden = true; });

function fill(id, entries) {
  for (const [name, words] of entries) part(id).add(new Option(words, name));
  part(id).addEventListener("change", (event) => {
    state[id] = id === "term" ? event.target.value : Number(event.target.value);
    paintText();
    paintTable();
    paintMap();
  });
}

fill("layer", Array.from({ length: data.n_layers }, (_, layer) => [layer, String(layer)]));
fill("head", Array.from({ length: data.n_heads }, (_, head) => [head, String(head)]));
fill("term", data.terms.map((term) => [term.name, term.words]));
part("choice").reset();
const scale = part("scale").getContext("2d");
data.colours.forEach((rgb, index) => {
  scale.fillStyle = css(rgb);
  scale.fillRect(index, 0, 1, 1);
});
paintText();
paintMap();
