// A session of the Vercel AI SDK: text, stream, tools and JSON. The last line says what came.
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { createOpenAI } from '@ai-sdk/openai';
import { generateObject, generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const [baseURL, name] = process.argv.slice(-2);
const chat = createOpenAICompatible({ name: 'moaspec', baseURL, apiKey: 'none', supportsStructuredOutputs: true });
const responses = createOpenAI({ baseURL, apiKey: 'none' });
const time = tool({
  description: 'Tells the time.',
  inputSchema: z.object({ city: z.enum(['Rome', 'Oslo']) }),
  execute: async ({ city }) => `noon in ${city}`,
});
const said = {};
for (const [kind, model] of [['chat', chat(name)], ['responses', responses.responses(name)]]) {
  const common = { model, temperature: 0, maxOutputTokens: 12, maxRetries: 0 };
  const whole = await generateText({ ...common, prompt: 'hello' });
  const stream = streamText({ ...common, prompt: 'hello' });
  let text = '';
  for await (const piece of stream.textStream) text += piece;
  const called = {
    ...common,
    maxOutputTokens: 200,
    tools: { time },
    stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? 'none' : { type: 'tool', toolName: 'time' } }),
    prompt: 'What time is it?',
  };
  const loop = await generateText(called);
  const streamed = streamText(called);
  for await (const piece of streamed.textStream) text += piece && '';
  const object = await generateObject({
    ...common,
    maxOutputTokens: 100,
    schema: z.object({ kind: z.enum(['cat', 'dog']) }),
    prompt: 'Which?',
  });
  said[kind] = {
    same: whole.text === text,
    results: loop.steps[0].toolResults.map((one) => one.output),
    streamed: (await streamed.steps)[0].toolResults.map((one) => one.output),
    steps: loop.steps.length,
    kind: object.object.kind,
    tokens: whole.usage.outputTokens,
  };
}
console.log(JSON.stringify(said));
