// SPDX-License-Identifier: Apache-2.0
// Markdown as elements: what chat models write. Text stays text; what is not known is shown as it is.

import {make} from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+-]*)/;
const HEADING = /^ {0,3}#{1,6}\s+(.*?)\s*#*$/;
const ITEM = /^(\s*)(?:([-*+])|(\d{1,9})[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const INLINE = [
  [/(`+)(.+?)\1(?!`)/, ([, , text]) => make("code", {}, text.trim() || text)],
  [/\*\*(?=\S)(.+?\S|\S)\*\*/, ([, text]) => make("strong", {}, ...inline(text))],
  [/\*(?=[^\s*])(.*?[^\s*])\*(?!\*)/, ([, text]) => make("em", {}, ...inline(text))],
  [/\[([^[\]]+)\]\(([^()\s]+)\)/, ([whole, text, target]) => link(target, text) ?? whole],
];

/** A link to a page of the web; null for anything else. */
function link(target, text) {
  if (!URL.canParse(target) || !["http:", "https:"].includes(new URL(target).protocol)) return null;
  return make("a", {href: target, target: "_blank", rel: "noopener noreferrer"}, ...inline(text));
}

/** A line's nodes: the mark that begins first, what is before it, and what is behind. */
function inline(text) {
  const found = INLINE.map(([pattern, build]) => [pattern.exec(text), build]).filter(([match]) => match);
  if (!found.length) return [text];
  const [match, build] = found.reduce((a, b) => (b[0].index < a[0].index ? b : a));
  const node = build(match);
  return [text.slice(0, match.index), node, ...inline(text.slice(match.index + match[0].length))];
}

/** Lines of a paragraph; a line's end is kept. */
const paragraph = (lines) =>
  make("p", {}, ...lines.flatMap((line, i) => [...(i ? [make("br")] : []), ...inline(line.trim())]));

/** The code of a fence that opens at `at`, up to the one that closes it or the end; and what is next. */
function fenced(lines, at) {
  const [, fence, language] = FENCE.exec(lines[at]);
  const isEnd = (line) => line.trim().startsWith(fence) && line.trim().replaceAll(fence[0], "") === "";
  let end = at + 1;
  while (end < lines.length && !isEnd(lines[end])) end += 1;
  const code = make("code", {}, lines.slice(at + 1, end).join("\n"));
  // It can be scrolled by keys.
  const label = language ? `Code: ${language}` : "Code";
  return [make("pre", {tabindex: "0", role: "region", "aria-label": label}, code), end + 1];
}

/** The list whose first item is at `at`, with what is indented below each item; and what is next. */
function list(lines, at) {
  const [, indent, bullet, number] = ITEM.exec(lines[at]);
  const element = make(bullet ? "ul" : "ol", number && number !== "1" ? {start: Number(number)} : {});
  const isOurs = (match) => match && match[1].length <= indent.length + 1 && Boolean(match[2]) === Boolean(bullet);
  while (at < lines.length && isOurs(ITEM.exec(lines[at]))) {
    const inside = [ITEM.exec(lines[at])[4]];
    const isInside = (line) => line.trim() === "" || line.search(/\S/) > indent.length + 1;
    for (at += 1; at < lines.length && isInside(lines[at]); at += 1) inside.push(lines[at].slice(indent.length + 2));
    element.append(make("li", {}, ...blocks(inside, true)));
  }
  return [element, at];
}

/** What the lines are; the first paragraph of a list's item is no paragraph of its own. */
function blocks(lines, isItem = false) {
  const made = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    let block = null;
    if (line.trim() === "") {
      at += 1;
      continue;
    }
    if (FENCE.test(line)) [block, at] = fenced(lines, at);
    else if (HEADING.test(line)) [block, at] = [make("h3", {}, ...inline(HEADING.exec(line)[1])), at + 1];
    else if (RULE.test(line)) [block, at] = [make("hr"), at + 1];
    else if (ITEM.test(line)) [block, at] = list(lines, at);
    else if (QUOTE.test(line)) {
      const quoted = [];
      for (; at < lines.length && QUOTE.test(lines[at]); at += 1) quoted.push(QUOTE.exec(lines[at])[1]);
      block = make("blockquote", {}, ...blocks(quoted));
    } else {
      const begin = at;
      const isMore = (one) => one.trim() !== "" && ![FENCE, HEADING, RULE, ITEM, QUOTE].some((kind) => kind.test(one));
      do at += 1;
      while (at < lines.length && isMore(lines[at]));
      block = paragraph(lines.slice(begin, at));
      if (isItem && !made.length) {
        made.push(...block.childNodes);
        continue;
      }
    }
    made.push(block);
  }
  return made;
}

/** An element with the text as it is meant. */
export const rendered = (text) => make("div", {class: "prose"}, ...blocks(text.split("\n")));
