// SPDX-License-Identifier: Apache-2.0
// Names and properties of methods and drafters, from /v1/models.

const OTHERS = {target: "target model", forced: "forced by the grammar"};
let drafters = new Map(); // by name, including those that this model cannot run

/** Stores the server's descriptions of drafters. */
export function learnNames(card) {
  drafters = new Map(card.drafters.map((one) => [one.name, one]));
}

/** Returns the drafters of a choice such as "a + b". */
const partsOf = (choice) => choice.split(" + ").map((name) => drafters.get(name) ?? {name});

/** Returns a drafter's title, or its name if the server does not describe it. */
export const sourceName = (source) => drafters.get(source)?.title ?? OTHERS[source] ?? source;

/** Returns the CSS class of a drafter, which determines its color. */
export const sourceClass = (source) => `from-${drafters.has(source) || source in OTHERS ? source : "other"}`;

/**
 * Returns the choices of methods for a server that can run `methods`, including hybrids: another
 * method may continue a drafter with a model. Methods that draft from a parameter of the request are
 * left out, because the page does not set it.
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

/** Returns whether the first drafter of a choice is a model, whose passes can be set. */
export const hasModel = (choice) => partsOf(choice)[0].needs_weights === true;

/** Returns the title of the drafter that learns from earlier runs; undefined if there is none. */
export const learns = (choice) => partsOf(choice).find((one) => one.learns)?.title;

/** Returns the speculative_config of a choice; `steps` null: the server's default. */
export function configOf(choice, {k, steps}) {
  if (choice === "naive") return {method: "naive"};
  const method = choice.replaceAll(" + ", "+");
  const config = {method, num_speculative_tokens: k};
  return hasModel(choice) ? {...config, num_model_steps: steps} : config;
}

/** Returns the heading of a choice. */
export function titleOf(choice) {
  if (choice === "naive") return "Plain decoding";
  return `With ${partsOf(choice).map((one) => one.short ?? one.name).join(" and ")} drafts`;
}
