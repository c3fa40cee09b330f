// The page of the server: its state, and what the user does.

import { colourOf, Editor, joined, NUM_LEVELS, paintOf } from "./editor.js";
import { EXAMPLES } from "./examples.js";
import { count, element, make, picture, probability, quoted, showBars, showCurve, showSessions, showTree } from "./panels.js";
import { alternatives, attention, drop, generate, hasMemory, meanAttention, NUM_ALTERNATIVES, ownSessions, read, Text } from "./reading.js";
import { get, post, tabStorage, useKey } from "./server.js";
import { linkFragment, linkedText, Work } from "./work.js";

const STRONG_BITS = 12; // tokens with this surprisal or more have the strongest color
const STRONG_DIFFERENCE = 4;
const CONTEXT = 1000; // characters of a line before and after what was typed, on which its tokens may depend
const TYPING_PAUSE = 200; // ms without a key, after which what was typed is read
const LONG = 20_000; // tokens, from which other memory lengths are not read before they are chosen
const KEEP_SECONDS = 2; // between times that a text is kept while it is written
const DRAFT = "transformer-xl draft"; // in sessionStorage: what was typed and has no tokens yet
const SETTINGS = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"];
const DEFAULTS = { max_tokens: 60, temperature: 0.8, top_p: 0.95, top_k: 0, min_p: 0, seed: "", memory: null, paint: "surprisal" };

const work = new Work();
const editor = new Editor(element("text"), element("scroller"), element("boxes"));
/** @type {Record<string, any>} */
const settings = { ...DEFAULTS };
/** @type {Map<string, import("./reading.js").Model>} */
let models = new Map();
/** @type {import("./reading.js").Model|null} */
let model = null;
/** @type {Map<number, string>} */
let names = new Map(); // of the model's tokens
/** @type {Text} */
let text = new Text(work, null, model);
/** @type {{first: number, last: number, value: string}|null} */
let draft = null; // what is in place of the tokens from `first` to before `last`
let typing = 0; // timer until the draft gets tokens
let fresh = new Set(); // ids of parts that were made by typing, which further typing changes
let chosen = null; // index of a token
let tops = new Map(); // by "memory index": { bits, top }
let looked = null; // { index, memory, weights }: what a token attends to
let asking = null; // AbortController of what is asked of the chosen token
let running = null; // AbortController of the request that writes
let reading = null; // AbortController of the requests that read
/** @type {Record<string, any[]>} */
let undone = { back: [], forth: [] }; // steps to the texts before and after: { start, end, inserted }, or { node, at } of another part

// Errors, and trying again

function report(error, again = null) {
  if (error?.name === "AbortError") return;
  if (error?.status === 401) {
    element("key").hidden = false;
    document.querySelector("main").hidden = true;
    element("key-value").focus();
  }
  element("error").firstElementChild.textContent = error?.message ?? "";
  element("error").hidden = !error;
  element("retry").hidden = !again || error?.status === 401;
  element("retry").onclick = () => {
    report(null);
    again();
    editor.root.focus({ preventScroll: true });
  };
}

// Run something; what goes wrong is displayed, and can be tried again.
const attempt = (action) => async (...values) => {
  try {
    return await action(...values);
  } catch (error) {
    report(error, () => attempt(action)(...values));
  }
};

// The text

async function fetchNames(ids, signal = undefined) {
  const missing = [...new Set(ids)].filter((id) => !names.has(id) && id < model.vocab_size);
  if (!missing.length) return;
  const into = names;
  const asked = model.is_lossless ? [missing] : missing.map((id) => [id]);
  const strings = (await Promise.all(asked.map((ids) => detokenize(ids, signal)))).flatMap(({ token_strs }) => token_strs);
  missing.forEach((id, index) => into.set(id, strings[index]));
}

// What tokens are by themselves, or in a text if that depends on those before them.
const detokenize = (ids, signal = undefined) => post("detokenize", { model: model.id, tokens: ids }, signal);

const nameOf = (id) => names.get(id) ?? "";
// What is shown of the tokens of a text, or of a part of it: names, or where they depend on their place, the text itself.
const shownOf = ({ ids, texts }, start = 0, end = ids.length) => (
  model.is_lossless ? ids.slice(start, end).map(nameOf) : (texts ?? []).slice(start, end));
const joinedText = (shown) => model.is_lossless ? joined(shown) : shown.join("");
const textOf = (...part) => joinedText(shownOf(...part));
// What a token is called: by itself if that is known.
const nameAt = (index) => names.get(text.ids[index]) ?? shownOf(text, index, index + 1)[0];
const currentNode = () => work.nodes.get(work.current) ?? null;
const memory = () => hasMemory(model) ? settings.memory : 0;

// The ids of the tokens that are shown.
function shownIds() {
  if (!draft) return text.ids;
  return [...text.ids.slice(0, draft.first), ...(draft.value ? [-1] : []), ...text.ids.slice(draft.last)];
}

// What is shown of them.
function shownParts() {
  const own = shownOf(text);
  return draft ? [...own.slice(0, draft.first), ...(draft.value ? [draft.value] : []), ...own.slice(draft.last)] : own;
}

// Show the text, which is as before up to a token.
function showText(from = 0) {
  if (!draft) text = new Text(work, currentNode(), model);
  editor.show(shownParts(), from);
  for (const key of tops.keys()) if (Number(key.split(" ")[1]) >= from) tops.delete(key);
  looked = null;
  element("start").hidden = editor.text !== "";
  if (!draft) choose(null);
  repaint();
}

// Everything about the text that is beside it.
function showAll() {
  showText();
  showBranches();
  showStatus();
  showMemory();
}

const surprisal = (index) => text.bits(index, memory()) ?? text.rough(index);
const saving = (index) => text.bits(index, 0) - text.bits(index, memory());
const sum = (value, first, last) => {
  let total = 0;
  for (let index = first; index <= last; index++) total += value(index);
  return total;
};
const attended = (index) => looked?.weights[looked.index - index] ?? 0;

// The paint of a character, which can have several tokens.
function paintAt(first, last) {
  if (draft && last >= draft.first) return "";
  if (settings.paint === "attention") return looked ? paintOf("looks", sum(attended, first, last) / looked.highest) : "";
  if (settings.paint === "surprisal") return paintOf("high", sum(surprisal, first, last) / STRONG_BITS);
  const saved = sum(saving, first, last);
  return Number.isNaN(saved) ? "" : paintOf(saved > 0 ? "saves" : "high", Math.abs(saved) / STRONG_DIFFERENCE);
}

const isModels = (index) => index < text.length && !(draft && index >= draft.first) && text.spanAt(index).node.kind === "model";

let [frame, isStale] = [0, false];
function repaint(isNew = true) {
  isStale ||= isNew;
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    if (model) editor.paint(paintAt, isModels, isStale);
    if (isStale) editor.box(chosen);
    isStale = false;
  });
}

function showLegend() {
  const swatch = (paint, label) => make("span", label, `swatch ${paint}`);
  const strong = (hue) => `${hue}-${NUM_LEVELS}`;
  const legends = {
    surprisal: ["Bits (probability):", swatch("", "0 (1)"), swatch("high-4", "4 (1/16)"), swatch("high-8", "8 (1/256)"),
      swatch(strong("high"), "12 or more")],
    memory: [swatch(strong("saves"), "memory saves 4 bits or more (blue)"), swatch("", "0"),
      swatch(strong("high"), "costs (orange)")],
    attention: looked ? ["Attention (probability):", swatch("", "0"), swatch("looks-6", (looked.highest / 2).toPrecision(2)),
      swatch(strong("looks"), looked.highest.toPrecision(2))] : [],
  };
  element("legend").replaceChildren(...legends[settings.paint]);
  showFinding();
}

// What a reader should see first, in a sentence.
function showFinding() {
  const root = element("finding");
  const [with_, without] = [text.mean(memory()), text.mean(0)];
  const hasBoth = settings.paint === "memory" && memory() && without !== undefined && with_ !== undefined && !draft;
  if (hasBoth) {
    root.replaceChildren(`Memory of ${count(memory(), "token")} ${without < with_ ? "costs" : "saves"} ${
      Math.abs(without - with_).toFixed(2)} of ${without.toFixed(2)} bits per token. Most at `);
    for (const { word, saved, offset } of mostSaved(3)) {
      root.append(make("button", quoted(word), "", { "data-offset": offset }), ` ${saved.toFixed(1)} bits `);
    }
    return;
  }
  say("finding", {
    surprisal: () => text.length ? "The stronger the color, the less the model expected what stands there." : "",
    memory: () => !hasMemory(model) ? "This model has no memory."
      : memory() ? "" : "Choose a memory length above 0 to see what it saves.",
    attention: () => !model?.attention ? "This model has no attention by distance to show."
      : looked ? `Token ${count(looked.index)} (${quoted(nameAt(looked.index))}) looks at the colored ones.`
        : asking ? "Reading the text \u2026" : "Click or tap a token to see where it looks.",
  }[settings.paint]());
}

// The words at which memory saves most, each once.
function mostSaved(number) {
  const words = new Map();
  let index = 0;
  for (const { 0: word, index: offset } of editor.text.matchAll(/[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]+/gu)) {
    while (index < text.length && editor.ends[index] <= offset) index++;
    let saved = 0;
    for (let at = index; at < text.length && editor.startOf(at) < offset + word.length; at++) saved += saving(at) || 0;
    if (saved > (words.get(word)?.saved ?? 0.05)) words.set(word, { word, saved, offset });
  }
  return [...words.values()].sort((first, second) => second.saved - first.saved).slice(0, number);
}

// Screen readers hear what changes, so nothing is written twice.
function say(id, words) {
  if (element(id).textContent !== words) element(id).textContent = words;
}

let progress = "";
function showStatus() {
  const mean = text.mean(memory());
  const of = hasMemory(model) ? ` with a memory of ${count(memory(), "token")}` : "";
  const state = running ? "writing \u2026 until you type or press Esc" : progress;
  const isBusy = Boolean(running || draft || reading);
  element("text").ariaBusy = String(isBusy);
  element("status").ariaLive = isBusy ? "off" : "polite"; // screen readers read it when the text is done
  say("status", [text.length ? count(text.length, "token") : "", mean === undefined ? ""
    : `${mean.toFixed(2)} bits per token${of}`, state].filter(Boolean).join("; "));
  element("reroll").disabled = running !== null || currentNode()?.kind !== "model";
  const where = place() < shownIds().length ? "Continue at the cursor" : "Continue";
  element("go").textContent = running ? "Stop (Esc)" : where;
}

// The chosen token

function choose(index) {
  if (chosen !== index) asking?.abort();
  chosen = index;
  editor.box(chosen);
  showToken();
  if (index !== null) attempt(ask)(index);
}

// Ask for the alternatives of the chosen token, or where it looks.
async function ask(index) {
  asking?.abort();
  const controller = asking = new AbortController();
  const { signal } = controller;
  const length = memory();
  try {
    if (settings.paint === "attention" && model.attention) {
      if (looked?.index !== index || looked.memory !== length) {
        looked = null;
        showLegend();
        const weights = await attention(text, index, length, signal);
        if (signal.aborted) return;
        looked = { index, memory: length, all: weights };
      }
      showLooked();
    }
    const key = `${length} ${index}`;
    if (!tops.has(key)) {
      const { first, tokens } = await alternatives(text, index, length, signal);
      if (signal.aborted) return;
      tokens.forEach((token, offset) => tops.set(`${length} ${first + offset}`, token));
    }
    const parts = text.ids.slice(editor.firstOf(index), lastOf(index) + 1);
    await fetchNames([...parts, ...(tops.get(key)?.top ?? []).map(([id]) => id)]);
    if (!signal.aborted) showToken();
  } finally {
    if (asking === controller) asking = null;
  }
}

function showLooked() {
  if (!looked) return;
  looked.weights = meanAttention(looked.all, element("layer").value, element("head").value);
  looked.highest = Math.max(...looked.weights);
  showPaint();
}

function showPaint() {
  showLegend();
  showToken();
  repaint();
}

// Show and keep what was chosen beside the text.
function showChoice() {
  showPaint();
  if (chosen !== null && !draft) attempt(ask)(chosen);
  keep();
}

function showToken() {
  const isShown = chosen !== null && chosen < text.length && !draft;
  element("token").classList.toggle("chosen", isShown);
  element("token-actions").hidden = !isShown;
  element("attention-choice").hidden = !isShown || settings.paint !== "attention" || !model?.attention;
  const parts = isShown ? Array.from({ length: lastOf(chosen) - editor.firstOf(chosen) + 1 }, (_, at) => editor.firstOf(chosen) + at) : [];
  element("token-parts").replaceChildren(...(parts.length < 2 ? [] : ["Several tokens:", ...parts.map((index) => (
    make("button", quoted(nameAt(index)), "", { "data-to": index, "aria-pressed": String(index === chosen) })))]));
  const at = isShown && looked?.index === chosen && settings.paint === "attention" ? strongest() : [];
  showBars(element("looks"), at, "go to ");
  if (!isShown) {
    element("token-name").textContent = "No token chosen";
    element("token-values").textContent = "Click or tap a token, or move there with the arrow keys.";
    showBars(element("alternatives"), []);
    return;
  }
  const [{ node }, bits, without] = [text.spanAt(chosen), surprisal(chosen), text.bits(chosen, 0)];
  element("token-name").textContent = `Token ${count(chosen)}: ${quoted(nameAt(chosen))}`;
  const lines = [bits === undefined || Number.isNaN(bits) ? "surprisal unknown" : `${bits.toFixed(2)} bits (probability ${probability(bits)})`];
  if (memory() && without !== undefined && bits !== undefined) {
    lines.push(`without memory ${without.toFixed(2)} bits: memory ${without < bits ? "costs" : "saves"} ${Math.abs(without - bits).toFixed(2)}`);
  }
  if (node.linked) lines.push("from a link"); // which can give any text any seed
  else lines.push(node.kind === "you" ? "written by you" : `sampled with seed ${node.seed}`);
  element("token-values").textContent = lines.join("; ");
  const { top = [], bits: own = null } = tops.get(`${memory()} ${chosen}`) ?? {};
  showBars(element("alternatives"), top.slice(0, NUM_ALTERNATIVES + 1).map(([id, value]) => ({
    label: quoted(nameOf(id)), part: 2 ** -value, value: `${probability(value)}, ${value.toFixed(1)} bits`, id,
    taken: id === text.ids[chosen] && own !== null })), "take ");
}

const lastOf = (index) => {
  while (index + 1 < editor.ends.length && editor.ends[index] === editor.startOf(index)) index++;
  return index;
};

// The tokens at which the chosen one looks most.
function strongest() {
  const { weights, index, highest } = looked;
  return weights.map((weight, distance) => ({ weight, distance })).sort((first, second) => second.weight - first.weight)
    .slice(0, NUM_ALTERNATIVES).map(({ weight, distance }) => ({
      label: distance > index ? "beginning" : quoted(shownOf(text, index - distance, index - distance + 1)[0]), part: weight / highest,
      value: `${weight.toPrecision(2)}, ${count(distance, "token")} back`, to: distance > index ? undefined : index - distance }));
}

function chooseAndShow(index) {
  editor.reveal(editor.ends[index]);
  editor.root.focus({ preventScroll: true });
  editor.select(editor.startOf(editor.firstOf(index)));
  choose(index);
}

// Typing

const here = () => ({ node: currentNode(), at: editor.selected()[1] });

// Let the text end in another part, as a step that can be undone; return the step.
function moveTo(node) {
  const step = here();
  undone = { back: [...undone.back, step], forth: [] };
  work.current = node.id;
  fresh = new Set();
  return step;
}

let undoing = Promise.resolve(); // one step after the other
const undo = (from, to) => undoing = undoing.then(attempt(async () => {
  running?.abort();
  while (draft && undone[from].at(-1)?.node !== undefined) await tokenized();
  const step = undone[from].pop();
  if (step?.inserted !== undefined) undone[to].push(edit(step.start, step.end, step.inserted));
  else if (step && (!step.node || work.nodes.has(step.node.id))) { // else another tab has deleted it
    undone[to].push(here());
    work.current = step.node?.id ?? null;
    showAll();
    editor.select(step.at);
    editor.reveal(step.at);
    keep();
    attempt(readAll)();
  }
}));

// What the characters between two offsets are, which may be shown by signs.
function realText(start, end) {
  if (start >= end) return "";
  const first = editor.firstOf(editor.tokenAt(start));
  const begin = editor.startOf(first);
  return joinedText(shownParts().slice(first, editor.tokenAt(end - 1) + 1)).slice(start - begin, end - begin);
}

// Put text in place of what is between two offsets; return the edit that undoes it.
function edit(start, end, inserted) {
  const [ids, parts] = [shownIds(), shownParts()];
  const isYours = (index) => ids[index] === -1 || !isModels(index) && index < ids.length;
  let first = start >= editor.text.length ? ids.length : editor.firstOf(editor.tokenAt(start));
  let last = end <= editor.startOf(first) ? first : editor.tokenAt(end - 1) + 1;
  const old = draft && { ...draft, at: draft.first, width: draft.value ? 1 : 0 };
  if (old) [first, last] = [Math.min(first, old.at), Math.max(last, old.at + old.width)];
  // the tokens of a word depend on all of it
  const from = first;
  const isNew = !old || first < old.at;
  for (let back = 0; isNew && back < 64 && first > 0 && isYours(first - 1) && (first === from || !/^\s/.test(parts[first])); back++) first--;
  first = editor.firstOf(first);
  for (let ahead = 0; ahead < 64 && last < ids.length && isYours(last) && !/^\s/.test(parts[last]); ahead++) last++;
  last = last > first && last < ids.length ? lastOf(last - 1) + 1 : last;
  const undoing = { start, end: start + inserted.length, inserted: realText(start, end) };
  const value = realText(editor.startOf(first), start) + inserted + realText(end, last ? editor.ends[last - 1] : 0);
  const inText = (index) => old && index > old.at ? index - old.width + old.last - old.first : index;
  draft = { first, last: old && last === old.at + old.width ? old.last : inText(last), value };
  showText(first);
  editor.select(start + inserted.length);
  showStatus();
  clearTimeout(typing);
  reading?.abort();
  typing = setTimeout(attempt(readDraft), TYPING_PAUSE);
  return undoing;
}

function type(start, end, inserted) {
  if (!model || start === end && !inserted) return;
  report(null);
  running?.abort();
  undone.back.push(edit(start, end, inserted.replaceAll("\r\n", "\n")));
  editor.reveal(editor.selected()[1]);
  if (undone.back.length > 1000) undone.back.shift();
  undone.forth = [];
}

// Give the draft its tokens, and read them.
async function readDraft() {
  await tokenized(true);
  await readAll();
}

async function tokenize(prompt) {
  const { tokens: ids, token_strs: texts } = await post("tokenize", { model: model.id, prompt, add_special_tokens: false });
  return { ids, texts: model.is_lossless ? undefined : texts };
}

// The tokens of a draft where they depend on what is around them in the line; words that it joins become a part of it.
async function tokenizeInLine({ first, last, value }) {
  const { texts: parts } = text;
  for (;;) {
    const before = parts.slice(0, first).join("").slice(-CONTEXT).replace(/^[^]*\n|^[\udc00-\udfff]/, "");
    const after = parts.slice(last).join("").slice(0, CONTEXT).replace(/\n[^]*$|[\ud800-\udbff]$/, "");
    const prompt = before + value + after;
    const [begin, end] = [before.length, before.length + value.length];
    const { ids, texts } = await tokenize(prompt);
    const [own, ownTexts] = [/** @type {number[]} */ ([]), /** @type {string[]} */ ([])];
    let [at, unit, taken, isJoined] = [0, 0, begin, [false, false]];
    texts.forEach((part, index) => {
      if (!part) return; // the next one has its text
      const start = at + Math.min(part.length - 1, part.length - part.trimStart().length);
      const stop = at + (part.trimEnd().length || part.length);
      at += part.length;
      if (start < end && stop > begin) { // more than white space of it is in the draft
        isJoined = [isJoined[0] || start < begin, isJoined[1] || stop > end];
        own.push(...ids.slice(unit, index + 1));
        ownTexts.push(...texts.slice(unit, index), prompt.slice(taken, Math.min(at, end)));
        taken = Math.min(at, end);
      }
      unit = index + 1;
    });
    if (isJoined[0]) do value = parts[--first] + value; while (first && !parts[first - 1]);
    if (isJoined[1]) do value += parts[last++]; while (!parts[last - 1]);
    if (isJoined.some(Boolean)) continue;
    if (own.length) ownTexts.push(ownTexts.pop() + prompt.slice(taken, end));
    return { first, last, value, ids: own, texts: ownTexts };
  }
}

// Give the draft its tokens. White space alone may have none: while the user is typing, it stays a draft then.
async function tokenized(isTyping = false) {
  clearTimeout(typing);
  while (draft) {
    const own = draft;
    const { first, last, value, ids, texts } = !model.is_lossless ? await tokenizeInLine(own)
      : { ...own, ...own.value ? await tokenize(own.value) : { ids: [], texts: undefined } };
    if (model.is_lossless) await fetchNames(ids);
    if (draft !== own) continue; // more was typed meanwhile
    if (isTyping && value && !ids.length && !text.length) return;
    draft = null;
    work.revive(text.spans);
    replace(first, last, ids, texts);
    if (value && !ids.length) keepSpace(first, value);
    showText(Math.max(0, first - 1));
    showBranches();
    keep();
  }
}

// Show white space that has no token with the token before it, or after it.
function keepSpace(first, space) {
  const now = new Text(work, currentNode(), model);
  if (!now.length) return;
  const index = Math.max(0, first - 1);
  const { node, start } = now.spanAt(index);
  node.texts[index - start] = first ? node.texts[index - start] + space : space + node.texts[index - start];
  work.touch(node);
}

// Put tokens in place of others, as a branch. The parts before go if all that follows was typed too, and nothing else follows.
function replace(first, last, ids, texts = undefined) {
  const { spans } = text;
  const followers = work.followers();
  const isOpen = ({ node, start, end }, index) => end - start === node.ids.length && node.model === model.id
    && (node.kind === "you" || fresh.has(node.id))
    && (followers.get(node.id) ?? []).every((child) => child === spans[index + 1]?.node);
  let from = spans.length;
  while (from > 0 && isOpen(spans[from - 1], from - 1)) from--;
  const owner = spans.slice(from).find(({ node, start, end }) => node.kind === "you" && start <= first && last <= end);
  const { node: old, start: begin } = owner ?? { node: null, start: first };
  const put = (into, inserted) => into ? [...into.slice(0, first - begin), ...inserted, ...into.slice(last - begin)] : inserted;
  const typed = put(old?.ids, ids);
  const rest = owner ? spans.slice(spans.indexOf(owner) + 1) : spans.filter(({ end }) => end > last);
  const [parent, at] = text.place(begin);
  /** @type {any} */
  let node = null;
  const add = (kind, its, itsTexts, seed = null, linked = false) => {
    node = work.add(node ?? parent, node?.ids.length ?? at, kind, model.id, its, seed, itsTexts);
    node.linked = linked;
    fresh.add(node.id);
  };
  if (typed.length || !rest.length && at < (parent?.ids.length ?? 0)) add("you", typed, texts && put(old?.texts, texts));
  if (old && node) { // what is known of its beginning
    for (const length in old.bits) node.bits[length] = old.bits[length].slice(0, first - begin);
    [node.made, node.sessions] = [old.made, old.sessions.filter((one) => one.at <= first - begin)];
    old.sessions = old.sessions.filter((one) => one.at > first - begin);
  }
  for (const { node: part, start, end } of rest) {
    const [ids, texts] = [part.ids, part.texts].map((one) => one?.slice(Math.max(0, last - start), end - start));
    add(part.kind, ids, texts, part.seed, part.linked);
  }
  if (old) removeNode(old.id);
  work.current = node?.id ?? parent?.id ?? null;
}

// Remove a part, what follows it, and what the server has read of them.
function removeNode(id) {
  for (const node of work.remove(id)) for (const session of [...node.sessions]) drop(node, session);
}

// Number of tokens before the cursor, which goes on after whole characters.
function place() {
  const [, offset] = editor.selected();
  return offset >= editor.text.length ? shownIds().length : editor.firstOf(offset ? editor.tokenAt(offset - 1) + 1 : 0);
}

// Whether the end of the text is in view: what is written is followed then, but not if the reader has scrolled away.
const isAtEnd = ({ scrollTop, clientHeight, scrollHeight }) => scrollTop + clientHeight > scrollHeight - 40;

// Reading: the chosen memory length first, no memory next, then the others, nearest first

function wantedLengths() {
  if (!hasMemory(model)) return [0];
  const lengths = memoryLengths();
  const own = lengths.indexOf(memory());
  const near = lengths.toSorted((first, second) => Math.abs(lengths.indexOf(first) - own) - Math.abs(lengths.indexOf(second) - own));
  return [...new Set([memory(), 0, ...(text.length > LONG ? [] : near)])];
}

async function readAll() {
  reading?.abort();
  reading = null;
  if (running || draft || !text.length) return showStatus();
  const { signal } = reading = new AbortController();
  const own = text;
  showStatus();
  try {
    for (const length of wantedLengths()) {
      if (own.known(length) >= own.length) continue;
      await read(own, length, signal, () => {
        if (own !== text || signal.aborted) return;
        const known = own.known(length);
        progress = known < own.length ? `reading with a memory of ${count(length)}: ${Math.floor(100 * known / own.length)}%` : "";
        if ([0, memory()].includes(length)) repaint();
        if (progress) showStatus();
      });
      if (signal.aborted || own !== text) return;
      showMemory();
      if ([0, memory()].includes(length)) showLegend();
      keep();
    }
    showServerSessions().catch(() => {});
    if (chosen !== null) showToken();
  } finally {
    if (reading?.signal === signal) [reading, progress] = [null, ""];
    showStatus();
  }
}

// Writing

async function writing(action) {
  if (!model) await start(); // the server did not answer, or needed a key
  if (running || !model) return;
  report(null);
  await tokenized();
  reading?.abort();
  work.revive(text.spans);
  running = new AbortController();
  showStatus();
  try {
    await action(running.signal);
  } catch (error) {
    if (error.name !== "AbortError") throw error; // what is tried again is to write
  } finally {
    running = null;
    await keep();
    showBranches();
    showStatus();
  }
  attempt(readAll)();
}

// Let the model go on after the first `end` tokens of a text.
async function write(signal, end = text.length, isOther = false) {
  if (!settings.max_tokens) return;
  const seed = settings.seed === "" || isOther ? crypto.getRandomValues(new Uint32Array(1))[0] : settings.seed;
  const [parent, at] = text.place(end);
  const begin = new Text(work, parent, model, parent ? at : undefined);
  const before = work.current;
  let keptAt = Date.now();
  const part = work.add(parent, at, "model", model.id, [], seed, model.is_lossless ? undefined : []);
  const step = moveTo(part);
  work.growing = part.id;
  showText(end);
  editor.select(editor.text.length);
  editor.reveal(editor.text.length);
  const { max_tokens, temperature, top_p, top_k, min_p } = settings;
  try {
    for await (const tokens of generate(begin, memory(), { max_tokens, temperature, top_p, top_k, min_p }, seed, signal)) {
      if (model.is_lossless) await fetchNames(tokens.map(({ id }) => id), signal);
      signal.throwIfAborted();
      if (tokens.length && !part.ids.length && /\s$/.test(editor.text)) tokens[0].text = tokens[0].text.replace(/^ /, "");
      const from = text.length;
      const follows = isAtEnd(editor.scroller);
      const wasAtEnd = editor.selected().every((offset) => offset >= editor.text.length);
      text.append(tokens);
      work.touch(part);
      editor.show(shownOf(text), from);
      element("start").hidden = true;
      if (wasAtEnd) editor.select(editor.text.length);
      if (follows) editor.scroller.scrollTop = editor.scroller.scrollHeight;
      repaint();
      showStatus();
      if (Date.now() < keptAt + 1000 * KEEP_SECONDS) continue;
      keptAt = Date.now();
      keep();
    }
  } finally {
    work.growing = null;
    if (!part.ids.length) {
      if (work.current === part.id) work.current = before;
      work.remove(part.id);
      undone.back = undone.back.filter((one) => one !== step);
      text = new Text(work, currentNode(), model); // of which what was typed meanwhile is a change
      showText();
    }
  }
}

const goOn = () => {
  const end = place();
  const isLast = end >= shownIds().length;
  return writing((signal) => write(signal, isLast ? text.length : Math.min(end, text.length)));
};

const reroll = () => writing((signal) => write(signal, text.spans.at(-1).start, true));

const takeInstead = (index, id) => writing(async (signal) => {
  const [parent, at] = text.place(index);
  const texts = model.is_lossless ? undefined : (await detokenize([...text.ids.slice(0, index), id], signal)).token_strs.slice(-1);
  await fetchNames([id], signal);
  signal.throwIfAborted();
  moveTo(work.add(parent, at, "you", model.id, [id], null, texts));
  showText(index);
  editor.select(editor.text.length);
});

// A text of its own.
async function begin(value) {
  work.current = null;
  fresh = new Set();
  undone = { back: [], forth: [] };
  showAll();
  edit(0, 0, value);
  await readDraft();
}

// Memory

const memoryLengths = () => {
  const longest = model.max_memory_length;
  const powers = Array.from({ length: 31 }, (_, power) => 2 ** power).filter((length) => length >= 8 && length < longest);
  return [...new Set([0, ...powers, model.memory_length, longest])].sort((first, second) => first - second);
};

function showMemory() {
  element("memory-choice").hidden = !hasMemory(model);
  if (!hasMemory(model)) return;
  const lengths = memoryLengths();
  if (!lengths.includes(settings.memory)) settings.memory = model.memory_length;
  const value = count(settings.memory, "token");
  element("memory").max = lengths.length - 1;
  element("memory").value = lengths.indexOf(settings.memory);
  element("memory").setAttribute("aria-valuetext", value);
  element("memory-value").textContent = value;
  showCurve(element("curve"), lengths, lengths.map((length) => text.mean(length)), settings.memory);
}

function chooseMemory(length) {
  settings.memory = length;
  showMemory();
  showStatus();
  showChoice();
  clearTimeout(chooseMemory.timer); // a slider passes many
  chooseMemory.timer = setTimeout(attempt(readAll), 150);
}
chooseMemory.timer = 0;

function choosePaint(paint) {
  settings.paint = paint;
  for (const input of element("paints").querySelectorAll("input")) input.checked = input.value === paint;
  showChoice();
}

// Branches, models, sessions, and what is kept

function describe(node, length) {
  const readable = isReadable(node);
  if (!readable) return { readable, label: `${count(length, "token")} that no model here can read, of ${node.model}` };
  if (node.model !== model.id) return { readable, label: `${count(length, "token")} of ${node.model}` };
  const words = quoted(textOf(node, 0, 40).replace(/\s+/g, " ").replace(/\ufffd+$/, "")).replaceAll("\u00b7", " ");
  const first = node.parent === null || !node.ids.length ? "" : `${quoted(shownOf(node, 0, 1)[0])} \u2013 `;
  return { readable, label: `${first}${node.ids.length ? words : "(the end)"} (${count(length, "token")})` };
}

// Whether a model is served that can read a part and what is before it; kept work can be of another time.
function isReadable(node) {
  for (let one = node; one; one = work.nodes.get(one.parent)) {
    const vocabSize = models.get(one.model)?.vocab_size ?? 0;
    if (!one.ids.every((id) => id < vocabSize)) return false;
  }
  return true;
}

function showBranches() {
  showTree(element("tree"), work, new Set(text.spans.map(({ node }) => node)), describe);
}

async function chooseNode(id) {
  if (running) return;
  await tokenized();
  const node = work.nodes.get(id);
  if (node && node.model !== model.id) chooseModel(node.model);
  work.current = node?.id ?? null;
  await showCurrent();
}

// Have what is shown of a part that was kept or linked without.
async function fetchTexts(part) {
  if (part.texts) return;
  const { ids } = new Text(work, part, model);
  part.texts = ids.length ? (await detokenize(ids)).token_strs.slice(ids.length - part.ids.length) : [];
  work.touch(part);
}

async function showCurrent() {
  reading?.abort();
  fresh = new Set();
  undone = { back: [], forth: [] };
  const own = new Text(work, currentNode(), model);
  const parts = [...work.nodes.values()].filter((node) => node.model === model.id && isReadable(node));
  if (model.is_lossless) await fetchNames([...own.ids, ...parts.flatMap(({ ids }) => ids.slice(0, 40))]);
  else for (const part of parts) await fetchTexts(part);
  showAll();
  editor.select(editor.text.length);
  showLegend();
  keep();
  attempt(readAll)();
}

async function dropNode(id) {
  if (running) return;
  await tokenized();
  removeNode(id);
  await showCurrent();
}

async function showServerSessions() {
  const sessions = await ownSessions(work.nodes.values());
  showSessions(sessions, ({ node, one }) => node.model === model.id ? textOf(node, Math.max(0, one.at - 20), one.at).slice(-20)
    : node.model);
}

let isFull = false; // the browser's store
async function keep() {
  try {
    await work.keep({ ...settings, model: model?.id });
    isFull = false;
  } catch {
    isFull = true;
    report(new Error("The browser has no room for all of this work. Delete some branches, or copy what you need."), keep);
  }
}

// Another tab has changed parts. What the user does here goes on.
async function merge(touched) {
  if (running || draft || !model) return;
  if (!text.spans.some(({ node }) => touched.has(node.id))) return showBranches();
  if (currentNode() === null) work.current = null;
  const [selection, ids, steps] = [editor.selected(), String(text.ids), undone];
  await showCurrent();
  editor.select(...selection);
  if (String(text.ids) === ids) undone = steps;
}

function chooseModel(id) {
  model = models.get(id) ?? models.values().next().value;
  editor.inPlace = !model.is_lossless;
  element("note").hidden = model.is_lossless;
  names = new Map();
  tops = new Map();
  element("model").value = model.id;
  settings.memory ??= model.memory_length;
  const options = (number) => [new Option("mean", ""), ...Array.from({ length: number }, (_, index) => new Option(String(index), String(index)))];
  const [numLayers, numHeads] = model.attention ?? [0, 0];
  element("layer").replaceChildren(...options(numLayers));
  element("head").replaceChildren(...options(numHeads));
}

// Another model reads the same text, as a text of its own.
async function switchModel(id) {
  await tokenized();
  const value = textOf(text);
  chooseModel(id);
  await begin(value);
}

// Pictures and links

function savePicture() {
  const notes = [`${model.id}: ${element("status").textContent}`, `${document.querySelector("#paints input:checked + span").textContent}. ${
    [...element("legend").childNodes].map((node) => node.textContent).join("  ")}`];
  const file = new Blob([picture(editor, notes, paintAt, colourOf)], { type: "image/svg+xml" });
  const link = make("a", undefined, "", { download: "transformer-xl.svg", href: URL.createObjectURL(file) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

async function share() {
  await tokenized();
  const { seed, ...shared } = settings;
  const read = model.is_lossless ? textOf(text) : (await detokenize(text.ids)).prompt;
  const fragment = await linkFragment({ model: model.id, text: read, chosen, settings: shared, parts: text.spans.map(
    ({ node, start, end }) => [node.kind, node.ids.slice(0, end - start), node.seed, node.texts?.slice(0, end - start)]) });
  element("link").value = location.origin + location.pathname + fragment;
  element("link-form").hidden = false;
  element("link").select();
  await navigator.clipboard?.writeText(element("link").value).catch(() => {}); // else it is selected, to be copied
}

// Open the text of a link beside the kept work: with its token ids if they are those of this model, else as text.
async function openLink() {
  const linked = await linkedText(location.hash);
  if (!linked) return;
  history.replaceState(null, "", location.pathname); // a reload must not open it again
  chooseModel(linked.model);
  takeSettings(linked.settings);
  let { parts } = linked;
  const tokens = parts.flatMap(([, ids]) => ids);
  const same = model.id === linked.model && tokens.every((id) => id < model.vocab_size);
  if (same && model.is_lossless) await fetchNames(tokens);
  const read = !same ? null : model.is_lossless ? joined(tokens.map(nameOf)) : (await detokenize(tokens)).prompt;
  if (read !== linked.text) {
    const { ids, texts } = await tokenize(parts.flatMap(([, , , one]) => one ?? []).join("") || linked.text);
    parts = [["you", ids, null, texts]];
  }
  let node = null;
  for (const [kind, ids, seed, texts] of parts.filter(([, ids]) => ids.length)) {
    node = work.add(node, node?.ids.length ?? 0, kind, model.id, ids, Number.isInteger(seed) ? seed : null, texts ?? undefined);
    node.linked = true;
  }
  if (!node) return;
  work.current = node.id;
  await showCurrent();
  if (Number.isInteger(linked.chosen) && text.ids[linked.chosen] !== undefined) chooseAndShow(linked.chosen);
}

// Take and show what is valid of settings that were kept or are in a link, which can be anything.
function takeSettings(given) {
  for (const name of SETTINGS) {
    const input = element(name);
    input.value = given?.[name] ?? "";
    if (input.value && input.checkValidity()) settings[name] = Number(input.value);
    input.value = settings[name];
  }
  if (Number.isInteger(given?.memory) && given.memory >= 0) settings.memory = given.memory;
  choosePaint(["surprisal", "memory", "attention"].find((paint) => paint === given?.paint) ?? settings.paint);
}

let kept = null; // settings and model of an earlier time
let keptDraft = JSON.parse(tabStorage.getItem(DRAFT) ?? "null");
async function start() {
  kept ??= await work.open(attempt(merge)).catch(() => report(new Error("This browser keeps no work: copy links."))) ?? {};
  const { data } = await get("v1/models");
  document.querySelector("main").hidden = false;
  models = new Map(data.map((one) => [one.id, one]));
  element("model").replaceChildren(...data.map(({ id }) => new Option(id, id)));
  chooseModel(currentNode()?.model ?? model?.id ?? kept.model);
  if (!isReadable(currentNode())) work.current = null;
  takeSettings(kept);
  kept = {};
  await showCurrent();
  if (keptDraft) {
    const { current, ...own } = keptDraft;
    keptDraft = null;
    if (current === work.current) {
      draft = own;
      showText(draft.first);
    } else if (own.value) await begin(own.value); // another tab has changed the text
  }
  if (draft) await readDraft();
  editor.root.focus({ preventScroll: true });
  await openLink();
}

// Events

// What the user does replaces the error before it; looking at the text does not.
const look = (id, event, action) => element(id).addEventListener(event, attempt(async (cause) => {
  await action(cause);
  if (event !== "click" || cause.detail) return; // else of the keyboard, whose button can be gone now
  const focused = document.activeElement;
  if (focused === document.body || !focused?.checkVisibility()) editor.root.focus({ preventScroll: true });
}));
const on = (id, event, action) => look(id, event, (cause) => {
  report(null);
  return action(cause);
});

element("examples").append(...EXAMPLES.map(([name], index) => make("button", name, "", { "data-example": index })));
on("examples", "click", async ({ target }) => {
  const { example } = target.dataset;
  if (example === undefined || running) return;
  choosePaint("memory");
  await begin(EXAMPLES[example][1]);
});
on("go", "click", () => running ? running.abort() : goOn());
document.addEventListener("mousedown", (event) => { // the text keeps the focus
  if (document.activeElement === editor.root && /** @type {any} */ (event.target).closest("button")) event.preventDefault();
});
on("reroll", "click", reroll);
on("fresh", "click", async () => {
  await chooseNode(null);
  editor.root.focus();
});
on("share", "click", share);
on("picture", "click", savePicture);
on("key", "submit", async (event) => {
  event.preventDefault();
  useKey(element("key-value").value);
  element("key").hidden = true;
  element("key-value").value = "";
  await start();
});
on("model", "change", ({ target }) => {
  if (!running) return switchModel(target.value);
  target.value = model.id;
});
for (const name of SETTINGS) {
  on(name, "change", ({ target }) => {
    if (!target.reportValidity()) return;
    settings[name] = target.value === "" ? DEFAULTS[name] : Number(target.value);
    target.value = settings[name];
    keep();
  });
}
look("paints", "change", ({ target }) => choosePaint(target.value));
look("memory", "input", ({ target }) => chooseMemory(memoryLengths()[target.value]));
look("curve", "click", ({ target }) => { if (target.dataset.memory) chooseMemory(Number(target.dataset.memory)); });
for (const id of ["layer", "head"]) look(id, "change", showLooked);
look("finding", "click", ({ target }) => { if (target.dataset.offset) chooseAndShow(editor.tokenAt(Number(target.dataset.offset))); });
look("looks", "click", ({ target }) => { if (target.dataset.to) editor.reveal(editor.ends[Number(target.dataset.to)]); });
look("token-parts", "click", ({ target }) => { if (target.dataset.to) choose(Number(target.dataset.to)); });
on("alternatives", "click", ({ target }) => { if (target.dataset.id) return takeInstead(chosen, Number(target.dataset.id)); });
on("branch", "click", () => writing((signal) => write(signal, chosen + 1)));
on("reroll-here", "click", () => writing((signal) => write(signal, chosen, true)));
const release = () => {
  looked = null;
  choose(null);
  editor.select(editor.text.length);
  showLegend();
  repaint();
  showStatus();
};
look("release", "click", release);
on("tree", "click", async ({ target }) => {
  const { node, drop: dropped } = target.closest("button")?.dataset ?? {};
  if (node) await chooseNode(Number(node));
  if (dropped) await dropNode(Number(dropped));
});
on("sessions", "click", async ({ target }) => {
  const { session } = target.closest("button")?.dataset ?? {};
  for (const node of work.nodes.values()) for (const one of node.sessions) if (one.id === session) drop(node, one);
  target.closest("button")?.closest("tr").remove();
  await keep();
});
look("sessions-details", "toggle", showServerSessions);

// The text
const selected = () => editor.selected().toSorted((first, second) => first - second);
look("text", "beforeinput", (event) => {
  if (event.isComposing || event.inputType === "insertCompositionText") return; // read when it has ended
  event.preventDefault();
  const [range] = event.getTargetRanges(); // of what is dropped or replaced
  if (range) getSelection().setBaseAndExtent(range.startContainer, range.startOffset, range.endContainer, range.endOffset);
  else if (event.inputType.startsWith("delete") && getSelection().isCollapsed) {
    getSelection().modify("extend", event.inputType.endsWith("Forward") ? "forward" : "backward",
      event.inputType.includes("Word") ? "word" : event.inputType.includes("Line") ? "lineboundary" : "character");
  }
  const [start, end] = selected();
  if (/^insert(Line|Paragraph)/.test(event.inputType)) type(start, end, "\n");
  else if (event.inputType.startsWith("insert")) type(start, end, event.data ?? event.dataTransfer?.getData("text/plain") ?? "");
  else if (event.inputType.startsWith("delete")) type(start, end, "");
});
document.addEventListener("selectionchange", () => editor.selected());
look("text", "focus", () => { if (!editor.root.matches(":active")) editor.select(...editor.last); });
let composed = 0;
look("text", "compositionstart", () => {
  running?.abort();
  editor.composing = true;
  composed = editor.lineOf(editor.selected()[0]);
});
look("text", "compositionend", () => {
  editor.composing = false;
  const { start, before, after } = editor.changedLine(composed);
  let [same, rest] = [0, 0];
  while (same < before.length && before[same] === after[same]) same++;
  while (rest < Math.min(before.length, after.length) - same && before.at(-1 - rest) === after.at(-1 - rest)) rest++;
  type(start + same, start + before.length - rest, after.slice(same, after.length - rest));
});
for (const name of ["copy", "cut"]) {
  look("text", name, (event) => {
    const [start, end] = selected();
    if (start === end) return; // as elsewhere, the clipboard stays
    event.preventDefault();
    event.clipboardData.setData("text/plain", realText(start, end));
    if (name === "cut") type(start, end, "");
  });
}
look("text", "click", ({ clientX, clientY, detail }) => {
  const index = draft || detail > 1 ? null : editor.tokenUnder(clientX, clientY);
  if (index !== null) choose(index);
  else if (!draft) release();
  showStatus();
});
let moved = 0;
look("text", "keyup", ({ key, altKey }) => {
  if (!/^(Arrow|Home|End|Page)/.test(key) || altKey || draft) return;
  const [anchor, focus] = editor.selected();
  showStatus();
  clearTimeout(moved);
  if (anchor !== focus || !text.length) return;
  const index = Math.min(text.length - 1, editor.tokenAt(focus));
  moved = setTimeout(() => { if (!draft && !running) choose(index); }, 100);
});
const tip = element("tip");
look("scroller", "pointermove", ({ clientX, clientY, pointerType }) => {
  const index = draft || pointerType === "touch" ? null : editor.tokenUnder(clientX, clientY);
  tip.hidden = index === null || index >= text.length;
  if (tip.hidden) return;
  const [first, bits] = [editor.firstOf(index), sum(surprisal, editor.firstOf(index), index)];
  const saved = memory() ? sum(saving, first, index) : NaN;
  tip.textContent = `${quoted(editor.text.slice(editor.startOf(first), editor.ends[index]))} ${
    Number.isNaN(bits) ? "not read yet" : `${bits.toFixed(1)} bits`}${Number.isNaN(saved) ? ""
    : `, memory ${saved < 0 ? "costs" : "saves"} ${Math.abs(saved).toFixed(1)}`}`;
  tip.style.transform = `translate(${Math.min(clientX + 12, innerWidth - 200)}px, ${clientY + 18}px)`;
});
look("scroller", "pointerleave", () => { tip.hidden = true; });
look("scroller", "scroll", () => repaint(false));
addEventListener("resize", () => repaint());
document.addEventListener("keydown", attempt((event) => {
  const { key, code, altKey, shiftKey } = event;
  const isCommand = event.ctrlKey || event.metaKey;
  const paint = ["surprisal", "memory", "attention"][["Digit1", "Digit2", "Digit3"].indexOf(code)];
  if (document.querySelector("main").hidden) return;
  if (key === "Escape") running ? running.abort() : release();
  else if (isCommand && key === "Enter") running || attempt(goOn)();
  else if (altKey && paint) choosePaint(paint);
  else if (altKey && (key === "ArrowUp" || key === "ArrowDown") && hasMemory(model)) {
    const lengths = memoryLengths();
    const length = lengths[lengths.indexOf(settings.memory) + (key === "ArrowUp" ? 1 : -1)];
    if (length !== undefined) chooseMemory(length);
  } else if (isCommand && event.target === editor.root && key.toLowerCase() === "z") shiftKey ? undo("forth", "back") : undo("back", "forth");
  else if (isCommand && event.target === editor.root && key.toLowerCase() === "y") undo("forth", "back");
  else return;
  event.preventDefault();
}));
addEventListener("hashchange", attempt(async () => {
  if (running) return;
  report(null);
  await openLink();
}));
addEventListener("beforeunload", (event) => { if (isFull) event.preventDefault(); });
addEventListener("pagehide", () => {
  work.growing = null;
  keep();
  tabStorage.setItem(DRAFT, JSON.stringify(draft && { ...draft, current: work.current }));
});
attempt(start)();
