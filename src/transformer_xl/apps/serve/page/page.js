// The page of the server. What a model or a link gives is put into the document as text nodes only.

import { meanAttention, strongestKeys } from "./attention.js";
import { get, post, remove, scoredTokens, stream, useKey } from "./server.js";
import { linkFragment, linkedText, STORAGE, Work } from "./work.js";

const NUM_ALTERNATIVES = 10;
const STRONG_BITS = 12; // tokens with this surprisal or more have the strongest colour
const STRONG_DIFFERENCE = 4;
const SETTINGS = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"];
const DEFAULTS = { max_tokens: 60, temperature: 0.8, top_p: 0.95, top_k: 0, min_p: 0, seed: "", memory: null, compare: false,
  attend: false };

const element = (id) => document.getElementById(id);
const work = new Work();
const settings = { ...DEFAULTS };
let models = new Map();
let model = null; // what /v1/models says about the chosen one
let names = new Map(); // text of each token id of that model
let shown = []; // the tokens in the document: { token, node, index, span }
let focused = null; // the one in `shown` whose values are displayed
let wanted = null; // the one whose alternatives are being fetched
let pinned = false;
let cursor = null; // { node, at }: where the next part goes, if not at the end of the text
let compared = null; // { kept, none }: bits of the tokens in `shown`, with memory and without
let running = null; // AbortController of the request that writes
let comparing = null;
let looked = null; // { index, attention }: what the pinned token attends to, by layer, head and distance
let looking = null;

function make(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function report(error) {
  if (error?.name === "AbortError") return;
  if (error?.status === 401) element("key").hidden = false;
  element("error").textContent = error?.message ?? "";
  element("error").hidden = !error;
}

// Run something; what goes wrong is displayed.
const attempt = (action) => async (...values) => {
  try {
    await action(...values);
  } catch (error) {
    report(error);
  }
};

// The text of tokens

async function fetchNames(ids) {
  const missing = [...new Set(ids)].filter((id) => id < model.vocab_size && !names.has(id));
  if (!missing.length) return;
  const into = names;
  const { token_strs } = await post("detokenize", { model: model.id, tokens: missing });
  missing.forEach((id, index) => into.set(id, token_strs[index]));
}

const encoder = new TextEncoder();
function bytesOf(id) {
  const name = names.get(id) ?? "";
  if (!/^bytes:(\\x[0-9a-f]{2})+$/.test(name)) return encoder.encode(name);
  return Uint8Array.from(name.slice(6).match(/[0-9a-f]{2}/g), (digits) => parseInt(digits, 16));
}

const visible = (text) => text.replaceAll("\n", "\u21b5\n").replaceAll("\t", "\u21e5")
  .replace(/[\u0000-\u0009\u000b-\u001f\u007f]/g, (character) => `\\x${character.charCodeAt(0).toString(16).padStart(2, "0")}`);
// between Unicode isolates, so that a right-to-left name does not reorder what is next to it
function nameOf(id) {
  const name = names.get(id) ?? "";
  return `\u2068${name ? visible(name).replaceAll("\n", "").replaceAll(" ", "\u00b7").slice(0, 60) : "\u2205"}\u2069`;
}

// A character of several tokens is displayed at the last of them.
function fillSpan(span, id, decoder) {
  const text = decoder.decode(bytesOf(id), { stream: true });
  span.textContent = text ? visible(text) : names.get(id) ? "\u00b7" : "\u2205";
  span.classList.toggle("odd", !text);
}

function textOf(tokens) {
  const decoder = new TextDecoder();
  return tokens.map(({ id }) => decoder.decode(bytesOf(id), { stream: true })).join("");
}

const strengthOf = (bits, strong) => String(Math.min(1, Math.max(0, bits / strong)));
const probability = (bits) => { const p = 2 ** -bits; return p >= 0.001 ? p.toPrecision(3) : p.toExponential(2); };

function paint(span, bits) {
  span.classList.toggle("unknown", bits === null);
  span.style.setProperty("--strength", bits === null ? "0" : strengthOf(bits, STRONG_BITS));
}

// The view of the text

const currentNode = () => work.nodes.get(work.current) ?? null;
let decoder = new TextDecoder();

function appendToken(entry) {
  const span = make("span");
  const index = shown.length;
  entry.span = span;
  shown.push(entry);
  span.tabIndex = index ? -1 : 0;
  span.dataset.index = index;
  span.setAttribute("role", "button");
  span.classList.toggle("you", entry.node.kind === "you");
  fillSpan(span, entry.token.id, decoder);
  paintToken(entry, index);
  element("text").append(span);
}

function paintToken({ span, token }, index) {
  paint(span, token.bits);
  const bits = token.bits === null ? "" : `, ${token.bits.toFixed(1)} bits`;
  span.setAttribute("aria-label", `token ${index}: ${nameOf(token.id)}${bits}`);
}

function showText() {
  decoder = new TextDecoder();
  shown = [];
  focused = wanted = null;
  pinned = false;
  cursor = null;
  clearAttention();
  element("text").replaceChildren();
  for (const entry of work.path(currentNode())) appendToken(entry);
  clearComparison();
  showToken();
  showCursor();
  showTree();
  showStatus();
}

function showStatus(note = "") {
  const known = shown.filter(({ token }) => token.bits !== null);
  const mean = known.reduce((sum, { token }) => sum + token.bits, 0) / known.length;
  element("status").ariaLive = running ? "off" : "polite"; // screen readers read it when the text is done
  element("status").textContent = shown.length
    ? `${shown.length.toLocaleString("en")} tokens${known.length ? `, ${mean.toFixed(2)} bits per token` : ""}${note}`
    : "Write the beginning of a text, or let the model begin one.";
  element("reroll").disabled = running !== null || currentNode()?.kind !== "model";
}

function showCursor() {
  const end = cursor ? work.path(cursor.node, cursor.at).length : shown.length;
  shown.forEach(({ span }, index) => span.classList.toggle("after", index >= end));
  element("prompt-label").textContent = cursor
    ? `Your text, which goes on after token ${end - 1} (a new branch)`
    : "Your text, which the model reads and continues";
}

// The values of the focused token

function showToken() {
  const entry = shown[focused];
  for (const span of element("text").querySelectorAll(".chosen")) {
    span.classList.remove("chosen");
    span.removeAttribute("aria-pressed");
  }
  element("token-actions").hidden = !entry || !pinned;
  element("token").classList.toggle("pinned", Boolean(entry) && pinned);
  element("alternatives").hidden = !entry?.token.top.length;
  if (!entry) {
    element("token-name").textContent = "No token selected";
    element("token-values").textContent = "Point at a token, or move with the arrow keys. Click it, or press Enter, to "
      + "keep it selected.";
    return;
  }
  const { token, node, span } = entry;
  span.classList.add("chosen");
  if (pinned) span.setAttribute("aria-pressed", "true");
  element("token-name").textContent = `Token ${focused}: ${nameOf(token.id)}`;
  const lines = [token.bits === null ? "surprisal unknown"
    : `${token.bits.toFixed(2)} bits, probability ${probability(token.bits)}`];
  if (compared) {
    const [kept, none] = [compared.kept[focused], compared.none[focused]];
    if (kept !== null) lines.push(`with memory ${kept.toFixed(2)} bits, without ${none.toFixed(2)}`);
  }
  if (node.linked) lines.push("from a link"); // which can give any text any seed
  else lines.push(node.kind === "you" ? "written by you" : `sampled with seed ${node.seed}`);
  element("token-values").textContent = lines.join("; ");
  const body = element("alternatives").tBodies[0];
  body.replaceChildren(...token.top.slice(0, NUM_ALTERNATIVES + 1).map(([id, bits]) => {
    const row = make("tr", undefined, id === token.id ? "taken" : "");
    const button = make("button", nameOf(id));
    button.type = "button";
    button.dataset.id = id;
    button.setAttribute("aria-label", `take ${nameOf(id)} instead`);
    button.disabled = id === token.id;
    const first = make("td");
    first.append(button);
    row.append(first, make("td", probability(bits)), make("td", bits.toFixed(2)));
    return row;
  }));
}

async function focusToken(index) {
  const entry = wanted = shown[index];
  await fetchNames(entry.token.top.map(([id]) => id));
  if (wanted !== entry) return; // another one was chosen meanwhile
  focused = index;
  showToken();
}

function pin(index) {
  pinned = true;
  focusToken(index).then(attend).catch(report);
}

function release() {
  pinned = false;
  cursor = null;
  clearAttention();
  showCursor();
  showToken();
}

function moveTo(index) {
  const next = Math.min(shown.length - 1, Math.max(0, index));
  for (const span of element("text").querySelectorAll("[tabindex='0']")) span.tabIndex = -1;
  shown[next].span.tabIndex = 0;
  shown[next].span.focus();
}

// Requests

const hasMemory = () => model.max_memory_length > 0;

// Return the id of a new session at the nearest point before the end of a node that the server still has in memory,
// and the tokens of the text after that point.
async function nearestSession(node, memory, signal) {
  const entries = work.path(node);
  let left = 0;
  for (let one = node, end = node.tokens.length; one; end = one.at, one = work.nodes.get(one.parent)) {
    left += end;
    const usable = one.session && end === one.tokens.length && one.session.memory === memory;
    if (!usable) continue;
    try {
      const { id } = await post(`v1/sessions/${one.session.id}/branch`, {}, signal);
      return { session: id, rest: entries.slice(entries.length - left + end) };
    } catch (error) {
      if (error.status !== 404) throw error;
      one.session = null; // it was deleted to make room
    }
  }
  return { session: "new", rest: entries };
}

// Read what of a node's text the server has not read, and let the model generate after it. Tokens are added to the node.
async function run(node, maxTokens, signal) {
  const { memory } = settings; // which may change meanwhile
  const { session, rest } = await nearestSession(node, memory, signal);
  const body = { model: node.model, session, prompt: rest.length ? rest.map(({ token }) => token.id) : "",
    max_tokens: maxTokens, echo: rest.length > 0, logprobs: NUM_ALTERNATIVES, return_tokens_as_token_ids: true };
  if (session === "new" && hasMemory()) body.memory_length = memory;
  if (maxTokens) {
    const { temperature, top_p, top_k, min_p } = settings;
    Object.assign(body, { temperature, top_p, top_k, min_p, seed: node.seed });
  }
  let made = session === "new" ? null : session;
  let numRead = 0;
  try {
    for await (const chunk of stream(body, signal)) {
      made = chunk.session;
      const tokens = chunk.choices.flatMap((choice) => choice.logprobs ? scoredTokens(choice.logprobs) : []);
      await fetchNames(tokens.map(({ id }) => id));
      for (const scored of tokens) {
        const entry = rest[numRead++];
        if (entry) {
          // a token that was generated keeps the value with which it was
          if (entry.token.bits === null) Object.assign(entry.token, { bits: scored.bits, top: scored.top });
          continue;
        }
        node.tokens.push(scored);
        appendToken({ token: scored, node, index: node.tokens.length - 1 });
      }
      if (rest.length && numRead <= rest.length) shown.forEach(paintToken);
      showStatus(" \u2026");
    }
    node.session = { id: made, memory };
  } catch (error) {
    if (made) remove(`v1/sessions/${made}`).catch(() => {});
    throw error;
  }
}

// Let one request after the other change the text, with the buttons as they must be meanwhile.
async function writing(action) {
  if (!model) await start(); // it needed a key, or the server did not answer
  if (running) return;
  running = new AbortController();
  element("go").disabled = true;
  element("stop").disabled = false;
  showStatus();
  try {
    await action(running.signal);
  } finally {
    running = null;
    element("go").disabled = false;
    element("stop").disabled = true;
    keep();
    showTree();
    showStatus();
    showSessions().catch(report);
    compare().catch(report);
  }
}

const randomSeed = () => crypto.getRandomValues(new Uint32Array(1))[0];
const endOf = (node) => ({ node, at: node?.tokens.length ?? 0 });

// Add a part and read it: what the user wrote.
async function readPart({ node, at }, ids, signal) {
  const part = work.add(node, at, "you", model.id, ids);
  await fetchNames(ids);
  work.current = part.id;
  showText();
  await run(part, 0, signal);
  return part;
}

// Add a part and generate it.
async function generatePart({ node, at }, signal, isOther = false) {
  if (!settings.max_tokens) return;
  const seed = settings.seed === "" || isOther ? randomSeed() : settings.seed;
  const part = work.add(node, at, "model", model.id, [], seed);
  const before = work.current;
  work.current = part.id;
  showText();
  try {
    await run(part, settings.max_tokens, signal);
  } finally {
    if (!part.tokens.length) {
      work.remove(part.id);
      work.current = before;
      showText();
    }
  }
}

const write = () => writing(async (signal) => {
  const text = element("prompt").value;
  let place = cursor ?? endOf(currentNode());
  if (text) {
    const { tokens } = await post("tokenize", { model: model.id, prompt: text, add_special_tokens: false }, signal);
    element("prompt").value = "";
    if (tokens.length) place = endOf(await readPart(place, tokens, signal));
  }
  await generatePart(place, signal);
});

const reroll = () => writing((signal) => {
  const node = currentNode();
  return generatePart({ node: work.nodes.get(node.parent), at: node.at }, signal, true);
});

const rerollFrom = ({ node, index }) => writing((signal) => generatePart({ node, at: index }, signal, true));

const takeInstead = ({ node, index }, id) => writing(async (signal) => {
  await generatePart(endOf(await readPart({ node, at: index }, [id], signal)), signal);
});

// With memory and without

function clearComparison() {
  comparing?.abort();
  compared = null;
  element("comparison").hidden = true;
}

async function bitsOfText(memoryLength, signal) {
  const body = { model: model.id, prompt: shown.map(({ token }) => token.id), max_tokens: 0, echo: true, logprobs: 0,
    memory_length: memoryLength, return_tokens_as_token_ids: true };
  const { choices } = await post("v1/completions", body, signal);
  return scoredTokens(choices[0].logprobs).map(({ bits }) => bits);
}

async function compare() {
  clearComparison();
  if (!settings.compare || !shown.length || !hasMemory() || running) return;
  const { signal } = comparing = new AbortController();
  const length = settings.memory;
  const [kept, none] = await Promise.all([bitsOfText(length, signal), bitsOfText(0, signal)]);
  if (signal.aborted) return;
  compared = { kept, none };
  const mean = (bits) => bits.reduce((sum, one) => sum + one, 0) / bits.length;
  const saved = mean(none) - mean(kept);
  element("comparison-help").textContent = "Both rows are read in segments of "
    + `${model.segment_length.toLocaleString("en")} tokens. Without memory, a token sees only the tokens of its segment.`;
  element("with-title").textContent = `Memory of ${length.toLocaleString("en")} tokens: ${mean(kept).toFixed(3)} bits per token`;
  element("without-title").textContent = `No memory: ${mean(none).toFixed(3)} bits per token`;
  element("difference-title").textContent = `Difference: memory saves ${saved.toFixed(3)} bits per token`;
  fillRow("with", (span, index) => paint(span, kept[index]));
  fillRow("without", (span, index) => paint(span, none[index]));
  fillRow("difference", (span, index) => {
    const difference = none[index] - kept[index];
    span.className += difference > 0 ? " less" : " more";
    span.style.setProperty("--strength", strengthOf(Math.abs(difference), STRONG_DIFFERENCE));
  });
  element("comparison").hidden = false;
  showToken();
}

// Fill a row with the tokens from `first` to before `end`.
function fillRow(id, paintSpan, first = 0, end = shown.length) {
  const own = new TextDecoder();
  element(id).replaceChildren(...shown.slice(first, end).map(({ token }, offset) => {
    const index = first + offset;
    const span = make("span");
    span.dataset.index = index;
    fillSpan(span, token.id, own);
    paintSpan(span, index);
    return span;
  }));
}

// Where the pinned token looks

function clearAttention() {
  looking?.abort();
  looking = looked = null;
  showAttention();
}

async function attend() {
  clearAttention();
  const index = focused;
  if (!settings.attend || !model.attention || !pinned || index === null) return;
  const { signal } = looking = new AbortController();
  const body = { model: model.id, prompt: shown.slice(0, index + 1).map(({ token }) => token.id) };
  if (hasMemory()) body.memory_length = settings.memory;
  showAttention();
  try {
    looked = { index, attention: (await post("attention", body, signal)).attention };
  } finally {
    if (!signal.aborted) {
      looking = null;
      showAttention();
    }
  }
}

function showAttention() {
  element("attention").hidden = !settings.attend || !model?.attention;
  element("attention-result").hidden = !looked;
  if (!looked) {
    element("attention-title").textContent = looking ? "Reading the text \u2026"
      : "Click a token, or press Enter on it, to see where it looks.";
    return;
  }
  const { index, attention } = looked;
  const [layer, head] = [element("layer").value, element("head").value];
  const weights = meanAttention(attention, layer, head);
  const highest = Math.max(...weights);
  const names = [layer === "" ? "all layers" : `layer ${layer}`, head === "" ? "all heads" : `head ${head}`];
  element("attention-title").textContent = `Where token ${index} (${nameOf(shown[index].token.id)}) looks: `
    + `${layer === "" || head === "" ? "mean of " : ""}${names.join(", ")}`;
  element("half").textContent = (highest / 2).toPrecision(2);
  element("highest").textContent = `${highest.toPrecision(2)}, the highest here`;
  // the token that begins a text comes before the first one, and is not in the document
  const first = Math.max(0, index + 1 - weights.length);
  fillRow("attended", (span, key) => {
    span.classList.add("less");
    span.classList.toggle("query", key === index);
    span.style.setProperty("--strength", strengthOf(weights[index - key], highest));
  }, first, index + 1);
  element("strongest").tBodies[0].replaceChildren(...strongestKeys(weights, NUM_ALTERNATIVES).map((distance) => {
    const key = index - distance;
    const row = make("tr");
    row.append(make("td", key < 0 ? "(the beginning of the text)" : `${key}: ${nameOf(shown[key].token.id)}`),
      make("td", distance.toLocaleString("en")), make("td", weights[distance].toPrecision(3)));
    return row;
  }));
}

function fillHeads() {
  const options = (count) => [new Option("mean", ""), ...Array.from({ length: count }, (_, index) => new Option(index, index))];
  element("attention-choice").hidden = !model.attention;
  const [numLayers, numHeads] = model.attention ?? [0, 0];
  element("layer").replaceChildren(...options(numLayers));
  element("head").replaceChildren(...options(numHeads));
}

const memoryLengths = () => {
  const longest = model.max_memory_length;
  const powers = Array.from({ length: 31 }, (_, power) => 2 ** power).filter((length) => length >= 8 && length < longest);
  return [...new Set([0, ...powers, model.memory_length, longest])].sort((first, second) => first - second);
};

function showMemory() {
  element("memory-choice").hidden = !hasMemory();
  if (!hasMemory()) return;
  const lengths = memoryLengths();
  if (!lengths.includes(settings.memory)) settings.memory = model.memory_length;
  const text = `${settings.memory.toLocaleString("en")} tokens`;
  element("memory").max = lengths.length - 1;
  element("memory").value = lengths.indexOf(settings.memory);
  element("memory").setAttribute("aria-valuetext", text);
  element("memory-value").textContent = text;
}

// Branches: parts that follow each other alone are at the same level

function showTree() {
  const onPath = new Set(shown.map(({ node }) => node.id));
  const list = (nodes) => {
    const made = make("ul");
    for (const node of nodes) {
      let children = [node];
      while (children.length === 1) {
        made.append(nodeItem(children[0], onPath));
        children = work.children(children[0].id);
      }
      if (children.length) {
        const item = make("li");
        item.append(list(children));
        made.append(item);
      }
    }
    return made;
  };
  const roots = work.children(null);
  element("tree").replaceChildren(roots.length ? list(roots) : make("p", "Nothing yet.", "help"));
}

// Whether a model is served that can read a node and what is before it; kept work can be of another time.
function isReadable(node) {
  for (let one = node; one; one = work.nodes.get(one.parent)) {
    const vocabSize = models.get(one.model)?.vocab_size ?? 0;
    if (!one.tokens.every(({ id }) => id < vocabSize)) return false;
  }
  return true;
}

function labelOf(node, readable) {
  const writer = node.kind === "you" ? "you" : "model";
  if (!readable) return `${writer}: ${node.tokens.length} tokens that no model here can read, of ${node.model}`;
  if (node.model !== model.id) return `${writer}: ${node.tokens.length} tokens of ${node.model}`;
  return `${writer}: ${textOf(node.tokens.slice(0, 40)).replace(/\s+/g, " ")}`;
}

function nodeItem(node, onPath) {
  const item = make("li");
  const row = make("div");
  const readable = isReadable(node);
  const choose = make("button", `${onPath.has(node.id) ? "\u25cf" : "\u25cb"} ${labelOf(node, readable)}`, "node");
  choose.disabled = !readable;
  choose.type = "button";
  choose.dataset.node = node.id;
  choose.setAttribute("aria-current", String(node.id === work.current));
  const drop = make("button", "\u2715");
  drop.type = "button";
  drop.dataset.drop = node.id;
  drop.setAttribute("aria-label", "delete this part and what follows it");
  row.append(choose, drop);
  item.append(row);
  return item;
}

async function chooseNode(id) {
  if (running) return;
  const node = work.nodes.get(id);
  if (node.model !== model.id) await chooseModel(node.model);
  work.current = id;
  await showCurrent();
}

const fetchNamesOfNodes = () => fetchNames([...work.nodes.values()].filter((node) => node.model === model.id)
  .flatMap((node) => node.tokens.map(({ id }) => id)));

async function showCurrent() {
  await fetchNamesOfNodes();
  showText();
  keep();
  await compare();
}

async function dropNode(id) {
  if (running) return;
  for (const { session } of work.remove(id)) {
    if (session) remove(`v1/sessions/${session.id}`).catch(() => {});
  }
  await showCurrent();
  await showSessions();
}

// Sessions

const size = (bytes) => bytes < 2 ** 20 ? `${(bytes / 2 ** 10).toFixed(1)} KiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`;

async function showSessions() {
  const { data, bytes } = await get("v1/sessions");
  const owners = new Map([...work.nodes.values()].filter((node) => node.session).map((node) => [node.session.id, node]));
  element("sessions-total").textContent = `${data.length} ${data.length === 1 ? "session" : "sessions"}, ${size(bytes)}. `
    + "A deleted one is read again from the text when it is needed.";
  element("sessions").hidden = !data.length;
  element("sessions").tBodies[0].replaceChildren(...data.map((session) => {
    const row = make("tr");
    const node = owners.get(session.id);
    const drop = make("button", "\u2715");
    drop.type = "button";
    drop.dataset.session = session.id;
    drop.setAttribute("aria-label", "delete this session");
    const last = make("td");
    last.append(drop);
    const end = node?.model === model.id ? `\u2026${textOf(node.tokens).slice(-20)}` : `${session.id.slice(0, 14)}\u2026`;
    row.append(make("td", end), make("td", session.tokens.toLocaleString("en")),
      make("td", `${session.memory_tokens.toLocaleString("en")} of ${session.memory_length.toLocaleString("en")}`),
      make("td", size(session.bytes)), last);
    return row;
  }));
}

// Models, settings, links, and what is kept

function keep() {
  const isKept = work.keep({ ...settings, model: model?.id });
  if (!isKept) report(new Error("The browser has no room for all of this work: delete some branches, or copy links."));
}

// Another tab has kept its work. What the user has selected here stays selected, unless the text itself is different.
async function merge() {
  const { lacks } = work.merge();
  if (lacks) keep(); // both tabs have written at once
  if (running || !model) return;
  await fetchNamesOfNodes();
  if (running) return;
  const path = work.path(currentNode());
  if (path.length === shown.length && path.every(({ token }, index) => token === shown[index].token)) {
    shown.forEach(paintToken);
    showTree();
  } else {
    showText();
    await compare();
  }
}

function chooseModel(id) {
  model = models.get(id) ?? models.values().next().value;
  names = new Map();
  element("model").value = model.id;
  settings.memory ??= model.memory_length;
  showMemory();
  fillHeads();
  showAttention();
}

// Another model reads the same text, as a text of its own.
const switchModel = (id) => writing(async (signal) => {
  const text = textOf(shown.map(({ token }) => token));
  chooseModel(id);
  work.current = null;
  await showCurrent();
  if (!text) return;
  const { tokens } = await post("tokenize", { model: model.id, prompt: text, add_special_tokens: false }, signal);
  await readPart(endOf(null), tokens, signal);
});

async function share() {
  const parts = [];
  for (const { token, node } of shown) {
    if (parts.at(-1)?.node !== node) parts.push({ node, ids: [] });
    parts.at(-1).ids.push(token.id);
  }
  const { memory, temperature, top_p, top_k, min_p, max_tokens } = settings;
  const fragment = await linkFragment({ model: model.id, text: textOf(shown.map(({ token }) => token)),
    parts: parts.map(({ node, ids }) => [node.kind, ids, node.seed]),
    settings: { memory, temperature, top_p, top_k, min_p, max_tokens } });
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
  Object.assign(settings, checkedSettings(linked.settings));
  showSettings();
  await writing(async (signal) => {
    let parts = linked.parts;
    const tokens = parts.flatMap(([, ids]) => ids);
    const same = model.id === linked.model && tokens.every((id) => id < model.vocab_size);
    if (same) await fetchNames(tokens);
    if (!same || textOf(tokens.map((id) => ({ id }))) !== linked.text) {
      const body = { model: model.id, prompt: linked.text, add_special_tokens: false };
      parts = [["you", (await post("tokenize", body, signal)).tokens]];
    }
    let node = null;
    for (const [kind, ids, seed] of parts.filter(([, ids]) => ids.length)) {
      node = work.add(node, node?.tokens.length ?? 0, kind, model.id, ids, Number.isInteger(seed) ? seed : null);
      node.linked = true;
    }
    if (!node) return;
    work.current = node.id;
    await showCurrent();
    await run(node, 0, signal);
  });
}

// Return the nearest value that an input takes.
function withinInput({ min, max, step }, value) {
  const near = Math.min(Number(max), Math.max(Number(min), value));
  return step === "1" ? Math.round(near) : near;
}

function checkedSettings(given) {
  const checked = {};
  for (const [name, initial] of Object.entries(DEFAULTS)) {
    const value = given?.[name];
    const isNumber = typeof value === "number" && Number.isFinite(value) && value >= 0;
    const isSwitch = typeof initial === "boolean";
    if (isNumber && !isSwitch || value === "" && name === "seed" || typeof value === "boolean" && isSwitch) {
      checked[name] = SETTINGS.includes(name) && value !== "" ? withinInput(element(name), value) : value;
    }
  }
  return checked;
}

function showSettings() {
  for (const name of SETTINGS) element(name).value = settings[name];
  element("compare").checked = settings.compare;
  element("attend").checked = settings.attend;
  if (model) showMemory();
}

async function start() {
  const { data } = await get("v1/models");
  models = new Map(data.map((one) => [one.id, one]));
  element("model").replaceChildren(...data.map(({ id }) => new Option(id, id)));
  chooseModel(currentNode()?.model ?? kept.model);
  if (!isReadable(currentNode())) work.current = null;
  await showCurrent();
  await showSessions();
  await openLink();
}

// Events

const kept = work.load();
Object.assign(settings, checkedSettings(kept));
showSettings();
for (const swatch of document.querySelectorAll(".swatch")) {
  const strength = swatch.dataset.fraction ?? strengthOf(Number(swatch.dataset.bits ?? 0), STRONG_BITS);
  swatch.style.setProperty("--strength", strength);
}

// What the user does replaces the error before it; looking at the text does not.
const look = (id, event, action) => element(id).addEventListener(event, attempt(action));
const on = (id, event, action) => look(id, event, (cause) => {
  report(null);
  return action(cause);
});
const indexOf = (event) => {
  const span = event.target.closest?.("[data-index]");
  return span ? Number(span.dataset.index) : null;
};

on("write", "submit", (event) => { event.preventDefault(); return write(); });
// the browser can show what is wrong with an input only where it is not hidden
element("write").addEventListener("invalid", () => { element("sampling").open = true; }, true);
look("prompt", "keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) element("write").requestSubmit();
});
on("stop", "click", () => running?.abort());
on("reroll", "click", reroll);
on("fresh", "click", () => {
  if (running) return;
  work.current = null;
  showText();
  keep();
  element("prompt").focus();
});
on("share", "click", share);
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
on("memory", "input", async ({ target }) => {
  settings.memory = memoryLengths()[target.value];
  showMemory();
  keep();
  await Promise.all([compare(), attend()]);
});
on("compare", "change", async ({ target }) => {
  settings.compare = target.checked;
  keep();
  await compare();
});
on("attend", "change", async ({ target }) => {
  settings.attend = target.checked;
  keep();
  await attend();
});
for (const id of ["layer", "head"]) look(id, "change", showAttention);
const rows = ["with", "without", "difference"];
for (const id of rows) {
  look(id, "scroll", ({ target }) => {
    for (const other of rows) element(other).scrollTop = target.scrollTop;
  });
}
for (const id of ["text", "attended", ...rows]) {
  look(id, "pointerover", async (event) => {
    const index = indexOf(event);
    if (index !== null && !pinned) await focusToken(index);
  });
}
look("text", "click", (event) => {
  const index = indexOf(event);
  if (index === null) return;
  moveTo(index);
  pin(index);
});
look("text", "focusin", async (event) => {
  const index = indexOf(event);
  if (index !== null && !pinned && event.target.matches(":focus-visible")) await focusToken(index);
});
look("text", "keydown", (event) => {
  const index = indexOf(event);
  if (index === null) return;
  const moves = { ArrowRight: index + 1, ArrowLeft: index - 1, ArrowDown: index + 10, ArrowUp: index - 10, Home: 0,
    End: shown.length - 1 };
  if (event.key in moves) {
    pinned = false;
    clearAttention();
    moveTo(moves[event.key]);
  } else if (event.key === "Enter" || event.key === " ") pin(index);
  else return;
  event.preventDefault();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (running) running.abort();
  else release();
});
look("release", "click", release);
on("branch", "click", () => {
  const { node, index } = shown[focused];
  cursor = { node, at: index + 1 };
  showCursor();
  element("prompt").focus();
});
on("reroll-here", "click", () => rerollFrom(shown[focused]));
on("alternatives", "click", (event) => {
  const button = event.target.closest("button");
  if (button) return takeInstead(shown[focused], Number(button.dataset.id));
});
on("tree", "click", async (event) => {
  const { node, drop } = event.target.closest("button")?.dataset ?? {};
  if (node) await chooseNode(Number(node));
  if (drop) await dropNode(Number(drop));
});
on("sessions", "click", async (event) => {
  const { session } = event.target.closest("button")?.dataset ?? {};
  if (!session) return;
  await remove(`v1/sessions/${session}`);
  await showSessions();
});
addEventListener("hashchange", attempt(async () => {
  if (running) return;
  report(null);
  await openLink();
}));
addEventListener("storage", attempt(async ({ key }) => { if (key === STORAGE) await merge(); }));
attempt(start)();
