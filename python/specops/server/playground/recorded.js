// SPDX-License-Identifier: Apache-2.0
// The recorded race that plays at the first visit. `make -C tools screenshots` records it.

import {request} from "./api.js";
import {board} from "./board.js";
import {$} from "./dom.js";
import {Generation} from "./generation.js";
import {play, offerReplay} from "./replay.js";
import {showVerdict} from "./race.js";
import {stored} from "./settings.js";

/** Returns whether this browser has no stored data for the page and follows no link. */
export const isFirstVisit = () => !location.hash && !stored("settings") && !stored("history");

/** Shows the recorded race if `isWanted` is still true once it is loaded. */
export async function showRecorded(isWanted) {
  const {prompt, machine, runs} = await (await request("page/recorded.json")).json();
  if (!isWanted()) return;
  board.clear("race");
  const generations = runs.map(({method, events}) => {
    const generation = new Generation(method, events.length);
    const lane = board.addLane(method, {prompt, showsSeed: false, how: ", both at once", badge: "Recorded demo"});
    events.forEach((event) => generation.take(event));
    generation.finish();
    generation.limit = generation.tokens.length;
    lane.start(generation);
    return generation;
  });
  board.finish();
  showVerdict(...generations, true);
  for (const id of ["factor", "spread"]) $(id).textContent = "";
  $("verdict-note").textContent =
    `A recorded race: the bundled model on ${machine}. A step is one pass of the model. “Start race” runs yours.`;
  offerReplay();
  if (!matchMedia("(prefers-reduced-motion: reduce)").matches) play();
}
