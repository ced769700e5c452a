// SPDX-License-Identifier: Apache-2.0
// The race: plain decoding and a method generate the same text at the same time; every token is compared.

import {board} from "./board.js";
import {$, perStepText, whole} from "./dom.js";
import {agreement, isSame} from "./generation.js";
import {learns} from "./names.js";
import {generate} from "./runs.js";
import {factorText, inRounds, speedUp, spreadText} from "./timing.js";

/** Returns a text such as "160 of 160 tokens, 160 of 160 logprobs"; `total` is the length of the longer text. */
function counted({tokens, sameTokens, logprobs, sameLogprobs}, total = tokens) {
  const parts = [`${whole(sameTokens)} of ${whole(total)} tokens`];
  if (logprobs) parts.push(`${whole(sameLogprobs)} of ${whole(Math.max(logprobs, total))} logprobs`);
  return parts.join(", ");
}

/** Shows the result of the race so far: tokens per step, and how far the generations agree. */
export function showVerdict(plain, fast, isOver) {
  $("verdict").hidden = false;
  $("per-step").textContent = perStepText(fast.perStep);
  $("steps-saved").hidden = fast.perStep === null;
  const found = agreement(plain, fast);
  const same = isOver ? isSame(plain, fast) : found.firstDifference < 0;
  const total = isOver ? Math.max(plain.tokens.length, fast.tokens.length) : found.tokens;
  const how = same ? (isOver ? "Same bits" : "Same bits so far") : "DIFFERENT";
  $("identical").textContent = `${how}: ${counted(found, total)}`;
  $("identical").className = `identical ${same ? "same" : "differs"}`;
  for (const lane of board.lanes) lane.pane?.mark(found.firstDifference);
}

/** Shows the speed-up over the timed pairs; `again` repeats the timing. */
function showSpeeds(pairs, perStep, again) {
  const found = speedUp(pairs, perStep);
  $("factor").textContent = found ? `${factorText(found)} as fast as plain` : "too short to be timed";
  $("spread").textContent = found ? `(${spreadText(found)})` : "";
  if (found) board.lanes.forEach((lane, i) => lane.showAlone(found.speeds[i]));
  board.offerAgain(found?.isDisturbed ? again : null);
}

/** Times each method alone, in turn, since in a race both share the steps. Returns whether all bits are the same. */
async function timeAlone(context, method, raced) {
  const methods = ["naive", method];
  const pairs = [];
  let same = true;
  try {
    await inRounds(async (number) => {
      $("verdict-note").textContent = `Timing each alone, pair ${number + 1}.`;
      const pair = [];
      for (const i of number % 2 ? [0, 1] : [1, 0]) {
        const run = await generate(context, methods[i]);
        same &&= isSame(run, raced[i]);
        pair[i] = run.speed;
      }
      pairs.push(pair);
    });
  } finally {
    // If the user stops the timing, use the pairs timed so far.
    $("verdict-note").textContent = same ? "" : "Alone they wrote OTHER bits than in the race. ";
    const again = (means) => conclude({...context, ...means}, raced);
    if (pairs.length) showSpeeds(pairs, raced[1].perStep, again);
    else $("factor").textContent ||= "not timed";
  }
  return same;
}

/** Shows the result of the race; returns a summary. */
async function conclude(context, raced) {
  const {method, alone, temperature, seed} = context.settings;
  showVerdict(...raced, true);
  let same = isSame(...raced);
  try {
    if (learns(method)) {
      $("verdict-note").textContent =
        `Not timed alone: the ${learns(method)} has this text by now, and would draft all of it. `;
    } else if (alone && method !== "naive") {
      same = (await timeAlone(context, method, raced)) && same;
    }
  } finally {
    if (Number(temperature) > 0) $("verdict-note").append(`Seed ${seed}.`);
  }
  const facts = [`${$("per-step").textContent} tokens per step`, $("factor").textContent].filter(Boolean);
  return `${facts.join(", ")}, ${same ? "same bits" : "DIFFERENT"}: ${raced[1].tokens.length} tokens`;
}

/** Runs a race; returns a summary of the result. */
export async function race(context) {
  const {settings} = context;
  board.clear("race");
  const lanes = ["naive", settings.method].map((method) =>
    board.addLane(method, {prompt: settings.prompt, showsSeed: false, how: ", both at once"}),
  );
  for (const id of ["factor", "spread", "verdict-note"]) $(id).textContent = "";
  board.extra = () => {
    const [plain, fast] = lanes.map(({generation}) => generation);
    if (plain?.steps.length && fast?.steps.length) showVerdict(plain, fast, false);
  };
  // If one run fails, do not wait for the other.
  const ended = new AbortController();
  const signal = AbortSignal.any([context.signal, ended.signal]);
  const runs = ["naive", settings.method].map((method, i) =>
    generate({...context, signal}, method, {
      onStart: (generation) => lanes[i].start(generation),
      onStep: () => board.refresh(),
    }),
  );
  let raced;
  try {
    raced = await Promise.all(runs);
  } catch (error) {
    ended.abort();
    await Promise.allSettled(runs);
    throw error;
  }
  board.finish();
  board.extra = () => {};
  return conclude(context, raced);
}
