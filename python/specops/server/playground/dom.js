// SPDX-License-Identifier: Apache-2.0
// Making elements. Text enters the page as text nodes alone, never as markup.

export const $ = (id) => document.getElementById(id);

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** An HTML element; children are nodes and texts. */
export function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function draw(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

const WHOLE = new Intl.NumberFormat("en", {maximumFractionDigits: 0});

export const whole = (number) => WHOLE.format(number);

/** A speed in tokens per second; null: there is none yet. */
export function perSecond(speed) {
  if (speed === null) return "–";
  return speed < 10 ? speed.toFixed(1) : whole(speed);
}

/** A time on the server's clock. */
export const milliseconds = (seconds) => `${whole(1000 * seconds)} ms`;

/** A number of tokens per step; null: there is none yet. */
export const perStepText = (perStep) => (perStep === null ? "–" : perStep.toFixed(2));

/** A token's text with its spaces and line ends made visible. */
export function visible(text) {
  if (text === "") return "∅";
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣");
}
