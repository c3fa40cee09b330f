// The work of the page: texts as trees. A part was written or generated in one go; it follows the first `at` tokens of its
// parent. Kept in IndexedDB, which all tabs share, and one text in the fragment of a link. The tokens of a part never change
// under its id, but for those that the tab that writes it adds: so no tab can overwrite what another one has written.

/** @typedef {{memory: number, at: number, id: string}} Session what a server has read of a part, with `at` of its tokens */
/** @typedef {{id: number, parent: number|null, at: number, kind: string, model: string, seed: number|null, ids: number[],
 *   texts?: string[], bits: Record<number, number[]>, rough: number[], sessions: Session[], linked?: boolean, made?: number,
 *   growing?: boolean}} Part `texts`: what is shown of each token, where that depends on its place; bits by memory length;
 *   `rough`: those with which it was generated, until it is read; `made`: when it was begun, in ms; `growing`: while another tab writes it */
/** @typedef {{node: Part, start: number, end: number}} Span the tokens that a text has of a part */

import { tabStorage } from "./server.js";

const MAX_LINK_CHARACTERS = 2_000_000; // of the JSON in a link, which bounds its parts and tokens too
const TAB = "transformer-xl text"; // in sessionStorage: the id of the last part of the text of this tab

const isIndex = (value) => Number.isInteger(value) && value >= 0;
const isIds = (value) => Array.isArray(value) && value.every(isIndex);
const isTexts = (value, { length }) => Array.isArray(value) && value.length === length && value.every((one) => typeof one === "string");

// Return an integer that no other tab has given to a part: of 53 random bits.
function randomId() {
  const [high, low] = crypto.getRandomValues(new Uint32Array(2));
  return high * 2 ** 21 + (low >>> 11);
}

/** @param {IDBRequest} request @returns {Promise<any>} */
const result = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

const packed = ({ bits, ids, ...rest }, growing) => ({ ...rest, growing, ids: Int32Array.from(ids),
  bits: Object.fromEntries(Object.entries(bits).map(([memory, values]) => [memory, Float32Array.from(values)])) });

// What is kept can be of another version, or damaged: return null then.
function unpackedPart(kept) {
  try {
    const part = { ...kept, ids: Array.from(kept.ids),
      bits: Object.fromEntries(Object.entries(kept.bits).map(([memory, values]) => [memory, Array.from(values, Number)])) };
    const isPart = isIndex(part.id) && (part.parent === null || isIndex(part.parent)) && isIndex(part.at)
      && ["you", "model"].includes(part.kind) && typeof part.model === "string" && isIds(part.ids)
      && (part.texts === undefined || isTexts(part.texts, part.ids)) && Array.isArray(part.rough)
      && part.sessions.every(({ memory, at, id }) => isIndex(memory) && isIndex(at) && typeof id === "string");
    return isPart ? part : null;
  } catch {
    return null;
  }
}

export class Work {
  /** @type {Map<number, Part>} */ nodes = new Map();
  /** @type {number|null} */ current = null; // id of the part at whose end the text ends
  /** @type {number|null} */ growing = null; // id of the part that this tab writes
  /** @type {IDBDatabase|null} */ #database = null;
  #changed = new Set();
  #removed = new Set();
  #channel = new BroadcastChannel("transformer-xl");

  /** Add a part after the first `at` tokens of another, or as the beginning of a text. @param {Part|null} parent */
  add(parent, at, kind, model, ids = [], seed = null, texts = undefined) {
    while (parent && at === 0) [parent, at] = [this.nodes.get(parent.parent) ?? null, parent.at];
    /** @type {Part} */
    const node = { id: randomId(), parent: parent?.id ?? null, at: parent ? at : 0, kind, model, seed, ids, texts, bits: {}, rough: [],
      sessions: [], made: Date.now() };
    return this.#put(node);
  }

  #put(node) {
    this.nodes.set(node.id, node);
    this.#changed.add(node.id);
    return node;
  }

  /** Let what was read of a part be kept. @param {Part} node */
  touch(node) {
    if (!node.growing) this.#changed.add(node.id);
  }

  /** Have the parts of a text again that another tab has deleted meanwhile. @param {Span[]} spans */
  revive(spans) {
    for (const { node } of spans) if (!this.nodes.has(node.id)) this.#put(node);
  }

  /** The parts that follow each part, by its id. */
  followers() {
    return Map.groupBy(this.nodes.values(), ({ parent }) => parent);
  }

  /** Delete a part and what follows it; return the deleted ones. @returns {Part[]} */
  remove(id) {
    const followers = this.followers();
    const removed = [this.nodes.get(id)];
    for (const one of removed) removed.push(...followers.get(one.id) ?? []);
    for (const one of removed) {
      this.nodes.delete(one.id);
      this.#removed.add(one.id);
    }
    if (removed.some((one) => one.id === this.current)) this.current = removed[0].parent;
    return removed;
  }

  /** The parts of a text from its beginning. @param {Part|null|undefined} node @returns {Span[]} */
  spans(node, end = node?.ids.length) {
    const spans = [];
    for (; node; end = node.at, node = this.nodes.get(node.parent)) spans.push({ node, start: 0, end });
    let start = 0;
    for (const span of spans.reverse()) {
      [span.start, span.end] = [start, start + span.end];
      start = span.end;
    }
    return spans;
  }

  /** Open what is kept; return the settings. @param {(touched: Set<number>) => void} listener hears of other tabs */
  async open(listener) {
    const request = indexedDB.open("transformer-xl", 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("parts", { keyPath: "id" });
      request.result.createObjectStore("state");
    };
    this.#database = await result(request);
    this.#channel.onmessage = async ({ data: { changed, removed, current } }) => {
      await this.#load(changed);
      const gone = new Set(removed.filter((id) => id !== this.growing));
      for (const node of this.nodes.values()) { // what is written now, or the other tab did not know, keeps what is before it
        if (gone.has(node.id) || !gone.has(node.parent)) continue;
        for (let one = node; one && (one === node || gone.delete(one.id)); one = this.nodes.get(one.parent)) this.#put(one);
      }
      for (const id of gone) this.nodes.delete(id);
      if (gone.has(this.current)) this.current = this.nodes.has(current) ? current : null;
      listener(new Set([...changed, ...removed]));
    };
    await this.#load(null);
    const state = await result(this.#database.transaction("state").objectStore("state").get("page")) ?? {};
    const own = Number(tabStorage.getItem(TAB) ?? state.current ?? 0);
    this.current = [own, own && state.current].find((id) => this.nodes.has(id)) ?? null;
    return state.settings ?? {};
  }

  async #load(ids) {
    const store = this.#database.transaction("parts").objectStore("parts");
    const kept = ids ? await Promise.all(ids.map((id) => result(store.get(id)))) : await result(store.getAll());
    for (const one of kept) {
      const part = unpackedPart(one);
      if (part && !this.#changed.has(part.id)) this.nodes.set(part.id, part);
    }
    // what follows a part that is gone or damaged becomes a text of its own; what follows itself is not shown
    for (const node of ids ? [] : this.nodes.values()) if (!this.nodes.has(node.parent)) node.parent = null;
    const followers = this.followers();
    const rooted = new Set(followers.get(null));
    for (const { id, ids: { length } } of rooted) {
      for (const follower of followers.get(id) ?? []) {
        follower.at = Math.min(follower.at, length);
        rooted.add(follower);
      }
    }
    for (const node of this.nodes.values()) {
      if (!rooted.has(node)) this.nodes.delete(node.id);
      else if (node.parent === null) node.at = 0;
    }
  }

  /** Keep what has changed. Rejects where the browser has no room. */
  async keep(settings) {
    tabStorage.setItem(TAB, String(this.current ?? 0));
    if (!this.#database) return;
    const [changed, removed] = [[...this.#changed].filter((id) => this.nodes.has(id)), [...this.#removed]];
    const transaction = this.#database.transaction(["parts", "state"], "readwrite");
    const done = new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = () => {
        for (const id of changed) this.#changed.add(id);
        for (const id of removed) this.#removed.add(id);
        reject(transaction.error);
      };
    });
    for (const id of removed) transaction.objectStore("parts").delete(id);
    for (const id of changed) transaction.objectStore("parts").put(packed(this.nodes.get(id), id === this.growing));
    transaction.objectStore("state").put({ settings, current: this.current }, "page");
    transaction.commit(); // else it is lost if the page is left now
    [this.#changed, this.#removed] = [new Set(), new Set()];
    await done;
    if (changed.length + removed.length) this.#channel.postMessage({ changed, removed, current: this.current });
  }
}

const piped = (bytes, through) => new Blob([bytes]).stream().pipeThrough(through);

// Unpack up to MAX_LINK_CHARACTERS, since a short link can hold a huge text of repeated characters.
async function unpacked(bytes) {
  let text = "";
  for await (const part of piped(bytes, new DecompressionStream("deflate-raw")).pipeThrough(new TextDecoderStream())) {
    text += part;
    if (text.length > MAX_LINK_CHARACTERS) throw new Error("too long");
  }
  return text;
}

// Return the fragment of a link that holds a text: its token ids, who wrote them, and the settings.
export async function linkFragment(text) {
  const json = JSON.stringify(text);
  if (json.length > MAX_LINK_CHARACTERS) throw new Error("The text is too long for a link. Copy the text itself.");
  const packed = await new Response(piped(json, new CompressionStream("deflate-raw"))).arrayBuffer();
  let binary = "";
  for (const byte of new Uint8Array(packed)) binary += String.fromCharCode(byte);
  return "#t=" + btoa(binary).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

// Return the text in the fragment of a link, or null; what is in a link can be anything, and is checked.
export async function linkedText(fragment) {
  if (!fragment.startsWith("#t=")) return null;
  let text;
  try {
    const binary = atob(fragment.slice(3).replaceAll("-", "+").replaceAll("_", "/"));
    const bytes = Uint8Array.from(binary, (character) => character.charCodeAt(0));
    text = JSON.parse(await unpacked(bytes));
  } catch {
    throw new Error("The link is damaged, it may have been cut, or its text is too long.");
  }
  const isText = typeof text?.model === "string" && typeof text.text === "string" && Array.isArray(text.parts)
    && text.parts.every((part) => ["you", "model"].includes(part?.[0]) && isIds(part[1])
      && (part[3] == null || isTexts(part[3], part[1])));
  if (!isText) throw new Error("The link has no text that this page can open.");
  return text;
}
