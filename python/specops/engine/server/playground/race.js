// SPDX-License-Identifier: Apache-2.0
// The race: plain decoding and a method write the same text at once, and every token is compared.

import {board} from "./board.js";
import {$, perSecond, whole} from "./dom.js";
import {agreement} from "./generation.js";
import {learns} from "./names.js";
import {drawSeed, generate} from "./runs.js";

/** "160 of 160 tokens", and of logprobs where both have them; `total` may count a longer text. */
function counted({tokens, sameTokens, logprobs, sameLogprobs}, total = tokens) {
  const parts = [`${whole(sameTokens)} of ${whole(total)} tokens`];
  if (logprobs) parts.push(`${whole(sameLogprobs)} of ${whole(Math.max(logprobs, total))} logprobs, to the last bit`);
  return parts.join(", ");
}

function showFactor(plain, fast, what) {
  const factor = plain.speed && fast.speed ? fast.speed / plain.speed : null;
  $("factor").textContent = factor === null ? "–" : `${factor.toFixed(2)}×`;
  $("factor-what").textContent = factor === null ? "too short to be timed" : `as fast, ${what}`;
  return factor;
}

/** Draws how far two generations agree; returns whether they do, wholly. */
function showAgreement(plain, fast, isOver) {
  const found = agreement(plain, fast);
  const isSame = found.firstDifference < 0 && (!isOver || plain.tokens.length === fast.tokens.length);
  const total = isOver ? Math.max(plain.tokens.length, fast.tokens.length) : found.tokens;
  const how = isSame ? (isOver ? "identical" : "identical so far") : "DIFFERENT";
  $("identical").textContent = `${how}: ${counted(found, total)}`;
  $("identical").className = `identical ${isSame ? "same" : "differs"}`;
  for (const lane of board.lanes) lane.pane?.mark(found.firstDifference);
  return isSame;
}

/** Times both again, one after the other: in a race each step serves both. */
async function timeAlone(context, method, seed, raced) {
  $("verdict-note").textContent = "Now each alone, for its own speed.";
  const alone = [];
  for (const one of ["naive", method]) alone.push(await generate(context, one, {seed}));
  const isSame = alone.every((one, i) => {
    const {firstDifference} = agreement(one, raced[i]);
    return firstDifference < 0 && one.tokens.length === raced[i].tokens.length;
  });
  return {alone, isSame};
}

function shared(plain, fast) {
  const factor = plain.speed && fast.speed ? `${(fast.speed / plain.speed).toFixed(2)}×` : "–";
  return `In the race every step served both, so that drafts cost the other side, too: ${factor} there.`;
}

/** Says what the race came to; returns whether all texts have the same bits. */
async function conclude(context, method, seed, raced) {
  const isSame = showAgreement(...raced, true);
  if (!context.settings.alone || learns(method) || method === "naive") {
    showFactor(...raced, "in shared steps");
    $("verdict-note").textContent = learns(method)
      ? "Both shared every step. Neither is timed alone: the suffix tree has this text by now, and would draft all of it."
      : `Both shared every step: alone, the factor may be another. Seed ${seed}.`;
    return isSame;
  }
  const {alone, isSame: isSameAlone} = await timeAlone(context, method, seed, raced);
  showFactor(...alone, "each alone");
  const speeds = `${perSecond(alone[0].speed)} → ${perSecond(alone[1].speed)} tokens/s`;
  const told = isSameAlone ? "the same bits once more" : "but alone they wrote OTHER bits than in the race";
  $("verdict-note").textContent = `Each alone: ${speeds}, ${told}. ${shared(...raced)} Seed ${seed}.`;
  return isSame && isSameAlone;
}

/** Runs a race; returns what it came to, in a few words. */
export async function race(context) {
  const {settings} = context;
  const seed = settings.seed || drawSeed();
  board.clear();
  const lanes = ["naive", settings.method].map((method) =>
    board.addLane(method, {prompt: settings.prompt, showsSeed: false}),
  );
  $("verdict").hidden = false;
  $("factor").textContent = "–";
  $("factor-what").textContent = "as fast";
  $("identical").textContent = "";
  $("verdict-note").textContent = "";
  board.extra = () => {
    const [plain, fast] = lanes.map(({generation}) => generation);
    if (!plain?.steps.length || !fast?.steps.length) return;
    showFactor(plain, fast, "in shared steps");
    showAgreement(plain, fast, false);
  };
  // Where one fails, nobody waits for the other.
  const ended = new AbortController();
  const signal = AbortSignal.any([context.signal, ended.signal]);
  const runs = ["naive", settings.method].map((method, i) =>
    generate({...context, signal}, method, {
      seed,
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
  const isSame = await conclude(context, settings.method, seed, raced);
  const factor = $("factor").textContent;
  return {seed, outcome: `${factor} as fast, ${isSame ? "identical" : "DIFFERENT"}: ${raced[1].tokens.length} tokens`};
}
