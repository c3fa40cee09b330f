// The work of the page: texts as trees. A node is a part that was written or generated in one go; it follows the first
// `at` tokens of its parent. Kept in localStorage, which all tabs share, and one text in the fragment of a link.

export const STORAGE = "transformer-xl work";
const MAX_LINK_TOKENS = 100_000;
const MAX_LINK_CHARACTERS = 4_000_000;

// Return an integer that no other tab has given to a node: of 53 random bits.
function randomId() {
  const [high, low] = crypto.getRandomValues(new Uint32Array(2));
  return high * 2 ** 21 + (low >>> 11);
}

export class Work {
  nodes = new Map();
  deleted = new Set(); // ids, so that another tab that still has the nodes deletes them too
  current = null; // id of the node at whose end the text ends

  // Add a part after the first `at` tokens of a node, or as the beginning of a text.
  add(parent, at, kind, model, ids = [], seed = null) {
    while (parent && at === 0) [parent, at] = [this.nodes.get(parent.parent), parent.at];
    const node = { id: randomId(), parent: parent?.id ?? null, at: parent ? at : 0, kind, model, seed,
      tokens: ids.map((id) => ({ id, bits: null, top: [] })), session: null };
    this.nodes.set(node.id, node);
    return node;
  }

  children(id) {
    return [...this.nodes.values()].filter((node) => node.parent === id);
  }

  // Delete a node and what follows it; return the deleted ones.
  remove(id) {
    const node = this.nodes.get(id);
    const removed = [node, ...this.children(id).flatMap((child) => this.remove(child.id))];
    this.nodes.delete(id);
    this.deleted.add(id);
    if (removed.some((one) => one.id === this.current)) this.current = node.parent;
    return removed;
  }

  // The tokens of a text from its beginning, each with its node and its index there.
  path(node, end = node?.tokens.length) {
    const parts = [];
    for (; node; end = node.at, node = this.nodes.get(node.parent)) {
      const owner = node;
      parts.unshift(node.tokens.slice(0, end).map((token, index) => ({ token, node: owner, index })));
    }
    return parts.flat();
  }

  // Keep the work in the browser: without alternatives if it is too large. Return whether all of it is kept.
  keep(settings) {
    this.merge();
    for (const withTops of [true, false]) {
      const nodes = [...this.nodes.values()].map((node) => ({ ...node,
        tokens: node.tokens.map(({ id, bits, top }) => withTops ? [id, bits, top] : [id, bits]) }));
      try {
        localStorage.setItem(STORAGE,
          JSON.stringify({ nodes, deleted: [...this.deleted], current: this.current, settings }));
        return withTops;
      } catch { /* the quota of the browser; try with less */ }
    }
    return false;
  }

  // Add what this tab or another one has kept to what is here; return it, and whether it lacks some of what is here.
  merge() {
    let kept = {};
    let nodes = [];
    try {
      kept = JSON.parse(localStorage.getItem(STORAGE)) ?? {};
      nodes = (kept.nodes ?? []).map((node) => (
        { ...node, tokens: node.tokens.map(([id, bits, top = []]) => ({ id, bits, top })) }));
      for (const id of kept.deleted ?? []) this.deleted.add(id);
    } catch {
      kept = {}; // of another version, or damaged
    }
    for (const node of nodes) {
      const own = this.nodes.get(node.id);
      if (!own) this.nodes.set(node.id, node);
      else node.tokens.forEach((token, index) => {
        if (index >= own.tokens.length) own.tokens.push(token);
        else if (own.tokens[index].bits === null) Object.assign(own.tokens[index], token);
      });
    }
    // a deleted node stays where another tab has added to it meanwhile
    const alive = new Set();
    for (const node of this.nodes.values()) {
      if (this.deleted.has(node.id)) continue;
      for (let one = node; one && !alive.has(one.id); one = this.nodes.get(one.parent)) alive.add(one.id);
    }
    while (this.current !== null && !alive.has(this.current)) this.current = this.nodes.get(this.current)?.parent ?? null;
    for (const id of this.nodes.keys()) if (!alive.has(id)) this.nodes.delete(id);
    const found = new Set(nodes.map(({ id }) => id));
    return { kept, lacks: [...alive].some((id) => !found.has(id)) };
  }

  // Load what is kept; return the settings.
  load() {
    const { kept } = this.merge();
    this.current = this.nodes.has(kept.current) ? kept.current : null;
    return kept.settings ?? {};
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
  const packed = await new Response(piped(JSON.stringify(text), new CompressionStream("deflate-raw"))).arrayBuffer();
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
    throw new Error("The link is damaged: it may have been cut.");
  }
  const isText = typeof text?.model === "string" && typeof text.text === "string" && Array.isArray(text.parts)
    && text.parts.every((part) => ["you", "model"].includes(part?.[0]) && Array.isArray(part[1])
      && part[1].every((id) => Number.isInteger(id) && id >= 0));
  if (!isText || text.parts.flatMap((part) => part[1]).length > MAX_LINK_TOKENS) {
    throw new Error("The link has no text that this page can open.");
  }
  return text;
}
