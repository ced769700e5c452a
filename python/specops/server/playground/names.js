// SPDX-License-Identifier: Apache-2.0
// What methods and drafters are called, and what each does, in a sentence.

export const SOURCES = {
  target: "target model",
  ngram: "n-gram look-up",
  suffix: "suffix tree",
  mtp: "MTP module",
  forced: "forced by the grammar",
};

/** A drafter's name in words; one that this page does not know keeps its own. */
export const sourceName = (source) => SOURCES[source] ?? source;

/** A class of its own for each drafter that has a colour. */
export const sourceClass = (source) => `from-${source in SOURCES ? source : "other"}`;

// MTP may be continued by another method: strategies by what the page calls them.
const HYBRIDS = {"mtp": "default", "mtp + ngram": "with_ngram", "mtp + suffix": "with_suffix"};

/** The methods to choose from, of a server that can run `methods`. */
export function choicesOf(methods) {
  return methods.flatMap((name) => (name === "mtp" ? Object.keys(HYBRIDS) : [name]));
}

/** What the page calls the method of a speculative_config. */
export function choiceOf(config) {
  if (config.method !== "mtp") return config.method;
  return Object.keys(HYBRIDS).find((name) => HYBRIDS[name] === config.mtp_strategy);
}

export const isHybrid = (choice) => choice in HYBRIDS && choice !== "mtp";
export const hasModules = (choice) => choice in HYBRIDS;

/** Whether drafts may be trees. */
export const hasTrees = (choice) => ["ngram", "suffix", "mtp"].includes(choice);

/** Whether a later run of the same request has better drafts, from what the first one wrote. */
export const learns = (choice) => choice.includes("suffix");

/** The speculative_config of a choice; `steps` is null for what the server takes by itself. */
export function configOf(choice, {k, steps, tree}) {
  if (choice === "naive") return {method: "naive"};
  const config = {method: choice, num_speculative_tokens: k, tree: tree && hasTrees(choice)};
  if (!hasModules(choice)) return config;
  return {...config, method: "mtp", mtp_strategy: HYBRIDS[choice], num_model_steps: steps};
}

/** A column's or a row's heading. */
export function titleOf(choice) {
  if (choice === "naive") return "Plain decoding";
  const names = choice.split(" + ").map((one) => ({ngram: "n-gram", suffix: "suffix", mtp: "MTP"})[one] ?? one);
  return `With ${names.join(" and ")} drafts`;
}
