// SPDX-License-Identifier: Apache-2.0
// The view of one generation: heading with speed, progress bar, text and counts.

import {make, milliseconds, perSecond, perStepText, whole} from "./dom.js";
import {titleOf} from "./names.js";
import {TokenPane} from "./tokens.js";

export class Lane {
  /**
   * prompt: shown before the text; how: how the speed is measured; badge: shown beside the title;
   * lanes: all lanes of the run; onInspect: as in `TokenPane`.
   */
  constructor(method, {prompt = "", showsSeed = true, how = "", badge = "", lanes, onInspect}) {
    this.title = titleOf(method);
    this.how = how;
    this.lanes = lanes;
    this.prompt = prompt;
    this.showsSeed = showsSeed;
    this.onInspect = onInspect;
    this.speed = make("b", {}, "–");
    this.unit = make("span");
    this.progress = make("progress", {max: 1, value: 0, "aria-label": `Progress of: ${this.title}`});
    this.text = make("div", {class: "pane", role: "group", "aria-label": `Text: ${this.title}`});
    this.facts = make("dl", {class: "facts"});
    const title = make("h2", {}, this.title, ...(badge ? [" ", make("span", {class: "badge"}, badge)] : []));
    const heading = make("header", {}, title, make("p", {class: "speed"}, this.speed, " ", this.unit));
    this.element = make("article", {class: "lane"}, heading, this.progress, this.facts, this.text);
    this.pane = null;
    this.alone = null; // measured speed to show instead of the generation's own
  }

  start(generation) {
    this.generation = generation;
    this.pane = new TokenPane(this.text, generation, this);
    this.paint();
  }

  /** Draws the steps that have arrived since the last call. */
  paint() {
    this.pane.paint();
    this.drawFigures(this.generation);
  }

  /** Shows the first `count` steps and the figures after them; see `TokenPane.showSteps`. */
  showSteps(count, moves) {
    this.pane.showSteps(count, moves);
    this.drawFigures(this.generation.after(count));
  }

  /** Draws the end of the text. */
  finish() {
    this.paint();
    this.pane.finish();
  }

  /** Draws the figures of a generation or of its beginning; the bar is full if the text is complete. */
  drawFigures(shown) {
    const isComplete = shown.finishReason !== null;
    const alone = isComplete ? this.alone : null;
    this.progress.max = shown.limit;
    this.progress.value = isComplete ? shown.limit : shown.tokens.length;
    this.speed.textContent = perSecond(alone ?? shown.speed);
    this.unit.replaceChildren("tokens/s", make("span", {class: "how"}, alone === null ? this.how : " alone"));
    const facts = factsOf(shown);
    if (this.showsSeed && shown.seed !== null) facts.push(["seed", shown.seed]);
    this.facts.replaceChildren(...facts.map(([name, value]) => fact(name, value)));
    if (isComplete) this.facts.append(this.end());
  }

  /** The time at which the text was complete; marked if no other lane was faster. */
  end() {
    const {seconds} = this.generation;
    const others = this.lanes.filter((lane) => lane !== this);
    const isFirst = others.length > 0 && others.every(({generation}) => generation?.seconds > seconds);
    return fact("done", `${isFirst ? "first, " : ""}at ${milliseconds(seconds)}`, isFirst ? "first" : "");
  }

  /** Shows the speed measured alone instead of that in the race. */
  showAlone(speed) {
    this.alone = speed;
    this.drawFigures(this.generation);
  }
}

const fact = (name, value, mark = "") => make("div", {class: mark}, make("dt", {}, name), make("dd", {}, value));

function factsOf(generation) {
  const {tokens, steps, perStep, drafted, accepted} = generation;
  const facts = [
    ["tokens", whole(tokens.length)],
    ["first token", steps.length ? milliseconds(steps[0].seconds) : "–"],
    ["per step", perStepText(perStep)],
  ];
  if (drafted) facts.push(["accepted", `${whole(accepted)} of ${whole(drafted)}`]);
  return facts;
}
