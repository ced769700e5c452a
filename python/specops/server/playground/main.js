// SPDX-License-Identifier: Apache-2.0
// The page: connects to the server, and runs what the form says, one thing at a time.

import {request} from "./api.js";
import {board, showLegend} from "./board.js";
import {hideCard} from "./card.js";
import {chat, follow, keepMessage, newChat, showChat} from "./chat.js";
import {showCode} from "./code.js";
import {compare} from "./compare.js";
import {copy} from "./copy.js";
import {$, make, perSecond, whole} from "./dom.js";
import {MESSAGES, PROMPTS} from "./examples.js";
import {forget, remember, showHistory} from "./history.js";
import {inLabels, unmark} from "./labels.js";
import {race} from "./race.js";
import {isFirstVisit, showRecorded} from "./recorded.js";
import {listenToReplay, offerReplay, showStep} from "./replay.js";
import {drawSeed, generate} from "./runs.js";
import {
  fillEmpty, fitForm, fitPrompt, foldPrompt, fragmentOf, fromFragment, offer,
  onOtherTab, readForm, store, stored, writeForm,
} from "./settings.js";

let running = null; // AbortController of what runs now
let card = null; // the model's, once the server has answered
let chosen = {}; // what the form is to have besides what the server does by itself
let seedShown = ""; // of the run on the screen

const setStatus = (text) => ($("status").textContent = text);

async function connect() {
  const response = await request("v1/models", {key: $("key").value});
  card = (await response.json()).data[0];
  $("model").textContent = `${card.id}, context of ${whole(card.max_model_len)} tokens`;
  offer(card);
  writeForm(chosen);
  changed();
}

/** Fills the form, as far as that is possible before the server says what it can do. */
function prepare() {
  const linked = location.hash ? fromFragment(location.hash) : {};
  chosen = {prompt: Object.values(PROMPTS)[0], ...stored("settings"), ...linked};
  writeForm(chosen);
  changed();
  fitPrompt();
}

/** One completion, in one lane. */
async function write(context) {
  board.clear("write");
  const {settings} = context;
  const showsSeed = Number(settings.temperature) > 0;
  const lane = board.addLane(settings.method, {prompt: settings.prompt, showsSeed});
  const run = await generate(context, settings.method, {
    onStart: (generation) => lane.start(generation),
    onStep: () => board.refresh(),
  });
  board.finish();
  return `${perSecond(run.speed)} tokens/s, ${run.tokens.length} tokens`;
}

const WORK = {race, write, chat, compare: (context) => compare(context, card.methods)};

const REPLAYED = ["race", "write"]; // modes whose results can be replayed

function setState(state) {
  document.body.dataset.state = state;
  // They stay focusable: who pressed one goes on from there.
  $("run").setAttribute("aria-disabled", state === "running");
  $("stop").setAttribute("aria-disabled", state !== "running");
}

/** Scrolls to the results, where they would begin below the window. */
function bringIntoView() {
  const isCalm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  if ($("results").getBoundingClientRect().top > 0.75 * innerHeight) {
    $("results").scrollIntoView({behavior: isCalm ? "auto" : "smooth"});
  }
}

async function start() {
  if (running) return;
  running = new AbortController();
  $("error").textContent = "";
  unmark();
  hideCard();
  setState("running");
  let settings = readForm();
  try {
    if (!card) await connect();
    fillEmpty();
    settings = readForm();
    settings.seed ||= drawSeed();
    seedShown = settings.seed;
    showRequest();
    setStatus("Generating.");
    foldPrompt(true);
    bringIntoView();
    const context = {settings, key: $("key").value, signal: running.signal};
    const outcome = await WORK[settings.mode](context);
    if (REPLAYED.includes(settings.mode)) offerReplay();
    remember(settings, outcome);
    showHistory(restore);
    setStatus(`Done: ${outcome}.`);
    setState("done");
  } catch (error) {
    board.finish();
    if (settings.mode !== "chat" && board.isEmpty) showNothing();
    else if (REPLAYED.includes(settings.mode)) offerReplay();
    failed(error);
  } finally {
    running = null;
  }
  if (readForm().mode !== settings.mode) changeMode();
}

function failed(error) {
  if (error.name === "AbortError") {
    setStatus("Stopped.");
    setState("stopped");
    return;
  }
  $("error").textContent = inLabels(error);
  if (error.status === 401) {
    $("key-label").hidden = false;
    $("contract").hidden = true; // a link takes no key along
    $("error").textContent = "“API key” is missing or wrong.";
  } else if (error.code === "context_length_exceeded" && readForm().mode === "chat") {
    $("error").append(" Edit an earlier message, or begin a new chat.");
  }
  setStatus("");
  setState("failed");
}

/** Goes back to an earlier run, with the seed that it had. */
function restore(values) {
  writeForm(values);
  changed();
  fitPrompt();
  $("run").focus();
}

/** Called after each change of the form. */
function changed() {
  fitForm();
  const {mode, tint, rejected} = readForm();
  $("results").dataset.tint = tint;
  $("results").dataset.rejected = rejected;
  showLegend(board.lanes);
  showExamples(mode === "chat" ? MESSAGES : PROMPTS);
  if (mode !== "chat") $("chats").hidden = true;
  $("bundled").hidden = mode !== "chat" || card?.id !== "specops-bundled"; // its name by default
  showRequest();
}

function showRequest() {
  const values = readForm();
  showCode({...values, seed: values.seed || seedShown}, card?.id, $("key").value !== "");
}

function showExamples(examples) {
  if ($("examples").dataset.of === Object.keys(examples).join()) return;
  $("examples").dataset.of = Object.keys(examples).join();
  $("examples").replaceChildren(
    ...Object.entries(examples).map(([name, text]) => {
      const button = make("button", {type: "button"}, name);
      button.addEventListener("click", () => {
        $("prompt").value = text;
        keep();
        fitPrompt();
        $("prompt").focus();
      });
      return button;
    }),
  );
}

/** Keeps the form's values; a link that was opened is left behind. */
function keep() {
  if (!card) {
    const {method, mode, ...others} = readForm(); // what methods there are is not known yet
    chosen = {...chosen, ...others};
    return;
  }
  store("settings", readForm());
  if (location.hash) history.replaceState(null, "", location.pathname);
}

async function share() {
  const values = readForm();
  // The link reproduces what the page shows.
  history.replaceState(null, "", fragmentOf({...values, seed: values.seed || seedShown}));
  const copied = await copy(location.href, $("share"), "Link copied", "Link in address bar");
  setStatus(copied ? "The link is copied." : "The link is in the address bar.");
}

/** Shows the form's request as code, or hides it. */
function toggleCode() {
  $("code").hidden = !$("code").hidden;
  $("as-code").setAttribute("aria-expanded", String(!$("code").hidden));
  showRequest();
}

function showNothing() {
  seedShown = "";
  board.clear(readForm().mode);
  $("idle").hidden = false;
}

/** Shows the mode that was chosen; what runs in another one ends first. */
function changeMode() {
  if (running) running.abort();
  else if (readForm().mode === "chat") showChat();
  else showNothing();
}

function listen() {
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    start();
  });
  for (const element of [$("form"), $("legend")]) {
    element.addEventListener("change", () => {
      changed();
      keep();
    });
  }
  $("modes").addEventListener("change", changeMode);
  $("prompt").addEventListener("input", () => {
    foldPrompt(false);
    fitPrompt();
    showRequest();
  });
  $("prompt").addEventListener("focus", () => foldPrompt(false));
  $("stop").addEventListener("click", () => running?.abort());
  onOtherTab("chats", () => {
    follow();
    if (!running && readForm().mode === "chat") showChat();
  });
  $("share").addEventListener("click", share);
  $("new-chat").addEventListener("click", newChat);
  $("keep-message").addEventListener("click", keepMessage);
  $("as-code").addEventListener("click", toggleCode);
  $("language").addEventListener("change", showRequest);
  $("copy-code").addEventListener("click", () => copy($("code-text").textContent, $("copy-code")));
  $("reset").addEventListener("click", () => {
    store("settings", null);
    location.replace(location.pathname);
  });
  $("forget").addEventListener("click", () => {
    forget();
    showHistory(restore);
    $("history").querySelector("summary").focus();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      hideCard();
      running?.abort();
    }
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
  });
}

listen();
listenToReplay();
board.onStep = showStep;
showHistory(restore);
prepare();
const isFirst = isFirstVisit();
const isUntouched = () => !running && board.isEmpty && readForm().mode === "race";
connect()
  .then(() => {
    if (!running && readForm().mode === "chat") showChat();
    else if (isFirst && isUntouched()) return showRecorded(isUntouched);
  })
  .catch((error) => {
    $("model").textContent = "not connected";
    failed(error);
  });
