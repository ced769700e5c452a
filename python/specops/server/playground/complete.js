// SPDX-License-Identifier: Apache-2.0
// The mode "complete": one completion in one lane.

import {board} from "./board.js";
import {perSecond} from "./dom.js";
import {generate} from "./runs.js";

/** Runs one completion; returns its speed and length. */
export async function write(context) {
  board.clear("write");
  const {settings} = context;
  const showsSeed = Number(settings.temperature) > 0;
  const lane = board.addLane(settings.method, {prompt: settings.prompt, showsSeed});
  const run = await generate(context, settings.method, {
    onStart: (generation) => lane.start(generation),
    onStep: () => board.refresh(),
  });
  board.finish();
  return `${perSecond(run.speed)} tokens/s, ${run.tokens.length} tokens`;
}
