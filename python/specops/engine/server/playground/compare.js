// SPDX-License-Identifier: Apache-2.0
// Every method in turn, alone, with the same seed: a table of speeds, and whether texts are the same.

import {board} from "./board.js";
import {$, make, perSecond} from "./dom.js";
import {agreement} from "./generation.js";
import {choicesOf, learns} from "./names.js";
import {drawSeed, generate} from "./runs.js";

const HEADS = ["method", "tokens/s", "against plain", "tokens per step", "accepted", "tokens and bits"];

function newTable(caption) {
  const head = make("tr", {}, ...HEADS.map((text) => make("th", {scope: "col"}, text)));
  const body = make("tbody");
  const table = make("table", {}, make("caption", {}, caption), make("thead", {}, head), body);
  $("table").replaceChildren(table);
  $("table").hidden = false;
  return body;
}

function verdict(run, plain) {
  if (run === plain) return ["–", ""];
  const {firstDifference} = agreement(plain, run);
  const isSame = firstDifference < 0 && plain.tokens.length === run.tokens.length;
  return isSame ? ["identical", "same"] : ["DIFFERENT", "differs"];
}

function rowOf(method, run, plain) {
  const factor = run.speed && plain.speed ? `${(run.speed / plain.speed).toFixed(2)}×` : "–";
  const [words, name] = verdict(run, plain);
  const share = run.drafted ? `${Math.round((100 * run.accepted) / run.drafted)} %` : "–";
  const cells = [perSecond(run.speed), factor, run.perStep.toFixed(2), share];
  return make(
    "tr",
    {},
    make("th", {scope: "row"}, method),
    ...cells.map((text) => make("td", {}, text)),
    make("td", {class: name}, words),
  );
}

/** Runs all methods; returns what they came to. */
export async function compare(context, methods) {
  const {settings} = context;
  const seed = settings.seed || drawSeed();
  const choices = choicesOf(methods);
  const isLearning = choices.filter(learns).length > 1;
  board.clear();
  const body = newTable(
    `Each alone, by the server’s clock, seed ${seed}.${
      isLearning ? " Suffix decoding drafts from texts it has seen: the second method with it has seen the first one’s." : ""
    }`,
  );
  // Warms the prefix cache and the CPU; by a method that learns nothing.
  await generate(context, "naive", {seed});
  const runs = [];
  for (const method of choices) {
    $("lanes").replaceChildren();
    board.lanes = [];
    const lane = board.addLane(method, {prompt: settings.prompt, showsSeed: false});
    const run = await generate(context, method, {
      seed,
      onStart: (generation) => lane.start(generation),
      onStep: () => board.refresh(),
    });
    board.finish();
    runs.push(run);
    body.append(rowOf(method, run, runs[0]));
  }
  const isSame = runs.every((run) => verdict(run, runs[0])[1] !== "differs");
  const best = runs.reduce((a, b) => ((b.speed ?? 0) > (a.speed ?? 0) ? b : a));
  return {seed, outcome: `${best.method} was fastest, ${isSame ? "all identical" : "not all identical"}`};
}
