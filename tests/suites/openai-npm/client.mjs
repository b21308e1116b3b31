// Run OpenAI's npm client against a gateway, and print what it received as one line of JSON.
const [modules, baseURL, apiKey] = process.argv.slice(2);
const { default: OpenAI, APIError } = await import(`${modules}/openai/index.mjs`);
const client = new OpenAI({ baseURL, apiKey });
const asked = [{ role: "user", content: "one" }];
const told = {};

told.models = [];
for await (const model of client.models.list()) told.models.push(model.id);

const first = await client.chat.completions.create({ model: "bob", messages: asked });
told.first = first.choices[0].message.content;
asked.push(first.choices[0].message, { role: "user", content: "two" });

const stream = client.chat.completions.stream({ model: "bob", messages: asked });
told.second = (await stream.finalChatCompletion()).choices[0].message.content;

const response = await client.responses.create({ model: "bob", input: "three" });
told.third = response.output_text;
const events = client.responses.stream({ model: "bob", input: "four", previous_response_id: response.id });
told.fourth = (await events.finalResponse()).output_text;
told.read = (await client.responses.retrieve(response.id)).output_text;

const tools = [{ type: "function", function: { name: "f", parameters: { type: "object", properties: {} } } }];
try {
  await client.chat.completions.create({ model: "bob", messages: asked, tools });
} catch (error) {
  told.refused = [error instanceof APIError, error.status, error.code, error.param];
}

const long = await client.chat.completions.create({
  model: "bob", messages: [{ role: "user", content: "go on for ever" }], stream: true,
});
for await (const chunk of long) {
  if (chunk.object) break;  // leaving the loop closes the stream
}
console.log(JSON.stringify(told));
