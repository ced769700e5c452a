// SPDX-License-Identifier: Apache-2.0
// Replays generations by the recorded times of the server's steps: slower, or step by step.

import {board} from "./board.js";
import {$, milliseconds} from "./dom.js";

const SLOWER = [1, 2, 5, 10, 20, 50, 100, 200];
const SECONDS = 8; // approximate duration of a replay
const PLACES = 1000; // positions of the slider

let lanes = [];
let moments = []; // times at which steps ended, in seconds, ascending
let now = 0; // time of the replay in seconds; steps that ended by then are shown
let frame = 0; // animation frame request while the replay runs
let drawnAt = 0;

const end = () => moments.at(-1) ?? 0;

/** Returns how many steps of a lane have ended. */
const endedIn = ({generation}) => generation.steps.filter(({seconds}) => seconds <= now).length;

/** Shows the steps that ended by a time; with `moves`, new ones are animated. */
function show(seconds, moves = false) {
  showTexts(seconds, moves);
  const lane = lanes.at(-1);
  board.showDrafts(lane.generation, endedIn(lane) - 1, moves);
}

function showTexts(seconds, moves) {
  now = Math.max(0, Math.min(seconds, end()));
  for (const lane of lanes) lane.showSteps(endedIn(lane), moves);
  board.markTime(now);
  $("time").value = end() ? (PLACES * now) / end() : PLACES;
  $("time").setAttribute("aria-valuetext", milliseconds(now));
  $("moment").textContent = milliseconds(now);
}

function pause() {
  cancelAnimationFrame(frame);
  frame = 0;
  $("play").textContent = now < end() ? "Play" : "Replay";
}

function advance(at) {
  const slower = Number($("slower").value);
  show(now + (at - drawnAt) / 1000 / slower, true);
  drawnAt = at;
  if (now < end()) frame = requestAnimationFrame(advance);
  else pause();
}

/** Continues the replay, or starts it again if it is at its end. */
export function play() {
  if (now >= end()) show(0);
  $("play").textContent = "Pause";
  drawnAt = performance.now();
  frame = requestAnimationFrame(advance);
}

/** Goes to the next or the previous time at which a step ended. */
function stepBy(direction) {
  pause();
  const to = direction > 0 ? moments.find((one) => one > now) : (moments.findLast((one) => one < now) ?? 0);
  if (to !== undefined) show(to, direction > 0);
  pause();
}

/** Goes to the time at which a step of a generation ended. */
export function showStep(generation, number) {
  if ($("replay").hidden || !lanes.some((lane) => lane.generation === generation)) return;
  pause();
  show(generation.steps[number].seconds);
  pause();
}

function close() {
  pause();
  lanes = [];
  $("replay").hidden = true;
}

/** Offers to replay the lanes on the board. */
export function offerReplay() {
  const shown = board.lanes.filter(({generation}) => generation?.steps.length);
  moments = [...new Set(shown.flatMap(({generation}) => generation.steps.map(({seconds}) => seconds)))].sort((a, b) => a - b);
  if (moments.length < 2) return;
  lanes = shown;
  board.onClear = close;
  const distance = (slower) => Math.abs(Math.log((slower * end()) / SECONDS));
  $("slower").value = SLOWER.reduce((a, b) => (distance(b) < distance(a) ? b : a));
  $("replay").hidden = false;
  showTexts(end(), false); // keep the drafts that the user inspects
  pause();
}

/** Adds the listeners of the replay's controls. */
export function listenToReplay() {
  $("slower").replaceChildren(...SLOWER.map((one) => new Option(one === 1 ? "real time" : `${one}× slower`, one)));
  $("time").max = PLACES;
  $("play").addEventListener("click", () => (frame ? pause() : play()));
  $("back").addEventListener("click", () => stepBy(-1));
  $("on").addEventListener("click", () => stepBy(1));
  $("time").addEventListener("input", () => {
    pause();
    show((Number($("time").value) * end()) / PLACES);
    pause();
  });
  $("replay").addEventListener("keydown", (event) => {
    const direction = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!direction || event.target === $("slower")) return;
    event.preventDefault();
    stepBy(direction);
  });
}
