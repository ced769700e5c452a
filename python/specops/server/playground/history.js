// SPDX-License-Identifier: Apache-2.0
// History of runs, stored in this browser.

import {$, make} from "./dom.js";
import {store, stored} from "./settings.js";

const MOST = 20;

/** Shows the runs; `onChoose` receives the form values of a clicked run. */
export function showHistory(onChoose) {
  const runs = stored("history") ?? [];
  $("runs").replaceChildren(
    ...runs.map(({values, outcome}) => {
      const begin = (values.prompt ?? values.message).trim().split("\n")[0].slice(0, 48);
      const title = values.mode === "compare" ? "all methods" : `${values.mode}, ${values.method}`;
      const button = make("button", {type: "button"}, make("b", {}, title), outcome, make("code", {}, begin));
      button.addEventListener("click", () => onChoose(values));
      return make("li", {}, button);
    }),
  );
  $("no-runs").hidden = runs.length > 0;
  $("forget").hidden = runs.length === 0;
}

/** Stores a run as the latest one. */
export function remember(values, outcome) {
  store("history", [{values, outcome}, ...(stored("history") ?? [])].slice(0, MOST));
}

/** Deletes all runs. */
export const forget = () => store("history", null);
