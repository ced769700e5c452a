// SPDX-License-Identifier: Apache-2.0
// Names and properties of methods and drafters, from /v1/models.

const OTHERS = {target: "target model", forced: "forced by the grammar"};
let drafters = new Map(); // by name, also those that this model cannot run

/** Takes over what the server says of drafters. */
export function learnNames(card) {
  drafters = new Map(card.drafters.map((one) => [one.name, one]));
}

/** The drafters of a choice, such as "a + b". */
const partsOf = (choice) => choice.split(" + ").map((name) => drafters.get(name) ?? {name});

/** A drafter's name in words; one that the server does not describe keeps its own. */
export const sourceName = (source) => drafters.get(source)?.title ?? OTHERS[source] ?? source;

/** A class of its own for each drafter that has a colour. */
export const sourceClass = (source) => `from-${drafters.has(source) || source in OTHERS ? source : "other"}`;

/**
 * The methods to choose from, of a server that can run `methods`: a model may be continued by another method. Those that
 * draft from a parameter of the request, which the page does not set, are left out.
 */
export function choicesOf(methods) {
  const isOffered = (name) => !drafters.get(name)?.parameter;
  const followers = [...drafters.values()].filter((one) => one.may_follow && isOffered(one.name));
  const hybrids = (name) => followers.map((one) => `${name} + ${one.name}`);
  return methods.filter(isOffered).flatMap((name) => [name, ...(hasModel(name) ? hybrids(name) : [])]);
}

/** Returns the page's name for the method of a speculative_config. */
export const choiceOf = (config) => config.method.replaceAll("+", " + ");

export const isHybrid = (choice) => choice.includes(" + ");

/** Returns whether a model makes the drafts, so that its passes are counted. */
export const hasModel = (choice) => partsOf(choice)[0].needs_weights === true;

/** Returns the drafter that learns from the text of an earlier run; undefined if there is none. */
export const learns = (choice) => partsOf(choice).find((one) => one.learns)?.title;

/** The speculative_config of a choice; `steps` is null for what the server takes by itself. */
export function configOf(choice, {k, steps}) {
  if (choice === "naive") return {method: "naive"};
  const method = choice.replaceAll(" + ", "+");
  const config = {method, num_speculative_tokens: k};
  return hasModel(choice) ? {...config, num_model_steps: steps} : config;
}

/** A column's or a row's heading. */
export function titleOf(choice) {
  if (choice === "naive") return "Plain decoding";
  return `With ${partsOf(choice).map((one) => one.short ?? one.name).join(" and ")} drafts`;
}
