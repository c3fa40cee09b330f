// The work of the page: texts as trees. A node is a part that was written or generated in one go; it follows the first
// `at` tokens of its parent. Kept in localStorage, and one text in the fragment of a link.

const STORAGE = "transformer-xl work";
const MAX_LINK_TOKENS = 100_000;
const MAX_LINK_CHARACTERS = 4_000_000;

export class Work {
  nodes = new Map();
  current = null; // id of the node at whose end the text ends
  next = 1;

  // Add a part after the first `at` tokens of a node, or as the beginning of a text.
  add(parent, at, kind, model, ids = [], seed = null) {
    while (parent && at === 0) [parent, at] = [this.nodes.get(parent.parent), parent.at];
    const node = { id: this.next++, parent: parent?.id ?? null, at: parent ? at : 0, kind, model, seed,
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
    for (const withTops of [true, false]) {
      const nodes = [...this.nodes.values()].map((node) => ({ ...node,
        tokens: node.tokens.map(({ id, bits, top }) => withTops ? [id, bits, top] : [id, bits]) }));
      try {
        localStorage.setItem(STORAGE, JSON.stringify({ nodes, current: this.current, next: this.next, settings }));
        return withTops;
      } catch { /* the quota of the browser; try with less */ }
    }
    return false;
  }

  // Load what is kept; return the settings.
  load() {
    try {
      const kept = JSON.parse(localStorage.getItem(STORAGE));
      if (!kept) return {};
      for (const node of kept.nodes) {
        this.nodes.set(node.id, { ...node, tokens: node.tokens.map(([id, bits, top = []]) => ({ id, bits, top })) });
      }
      this.current = this.nodes.has(kept.current) ? kept.current : null;
      this.next = kept.next;
      return kept.settings ?? {};
    } catch {
      this.nodes.clear(); // of another version, or damaged
      return {};
    }
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
