// The requests of the page. The API key stays in this tab: sessionStorage, and never in the kept work or in a link.

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const KEY = "transformer-xl key";

// What this tab keeps, or as long as the page is open where the browser forbids it.
const forgotten = new Map();
/** @type {{getItem(name: string): string|null, setItem(name: string, value: string): void}} */
export const tabStorage = (() => {
  try {
    return sessionStorage;
  } catch {
    return { getItem: (name) => forgotten.get(name) ?? null, setItem: (name, value) => { forgotten.set(name, value); } };
  }
})();

export const useKey = (key) => tabStorage.setItem(KEY, key);

async function send(method, path, body, signal) {
  /** @type {Record<string, string>} */
  const headers = {};
  const key = tabStorage.getItem(KEY);
  if (/[^ -~]/.test(key ?? "")) throw new ServerError(401, "The key has characters that no key has: it must be ASCII.");
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "The server does not answer. Is it still running?");
  }
  if (!answer.ok) {
    const { error } = await answer.json().catch(() => ({}));
    throw new ServerError(answer.status, error?.message ?? `The server answers with status ${answer.status}.`);
  }
  return answer;
}

const json = (method) => async (path, body = undefined, signal = undefined) => (await send(method, path, body, signal)).json();
export const [get, post, remove] = ["GET", "POST", "DELETE"].map(json);

// Yield the chunks of a streamed completion.
export async function* stream(body, signal) {
  const answer = await send("POST", "v1/completions", { ...body, stream: true }, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      return { value: "", done: true };
    });
    if (done) throw new ServerError(0, "The connection ended before the text did.");
    buffer += value;
    const events = buffer.split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(500, chunk.error.message);
      yield chunk;
    }
  }
}

// The tokens of the log-probabilities in an answer: id, surprisal in bits, and the alternatives as [id, bits].
export function scoredTokens(logprobs) {
  const idOf = (name) => Number(name.slice("token_id:".length));
  const bitsOf = (logprob) => Math.max(0, Math.round(-logprob / Math.LN2 * 1e4) / 1e4);
  return logprobs.tokens.map((name, index) => {
    const logprob = logprobs.token_logprobs[index];
    const top = Object.entries(logprobs.top_logprobs[index] ?? {}).map(([other, value]) => [idOf(other), bitsOf(value)]);
    top.sort((first, second) => first[1] - second[1]);
    return { id: idOf(name), bits: logprob === null ? null : bitsOf(logprob), top };
  });
}
