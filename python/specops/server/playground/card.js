// SPDX-License-Identifier: Apache-2.0
// The card with the details of one token, for mouse and keyboard.

import {$, make, visible} from "./dom.js";
import {sourceName} from "./names.js";

const percent = (logprob) => {
  const p = 100 * Math.exp(logprob);
  return p >= 10 ? `${p.toFixed(0)} %` : p >= 0.1 ? `${p.toFixed(1)} %` : "< 0.1 %";
};

function origin({source, step}, {steps}) {
  const {drafts} = steps[step];
  if (source !== "target") return `Proposed by: ${sourceName(source)}. Accepted by the target model.`;
  if (!drafts) return "Chosen by the target model; there were no drafts.";
  const rejected = drafts.texts[drafts.accepted];
  if (rejected === undefined) return "Chosen by the target model, behind the last accepted draft.";
  return `Chosen by the target model instead of “${visible(rejected)}”.`;
}

function alternativesOf({id, text, logprob, alternatives}) {
  const list = make("ol", {class: "alternatives"});
  for (const one of alternatives) {
    const isChosen = one.logprob === logprob && one.text === text;
    const meter = make("meter", {min: 0, max: 1, value: Math.exp(one.logprob), "aria-hidden": "true"});
    list.append(
      make("li", {class: isChosen ? "chosen" : ""}, make("code", {}, visible(one.text)), meter, percent(one.logprob)),
    );
  }
  return list;
}

function fill(card, generation, token) {
  const {drafts} = generation.steps[token.step];
  const heading = make("p", {class: "what"}, make("code", {}, visible(token.text)), ` token ${token.id}`);
  if (token.logprob !== undefined) heading.append(`, probability ${percent(token.logprob)}`);
  const step = `Step ${token.step + 1}: ${
    drafts ? `${drafts.accepted} of ${drafts.texts.length} drafts accepted` : "no drafts"
  }.`;
  card.replaceChildren(heading, make("p", {}, origin(token, generation)), make("p", {class: "soft"}, step));
  if (token.alternatives?.length > 1) card.append(alternativesOf(token));
}

function place(card, span) {
  const at = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const {width, height} = card.getBoundingClientRect();
  const below = at.bottom + 6;
  const isAbove = below + height > innerHeight && at.top - 6 - height > 0;
  card.style.left = `${Math.max(8, Math.min(at.left, document.documentElement.clientWidth - width - 8))}px`;
  card.style.top = `${isAbove ? at.top - 6 - height : below}px`;
}

/** Shows the card for a token whose span is `span`. */
export function showCard(generation, number, span) {
  const card = $("card");
  hideCard();
  fill(card, generation, generation.tokens[number]);
  card.hidden = false;
  place(card, span);
  span.setAttribute("aria-describedby", card.id);
}

/** Hides the card. */
export function hideCard() {
  $("card").hidden = true;
  document.querySelector("[aria-describedby=card]")?.removeAttribute("aria-describedby");
}
