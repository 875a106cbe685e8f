// The task as a program of the AI SDK: node ai_sdk.mjs PROVIDER, in a directory with its packages.
import { readFile, writeFile } from 'node:fs/promises';
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const settings = { baseURL: `${process.env.BATON_URL}/v1`, apiKey: 'sk-none' };
const models = {
  openai: () => createOpenAI(settings)('fake'),
  compatible: () => createOpenAICompatible({ ...settings, name: 'baton', includeUsage: true })('fake'),
  anthropic: () => createAnthropic(settings)('fake'),
};
const result = streamText({
  model: models[process.argv[2]](),
  system: 'You keep notes. '.repeat(200),
  prompt: process.env.BATON_TASK,
  stopWhen: stepCountIs(5),
  tools: {
    write_note: tool({
      description: 'Writes the note.',
      inputSchema: z.object({ text: z.string(), tags: z.record(z.string(), z.string()).optional() }),
      execute: ({ text }) => writeFile('note.txt', text).then(() => 'written'),
    }),
    read_note: tool({ description: 'Reads the note.', inputSchema: z.object({}), execute: () => readFile('note.txt', 'utf8') }),
  },
  onError: ({ error }) => { throw error; },
});
console.log(await result.text);
