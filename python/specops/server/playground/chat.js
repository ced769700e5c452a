// SPDX-License-Identifier: Apache-2.0
// Conversations with a model that has a chat template. They are kept in this browser.

import {board} from "./board.js";
import {copy} from "./copy.js";
import {$, make, perSecond} from "./dom.js";
import {rendered} from "./markdown.js";
import {drawSeed, generate} from "./runs.js";
import {fitPrompt, foldPrompt, store, stored} from "./settings.js";

const MOST = 50; // chats

let chats = stored("chats") ?? []; // {id, messages}, the latest first
let current = chats[0]?.id ?? null; // null: one that has no message yet
let isNew = false; // and is to have none of another tab
let replaced = null; // the place of the message that the next one replaces, with all behind it

const messagesOf = (id) => chats.find((one) => one.id === id)?.messages ?? [];

/** Takes what other tabs have said or forgotten. */
export function follow() {
  chats = stored("chats") ?? chats;
  if (!chats.some(({id}) => id === current)) current = isNew ? null : (chats[0]?.id ?? null);
}

const isRunning = () => document.body.dataset.state === "running";

function keep(id, messages) {
  chats = [{id, messages}, ...(stored("chats") ?? chats).filter((one) => one.id !== id)].slice(0, MOST);
  store("chats", chats);
}

function button(name, onClick, attributes = {}) {
  const made = make("button", {type: "button", ...attributes}, name);
  made.addEventListener("click", onClick);
  return made;
}

const copyButton = (text) => button("Copy", (event) => copy(text, event.target));

/** Puts a message back into its field: what is sent then takes its place. */
function edit(place) {
  if (isRunning()) return;
  $("prompt").value = messagesOf(current)[place].content;
  replaced = place;
  showChat();
  foldPrompt(false);
  fitPrompt();
  $("prompt").focus();
}

function regenerate(place) {
  if (isRunning()) return;
  edit(place);
  $("form").requestSubmit();
}

function question({content}, place) {
  const words = make("p", {class: "message"}, make("span", {class: "unseen"}, "You: "), content);
  const buttons = place === null ? [] : [copyButton(content), button("Edit", () => edit(place))];
  return make("div", {class: "asked"}, words, make("p", {class: "tools"}, ...buttons));
}

/** The buttons below an answer; the last one can be written again. */
function toolsOf({content}, place) {
  const again = button("Regenerate", () => regenerate(place - 1));
  return make("p", {class: "tools"}, copyButton(content), ...(place === messagesOf(current).length - 1 ? [again] : []));
}

const answer = (message, place) =>
  make("article", {class: "lane"}, make("h2", {}, "Assistant"), rendered(message.content), toolsOf(message, place));

/** Shows what has been said so far, and which other chats there are. */
export function showChat() {
  board.clear("chat");
  const messages = messagesOf(current);
  const shown = messages.map((one, place) => (one.role === "user" ? question : answer)(one, place));
  if (replaced !== null) for (const one of shown.slice(replaced)) one.classList.add("replaced");
  $("lanes").replaceChildren(...shown);
  $("replaces").hidden = replaced === null;
  showList();
}

function showList() {
  $("chats").hidden = chats.length === 0;
  $("chat-list").replaceChildren(
    ...chats.map(({id, messages}) => {
      const title = messages[0].content.trim().split("\n")[0].slice(0, 60) || "(empty)";
      const open = button(title, () => openChat(id), {"aria-current": id === current ? "true" : null});
      return make("li", {}, open, button("Delete", () => deleteChat(id), {"aria-label": `Delete: ${title}`}));
    }),
  );
}

function openChat(id) {
  if (isRunning()) return;
  current = id;
  isNew = false;
  replaced = null;
  showChat();
}

function deleteChat(id) {
  if (isRunning()) return;
  chats = (stored("chats") ?? chats).filter((one) => one.id !== id);
  store("chats", chats);
  if (id === current) newChat();
  else showChat();
  $("chats").querySelector("summary").focus();
}

/** Begins a chat; the others stay in the list. */
export function newChat() {
  openChat(null);
  isNew = true;
  $("prompt").focus();
}

/** Takes back that a message is to be replaced. */
export function keepMessage() {
  replaced = null;
  $("prompt").value = "";
  fitPrompt();
  showChat();
  $("prompt").focus();
}

/** Sends the message and streams the answer; returns a summary of the speed. */
export async function chat(context) {
  const {settings} = context;
  if (!settings.prompt.trim()) throw new Error("“Message” is empty.");
  const id = current ?? drawSeed();
  const message = {role: "user", content: settings.prompt};
  const before = messagesOf(current).slice(0, replaced ?? undefined);
  showChat();
  [...$("lanes").children].slice(before.length).forEach((one) => one.remove());
  const element = question(message, null);
  $("lanes").append(element);
  const system = settings.system ? [{role: "system", content: settings.system}] : [];
  const lane = board.addLane(settings.method, {showsSeed: Number(settings.temperature) > 0});
  element.scrollIntoView({block: "nearest"});
  try {
    const run = await generate(context, settings.method, {
      messages: [...system, ...before, message],
      onStart: (generation) => lane.start(generation),
      onStep: () => board.refresh(),
    });
    board.finish();
    follow();
    // Another tab may have added messages meanwhile; they precede this one.
    const earlier = replaced === null ? messagesOf(id) : before;
    const hasMore = earlier.length > before.length;
    current = id;
    isNew = false;
    replaced = null;
    keep(id, [...earlier, message, {role: "assistant", content: run.content}]);
    if (hasMore) showChat();
    else settle(lane, element, message, earlier.length);
    $("prompt").value = "";
    fitPrompt();
    return `${perSecond(run.speed)} tokens/s`;
  } catch (error) {
    // The message stays in its field until its answer is complete.
    if (!lane.generation?.tokens.length) showChat();
    throw error;
  }
}

/** Shows the new answer as formatted text, above its tokens. */
function settle(lane, element, sent, place) {
  const message = messagesOf(current)[place + 1];
  const inside = make("details", {class: "inside"}, make("summary", {}, "Tokens, and who proposed them"));
  inside.append(lane.facts, lane.text);
  lane.element.append(rendered(message.content), toolsOf(message, place + 1), inside);
  element.replaceWith(question(sent, place));
  $("lanes").querySelectorAll(".tools button:nth-child(2)").forEach((one) => {
    if (one.textContent === "Regenerate" && !lane.element.contains(one)) one.remove();
  });
  $("replaces").hidden = true;
  showList();
}
