// SPDX-License-Identifier: Apache-2.0
// The form's values: kept in this browser, and in links. The API key is in neither.

import {$} from "./dom.js";
import {choicesOf, choiceOf, hasModel, isHybrid, learnNames} from "./names.js";

const STORE = "specops";
const FIELDS = [
  ...["prompt", "method", "k", "steps", "tokens", "temperature", "seed", "top_p"],
  ...["alternatives", "alone", "system", "tint", "rejected"],
];
// For an empty field, the page's initial value or the server's default applies.
const NUMBERS = ["k", "tokens", "temperature", "top_p"];
// Not part of what a run does, so not of links either.
const LOCAL = ["tint", "rejected", "alone"];

/** Returns a value stored in this browser; undefined if there is none. */
export function stored(name) {
  try {
    return JSON.parse(localStorage.getItem(`${STORE}-${name}`));
  } catch {
    return null;
  }
}

/** Calls back where another tab of this browser keeps or drops the value. */
export function onOtherTab(name, callback) {
  addEventListener("storage", ({key}) => {
    if (key === `${STORE}-${name}` || key === null) callback();
  });
}

/** Keeps a value, or drops it where it is null. */
export function store(name, value) {
  try {
    if (value === null) localStorage.removeItem(`${STORE}-${name}`);
    else localStorage.setItem(`${STORE}-${name}`, JSON.stringify(value));
  } catch {
    // Storage is full or forbidden: the page works without it.
  }
}

const modeInput = (mode) => document.querySelector(`input[name=mode][value="${CSS.escape(mode)}"]`);

const isCheck = (id) => $(id).type === "checkbox";

/** All values of the form, as texts and booleans. */
export function readForm() {
  const values = {mode: document.querySelector("input[name=mode]:checked").value};
  for (const id of FIELDS) values[id] = isCheck(id) ? $(id).checked : $(id).value;
  return values;
}

/** Fills the form; what a field cannot take, and what is no field, is left out. */
export function writeForm(values) {
  const mode = modeInput(String(values.mode ?? ""));
  if (mode && !mode.parentElement.hidden) mode.checked = true;
  for (const id of FIELDS) {
    const value = values[id];
    if (value === undefined || value === null) continue;
    if (isCheck(id)) $(id).checked = value === true || value === "true";
    else if ($(id).tagName !== "SELECT") $(id).value = value;
    else if ([...$(id).options].some((option) => option.value === value)) $(id).value = value;
  }
}

/** Fills empty fields with what they mean, which they have shown as placeholders. */
export function fillEmpty() {
  for (const id of NUMBERS) $(id).value ||= $(id).defaultValue;
}

/** The fragment of a link that leads to these values. */
export function fragmentOf(values) {
  const shared = Object.entries(values).filter(([name, value]) => !LOCAL.includes(name) && value !== "");
  return `#${new URLSearchParams(shared)}`;
}

/** The values of a link. */
export const fromFragment = (fragment) => Object.fromEntries(new URLSearchParams(fragment.slice(1)));

/** Offers the server's methods, and sets the form to what the server does by itself. */
export function offer(card) {
  const own = card.speculative_config;
  learnNames(card);
  $("method").replaceChildren(...choicesOf(card.methods).map((name) => new Option(name, name)));
  const choice = choiceOf(own);
  // A race of plain decoding against itself shows little.
  const first = card.methods.find((name) => name !== "naive" && !hasModel(name));
  $("method").value = choice === "naive" ? first ?? choice : choice;
  if (own.num_speculative_tokens > 0) $("k").value = $("k").defaultValue = own.num_speculative_tokens;
  const usual = isHybrid(choice) ? 1 : own.num_speculative_tokens;
  if (hasModel(choice) && own.num_model_steps !== usual) $("steps").value = own.num_model_steps;
  $("chat-mode").hidden = !card.has_chat_template;
}

/** Shows the fields that the mode and the method have. */
export function fitForm() {
  const {mode, method} = readForm();
  const drafts = mode === "compare" || method !== "naive";
  $("method").disabled = mode === "compare";
  $("k").disabled = !drafts;
  $("steps-label").hidden = mode === "compare" || !hasModel(method);
  for (const id of NUMBERS) $(id).placeholder = $(id).defaultValue;
  $("steps").placeholder = isHybrid(method) ? "1" : "all";
  $("system-label").hidden = mode !== "chat";
  $("new-chat").hidden = mode !== "chat";
  $("prompt-label").textContent = mode === "chat" ? "Message" : "Prompt";
  const verbs = {race: "Start race", write: "Complete", compare: "Compare all", chat: "Send"};
  $("run").textContent = verbs[mode];
}

/** Shows four lines of the prompt, so that results are in sight; or more, while it is written. */
export function foldPrompt(folds) {
  if ($("form").classList.contains("folded") === folds) return;
  $("form").classList.toggle("folded", folds);
  fitPrompt();
}

/** As tall as its text, up to a limit, and at its end: the last line is where the model goes on. */
export function fitPrompt() {
  const field = $("prompt");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
  field.scrollTop = field.scrollHeight;
}
