// SPDX-License-Identifier: Apache-2.0
// The results: lanes and charts. They are drawn at most once per frame, however fast tokens arrive.

import {hideCard, showCard} from "./card.js";
import {acceptance, draftChain, markTime, timeline} from "./charts.js";
import {$, make} from "./dom.js";
import {Lane} from "./lane.js";
import {sourceClass, sourceName} from "./names.js";

const CHART_MILLISECONDS = 150; // between two drawings of the charts

class Board {
  constructor() {
    this.lanes = [];
    this.extra = () => {}; // draws more in every frame
    this.onClear = () => {};
    this.again = null; // repeats the timing of the results shown
    this.onStep = () => {}; // called with a generation and the number of the clicked step
    this.frame = 0;
    this.drawnAt = 0;
    this.inspected = null; // [generation, step]
  }

  /** Removes the results of the previous run, and sets the layout of a mode. */
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

  /** Adds a lane; the options are those of `Lane`. */
  addLane(method, options) {
    const onInspect = (generation, place, span) => this.inspect(generation, place, span);
    const lane = new Lane(method, {...options, lanes: this.lanes, onInspect});
    this.lanes.push(lane);
    $("lanes").append(lane.element);
    return lane;
  }

  /** Greys out speeds if their timing was disturbed, and offers to call `again`. null: it was not disturbed. */
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

  /** Draws everything in the next frame. */
  refresh() {
    this.frame ||= requestAnimationFrame(() => this.paint());
  }

  paint() {
    this.frame = 0;
    for (const lane of this.lanes) if (lane.generation) lane.paint();
    this.extra();
    if (performance.now() - this.drawnAt > CHART_MILLISECONDS) this.drawCharts();
  }

  /** Draws everything now, at the end of a run. */
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

  /** Shows a clicked step: focuses its first token, whose card opens, and shows the drafts. */
  lookAt(lane, number) {
    this.onStep(lane.generation, number);
    lane.pane.spans[lane.generation.steps[number].first]?.focus({preventScroll: true});
  }

  /** Marks the current time of a replay in the timeline. */
  markTime(seconds) {
    markTime($("timeline").firstElementChild, seconds);
  }

  /** Shows the drafts of a step unless they are shown already; with `unfolds`, they appear one by one. */
  showDrafts(generation, number, unfolds) {
    if (number < 0 || (this.inspected?.[0] === generation && this.inspected[1] === number)) return;
    this.inspected = [generation, number];
    this.drawDrafts(null, unfolds);
  }

  /** Draws the drafts of the inspected step, or else of the last step with drafts. */
  drawDrafts(latest = null, unfolds = false) {
    let [generation, number] = this.inspected ?? [latest, -1];
    if (!generation) return;
    if (number < 0) number = generation.steps.findLastIndex(({drafts}) => drafts);
    const drafts = generation.steps[number]?.drafts;
    $("drafts-caption").textContent = number < 0 ? "Drafts of a step" : `Drafts of step ${number + 1}`;
    $("drafts").replaceChildren(drafts ? draftChain(drafts, unfolds) : "No drafts in this step.");
    this.fadeDrafts();
  }

  /** Fades the right edge of the drafts if more of them are hidden there. */
  fadeDrafts() {
    const {scrollLeft, clientWidth, scrollWidth} = $("drafts");
    $("drafts").classList.toggle("continues", scrollLeft + clientWidth < scrollWidth - 1);
  }
}

const PROBABILITIES = ["90 % or more", "60 %", "30 %", "10 %", "less"];

/** Shows the meaning of the colors in the lanes, if any lane has text. */
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
