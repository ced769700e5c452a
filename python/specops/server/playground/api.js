// SPDX-License-Identifier: Apache-2.0
// Client of the server: requests, event streams, and error messages as sentences.

/** Error whose message is a sentence for the user. */
export class ServerError extends Error {
  constructor(message, {status = 0, param = null, code = null} = {}) {
    super(sentence(message));
    Object.assign(this, {status, param, code});
  }
}

function sentence(text) {
  const trimmed = text.trim();
  // Keep the case of a field name at the beginning.
  const first = trimmed.split(/\s/, 1)[0].includes("_") ? trimmed : trimmed[0].toUpperCase() + trimmed.slice(1);
  return /[.!?]$/.test(first) ? first : `${first}.`;
}

async function errorOf(response) {
  let error = {message: `the server answered ${response.status} ${response.statusText}`};
  try {
    ({error} = await response.json());
  } catch {
    // The response has no JSON body; use the status.
  }
  const seconds = response.headers.get("Retry-After");
  const message = seconds ? `${sentence(error.message)} Try again in ${seconds} s` : error.message;
  return new ServerError(message, {...error, status: response.status});
}

/** Sends a request to the server; `body` is JSON text, for a POST. Throws a ServerError, or an AbortError. */
export async function request(path, {key = "", body = null, signal = null} = {}) {
  const headers = {"Content-Type": "application/json"};
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, {method: body === null ? "GET" : "POST", headers, body, signal});
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("the server does not answer; is it still running?", {code: "no_answer"});
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

/** Yields the parsed events of a stream; throws a ServerError if the connection ends early. */
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
    if (part.done) throw new ServerError("the connection ended before the answer was complete");
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
  // A seed may have 64 bits, which JavaScript's numbers cannot hold, so keep its digits.
  const seed = /"seed":(-?\d+)/.exec(data);
  if (seed) event.seed = seed[1];
  return event;
}
