// SPDX-License-Identifier: Apache-2.0
// Error messages in the terms of the form: field names of the API are replaced by labels.

import {$} from "./dom.js";

const FIELDS = {
  max_tokens: "tokens",
  max_completion_tokens: "tokens",
  num_speculative_tokens: "k",
  num_model_steps: "steps",
  temperature: "temperature",
  top_p: "top_p",
  top_logprobs: "alternatives",
  logprobs: "alternatives",
  seed: "seed",
  prompt: "prompt",
  messages: "message",
};
// Names without an underscore may be ordinary words, so they are not replaced in messages.
const NAMES = Object.keys(FIELDS).filter((name) => name.includes("_"));

const labelOf = (id) => $(id).labels[0].firstChild.textContent.trim();

/** Marks the fields that an error is about, and returns its message with their labels. */
export function inLabels({message, param}) {
  const found = new Set([FIELDS[param]].filter(Boolean));
  const text = message.replace(new RegExp(`\\b(${NAMES.join("|")})\\b`, "g"), (name) => {
    found.add(FIELDS[name]);
    return `“${labelOf(FIELDS[name])}”`;
  });
  for (const id of found) {
    $(id).setAttribute("aria-invalid", "true");
    $(id).setAttribute("aria-describedby", "error");
  }
  return text;
}

/** Removes the marks. */
export function unmark() {
  for (const one of document.querySelectorAll("[aria-invalid]")) {
    one.removeAttribute("aria-invalid");
    one.removeAttribute("aria-describedby");
  }
}
