// SPDX-License-Identifier: Apache-2.0
// The results: lanes and charts, drawn at most once a frame however fast tokens come.

import {hideCard, showCard} from "./card.js";
import {acceptance, draftChain, markTime, timeline} from "./charts.js";
import {$, make} from "./dom.js";
import {Lane} from "./lane.js";
import {sourceClass, sourceName} from "./names.js";

const CHART_MILLISECONDS = 150; // between two drawings of the charts

class Board {
  constructor() {
    this.lanes = [];
    this.extra = () => {}; // drawn with every frame
    this.onClear = () => {};
    this.again = null; // times what is shown once more
    this.onStep = () => {}; // called with a generation and the step of it that was clicked
    this.frame = 0;
    this.drawnAt = 0;
    this.inspected = null; // [generation, step]
  }

  /** Takes away what an earlier run has left, and lays the results out for a mode. */
  clear(mode) {
    this.onClear();
    this.onClear = () => {};
    $("results").dataset.mode = mode;
    this.lanes = [];
    this.extra = () => {};
    this.inspected = null;
    this.offerAgain(null);
    for (const id of ["idle", "verdict", "charts", "table"]) $(id).hidden = true;
    for (const id of ["lanes", "table", "acceptance", "drafts", "timeline"]) $(id).replaceChildren();
    showLegend([]);
  }

  /** True if no run has shown a step. */
  get isEmpty() {
    return !this.lanes.some(({generation}) => generation?.tokens.length) && !document.querySelector("#table tbody tr");
  }

  /** Adds a lane; options are those of Lane. */
  addLane(method, options) {
    const onInspect = (generation, place, span) => this.inspect(generation, place, span);
    const lane = new Lane(method, {...options, lanes: this.lanes, onInspect});
    this.lanes.push(lane);
    $("lanes").append(lane.element);
    return lane;
  }

  /** Greys out speeds whose timing was disturbed, and offers to repeat it by `again`; null: it was not. */
  offerAgain(again) {
    this.again = again;
    $("disturbed").hidden = again === null;
    $("results").classList.toggle("doubtful", again !== null);
  }

  inspect(generation, place, span) {
    hideCard();
    if (!generation) return;
    showCard(generation, place, span);
    this.inspected = [generation, generation.tokens[place].step];
    this.drawDrafts();
  }

  /** Has everything drawn with the next frame. */
  refresh() {
    this.frame ||= requestAnimationFrame(() => this.paint());
  }

  paint() {
    this.frame = 0;
    for (const lane of this.lanes) if (lane.generation) lane.paint();
    this.extra();
    if (performance.now() - this.drawnAt > CHART_MILLISECONDS) this.drawCharts();
  }

  /** Draws what is left, at the end of a run. */
  finish() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    for (const lane of this.lanes) if (lane.generation) lane.finish();
    this.extra();
    this.drawCharts();
  }

  drawCharts() {
    this.drawnAt = performance.now();
    const shown = this.lanes.filter((lane) => lane.generation?.steps.length);
    $("charts").hidden = !shown.length;
    if (!shown.length) return;
    const drafting = shown.map(({generation}) => generation).findLast(({positions}) => positions.length);
    $("acceptance").replaceChildren(drafting ? acceptance(drafting.positions) : "Plain decoding has no drafts.");
    const width = Math.max(260, $("timeline").clientWidth);
    const last = shown.slice(-2);
    const generations = last.map(({generation}) => generation);
    const onStep = (row, number) => this.lookAt(last[row], number);
    $("timeline").replaceChildren(timeline(generations, last.map(({title}) => title), width, onStep));
    this.drawDrafts(drafting);
    showLegend(this.lanes);
  }

  /** Goes to a step that was clicked: its first token, with what is known of it, and its drafts. */
  lookAt(lane, number) {
    this.onStep(lane.generation, number);
    lane.pane.spans[lane.generation.steps[number].first]?.focus({preventScroll: true});
  }

  /** Marks a moment of a replay in the timeline. */
  markTime(seconds) {
    markTime($("timeline").firstElementChild, seconds);
  }

  /** Shows the drafts of a step, if others are shown; with `unfolds` they come one by one. */
  showDrafts(generation, number, unfolds) {
    if (number < 0 || (this.inspected?.[0] === generation && this.inspected[1] === number)) return;
    this.inspected = [generation, number];
    this.drawDrafts(null, unfolds);
  }

  /** Draws the drafts of the step that is looked at, or of the last one that had some. */
  drawDrafts(latest = null, unfolds = false) {
    let [generation, number] = this.inspected ?? [latest, -1];
    if (!generation) return;
    if (number < 0) number = generation.steps.findLastIndex(({drafts}) => drafts);
    const drafts = generation.steps[number]?.drafts;
    $("drafts-caption").textContent = number < 0 ? "Drafts of a step" : `Drafts of step ${number + 1}`;
    $("drafts").replaceChildren(drafts ? draftChain(drafts, unfolds) : "No drafts in this step.");
    this.fadeDrafts();
  }

  /** Fades the drafts out on the right if there are more of them. */
  fadeDrafts() {
    const {scrollLeft, clientWidth, scrollWidth} = $("drafts");
    $("drafts").classList.toggle("continues", scrollLeft + clientWidth < scrollWidth - 1);
  }
}

const PROBABILITIES = ["90 % or more", "60 %", "30 %", "10 %", "less"];

/** Shows the meaning of the colors in the lanes, if they have text. */
export function showLegend(lanes) {
  const sources = new Set(lanes.flatMap(({generation}) => generation?.tokens.map(({source}) => source) ?? []));
  const names = ["target", ...[...sources].filter((source) => source !== "target").sort()];
  $("legend").hidden = sources.size === 0;
  const keys = {
    source: names.map((name) => make("span", {class: `token ${sourceClass(name)}`}, sourceName(name))),
    probability: PROBABILITIES.map((text, i) => make("span", {class: `token p${i}`}, text)),
  }[$("tint").value] ?? [];
  if ($("rejected").checked) keys.push(make("del", {}, "rejected draft"));
  $("legend-keys").replaceChildren(...keys);
}

export const board = new Board();
