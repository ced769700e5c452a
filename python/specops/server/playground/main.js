// SPDX-License-Identifier: Apache-2.0
// The main module of the page: connects to the server, and runs the requests of the form one at a time.

import {request} from "./api.js";
import {board, showLegend} from "./board.js";
import {hideCard} from "./card.js";
import {chat, follow, keepMessage, newChat, showChat} from "./chat.js";
import {showCode} from "./code.js";
import {compare} from "./compare.js";
import {write} from "./complete.js";
import {copy} from "./copy.js";
import {$, whole} from "./dom.js";
import {PROMPTS, showExamples} from "./examples.js";
import {forget, remember, showHistory} from "./history.js";
import {inLabels, unmark} from "./labels.js";
import {race} from "./race.js";
import {isFirstVisit, showRecorded} from "./recorded.js";
import {listenToReplay, offerReplay, showStep} from "./replay.js";
import {drawSeed} from "./runs.js";
import {
  fillEmpty, fitForm, fitPrompt, foldPrompt, fragmentOf, fromFragment, narrow,
  offer, ofView, onOtherTab, readForm, store, stored, textField, writeForm,
} from "./settings.js";

let running = null; // AbortController of the current run
let card = null; // the model's entry of /v1/models, once the server has answered
let chosen = {}; // form values that differ from the server's defaults
let seedShown = ""; // seed of the run on the screen

const setStatus = (text) => ($("status").textContent = text);

async function connect() {
  const response = await request("v1/models", {key: $("key").value});
  card = (await response.json()).data[0];
  $("model").textContent = `${card.id}, context of ${whole(card.max_model_len)} tokens`;
  offer(card);
  const {mode, method, k, steps} = chosen; // other values do not depend on the server
  writeForm({mode, method, k, steps});
  changed();
}

/** Fills the form, as far as possible before the server has answered. */
function prepare() {
  const linked = location.hash ? fromFragment(location.hash) : {};
  chosen = {prompt: Object.values(PROMPTS)[0], ...stored("settings"), ...linked};
  writeForm(chosen);
  changed();
  fitPrompt();
}

const WORK = {race, write, chat, compare: (context) => compare(context, card.methods)};

const REPLAYED = ["race", "write"]; // modes whose results can be replayed

function setState(state) {
  document.body.dataset.state = state;
  // Use aria-disabled, since a disabled button would lose the focus.
  $("run").setAttribute("aria-disabled", state === "running");
  $("stop").setAttribute("aria-disabled", state !== "running");
}

/** Scrolls to the results on a phone, or if they would begin near or below the end of the window. */
function bringIntoView() {
  const isCalm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  if (narrow.matches || $("results").getBoundingClientRect().top > 0.75 * innerHeight) {
    $("results").scrollIntoView({behavior: isCalm ? "auto" : "smooth"});
  }
}

/** Runs the request of the form, or `again` instead if given. */
async function start(again = null) {
  if (running) return;
  running = new AbortController();
  $("error").textContent = "";
  unmark();
  hideCard();
  setState("running");
  let {mode} = readForm();
  try {
    if (!card) await connect();
    ({mode} = readForm());
    setStatus("Generating.");
    const means = {key: $("key").value, signal: running.signal};
    const outcome = await (again ?? work)(means);
    if (REPLAYED.includes(mode)) offerReplay();
    setStatus(`Done: ${outcome}.`);
    setState("done");
  } catch (error) {
    board.finish();
    if (mode !== "chat" && board.isEmpty) showNothing();
    else if (REPLAYED.includes(mode)) offerReplay();
    failed(error);
  } finally {
    running = null;
  }
  if (readForm().mode !== mode) changeMode();
}

/** Runs the request of the form, and adds it to the history. */
async function work(means) {
  fillEmpty();
  const settings = readForm();
  settings.seed ||= drawSeed();
  seedShown = settings.seed;
  showRequest();
  foldPrompt(true);
  if (settings.mode !== "chat") bringIntoView();
  const outcome = await WORK[settings.mode]({settings, ...means});
  remember(ofView(settings), outcome);
  showHistory(restore);
  return outcome;
}

/** Asks for an API key, or for another one if the key was refused. */
function askForKey() {
  const isMissing = $("key").value === "";
  $("key-label").hidden = false;
  $("contract").hidden = true; // a link cannot send the key
  $("error").textContent = isMissing ? "This server needs an API key." : "The server does not accept this API key.";
  $("error").classList.toggle("asks", isMissing);
  $("key").focus();
}

function failed(error) {
  $("error").classList.remove("asks");
  if (error.name === "AbortError") {
    setStatus("Stopped.");
    setState("stopped");
    return;
  }
  $("error").textContent = inLabels(error);
  if (error.status === 401) {
    askForKey();
  } else if (error.code === "no_answer") {
    chosen = readForm();
    card = null;
    $("model").textContent = "not connected";
  } else if (error.code === "context_length_exceeded" && readForm().mode === "chat") {
    $("error").append(" Edit an earlier message, or begin a new chat.");
  }
  setStatus("");
  setState("failed");
}

/** Restores the form values of an earlier run, including its seed. */
function restore(values) {
  chosen = {...chosen, ...values};
  writeForm(values);
  changed();
  fitPrompt();
  $("run").focus();
}

/** Updates the page after a change of the form. */
function changed() {
  fitForm();
  const {mode, tint, rejected} = readForm();
  $("results").dataset.tint = tint;
  $("results").dataset.rejected = rejected;
  showLegend(board.lanes);
  showExamples(mode, (text) => {
    textField().value = text;
    keep();
    fitPrompt();
    textField().focus();
  });
  if (mode !== "chat") $("chats").hidden = true;
  showRequest();
}

function showRequest() {
  const values = readForm();
  showCode({...values, seed: values.seed || seedShown}, card?.id, $("key").value !== "");
}

/** Stores the form's values, except an unsent message, and removes the fragment of an opened link. */
function keep() {
  const {message, ...values} = readForm();
  if (!card) {
    const {method, mode, k, ...others} = values; // the server's methods are not known yet
    chosen = {...chosen, ...others, ...(k !== $("k").defaultValue && {k})};
    return;
  }
  store("settings", values);
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
  $("code").scrollIntoView({block: "nearest"});
}

function showNothing() {
  seedShown = "";
  board.clear(readForm().mode);
  $("idle").hidden = false;
}

/** Shows the chosen mode; a run of another mode is stopped first. */
function changeMode() {
  chosen.mode = readForm().mode;
  if (running) running.abort();
  else if (readForm().mode === "chat") showChat();
  else showNothing();
}

/** Connects to the server, and shows the chats or the recorded race. */
async function open() {
  try {
    await connect();
    if (!running) $("error").textContent = "";
    if (!running && readForm().mode === "chat") showChat();
    else if (isFirst && isUntouched()) await showRecorded(isUntouched);
  } catch (error) {
    $("model").textContent = "not connected";
    if (!running) failed(error);
  }
}

function listen() {
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    start();
  });
  for (const element of [$("modes"), $("form"), $("legend")]) {
    element.addEventListener("change", () => {
      changed();
      keep();
    });
  }
  $("modes").addEventListener("change", changeMode);
  for (const field of [$("prompt"), $("message")]) {
    field.addEventListener("input", () => {
      foldPrompt(false);
      fitPrompt();
      showRequest();
    });
  }
  $("prompt").addEventListener("focus", () => foldPrompt(false));
  $("message").addEventListener("keydown", (event) => {
    const begins = event.shiftKey || event.isComposing || matchMedia("(pointer: coarse)").matches;
    if (event.key !== "Enter" || begins) return;
    event.preventDefault();
    $("form").requestSubmit();
  });
  $("key").addEventListener("change", () => card || open());
  $("again").addEventListener("click", () => {
    $("run").focus({preventScroll: true}); // this button will be hidden
    start(board.again);
  });
  $("drafts").addEventListener("scroll", () => board.fadeDrafts());
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
open();
