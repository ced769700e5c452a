// SPDX-License-Identifier: Apache-2.0
// Draws a generation's tokens as they arrive: colors, rejected drafts, and navigation by keys.

import {make} from "./dom.js";
import {sourceClass} from "./names.js";

// Least probability of each class, from likely to unlikely.
const LEAST = [0.9, 0.6, 0.3, 0.1];

function probabilityClass(logprob) {
  if (logprob === undefined) return "";
  const place = LEAST.findIndex((least) => Math.exp(logprob) >= least);
  return `p${place < 0 ? LEAST.length : place}`;
}

/** Returns the last lines of a prompt that are not blank, to show before its continuation. */
export function endOf(prompt) {
  const lines = prompt.split("\n");
  let begin = lines.length - 1;
  while (begin > 0 && lines.slice(begin).join("").trim() === "") begin -= 1;
  if (begin > 0 && lines[begin - 1].trim() !== "") begin -= 1;
  return (begin > 0 ? "…\n" : "") + lines.slice(begin).join("\n");
}

export class TokenPane {
  /**
   * element: where tokens are drawn; generation: the tokens; prompt: shown before them; onInspect:
   * called with (generation, place, span) when the user inspects a token, and with null afterwards.
   */
  constructor(element, generation, {prompt = "", onInspect}) {
    this.element = element;
    this.generation = generation;
    this.onInspect = onInspect;
    this.spans = [];
    this.numSteps = 0;
    this.nodes = []; // list of nodes of each step
    this.marked = null;
    element.replaceChildren(make("span", {class: "before"}, endOf(prompt)));
    element.addEventListener("keydown", (event) => this.move(event));
    for (const kind of ["mouseover", "focusin"]) {
      element.addEventListener(kind, (event) => this.inspect(event.target));
    }
    element.addEventListener("mouseleave", () => {
      // Inspect the focused token again, if there is one.
      onInspect(null);
      this.inspect(document.activeElement);
    });
    element.addEventListener("focusout", () => onInspect(null));
  }

  /** Draws the steps that have arrived since the last call. */
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
      // The model's own token replaces the first rejected draft.
      if (place === last && drafts && drafts.accepted < drafts.texts.length) nodes.push(rejectedOf(drafts));
      nodes.push(this.spanOf(place));
    }
    return nodes;
  }

  /** Shows the first `count` steps; with `moves`, the rejected drafts of the last one are animated. */
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
    // Tab reaches one token; arrow keys move between tokens.
    const span = make("span", {class: names, tabindex: place ? "-1" : "0", "data-place": place}, token.text);
    this.spans.push(span);
    return span;
  }

  /** Draws the last token again, at the end: its text may have changed if the text ends within a character. */
  finish() {
    const last = this.generation.tokens.length - 1;
    if (last >= 0) this.spans[last].textContent = this.generation.tokens[last].text;
  }

  /** Marks the first token that differs; -1: no token. */
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
