// SPDX-License-Identifier: Apache-2.0
// A generation on the page: its heading with the speed, its progress, its text and its counts.

import {make, perSecond, perStepText, whole} from "./dom.js";
import {titleOf} from "./names.js";
import {TokenPane} from "./tokens.js";

export class Lane {
  /** prompt: shown in front of the text; unit: of the speed; onInspect: as of TokenPane. */
  constructor(method, {prompt = "", showsSeed = true, unit = "tokens/s", onInspect}) {
    this.title = titleOf(method);
    this.prompt = prompt;
    this.showsSeed = showsSeed;
    this.onInspect = onInspect;
    this.speed = make("b", {}, "–");
    this.unit = make("span", {}, unit);
    this.progress = make("progress", {max: 1, value: 0, "aria-label": `Progress of: ${this.title}`});
    this.text = make("div", {class: "pane", role: "group", "aria-label": `Text: ${this.title}`});
    this.facts = make("dl", {class: "facts"});
    const heading = make("header", {}, make("h2", {}, this.title), make("p", {class: "speed"}, this.speed, " ", this.unit));
    this.element = make("article", {class: "lane"}, heading, this.progress, this.facts, this.text);
    this.pane = null;
    this.alone = null; // the speed in the place of the generation's
  }

  start(generation) {
    this.generation = generation;
    this.pane = new TokenPane(this.text, generation, this);
    this.paint();
  }

  /** Draws what came since the last time. */
  paint() {
    const {generation} = this;
    this.pane.paint();
    this.progress.max = generation.limit;
    this.progress.value = generation.tokens.length;
    this.speed.textContent = perSecond(this.alone ?? generation.speed);
    const facts = factsOf(generation);
    if (this.showsSeed && generation.seed !== null) facts.push(["seed", generation.seed]);
    this.facts.replaceChildren(...facts.map(([name, value]) => fact(name, value)));
  }

  /** Shows the first `count` steps, as TokenPane does, and a bar that is as long. */
  showSteps(count, moves) {
    const {steps} = this.generation;
    this.pane.showSteps(count, moves);
    if (count < steps.length) this.progress.value = steps[count].first;
    else this.fillBar();
  }

  /** Draws the end: a whole bar only where the text is whole. */
  finish() {
    this.paint();
    this.pane.finish();
    this.fillBar();
  }

  fillBar() {
    const {finishReason, tokens} = this.generation;
    this.progress.value = finishReason === null ? tokens.length : this.progress.max;
  }

  /** Puts the speed that the method has alone in the place of the race's. */
  showAlone(speed) {
    this.alone = speed;
    this.speed.textContent = perSecond(speed);
    this.unit.textContent = "tokens/s alone";
  }
}

const fact = (name, value) => make("div", {}, make("dt", {}, name), make("dd", {}, value));

function factsOf(generation) {
  const {tokens, firstToken, perStep, drafted, accepted} = generation;
  const facts = [
    ["tokens", whole(tokens.length)],
    ["first after", firstToken === null ? "–" : `${firstToken.toFixed(0)} ms`],
    ["per step", perStepText(perStep)],
  ];
  if (drafted) facts.push(["accepted", `${whole(accepted)} of ${whole(drafted)} drafts`]);
  return facts;
}
