// What the server computes of a text: the surprisal of its tokens with a memory length, as `txl score` does; alternatives;
// attention; and its continuation.

import { firstIndex } from "./editor.js";
import { get, post, remove, scoredTokens, stream } from "./server.js";

/** @import { Part, Work } from "./work.js" */
/** @typedef {{id: string, vocab_size: number, is_lossless: boolean, segment_length: number, memory_length: number,
 *   max_memory_length: number, attention: [number, number]|null}} Model as /v1/models describes it */

export const NUM_ALTERNATIVES = 10;
const CHUNK_SEGMENTS = 16; // read in a request
const WINDOW = 256; // tokens whose alternatives are fetched at once
const NGRAM = 64; // tokens before those that layers see, of which n-gram embeddings may be

export class Text {
  /** @param {Work} work @param {Part|null|undefined} node @param {Model} model */
  constructor(work, node, model, end = node?.ids.length) {
    this.work = work;
    this.model = model;
    this.spans = work.spans(node, end);
    this.ids = this.spans.flatMap(({ node: part, start, end }) => part.ids.slice(0, end - start));
    this.texts = this.spans.flatMap(({ node: part, start, end }) => part.texts?.slice(0, end - start) ?? []);
  }

  get length() { return this.ids.length; }

  spanAt(index) { return this.spans[firstIndex(this.spans.length, (at) => this.spans[at].end > index)] ?? this.spans.at(-1); }

  /** The surprisal of a token in bits: NaN if it has none, undefined if it is not known yet. */
  bits(index, memory) {
    const { node, start } = this.spanAt(index);
    return node.bits[memory]?.[index - start];
  }

  /** The surprisal with which a token was generated, where it is not known better. */
  rough(index) {
    const { node, start } = this.spanAt(index);
    return node.rough[index - start];
  }

  /** Mean surprisal with a memory length, or undefined if it is not known of all tokens. */
  mean(memory) {
    if (!this.length || this.known(memory) < this.length) return undefined;
    const bits = this.spans.flatMap(({ node, start, end }) => node.bits[memory]?.slice(0, end - start) ?? []).filter((one) => one >= 0);
    return bits.reduce((sum, one) => sum + one, 0) / bits.length;
  }

  /** Add tokens that were generated to the last part. */
  append(tokens) {
    const span = this.spans.at(-1);
    for (const ids of [span.node.ids, this.ids]) ids.push(...tokens.map(({ id }) => id));
    if (span.node.texts) for (const texts of [span.node.texts, this.texts]) texts.push(...tokens.map((token) => token.text));
    span.node.rough.push(...tokens.map(({ bits }) => bits));
    span.end = this.length;
  }

  /** Number of tokens from the beginning whose surprisal is known with a memory length. */
  known(memory) {
    const numberOf = ({ node }) => node.bits[memory]?.length ?? 0;
    const span = this.spans.find((one) => numberOf(one) < one.end - one.start);
    return span ? span.start + numberOf(span) : this.length;
  }

  setBits(memory, from, tokens) {
    tokens.forEach(({ bits }, offset) => {
      const { node, start } = this.spanAt(from + offset);
      (node.bits[memory] ??= [])[from + offset - start] = bits ?? NaN;
      this.work.touch(node);
    });
  }

  /** The place after the first `end` tokens, where another part can begin. @returns {[Part|null, number]} */
  place(end = this.length) {
    const span = end ? this.spanAt(end - 1) : null;
    return span ? [span.node, end - span.start] : [null, 0];
  }
}

const floor = (index, segment) => index - index % segment;

export const hasMemory = (model) => model.max_memory_length > 0;

// Return where to begin to read, so that what is at `index` is as if all of the text were read: a layer sees `memory` tokens
// before a segment.
function contextStart({ attention, segment_length, max_memory_length }, index, memory) {
  if (!max_memory_length || !attention) return 0;
  const seen = memory ? attention[0] * (memory + segment_length) + NGRAM : 0;
  return Math.max(0, floor(index - Math.min(seen, index), segment_length));
}

// The tokens before `start` are in the session, or not seen but for the last one, with which the segment begins.
const promptFrom = ({ ids }, start, end) => ({ prompt: ids.slice(Math.max(0, start - 1), end), add_special_tokens: !start });

async function score(text, start, end, memory, { logprobs = 0, signal = undefined, session = undefined } = {}) {
  const body = { model: text.model.id, max_tokens: 0, echo: true, logprobs, return_tokens_as_token_ids: true, session,
    ...(session ? { prompt: text.ids.slice(start, end) } : promptFrom(text, start, end)),
    memory_length: hasMemory(text.model) ? memory : undefined };
  const answer = await post("v1/completions", body, signal);
  return { tokens: scoredTokens(answer.choices[0].logprobs).slice(session || !start ? 0 : 1), session: answer.session };
}

// Return a branch of the session that has read most of the first `end` tokens, or null. Sessions that are kept never change.
async function branchOf(text, memory, end, signal) {
  const found = text.spans.flatMap(({ node, start, end: last }) => node.sessions
    .filter((one) => one.memory === memory && start + one.at <= Math.min(end, last))
    .map((one) => ({ node, one, at: start + one.at }))).sort((first, second) => second.at - first.at);
  for (const { node, one, at } of found) {
    try {
      const { id } = await post(`v1/sessions/${encodeURIComponent(one.id)}/branch`, {}, signal);
      return { id, at };
    } catch (error) {
      if (error.status !== 404) throw error;
      drop(node, one); // it was deleted to make room
    }
  }
  return null;
}

/** @param {Part} node */
export function drop(node, session) {
  node.sessions = node.sessions.filter((one) => one !== session);
  remove(`v1/sessions/${encodeURIComponent(session.id)}`).catch(() => {});
}

function keepSession(text, memory, end, id) {
  const [node, at] = text.place(end);
  node.sessions.push({ memory, at, id });
  text.work.touch(node);
  const own = text.spans.flatMap((span) => span.node.sessions.filter((one) => one.memory === memory)
    .map((one) => /** @type {const} */ ([span.node, one, span.start + one.at])))
    .sort((first, second) => second[2] - first[2]);
  for (const [owner, one] of own.slice(2)) drop(owner, one); // going on and small changes need the last ones
}

/** Read what is not known of a text with a memory length. @param {Text} text @param {() => void} progress */
export async function read(text, memory, signal, progress) {
  const { length, model: { segment_length: segment } } = text;
  const chunk = CHUNK_SEGMENTS * segment;
  let at = text.known(memory);
  const add = (tokens) => {
    text.setBits(memory, at, tokens);
    at += tokens.length;
    progress();
  };
  if (at >= length) return;
  if (!hasMemory(text.model) || memory && length <= chunk) {
    at = 0;
    add((await score(text, 0, length, memory, { signal })).tokens);
  } else if (!memory) { // each segment alone
    for (at = floor(at, segment); at < length;) {
      add((await score(text, at, Math.min(length, at + chunk), 0, { signal })).tokens);
    }
  } else {
    const whole = floor(length, segment);
    let branch = await branchOf(text, memory, at, signal);
    at = branch?.at ?? 0;
    while (at < length) {
      const end = at < whole ? Math.min(whole, at + chunk) : length;
      const { tokens, session } = await score(text, at, end, memory, { signal, session: branch?.id ?? "new" });
      add(tokens);
      // a session is at a whole number of segments, since each request begins one
      if (at > whole) remove(`v1/sessions/${session}`).catch(() => {});
      else keepSession(text, memory, at, session);
      if (at < length) branch = await branchOf(text, memory, at, signal);
    }
  }
}

/** Return the tokens around one with their alternatives: the index of the first, and the tokens. @param {Text} text */
export async function alternatives(text, index, memory, signal) {
  const first = floor(index, WINDOW);
  const start = contextStart(text.model, first, memory);
  const end = Math.min(text.length, first + WINDOW);
  const { tokens } = await score(text, start, end, memory, { logprobs: NUM_ALTERNATIVES, signal });
  return { first, tokens: tokens.slice(first - start) };
}

/** Return what a token attends to: probabilities by layer, head and distance. @param {Text} text @returns {Promise<number[][][]>} */
export async function attention(text, index, memory, signal) {
  const start = contextStart(text.model, index, memory);
  const body = { model: text.model.id, ...promptFrom(text, start, index + 1),
    memory_length: hasMemory(text.model) ? memory : undefined };
  return (await post("attention", body, signal)).attention;
}

/** Return the probabilities by distance of a layer and head, or their mean where the layer or the head is "".
 * @param {number[][][]} weights @returns {number[]} */
export function meanAttention(weights, layer, head) {
  const layers = layer === "" ? weights : [weights[layer]];
  const heads = layers.flatMap((one) => head === "" ? one : [one[head]]);
  return heads[0].map((_, distance) => heads.reduce((sum, one) => sum + one[distance], 0) / heads.length);
}

/** Yield the tokens that the model writes after a text, each with its part of what it writes. @param {Text} text */
export async function* generate(text, memory, sampling, seed, signal) {
  const isLong = hasMemory(text.model) && memory && text.length > CHUNK_SEGMENTS * text.model.segment_length;
  const branch = isLong ? await branchOf(text, memory, text.length, signal) : null;
  const rest = text.ids.slice(branch?.at ?? 0);
  const body = { model: text.model.id, prompt: rest.length ? rest : "", logprobs: 0, return_tokens_as_token_ids: true, ...sampling,
    seed, session: branch?.id, memory_length: hasMemory(text.model) ? memory : undefined };
  let length = 0; // of what was written, in characters as the server counts them
  try {
    for await (const { choices: [choice] } of stream(body, signal)) {
      const [characters, starts] = [[...choice.text], choice.logprobs.text_offset.map((offset) => offset - length)];
      length += characters.length;
      yield scoredTokens(choice.logprobs).map((token, index) => (
        { ...token, text: characters.slice(index && starts[index], starts[index + 1]).join("") }));
    }
  } finally {
    if (branch) remove(`v1/sessions/${branch.id}`).catch(() => {});
  }
}

/** Return the sessions of these parts that the server has. @param {Iterable<Part>} parts */
export async function ownSessions(parts) {
  const own = new Map([...parts].flatMap((node) => node.sessions.map((one) => [one.id, { node, one }])));
  if (!own.size) return [];
  const { data } = await get("v1/sessions");
  return data.filter(({ id }) => own.has(id)).map((session) => ({ ...session, ...own.get(session.id) }));
}
