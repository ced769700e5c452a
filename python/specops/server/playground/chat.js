// SPDX-License-Identifier: Apache-2.0
// Chats with a model that has a chat template. They are stored in this browser.

import {board} from "./board.js";
import {hideCard} from "./card.js";
import {copy} from "./copy.js";
import {$, make, perSecond} from "./dom.js";
import {rendered} from "./markdown.js";
import {drawSeed, generate} from "./runs.js";
import {fitPrompt, store, stored} from "./settings.js";

const MOST = 50; // maximum number of stored chats
const GAP = 16; // pixels between the newest message and the form
const FOLLOWED = 160; // the page follows new text unless its end is further below, in pixels
const CUT = "Cut off: the answer has as many tokens as Settings allow.";
const WELCOME = `Send a message to begin. Drafts make the answer faster and change none of its text.
  Below each answer you can see which drafter proposed which token.`;

let chats = stored("chats") ?? []; // list of {id, messages}, latest first
let current = chats[0]?.id ?? null; // id of the open chat; null: it has no message yet
let isNew = false; // the user began this chat, so do not open a chat of another tab
let replaced = null; // index of the message that the next one replaces, with all later messages

const messagesOf = (id) => chats.find((one) => one.id === id)?.messages ?? [];

/** Reads the changes that other tabs have made to the chats. */
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

/** Puts a message back into the input field; the next message sent replaces it. */
function edit(place) {
  if (isRunning()) return;
  replaced = place;
  showChat();
  write(messagesOf(current)[place].content);
  $("message").focus({preventScroll: true});
}

/** Writes a text into the input field. */
function write(text) {
  $("message").value = text;
  fitPrompt();
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

/** The buttons below an answer; only the last answer can be generated again. */
function toolsOf({content}, place) {
  const again = button("Regenerate", () => regenerate(place - 1));
  return make("p", {class: "tools"}, copyButton(content), ...(place === messagesOf(current).length - 1 ? [again] : []));
}

const answer = (message, place) =>
  make("article", {class: "lane"}, make("h2", {}, "Assistant"), rendered(message.content), toolsOf(message, place));

/** Shows the messages of the open chat, and the list of chats. */
export function showChat() {
  board.clear("chat");
  const messages = messagesOf(current);
  const shown = messages.map((one, place) => (one.role === "user" ? question : answer)(one, place));
  if (replaced !== null) for (const one of shown.slice(replaced)) one.classList.add("replaced");
  const welcome = make("p", {class: "soft"}, WELCOME);
  $("lanes").replaceChildren(...(shown.length ? shown : [welcome]));
  $("replaces").hidden = replaced === null;
  showList();
  showNewest();
}

/** Scrolls to the newest message; with `follows`, only if the page shows nearly its end already. */
function showNewest(follows = false) {
  const below = $("results").getBoundingClientRect().bottom + $("form").offsetHeight + GAP - innerHeight;
  if (below > 0 && !(follows && below > FOLLOWED)) scrollBy({top: below, behavior: "instant"});
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

/** Begins a new chat; the others stay in the list. */
export function newChat() {
  openChat(null);
  isNew = true;
  $("message").focus();
}

/** Cancels the replacement of a message. */
export function keepMessage() {
  replaced = null;
  write("");
  showChat();
  $("message").focus();
}

/** Sends the message and streams the answer; returns a summary of the speed. */
export async function chat(context) {
  const {settings} = context;
  if (!settings.message.trim()) throw new Error("“Message” is empty.");
  const id = current ?? drawSeed();
  const message = {role: "user", content: settings.message};
  const before = messagesOf(current).slice(0, replaced ?? undefined);
  showChat();
  write("");
  const element = question(message, null);
  $("lanes").replaceChildren(...[...$("lanes").children].slice(0, before.length), element);
  const system = settings.system ? [{role: "system", content: settings.system}] : [];
  const lane = board.addLane(settings.method, {showsSeed: Number(settings.temperature) > 0});
  board.extra = () => showNewest(true);
  showNewest();
  try {
    const run = await generate(context, settings.method, {
      messages: [...system, ...before, message],
      onStart: (generation) => lane.start(generation),
      onStep: () => board.refresh(),
    });
    board.finish();
    follow();
    // Messages that another tab has added meanwhile precede this one.
    const earlier = replaced === null ? messagesOf(id) : before;
    const hasMore = earlier.length > before.length;
    current = id;
    isNew = false;
    replaced = null;
    keep(id, [...earlier, message, {role: "assistant", content: run.content}]);
    if (hasMore) showChat();
    else settle(lane, element, message, earlier.length);
    showNewest();
    return `${perSecond(run.speed)} tokens/s`;
  } catch (error) {
    // Put a message without a complete answer back into the input field.
    if (!$("message").value) write(message.content);
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
  if (lane.generation.finishReason === "length") inside.before(make("p", {class: "soft"}, CUT));
  hideCard();
  element.replaceWith(question(sent, place));
  $("lanes").querySelectorAll(".tools button:nth-child(2)").forEach((one) => {
    if (one.textContent === "Regenerate" && !lane.element.contains(one)) one.remove();
  });
  $("replaces").hidden = true;
  showList();
}
