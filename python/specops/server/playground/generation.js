// SPDX-License-Identifier: Apache-2.0
// Data of one generation: tokens, their sources, drafts and times. This module draws nothing.

/**
 * Collects a stream with `include_steps`.
 *
 * tokens: {id, text, source, step, logprob, alternatives: [{text, logprob}]}; the last two are
 *   undefined without logprobs.
 * steps: {seconds, first, count, drafts}: `first` is the index of the step's first token; `drafts`
 *   is null or {texts, sources, accepted}, where `accepted` is a number.
 * positions: {drafted, accepted} by the distance of a draft from the last token.
 */
export class Generation {
  constructor(method, limit) {
    this.method = method;
    this.limit = limit; // maximum number of tokens
    this.tokens = [];
    this.steps = [];
    this.positions = [];
    this.seed = null;
    this.timings = null; // set when the generation is complete
    this.finishReason = null;
    this.content = ""; // in a chat: the text without reasoning
    this.decoder = new TextDecoder(); // a character may span tokens
  }

  take(event) {
    if (event.seed !== undefined) this.seed = event.seed;
    for (const choice of event.choices) {
      if (choice.step) this.takeStep(choice.step, readLogprobs(choice.logprobs));
      this.content += choice.delta?.content ?? "";
      if (choice.finish_reason) this.finishReason = choice.finish_reason;
    }
    if (event.timings) this.timings = event.timings;
  }

  takeStep(step, logprobs) {
    const number = this.steps.length;
    this.steps.push({
      seconds: step.seconds,
      first: this.tokens.length,
      count: step.token_ids.length,
      drafts: step.drafts && this.takeDrafts(step.drafts),
    });
    step.token_ids.forEach((id, i) => {
      const text = this.decoder.decode(Uint8Array.from(step.bytes[i]), {stream: true});
      this.tokens.push({id, text, source: step.sources[i], step: number, ...logprobs?.[i]});
    });
  }

  takeDrafts({token_ids: ids, bytes, sources, num_accepted: accepted}) {
    ids.forEach((_, place) => {
      this.positions[place] ??= {drafted: 0, accepted: 0};
      this.positions[place].drafted += 1;
      this.positions[place].accepted += place < accepted;
    });
    const decoder = new TextDecoder();
    // The server hides rejected drafts that may be texts of other clients.
    const texts = bytes.map((data, place) => (ids[place] === null ? "…" : decoder.decode(Uint8Array.from(data))));
    return {texts, sources, accepted};
  }

  /** Adds the rest of an incomplete character, at the end of the stream. */
  finish() {
    const rest = this.decoder.decode();
    if (rest && this.tokens.length) this.tokens.at(-1).text += rest;
  }

  get text() {
    return this.tokens.map((token) => token.text).join("");
  }

  /** Returns the generation as it was after its first `count` steps. */
  after(count) {
    if (count >= this.steps.length) return this;
    const {method, limit, seed, steps, tokens} = this;
    const values = {seed, steps: steps.slice(0, count), tokens: tokens.slice(0, steps[count].first)};
    return Object.assign(new Generation(method, limit), values);
  }

  /** Number of drafts. */
  get drafted() {
    return this.steps.reduce((sum, {drafts}) => sum + (drafts?.texts.length ?? 0), 0);
  }

  /** Number of accepted drafts. */
  get accepted() {
    return this.steps.reduce((sum, {drafts}) => sum + (drafts?.accepted ?? 0), 0);
  }

  /** Time at which the last step ended, in seconds by the server's clock. */
  get seconds() {
    return this.steps.at(-1)?.seconds ?? 0;
  }

  /** Tokens per second by the server's clock, without the first step; null: not known yet. */
  get speed() {
    if (this.timings) return this.timings.tokens_per_second;
    if (this.steps.length < 2) return null;
    const [first] = this.steps;
    return (this.tokens.length - first.count) / (this.seconds - first.seconds);
  }

  /** Tokens per step, without the first step, which reads the prompt; null: there is no other step. */
  get perStep() {
    const {steps, tokens} = this;
    return steps.length > 1 ? (tokens.length - steps[0].count) / (steps.length - 1) : null;
  }
}

/** Returns {logprob, alternatives} of each token, from either of OpenAI's two formats. */
function readLogprobs(logprobs) {
  if (!logprobs) return null;
  if (logprobs.content) {
    return logprobs.content.map(({logprob, top_logprobs: top}) => ({
      logprob,
      alternatives: top.map(({token, logprob: its}) => ({text: token, logprob: its})),
    }));
  }
  return logprobs.token_logprobs.map((logprob, i) => ({
    logprob,
    alternatives: Object.entries(logprobs.top_logprobs[i])
      .map(([text, its]) => ({text, logprob: its}))
      .sort((a, b) => b.logprob - a.logprob),
  }));
}

/** Returns whether two complete generations have the same tokens and the same bits of logprobs. */
export const isSame = (a, b) => a.tokens.length === b.tokens.length && agreement(a, b).firstDifference < 0;

/**
 * Compares the tokens that two generations both have.
 *
 * Returns {tokens, sameTokens, logprobs, sameLogprobs, firstDifference}. Logprobs are compared bit
 * by bit. firstDifference is an index, or -1 if there is none.
 */
export function agreement(a, b) {
  const counts = {tokens: 0, sameTokens: 0, logprobs: 0, sameLogprobs: 0, firstDifference: -1};
  const count = Math.min(a.tokens.length, b.tokens.length);
  for (let place = 0; place < count; place++) {
    const [first, second] = [a.tokens[place], b.tokens[place]];
    const hasLogprobs = first.logprob !== undefined && second.logprob !== undefined;
    const isSame = first.id === second.id;
    const isSameLogprob = hasLogprobs && Object.is(first.logprob, second.logprob);
    counts.tokens += 1;
    counts.sameTokens += isSame;
    counts.logprobs += hasLogprobs;
    counts.sameLogprobs += isSameLogprob;
    if (counts.firstDifference < 0 && !(isSame && (isSameLogprob || !hasLogprobs))) {
      counts.firstDifference = place;
    }
  }
  return counts;
}
