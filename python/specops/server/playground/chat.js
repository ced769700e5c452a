// SPDX-License-Identifier: Apache-2.0
// A conversation with a model that has a chat template. It is kept in this browser.

import {board} from "./board.js";
import {$, make, perSecond} from "./dom.js";
import {generate} from "./runs.js";
import {fitPrompt, store, stored} from "./settings.js";

let messages = stored("chat") ?? [];

/** Takes what another tab has said, or that it has begun anew. */
export function follow() {
  messages = stored("chat") ?? [];
}

const bubble = (text) => make("p", {class: "message"}, make("span", {class: "unseen"}, "You: "), text);

const answer = (text) =>
  make("article", {class: "lane"}, make("h2", {}, "Assistant"), make("div", {class: "pane"}, text));

/** Shows what has been said so far. */
export function showChat() {
  board.clear("chat");
  $("lanes").replaceChildren(
    ...messages.map(({role, content}) => (role === "user" ? bubble(content) : answer(content))),
  );
}

/** Forgets the conversation. */
export function newChat() {
  messages = [];
  store("chat", null);
  showChat();
  $("prompt").focus();
}

/** Sends the message and streams the answer; returns what it came to. */
export async function chat(context) {
  const {settings} = context;
  if ($("results").dataset.mode !== "chat" || !messages.length) showChat();
  board.lanes = [];
  board.inspected = null;
  const said = {role: "user", content: settings.prompt};
  const question = bubble(said.content);
  $("lanes").append(question);
  const system = settings.system ? [{role: "system", content: settings.system}] : [];
  const lane = board.addLane(settings.method, {showsSeed: Number(settings.temperature) > 0});
  const before = messages;
  try {
    const run = await generate(context, settings.method, {
      messages: [...system, ...messages, said],
      onStart: (generation) => lane.start(generation),
      onStep: () => board.refresh(),
    });
    board.finish();
    messages.push(said, {role: "assistant", content: run.text});
    store("chat", messages);
    if (messages !== before) showChat(); // another tab has said something meanwhile
    $("prompt").value = "";
    fitPrompt();
    return `${perSecond(run.speed)} tokens/s`;
  } catch (error) {
    // The message is in its field still: what has no whole answer is not said.
    if (!lane.generation?.tokens.length) {
      question.remove();
      lane.element.remove();
      board.lanes = [];
    }
    throw error;
  }
}
