// SPDX-License-Identifier: Apache-2.0
// Three small charts, as SVG: acceptance by position, the drafts of a step, and steps over time.

import {draw, milliseconds, visible} from "./dom.js";
import {sourceClass} from "./names.js";

const UNFOLD_MILLISECONDS = 90; // between two drafts

const picture = (width, height, label, ...children) =>
  draw("svg", {viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label}, ...children);

const box = (x, y, width, height, name) =>
  draw("rect", {x, y, width: Math.max(width, 0), height: Math.max(height, 0), class: name});

const words = (x, y, text, name = "", anchor = "middle") =>
  draw("text", {x, y, class: name, "text-anchor": anchor}, text);

/** Bar chart of the acceptance rate of drafts by their distance from the last token. */
export function acceptance(positions) {
  const [pitch, top, tall] = [Math.max(24, Math.min(46, Math.floor(320 / Math.max(positions.length, 1)))), 18, 90];
  const bars = positions.flatMap(({drafted, accepted}, place) => {
    const [x, share] = [place * pitch + 4, accepted / drafted];
    return [
      box(x, top, pitch - 8, tall, "bar-room"),
      box(x, top + tall * (1 - share), pitch - 8, tall * share, "bar"),
      words(x + pitch / 2 - 4, top - 5, `${Math.round(100 * share)}`, "value"),
      words(x + pitch / 2 - 4, top + tall + 14, `${place + 1}`),
    ];
  });
  const descriptions = positions.map(({drafted, accepted}, place) => `position ${place + 1}: ${accepted} of ${drafted}`);
  const label = `Accepted drafts by position, in percent. ${descriptions.join("; ")}.`;
  return picture(Math.max(positions.length * pitch, 60), top + tall + 20, label, ...bars);
}

/**
 * Draws a step's drafts as a chain: accepted ones are connected by a line, others are struck out. With
 * `unfolds`, they appear one by one.
 */
export function draftChain({texts, sources, accepted}, unfolds = false) {
  const [wide, tall, gap, top] = [76, 24, 14, 4];
  const middle = top + tall / 2;
  const x = (place) => 12 + place * (wide + gap);
  const shapes = [draw("circle", {cx: 5, cy: middle, r: 4, class: "root"})];
  texts.map(visible).forEach((text, place) => {
    const left = x(place);
    const fate = place < accepted ? "kept" : "dropped";
    const edge = draw("path", {d: `M${place ? left - gap : 9} ${middle}H${left}`, class: `edge ${fate}`});
    const shown = text.length > 9 ? `${text.slice(0, 8)}…` : text;
    const name = `draft ${sourceClass(sources[place])} ${fate}`;
    const group = draw("g", {class: name}, box(left, top, wide, tall, ""));
    group.append(words(left + wide / 2, middle + 4, shown));
    for (const shape of unfolds ? [edge, group] : []) {
      shape.classList.add("unfolds");
      shape.style.animationDelay = `${UNFOLD_MILLISECONDS * place}ms`;
    }
    shapes.push(edge, group);
  });
  const descriptions = texts.map((text, place) => `${visible(text)} ${place < accepted ? "accepted" : "rejected"}`);
  return picture(x(texts.length), top + tall + 6, `Drafts: ${descriptions.join(", ")}.`, ...shapes);
}

/** The bars of the timeline: a stack of tokens per step, drawn as one path per drafter. */
function bars(generation, scale, {left, unit, base}) {
  const bySource = new Map();
  for (const {seconds, first, count} of generation.steps) {
    for (let i = 0; i < count; i++) {
      const source = generation.tokens[first + i].source;
      const piece = `M${(left + seconds * scale).toFixed(1)} ${base - i * unit}v-${0.88 * unit}`;
      bySource.set(source, (bySource.get(source) ?? "") + piece);
    }
  }
  // The width follows from the mean distance between steps.
  const pitch = (generation.seconds * scale) / Math.max(generation.steps.length, 1);
  const width = Math.max(0.8, Math.min(0.7 * pitch, 5)).toFixed(1);
  return [...bySource].map(([source, d]) =>
    draw("path", {d, class: `step ${sourceClass(source)}`, "stroke-width": width}),
  );
}

/**
 * Timeline with a row per generation. Each step is a stack of its tokens, at the time when the step
 * ended by the server's clock. A click calls `onStep` with the nearest row and step.
 */
export function timeline(generations, titles, width, onStep) {
  const [left, right, highest] = [8, 12, 60];
  const maxCount = Math.max(2, ...generations.flatMap(({steps}) => steps.map(({count}) => count)));
  const unit = Math.min(5, highest / maxCount);
  const tall = maxCount * unit + 26; // includes the title above the bars
  const end = Math.max(0.001, ...generations.map(({seconds}) => seconds));
  const scale = (width - left - right) / end;
  const shapes = generations.flatMap((generation, row) => {
    const base = (row + 1) * tall - 6;
    const {seconds, steps} = generation;
    const axis = draw("path", {d: `M${left} ${base + 1}H${(left + seconds * scale).toFixed(1)}`, class: "axis"});
    const title = `${titles[row]}: ${steps.length} steps, ${milliseconds(seconds)}`;
    return [axis, ...bars(generation, scale, {left, unit, base}), words(left, base - tall + 20, title, "", "start")];
  });
  const descriptions = generations.map(({steps, tokens}, row) => `${titles[row]}: ${tokens.length} tokens in ${steps.length} steps`);
  const drawn = picture(width, tall * generations.length + 2, `${descriptions.join("; ")}.`, ...shapes);
  drawn.append(draw("path", {class: "moment", "data-left": left, "data-scale": scale}));
  drawn.addEventListener("click", ({clientX, clientY}) => {
    const corner = drawn.getBoundingClientRect();
    const row = Math.min(Math.floor((clientY - corner.top) / tall), generations.length - 1);
    const {steps} = generations[row];
    const distance = ({seconds}) => Math.abs(left + seconds * scale - (clientX - corner.left));
    if (steps.length) onStep(row, steps.reduce((best, one, i) => (distance(one) < distance(steps[best]) ? i : best), 0));
  });
  return drawn;
}

/** Marks a time in a timeline. */
export function markTime(drawn, seconds) {
  const mark = drawn.querySelector(".moment");
  const x = (Number(mark.dataset.left) + seconds * Number(mark.dataset.scale)).toFixed(1);
  mark.setAttribute("d", `M${x} 0V${drawn.getAttribute("height")}`);
}
