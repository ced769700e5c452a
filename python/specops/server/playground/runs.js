// SPDX-License-Identifier: Apache-2.0
// One run: sends the request of the form, and collects its generation step by step.

import {request, events} from "./api.js";
import {Generation} from "./generation.js";
import {configOf} from "./names.js";

/** Returns a random seed, for requests that must have the same one. */
export const drawSeed = () => String(crypto.getRandomValues(new Uint32Array(1))[0]);

/** Returns the path and the fields of a request except the seed; `messages`: the messages of a chat. */
export function requestOf(settings, method, messages) {
  const {alternatives} = settings;
  const fields = {
    ...(messages ? {messages} : {prompt: settings.prompt}),
    max_tokens: Number(settings.tokens),
    temperature: Number(settings.temperature),
    top_p: Number(settings.top_p),
    speculative_config: configOf(method, {
      k: Number(settings.k),
      // null: the server's default, which is all drafts, or one if another method continues.
      steps: settings.steps === "" ? null : Number(settings.steps),
    }),
  };
  if (alternatives !== "" && messages) {
    Object.assign(fields, {logprobs: true, top_logprobs: Number(alternatives)});
  } else if (alternatives !== "") {
    fields.logprobs = Number(alternatives);
  }
  return {path: messages ? "v1/chat/completions" : "v1/completions", fields};
}

function bodyOf(fields, seed) {
  const text = JSON.stringify({...fields, stream: true, stream_options: {include_steps: true}});
  // Append the seed as digits, since JavaScript's numbers cannot hold 64-bit integers.
  return `${text.slice(0, -1)},"seed":${seed}}`;
}

/**
 * Runs one request and returns its Generation.
 *
 * context: {settings, key, signal}, where the settings have a seed. messages: the messages of a chat.
 * onStart and onStep are called with the generation: at its beginning, and after every event.
 */
export async function generate(context, method, {messages = null, onStart, onStep} = {}) {
  const {settings, key, signal} = context;
  const generation = new Generation(method, Number(settings.tokens));
  onStart?.(generation);
  const {path, fields} = requestOf(settings, method, messages);
  const response = await request(path, {key, signal, body: bodyOf(fields, settings.seed)});
  for await (const event of events(response)) {
    generation.take(event);
    onStep?.(generation);
  }
  generation.finish();
  onStep?.(generation);
  return generation;
}
