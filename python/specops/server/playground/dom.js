// SPDX-License-Identifier: Apache-2.0
// Creation of elements. Text enters the page only as text nodes, never as markup.

export const $ = (id) => document.getElementById(id);

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** Creates an HTML element; children are nodes and texts. */
export function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** Creates an SVG element. */
export function draw(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

const WHOLE = new Intl.NumberFormat("en", {maximumFractionDigits: 0});

export const whole = (number) => WHOLE.format(number);

/** Formats a speed in tokens per second; null: not known yet. */
export function perSecond(speed) {
  if (speed === null) return "–";
  return speed < 10 ? speed.toFixed(1) : whole(speed);
}

/** Formats seconds as milliseconds. */
export const milliseconds = (seconds) => `${whole(1000 * seconds)} ms`;

/** Formats a number of tokens per step; null: not known yet. */
export const perStepText = (perStep) => (perStep === null ? "–" : perStep.toFixed(2));

/** Returns a token's text with visible spaces, tabs and line ends. */
export function visible(text) {
  if (text === "") return "∅";
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣");
}
