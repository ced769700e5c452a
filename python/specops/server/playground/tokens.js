// SPDX-License-Identifier: Apache-2.0
// Draws a generation's tokens as they come: tints, rejected drafts, and a way through them by keys.

import {make} from "./dom.js";
import {sourceClass} from "./names.js";

// Probabilities by class: from sure to unlikely.
const LEAST = [0.9, 0.6, 0.3, 0.1];

function probabilityClass(logprob) {
  if (logprob === undefined) return "";
  const place = LEAST.findIndex((least) => Math.exp(logprob) >= least);
  return `p${place < 0 ? LEAST.length : place}`;
}

/** The end of a prompt, for above its continuation: the last lines that say something. */
export function endOf(prompt) {
  const lines = prompt.split("\n");
  let begin = lines.length - 1;
  while (begin > 0 && lines.slice(begin).join("").trim() === "") begin -= 1;
  if (begin > 0 && lines[begin - 1].trim() !== "") begin -= 1;
  return (begin > 0 ? "…\n" : "") + lines.slice(begin).join("\n");
}

export class TokenPane {
  /**
   * element: what to draw into; generation: whose tokens; prompt: shown in front of them;
   * onInspect: called with (generation, place, span) where a token is looked at, and with null.
   */
  constructor(element, generation, {prompt = "", onInspect}) {
    this.element = element;
    this.generation = generation;
    this.onInspect = onInspect;
    this.spans = [];
    this.numSteps = 0;
    this.nodes = []; // of each step
    this.marked = null;
    element.replaceChildren(make("span", {class: "before"}, endOf(prompt)));
    element.addEventListener("keydown", (event) => this.move(event));
    for (const kind of ["mouseover", "focusin"]) {
      element.addEventListener(kind, (event) => this.inspect(event.target));
    }
    element.addEventListener("mouseleave", () => {
      // Back to the token that has the focus, if one has.
      onInspect(null);
      this.inspect(document.activeElement);
    });
    element.addEventListener("focusout", () => onInspect(null));
  }

  /** Draws what came since the last time. */
  paint() {
    const {element, generation} = this;
    const isAtEnd = element.scrollTop + element.clientHeight > element.scrollHeight - 40;
    const made = document.createDocumentFragment();
    for (; this.numSteps < generation.steps.length; this.numSteps++) {
      this.nodes.push(this.nodesOf(generation.steps[this.numSteps]));
      made.append(...this.nodes.at(-1));
    }
    element.append(made);
    if (isAtEnd) element.scrollTop = element.scrollHeight;
  }

  nodesOf({first, count, drafts}) {
    const nodes = [];
    const last = first + count - 1;
    for (let place = first; place <= last; place++) {
      // The model's own token stands where the first draft was rejected.
      if (place === last && drafts && drafts.accepted < drafts.texts.length) nodes.push(rejectedOf(drafts));
      nodes.push(this.spanOf(place));
    }
    return nodes;
  }

  /** Shows the first `count` steps; with `moves`, the rejected drafts of the last one fly out. */
  showSteps(count, moves) {
    this.nodes.forEach((nodes, number) => {
      for (const node of nodes) {
        node.hidden = number >= count;
        if (!node.matches(".rejected")) continue;
        const flies = moves && number === count - 1;
        node.classList.toggle("flying", flies);
        node.ariaHidden = String(flies);
      }
    });
    this.element.scrollTop = this.element.scrollHeight;
  }

  spanOf(place) {
    const token = this.generation.tokens[place];
    const names = `token ${sourceClass(token.source)} ${probabilityClass(token.logprob)}`;
    // One stop for the Tab key; arrows go from token to token.
    const span = make("span", {class: names, tabindex: place ? "-1" : "0", "data-place": place}, token.text);
    this.spans.push(span);
    return span;
  }

  /** Called at the end: a text that broke off in the middle of a character. */
  finish() {
    const last = this.generation.tokens.length - 1;
    if (last >= 0) this.spans[last].textContent = this.generation.tokens[last].text;
  }

  /** Marks the token at which two texts part. */
  mark(place) {
    this.marked?.classList.remove("differs");
    this.marked = place < 0 ? null : (this.spans[place] ?? null);
    this.marked?.classList.add("differs");
  }

  move(event) {
    const at = this.spans.indexOf(document.activeElement);
    const to = {ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: this.spans.length - 1}[event.key];
    if (at < 0 || to === undefined || !this.spans[to] || this.spans[to].hidden) return;
    event.preventDefault();
    this.spans[at].tabIndex = -1;
    this.spans[to].tabIndex = 0;
    this.spans[to].focus();
  }

  inspect(target) {
    if (!this.spans.includes(target)) return;
    this.onInspect(this.generation, Number(target.dataset.place), target);
  }
}

function rejectedOf({texts, sources, accepted}) {
  const drafts = texts.map((text, place) => make("del", {class: sourceClass(sources[place])}, text.replaceAll("\n", "⏎")));
  return make("span", {class: "rejected"}, ...drafts.slice(accepted));
}
