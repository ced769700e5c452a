// SPDX-License-Identifier: Apache-2.0
// Speed-up of one way of decoding over another: the median of alternating runs.

const MOST_ROUNDS = 7;
const FOR_QUARTERS = 4; // pairs
const WIDEST = 1.5; // an undisturbed spread: the upper quartile over the lower
const MILLISECONDS = 3000; // for all rounds, if there is to be more than one

/** The value that a share of all is below, between two of them in proportion; they are sorted. */
function quantile(sorted, share) {
  const at = share * (sorted.length - 1);
  const [low, high] = [sorted[Math.floor(at)], sorted[Math.ceil(at)]];
  return low + (high - low) * (at - Math.floor(at));
}

/** The middle one; of two, the lower. */
export const middle = (sorted) => sorted[Math.floor((sorted.length - 1) / 2)];

/**
 * A speed-up over pairs of speeds [plain, fast]: {factor, speeds, low, high, count, isCapped,
 * isDisturbed}, or null where nothing could be timed. `factor` is the median and `speeds` the pair that has it, since
 * a machine is not as fast all the time. A quarter of the pairs is below
 * `low`, a quarter above `high`; of fewer than four, none.
 *
 * A step with drafts takes at least as long as one without, so nothing is faster by more than its
 * tokens per step. Where clocks say more, they were disturbed: the figures stop there. Clocks were
 * also disturbed where the pairs differ much.
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

/** "1.84×", or "at most 1.84×" where clocks say more. */
export const factorText = ({factor, isCapped}) => `${isCapped ? "at most " : ""}${factor.toFixed(2)}×`;

/** "middle half of 7 timed pairs: 1.70× to 1.92×". */
export function spreadText({low, high, count}) {
  const half = count < FOR_QUARTERS ? "" : "middle half of ";
  return count > 1 ? `${half}${count} timed pairs: ${low.toFixed(2)}× to ${high.toFixed(2)}×` : "one timed pair";
}

/** Calls `round` with 0, 1, .. as long as there is time: once at least. */
export async function inRounds(round) {
  const begin = performance.now();
  for (let number = 0; number < MOST_ROUNDS; number++) {
    await round(number);
    const spent = performance.now() - begin;
    if (spent + spent / (number + 1) > MILLISECONDS) return;
  }
}
