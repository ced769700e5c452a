// SPDX-License-Identifier: Apache-2.0
// Speed-up of one way of decoding over another: the median over alternating runs.

const MOST_ROUNDS = 7;
const FOR_QUARTERS = 4; // number of pairs from which on quartiles are shown
const WIDEST = 1.5; // largest ratio of the quartiles without a disturbance
const MILLISECONDS = 3000; // time for all rounds; the first one always runs

/** Returns a quantile of sorted values, with linear interpolation. */
function quantile(sorted, share) {
  const at = share * (sorted.length - 1);
  const [low, high] = [sorted[Math.floor(at)], sorted[Math.ceil(at)]];
  return low + (high - low) * (at - Math.floor(at));
}

/** Returns the median of sorted values; the lower one of two middle values. */
export const middle = (sorted) => sorted[Math.floor((sorted.length - 1) / 2)];

/**
 * Returns the speed-up over pairs of speeds [plain, fast]: {factor, speeds, low, high, count, isCapped,
 * isDisturbed}, or null if nothing could be timed. `factor` is the median, and `speeds` the pair with
 * this factor, since the speed of a machine varies. `low` and `high` are the quartiles; with fewer than
 * four pairs, the minimum and the maximum.
 *
 * A step with drafts takes at least as long as one without, so the speed-up cannot exceed the tokens
 * per step. A higher measured value comes from a disturbance, so values are capped there. The timing
 * was also disturbed if the pairs differ much.
 */
export function speedUp(pairs, perStep) {
  const timed = pairs
    .filter(([plain, fast]) => plain && fast)
    .map(([plain, fast]) => ({factor: fast / plain, speeds: [plain, fast]}))
    .sort((a, b) => a.factor - b.factor);
  if (!timed.length || perStep === null) return null;
  const {factor, speeds} = middle(timed);
  const shares = timed.length < FOR_QUARTERS ? [0, 1] : [0.25, 0.75];
  const [low, high] = shares.map((share) => quantile(timed.map((one) => one.factor), share));
  return {
    factor: Math.min(factor, perStep),
    speeds,
    low: Math.min(low, perStep),
    high: Math.min(high, perStep),
    count: timed.length,
    isCapped: factor > perStep,
    isDisturbed: high > perStep || high > WIDEST * low,
  };
}

/** Returns a text such as "1.84×", or "at most 1.84×" if the factor is capped. */
export const factorText = ({factor, isCapped}) => `${isCapped ? "at most " : ""}${factor.toFixed(2)}×`;

/** Returns a text such as "middle half of 7 timed pairs: 1.70× to 1.92×". */
export function spreadText({low, high, count}) {
  const half = count < FOR_QUARTERS ? "" : "middle half of ";
  return count > 1 ? `${half}${count} timed pairs: ${low.toFixed(2)}× to ${high.toFixed(2)}×` : "one timed pair";
}

/** Calls `round` with 0, 1, .. while there is time, but at least once. */
export async function inRounds(round) {
  const begin = performance.now();
  for (let number = 0; number < MOST_ROUNDS; number++) {
    await round(number);
    const spent = performance.now() - begin;
    if (spent + spent / (number + 1) > MILLISECONDS) return;
  }
}
