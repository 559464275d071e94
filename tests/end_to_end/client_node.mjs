// OpenAI's own Node client against a gateway: `node client_node.mjs URL MODEL KEY` prints one JSON object.
import OpenAI from "openai";

const [, , baseURL, model, apiKey] = process.argv;
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "What is 12 + 30? Show the work." }];
const how = { model, messages, max_completion_tokens: 24, temperature: 0.7, seed: 11 };

const { data: whole, response } = await client.chat.completions.create(how).withResponse();
const again = await client.chat.completions.create({ ...how, n: 2, logprobs: true, top_logprobs: 1 });

let text = "";
let usage = null;
let finish = null;
const stream = await client.chat.completions.create({
  ...how,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  finish = chunk.choices[0]?.finish_reason ?? finish;
  usage = chunk.usage ?? usage;
}

const helper = client.chat.completions.stream(how);
const final = await helper.finalChatCompletion();

const aborted = await client.chat.completions.create({ ...how, stream: true });
for await (const chunk of aborted) {
  if (chunk.choices[0]?.delta?.content) break; // closes the connection
}

const completion = await client.completions.create({ model, prompt: [[5, 6, 7]], max_tokens: 3, echo: true, logprobs: 1 });

const errors = [];
for (const wrong of [{ model: "nobody" }, { temperature: 9 }, { tools: [{ type: "function", function: { name: "f" } }] }]) {
  try {
    await client.chat.completions.create({ ...how, ...wrong });
  } catch (error) {
    errors.push([error.constructor.name, error.status, error.code, error.param]);
  }
}
const models = [];
for await (const found of client.models.list()) models.push(found.id);

console.log(
  JSON.stringify({
    whole: whole.choices[0].message.content,
    seed: response.headers.get("x-paceline-seed"),
    requestId: whole._request_id === response.headers.get("x-request-id"),
    again: again.choices.map((choice) => choice.message.content),
    numScored: again.choices[0].logprobs.content.length,
    numTokens: again.usage.completion_tokens,
    text,
    usage: usage.completion_tokens,
    finish,
    final: final.choices[0].message.content,
    echoed: completion.choices[0].logprobs.tokens.length,
    errors,
    models,
  }),
);
