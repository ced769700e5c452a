// SPDX-License-Identifier: Apache-2.0
// The form's values, which are stored in this browser and in links. The API key is in neither.

import {$} from "./dom.js";
import {choicesOf, choiceOf, hasModel, isHybrid, learnNames} from "./names.js";

const STORE = "specops";
const FIELDS = [
  ...["prompt", "message", "method", "k", "steps", "tokens", "temperature", "seed", "top_p"],
  ...["alternatives", "alone", "system", "tint", "rejected"],
];
// For an empty field, the page's initial value or the server's default applies.
const NUMBERS = ["k", "tokens", "temperature", "top_p"];
export const narrow = matchMedia("(max-width: 640px)");
// These fields do not affect a run, so links leave them out.
const LOCAL = ["tint", "rejected", "alone"];

/** Returns a value stored in this browser; null if there is none. */
export function stored(name) {
  try {
    return JSON.parse(localStorage.getItem(`${STORE}-${name}`));
  } catch {
    return null;
  }
}

/** Calls `callback` when another tab of this browser stores or deletes the value. */
export function onOtherTab(name, callback) {
  addEventListener("storage", ({key}) => {
    if (key === `${STORE}-${name}` || key === null) callback();
  });
}

/** Stores a value; null deletes it. */
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

/** Returns all values of the form, as texts and booleans. */
export function readForm() {
  const values = {mode: document.querySelector("input[name=mode]:checked").value};
  for (const id of FIELDS) values[id] = isCheck(id) ? $(id).checked : $(id).value;
  return values;
}

/** Fills the form; unknown fields, and values that a field does not accept, are ignored. */
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

/** Fills empty fields with their defaults, which were shown as placeholders. */
export function fillEmpty() {
  for (const id of NUMBERS) $(id).value ||= $(id).defaultValue;
}

/** Returns the values without the text of the other kind of view: the prompt, or the message. */
export function ofView({prompt, message, ...values}) {
  return values.mode === "chat" ? {...values, message} : {...values, prompt};
}

/** Returns the fragment of a link to these values. */
export function fragmentOf(values) {
  const shared = Object.entries(ofView(values)).filter(([name, value]) => !LOCAL.includes(name) && value !== "");
  return `#${new URLSearchParams(shared)}`;
}

/** Returns the values in the fragment of a link. */
export const fromFragment = (fragment) => Object.fromEntries(new URLSearchParams(fragment.slice(1)));

/** Offers the server's methods, and sets the form to the server's defaults. */
export function offer(card) {
  const own = card.speculative_config;
  learnNames(card);
  $("method").replaceChildren(...choicesOf(card.methods).map((name) => new Option(name, name)));
  const choice = choiceOf(own);
  // A race of plain decoding against itself shows little.
  const first = card.methods.find((name) => name !== "naive" && !hasModel(name));
  $("method").value = choice === "naive" ? first ?? choice : choice;
  const isUsual = $("k").value === $("k").defaultValue;
  if (own.num_speculative_tokens > 0) $("k").defaultValue = own.num_speculative_tokens;
  if (isUsual) $("k").value = $("k").defaultValue;
  const usual = isHybrid(choice) ? 1 : own.num_speculative_tokens;
  if (hasModel(choice) && own.num_model_steps !== usual) $("steps").value = own.num_model_steps;
  $("chat-mode").hidden = !card.can_chat;
}

/** Shows the fields of the mode and method, and moves the form to its place in this mode. */
export function fitForm() {
  const {mode, method} = readForm();
  const isChat = mode === "chat";
  const isNewView = document.body.dataset.mode !== mode;
  document.body.dataset.mode = mode;
  const drafts = mode === "compare" || method !== "naive";
  $("method").disabled = mode === "compare";
  $("k").disabled = !drafts;
  $("steps-label").hidden = mode === "compare" || !hasModel(method);
  for (const id of NUMBERS) $(id).placeholder = $(id).defaultValue;
  $("steps").placeholder = isHybrid(method) ? "1" : "all";
  $("system-label").hidden = $("new-chat").hidden = !isChat;
  for (const id of ["prompt", "message"]) $(id).hidden = $(id).labels[0].hidden = (id === "message") !== isChat;
  // Moving an element removes the focus, so move it only if its place changes.
  const above = $(isChat ? "results" : "modes");
  if (above.nextElementSibling !== $("form")) above.after($("form"), $("code"));
  const isFolded = isChat || narrow.matches;
  if ($("more").contains($("main-settings")) !== isFolded) {
    if (isFolded) $("more-label").after($("main-settings"));
    else $("more").before($("main-settings"));
  }
  $("more-label").textContent = isFolded ? "Settings" : "More settings";
  const verbs = {race: "Start race", write: "Complete", compare: "Compare all", chat: "Send"};
  $("run").textContent = verbs[mode];
  if (isNewView) fitPrompt();
}

narrow.addEventListener("change", fitForm);

/** Returns the text field of the mode: the prompt, or the message. */
export const textField = () => $(document.body.dataset.mode === "chat" ? "message" : "prompt");

/** Shows only a few lines of the prompt, so that results are in sight, or more while the user edits it. */
export function foldPrompt(folds) {
  if ($("form").classList.contains("folded") === folds) return;
  $("form").classList.toggle("folded", folds);
  fitPrompt();
}

/** Fits the height of the text field to its text, up to a limit, and scrolls to the end, where the model continues. */
export function fitPrompt() {
  const field = textField();
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + field.offsetHeight - field.clientHeight}px`;
  field.scrollTop = field.scrollHeight;
}
