// SPDX-License-Identifier: Apache-2.0
// The mode "all methods": runs every method alone with the same seed, and shows a table of speeds and differences.

import {board} from "./board.js";
import {$, make, perSecond, perStepText} from "./dom.js";
import {isSame} from "./generation.js";
import {choicesOf, learns} from "./names.js";
import {offerReplay} from "./replay.js";
import {generate} from "./runs.js";
import {factorText, inRounds, middle, speedUp, spreadText} from "./timing.js";

const HEADS = ["method", "tokens per step", "drafts accepted", "tokens/s", "against plain", "tokens and bits"];

/** Runs of one method: the first one is displayed, and the later ones are timed. */
class Entry {
  constructor(method, prompt) {
    this.method = method;
    this.prompt = prompt;
    this.runs = [];
    this.row = make("tr");
    this.button = make("button", {type: "button", title: "Show its text"}, method);
    this.row.addEventListener("click", () => this.open());
  }

  /** Shows the text of the first run. */
  open() {
    if (document.body.dataset.state === "running") return;
    const lane = newLane(this.method, this.prompt);
    lane.start(this.first);
    board.finish();
    offerReplay();
    for (const one of this.row.parentElement.querySelectorAll("button")) {
      one.setAttribute("aria-pressed", String(one === this.button));
    }
  }

  get first() {
    return this.runs[0];
  }

  /** Speeds of the timed runs; of the first run if there is no other. */
  get speeds() {
    return (this.runs.length > 1 ? this.runs.slice(1) : this.runs).map(({speed}) => speed);
  }

  get speed() {
    const timed = this.speeds.filter((speed) => speed).sort((a, b) => a - b);
    return timed.length ? middle(timed) : null;
  }

  /** True if every run has the same bits as the first run of plain decoding. */
  isExact(plain) {
    return this.runs.every((run) => isSame(run, plain.first));
  }

  paint(plain) {
    const {first} = this;
    const words = this.isExact(plain) ? ["identical", "same"] : ["DIFFERENT", "differs"];
    const [verdict, name] = this === plain && words[1] === "same" ? ["–", ""] : words;
    const acceptance = first.drafted ? `${Math.round((100 * first.accepted) / first.drafted)} %` : "–";
    this.row.replaceChildren(
      make("th", {scope: "row"}, this.button),
      ...[perStepText(first.perStep), acceptance].map((text) => make("td", {}, text)),
      make("td", {class: "timed"}, perSecond(this.speed)),
      make("td", {class: "timed"}, ...(this === plain ? ["–"] : this.against(plain))),
      make("td", {class: name}, verdict),
    );
  }

  /** The speed-up over plain decoding, computed per round. */
  speedUp(plain) {
    const others = this.runs.length > 1 ? plain.speeds : [plain.first.speed];
    return speedUp(this.speeds.map((speed, round) => [others[round], speed]), this.first.perStep);
  }

  against(plain) {
    const found = this.speedUp(plain);
    return found ? [factorText(found), " ", make("small", {}, spreadText(found))] : ["–"];
  }
}

function newTable(choices, seed) {
  const notes = ["Each method runs alone, in turn; speeds are medians by the server’s clock. naive is plain decoding."];
  if (seed) notes.push(`Seed ${seed}.`);
  const learners = choices.filter(learns);
  if (learners.length) notes.push(`The ${learns(learners[0])} remembers every text, so it is timed once.`);
  if (learners.length > 1) notes.push("In the second method with it, it knows the text already.");
  const head = make("tr", {}, ...HEADS.map((text) => make("th", {scope: "col"}, text)));
  const body = make("tbody");
  const table = make("table", {}, make("caption", {}, notes.join(" ")), make("thead", {}, head), body);
  $("table").replaceChildren(table);
  $("table").hidden = false;
  return body;
}

/** Returns a new lane, which replaces those shown. */
function newLane(method, prompt) {
  $("lanes").replaceChildren();
  board.lanes = [];
  board.inspected = null;
  return board.addLane(method, {prompt, showsSeed: false});
}

/** Runs a method once, and shows its text. */
async function draw(context, method) {
  const lane = newLane(method, context.settings.prompt);
  const run = await generate(context, method, {
    onStart: (generation) => lane.start(generation),
    onStep: () => board.refresh(),
  });
  board.finish();
  return run;
}

/** Runs all methods; returns a summary of the results. */
export async function compare(context, methods) {
  const {temperature, seed} = context.settings;
  const choices = choicesOf(methods);
  board.clear("compare");
  const body = newTable(choices, Number(temperature) > 0 && seed);
  // Warm up the prefix cache and the CPU, with a method that learns nothing.
  await generate(context, "naive");
  const entries = choices.map((method) => new Entry(method, context.settings.prompt));
  const plain = entries.find(({method}) => method === "naive");
  for (const entry of entries) {
    entry.runs.push(await draw(context, entry.method));
    body.append(entry.row);
    entry.paint(plain);
  }
  return time(context, entries, plain);
}

/** Times in turn all methods that do not learn from texts; returns a summary of the results. */
async function time(context, entries, plain) {
  const repeated = entries.filter(({method}) => !learns(method));
  for (const entry of repeated) entry.runs.length = 1;
  await inRounds(async (number) => {
    const runs = new Map();
    for (const entry of number % 2 ? repeated.toReversed() : repeated) {
      runs.set(entry, await generate(context, entry.method));
    }
    for (const [entry, run] of runs) entry.runs.push(run);
    for (const entry of repeated) entry.paint(plain);
  });
  const isDisturbed = repeated.some((entry) => entry !== plain && entry.speedUp(plain)?.isDisturbed);
  board.offerAgain(isDisturbed ? (means) => time({...context, ...means}, entries, plain) : null);
  const best = entries.reduce((a, b) => ((b.speed ?? 0) > (a.speed ?? 0) ? b : a));
  const same = entries.every((entry) => entry.isExact(plain));
  return `${best.method} was fastest, ${same ? "all identical" : "not all identical"}`;
}
