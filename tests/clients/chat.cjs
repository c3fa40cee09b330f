// The openai client for Node: a chat of three turns, a stream, two samples, and errors; prints what it saw as JSON.
const { OpenAI } = require("openai");

async function errorOf(promise) {
  try {
    await promise;
    return "no error";
  } catch (error) {
    return error.constructor.name;
  }
}

async function main() {
  const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0, timeout: 60000 });
  const settings = { model: "mine", max_tokens: 12, seed: 3 };
  const messages = [];
  const contents = [];
  for (let turn = 0; turn < 3; turn++) {
    messages.push({ role: "user", content: `question ${turn}` });
    const answer = await client.chat.completions.create({ ...settings, messages });
    messages.push(answer.choices[0].message);
    contents.push(answer.choices[0].message.content);
  }
  const stream = await client.chat.completions.create({ ...settings, messages: messages.slice(0, 1), stream: true });
  let streamed = "";
  for await (const chunk of stream) streamed += chunk.choices[0]?.delta?.content ?? "";
  const two = await client.completions.create({ ...settings, prompt: "the ", n: 2 });
  const errors = [
    await errorOf(client.chat.completions.create({ ...settings, model: "gpt-4o", messages })),
    await errorOf(client.chat.completions.create({ ...settings, temperature: -1, messages })),
    await errorOf(client.embeddings.create({ model: "mine", input: "the offer" })),
  ];
  console.log(JSON.stringify({ contents, streamed, samples: two.choices.length, errors }));
}

main();
