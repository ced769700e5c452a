// SPDX-License-Identifier: Apache-2.0
// One request: from the form's values to a generation, step by step.

import {request, events} from "./api.js";
import {Generation} from "./generation.js";
import {configOf} from "./names.js";

/** A seed for requests that are to have the same one. */
export const drawSeed = () => String(crypto.getRandomValues(new Uint32Array(1))[0]);

/** Returns the path and the fields of a request except the seed; `messages`: those of a chat. */
export function requestOf(settings, method, messages) {
  const {alternatives} = settings;
  const fields = {
    ...(messages ? {messages} : {prompt: settings.prompt}),
    max_tokens: Number(settings.tokens),
    temperature: Number(settings.temperature),
    top_p: Number(settings.top_p),
    speculative_config: configOf(method, {
      k: Number(settings.k),
      // Absent: what the server takes by itself, all drafts by MTP, or one where another goes on.
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
  // As digits: JSON has integers that JavaScript's numbers do not hold.
  return `${text.slice(0, -1)},"seed":${seed}}`;
}

/**
 * Runs one request and returns its Generation.
 *
 * context: {settings, key, signal}, the settings with a seed; messages: of a chat; onStart and
 * onStep are called with the generation, when it begins and with every step.
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
