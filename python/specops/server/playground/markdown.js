// SPDX-License-Identifier: Apache-2.0
// Converts the Markdown that chat models write to elements. Unknown syntax is shown as text.

import {make} from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const SUBHEADING = /^ {0,3}#{2,6}\s/;
const ITEM = /^(\s*)(?:([-*+])|(\d{1,9})[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const DEEPEST = 16; // maximum depth of nested lists and quotations
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const KINDS = [FENCE, SUBHEADING, RULE, ITEM, QUOTE]; // these end a paragraph
const INLINE = [
  [/(`{1,3})(.+?)\1(?!`)/y, ([, , text]) => make("code", {}, text.trim() || text)],
  [/\*\*(?=\S)(.+?\S|\S)\*\*/y, ([, text]) => make("strong", {}, ...inline(text))],
  [/\*(?=[^\s*])(.*?[^\s*])\*(?!\*)/y, ([, text]) => make("em", {}, ...inline(text))],
  [/\[([^[\]]+)\]\(([^()\s]+)\)/y, ([whole, text, target]) => link(target, text) ?? whole],
];

/** Returns a link to an http or https address; null for any other target. */
function link(target, text) {
  if (!URL.canParse(target) || !["http:", "https:"].includes(new URL(target).protocol)) return null;
  return make("a", {href: target, target: "_blank", rel: "noopener noreferrer"}, ...inline(text));
}

/** Returns the element of a mark at `at` and its end; null if there is no mark. */
function markAt(text, at) {
  for (const [pattern, build] of INLINE) {
    pattern.lastIndex = at;
    const match = pattern.exec(text);
    if (match) return [build(match), at + match[0].length];
  }
  return null;
}

/** Returns the nodes of a line. Each position is examined once, even if many marks do not end. */
function inline(text) {
  const nodes = [];
  let begin = 0; // start of the text since the last mark
  for (let at = 0; at < text.length; ) {
    const found = "`*[".includes(text[at]) ? markAt(text, at) : null;
    if (!found) {
      at += 1;
      continue;
    }
    nodes.push(text.slice(begin, at), found[0]);
    begin = at = found[1];
  }
  return [...nodes, text.slice(begin)];
}

/** Returns a paragraph of lines, with their line ends and indentation. */
const paragraph = (lines) =>
  make("p", {}, ...lines.flatMap((line, i) => [...(i ? [make("br")] : []), ...inline(line.trimEnd())]));

/** Returns whether line `at` is a heading. A single # next to other lines is a comment in code. */
function isHeading(lines, at) {
  const isBlank = (line) => (line ?? "").trim() === "";
  const level = HEADING.exec(lines[at])?.[1].length ?? 0;
  return level > 1 || (level === 1 && isBlank(lines[at - 1]) && isBlank(lines[at + 1]));
}

/** Returns the code between the fence at `at` and its end or that of the text, and the index of the next line. */
function fenced(lines, at) {
  const [, fence, language] = FENCE.exec(lines[at]);
  const isEnd = (line) => line.trim().startsWith(fence) && line.trim().replaceAll(fence[0], "") === "";
  let end = at + 1;
  while (end < lines.length && !isEnd(lines[end])) end += 1;
  const code = make("code", {}, lines.slice(at + 1, end).join("\n"));
  // tabindex lets keys scroll the code.
  const label = language ? `Code: ${language}` : "Code";
  return [make("pre", {tabindex: "0", role: "group", "aria-label": label}, code), end + 1];
}

/** Returns the list that begins at `at`, with the blocks indented below its items, and the index of the next line. */
function list(lines, at, depth) {
  const [, indent, bullet, number] = ITEM.exec(lines[at]);
  const element = make(bullet ? "ul" : "ol", number && number !== "1" ? {start: Number(number)} : {});
  const isOurs = (match) => match && match[1].length <= indent.length + 1 && Boolean(match[2]) === Boolean(bullet);
  while (at < lines.length && isOurs(ITEM.exec(lines[at]))) {
    const inside = [ITEM.exec(lines[at])[4]];
    const isInside = (line) => line.trim() === "" || line.search(/\S/) > indent.length + 1;
    for (at += 1; at < lines.length && isInside(lines[at]); at += 1) inside.push(lines[at].slice(indent.length + 2));
    const [first, ...others] = blocks(inside, depth + 1);
    // Put the first paragraph of an item into the item without a <p>.
    const begin = first?.tagName === "P" ? [...first.childNodes] : [first ?? ""];
    element.append(make("li", {}, ...begin, ...others));
  }
  return [element, at];
}

/** Returns the quotation that begins at `at`, and the index of the next line. */
function quotation(lines, at, depth) {
  const quoted = [];
  for (; at < lines.length && QUOTE.test(lines[at]); at += 1) quoted.push(QUOTE.exec(lines[at])[1]);
  return [make("blockquote", {}, ...blocks(quoted, depth + 1)), at];
}

/** Returns the block that begins at `at`, and the index of the next line. */
function blockAt(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line)) return fenced(lines, at);
  if (isHeading(lines, at)) return [make("h3", {}, ...inline(HEADING.exec(line)[2])), at + 1];
  if (RULE.test(line)) return [make("hr"), at + 1];
  if (ITEM.test(line)) return list(lines, at, depth);
  if (QUOTE.test(line)) return quotation(lines, at, depth);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() !== "" && !KINDS.some((kind) => kind.test(lines[end]))) end += 1;
  return [paragraph(lines.slice(at, end)), end];
}

/** Returns the elements of some lines. */
function blocks(lines, depth = 0) {
  if (depth > DEEPEST) return [lines.join("\n")];
  const made = [];
  for (let at = 0; at < lines.length; ) {
    if (lines[at].trim() === "") {
      at += 1;
      continue;
    }
    const [block, next] = blockAt(lines, at, depth);
    made.push(block);
    at = next;
  }
  return made;
}

/** Returns an element with a Markdown text as elements. */
export const rendered = (text) => make("div", {class: "prose"}, ...blocks(text.split("\n")));
