// SPDX-License-Identifier: Apache-2.0
// Talking to the server: requests, streams of events, and errors as sentences.

/** What went wrong, as a sentence for whoever looks at the page. */
export class ServerError extends Error {
  constructor(message, {status = 0, param = null, code = null} = {}) {
    super(sentence(message));
    Object.assign(this, {status, param, code});
  }
}

function sentence(text) {
  const trimmed = text.trim();
  // What begins with the name of a field keeps it as it is.
  const first = trimmed.split(/\s/, 1)[0].includes("_") ? trimmed : trimmed[0].toUpperCase() + trimmed.slice(1);
  return /[.!?]$/.test(first) ? first : `${first}.`;
}

async function errorOf(response) {
  let error = {message: `the server answered ${response.status} ${response.statusText}`};
  try {
    ({error} = await response.json());
  } catch {
    // No body: the status says it.
  }
  const seconds = response.headers.get("Retry-After");
  const message = seconds ? `${sentence(error.message)} Try again in ${seconds} s` : error.message;
  return new ServerError(message, {...error, status: response.status});
}

/** Asks the server; `body` is JSON text, for a POST. Throws a ServerError, or an AbortError. */
export async function ask(path, {key = "", body = null, signal = null} = {}) {
  const headers = {"Content-Type": "application/json"};
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, {method: body === null ? "GET" : "POST", headers, body, signal});
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("the server does not answer; is it still running?");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

/** The events of a stream, parsed; throws a ServerError where it breaks off. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      part = {done: true};
    }
    if (part.done) throw new ServerError("the connection broke off before the answer was complete");
    const frames = (rest + part.value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      const data = frame.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield parsed(data);
    }
  }
}

function parsed(data) {
  const event = JSON.parse(data);
  if (event.error) throw new ServerError(event.error.message, event.error);
  // A seed may have 64 bits, which JavaScript's numbers do not hold: its digits are kept.
  const seed = /"seed":(-?\d+)/.exec(data);
  if (seed) event.seed = seed[1];
  return event;
}
