// What is beside the text. What a model or a link gives is put into the document as text nodes and attributes only.

import { visible } from "./editor.js";

/** @import { Part, Work } from "./work.js" */

/** @returns {any} */
export const element = (id) => document.getElementById(id);

/** @returns {any} */
export function make(tag, text = undefined, className = "", attributes = {}) {
  return filled(document.createElement(tag), text, { ...(className && { class: className }), ...(tag === "button" && { type: tag }), ...attributes });
}

/** @returns {any} */
export const draw = (tag, attributes, text = undefined) => filled(document.createElementNS("http://www.w3.org/2000/svg", tag), text, attributes);

function filled(made, text, attributes) {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

export const count = (number, of = "") => `${number.toLocaleString("en")}${of && ` ${of}${number === 1 ? "" : "s"}`}`;
export const probability = (bits) => { const p = 2 ** -bits; return p >= 0.001 ? p.toPrecision(3) : p.toExponential(1); };

// The name of a token, on one line; between Unicode isolates, so that it does not reorder what is next to it.
export const quoted = (name) => `\u2068${name ? visible(name).replace(/^bytes:(?=\\x)/, "").replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5")
  .replaceAll(" ", "\u00b7").slice(0, 60) : "\u2205"}\u2069`;

/** Fill a list of bars. @param {{label: string, part: number, value: string, taken?: boolean, id?: number, to?: number}[]} rows */
export function showBars(list, rows, action = "") {
  list.hidden = !rows.length;
  list.replaceChildren(...rows.map(({ label, part, value, taken = false, id, to }) => {
    const row = make("li", undefined, taken ? "taken" : "");
    const button = make("button", label, "", { "aria-label": `${action}${label}, ${value}` });
    if (id !== undefined) button.dataset.id = id;
    if (to !== undefined) button.dataset.to = to;
    button.disabled = taken || id === undefined && to === undefined;
    const [track, bar] = [make("span"), make("i")];
    bar.style.setProperty("--part", String(part));
    track.append(bar);
    row.append(button, track, make("small", value));
    return row;
  }));
}

/** Draw mean bits by memory length. @param {number[]} lengths @param {(number|undefined)[]} means */
export function showCurve(root, lengths, means, chosen) {
  const [width, height, left, right, top, bottom] = [340, 132, 12, 12, 24, 34];
  const known = means.filter((mean) => mean !== undefined);
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const x = (index) => left + (width - left - right) * index / Math.max(1, lengths.length - 1);
  const y = (mean) => high > low ? top + (height - top - bottom) * (high - mean) / (high - low) : (top + height - bottom) / 2;
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  svg.append(draw("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom + 6, y2: height - bottom + 6 }));
  const points = lengths.flatMap((length, index) => means[index] === undefined ? [] : [{ length, index, mean: means[index] }]);
  svg.append(draw("polyline", { points: points.map(({ index, mean }) => `${x(index)},${y(mean)}`).join(" ") }));
  const ends = [0, lengths.length - 1];
  const label = (index, at, words) => svg.append(draw("text", { x: x(index), y: at,
    "text-anchor": ["start", "end"][ends.indexOf(index)] ?? "middle", class: lengths[index] === chosen ? "chosen" : "" }, words));
  for (const { length, index, mean } of points) {
    const isChosen = length === chosen;
    const circle = draw("circle", { cx: x(index), cy: y(mean), r: isChosen ? 6 : 4, class: isChosen ? "chosen" : "", "data-memory": length });
    circle.append(draw("title", {}, `memory of ${count(length, "token")}: ${mean.toFixed(3)} bits per token`));
    svg.append(circle);
    if (isChosen || ends.includes(index) && Math.abs(index - lengths.indexOf(chosen)) > 1) label(index, y(mean) - 9, `${mean.toFixed(2)} bits`);
  }
  lengths.forEach((length, index) => label(index, height - 14, length >= 1024 ? `${+(length / 1024).toFixed(1)}k` : length));
  svg.append(draw("text", { x: width / 2, y: height - 1, "text-anchor": "middle" }, "memory length in tokens; the curve is mean bits per token"));
  svg.setAttribute("aria-label", `Mean surprisal by memory length: ${points.map(({ length, mean }) => (
    `${count(length)} tokens ${mean.toFixed(2)} bits`)).join(", ")}`);
  root.replaceChildren(...(points.length ? [svg] : []));
}

/** Draw the texts, each with the fork of its branches. A row is what goes on without a fork.
 * @param {Work} work @param {Set<Part>} path @param {(node: Part, from: number) => {label: string, readable: boolean}} describe */
export function showTree(root, work, path, describe) {
  const followers = work.followers();
  const row = (/** @type {Part} */ node, isBranch) => {
    const chain = [node];
    const forks = [];
    for (const last of chain) {
      const children = followers.get(last.id) ?? [];
      const after = children.filter(({ at }) => at === last.ids.length);
      const next = after.length === 1 ? after[0] : null;
      forks.push(...children.filter((child) => child !== next).sort((first, second) => first.at - second.at));
      if (next) chain.push(next);
    }
    const leaf = chain.at(-1);
    const item = make("li");
    const line = make("div");
    const { label, readable } = describe(node, chain.reduce((sum, one) => sum + one.ids.length, 0));
    const sign = path.has(node) ? "\u25cf" : "\u25cb";
    const choose = make("button", `${sign} ${isBranch ? `at ${count(node.at)}: ` : ""}${label}`, "node", {
      "data-node": leaf.id, "aria-current": String(chain.some(({ id }) => id === work.current)) });
    choose.disabled = !readable;
    line.append(choose, make("button", "\u2715", "", { "data-drop": node.id,
      "aria-label": `delete ${isBranch ? "this branch" : "this text and its branches"}` }));
    item.append(line);
    if (forks.length) {
      const list = make("ul");
      list.append(...forks.map((fork) => row(fork, true)));
      item.append(list);
    }
    return item;
  };
  const list = make("ul");
  const texts = (followers.get(null) ?? []).sort((first, second) => (first.made ?? 0) - (second.made ?? 0));
  list.append(...texts.map((node) => row(node, false)));
  root.replaceChildren(list.childElementCount ? list : make("p", "Nothing yet.", "help"));
}

const size = (bytes) => bytes < 2 ** 20 ? `${(bytes / 2 ** 10).toFixed(1)} KiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`;

/** List sessions, each with the end of its text. */
export function showSessions(sessions, endOf) {
  const bytes = sessions.reduce((sum, session) => sum + session.bytes, 0);
  element("sessions-total").textContent = `Memories on the server: ${sessions.length}, ${size(bytes)}`;
  element("sessions").hidden = !sessions.length;
  element("sessions").tBodies[0].replaceChildren(...sessions.map((session) => {
    const row = make("tr");
    const last = make("td");
    last.append(make("button", "\u2715", "", { "data-session": session.id, "aria-label": "delete this memory" }));
    row.append(make("td", `\u2026${endOf(session)}`), make("td", count(session.tokens)),
      make("td", `${count(session.memory_tokens)} of ${count(session.memory_length)}`), make("td", size(session.bytes)), last);
    return row;
  }));
}

/** Return what is in view as an SVG picture. @param {import("./editor.js").Editor} editor @param {string[]} notes
 * @param {(first: number, last: number) => string} paint @param {(paint: string) => string} colourOf */
export function picture(editor, notes, paint, colourOf) {
  const view = editor.scroller.getBoundingClientRect();
  const { fontFamily, color } = getComputedStyle(editor.root);
  const back = getComputedStyle(document.body).backgroundColor;
  const head = 22 * notes.length + 8;
  const svg = draw("svg", { xmlns: "http://www.w3.org/2000/svg", width: view.width, height: view.height + head,
    "font-family": fontFamily, "font-size": 15, fill: color });
  svg.append(draw("rect", { width: "100%", height: "100%", fill: back }));
  notes.forEach((note, index) => svg.append(draw("text", { x: 8, y: 20 + 22 * index, "font-size": 14 }, note)));
  const [begin, end] = editor.view();
  for (let index = editor.tokenAt(begin); index <= Math.min(editor.tokenAt(end), editor.ends.length - 1); index++) {
    const first = editor.firstOf(index);
    const text = editor.text.slice(editor.startOf(first), editor.ends[index]);
    if (!text) continue; // the next token has the rest of the character
    const name = paint(first, index);
    editor.rectsOf(index).forEach((rect, part) => {
      const [x, y] = [rect.left - view.left, rect.top - view.top + head];
      if (y < head - 4 || y > view.height + head - 12) return;
      if (name) svg.append(draw("rect", { x, y, width: rect.width, height: rect.height, fill: colourOf(name) }));
      if (text.trim() && !part) {
        svg.append(draw("text", { x, y: y + rect.height * 0.77, "xml:space": "preserve" }, text.replaceAll("\n", "")));
      }
    });
  }
  return new XMLSerializer().serializeToString(svg);
}
