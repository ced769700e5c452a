// SPDX-License-Identifier: Apache-2.0
// A conversation with a model that has a chat template. It is kept in this browser.

import {board} from "./board.js";
import {$, make, perSecond} from "./dom.js";
import {generate} from "./runs.js";
import {fitPrompt, store, stored} from "./settings.js";

let messages = stored("chat") ?? [];

const bubble = (text) => make("p", {class: "message"}, make("span", {class: "unseen"}, "You: "), text);

const answer = (text) =>
  make("article", {class: "lane"}, make("h2", {}, "Assistant"), make("div", {class: "pane"}, text));

/** Shows what has been said so far. */
export function showChat() {
  board.clear();
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
  if (!$("lanes").children.length || !messages.length) showChat();
  board.lanes = [];
  board.inspected = null;
  const said = {role: "user", content: settings.prompt};
  const question = bubble(said.content);
  $("lanes").append(question);
  const system = settings.system ? [{role: "system", content: settings.system}] : [];
  const lane = board.addLane(settings.method, {});
  try {
    const run = await generate(context, settings.method, {
      seed: settings.seed,
      messages: [...system, ...messages, said],
      onStart: (generation) => lane.start(generation),
      onStep: () => board.refresh(),
    });
    board.finish();
    messages.push(said, {role: "assistant", content: run.text});
    store("chat", messages);
    $("prompt").value = "";
    fitPrompt();
    return {seed: run.seed, outcome: `${perSecond(run.speed)} tokens/s`};
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
