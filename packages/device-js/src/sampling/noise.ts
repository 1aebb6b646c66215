/**
 * Positional noise: a random number for each token, from a text's seed, choice and position. It has
 * no state, and its bits equal those of the server (`moaspec/sampling/noise.py`).
 */

const MULTIPLIERS = [0xd2511f53, 0xcd9e8d57] as const;
const KEY_STEPS = [0x9e3779b9, 0xbb67ae85] as const;
const ROUNDS = 10;

/** Four words of 32 bits. */
export type Words = readonly [number, number, number, number];

/**
 * Philox4x32-10: the block of four words of a counter.
 *
 * Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011).
 */
export function philox(counter: Words, key: readonly [number, number]): Words {
  let [c0, c1, c2, c3] = counter;
  let [k0, k1] = key;
  for (let round = 0; round < ROUNDS; round++) {
    const high0 = highWord(c0, MULTIPLIERS[0]);
    const low0 = Math.imul(c0, MULTIPLIERS[0]) >>> 0;
    const high1 = highWord(c2, MULTIPLIERS[1]);
    const low1 = Math.imul(c2, MULTIPLIERS[1]) >>> 0;
    [c0, c1, c2, c3] = [(high1 ^ c1 ^ k0) >>> 0, low1, (high0 ^ c3 ^ k1) >>> 0, low0];
    k0 = (k0 + KEY_STEPS[0]) >>> 0;
    k1 = (k1 + KEY_STEPS[1]) >>> 0;
  }
  return [c0, c1, c2, c3];
}

/** The upper 32 bits of a product of two words. */
function highWord(a: number, b: number): number {
  const aLow = a & 0xffff;
  const aHigh = a >>> 16;
  const bLow = b & 0xffff;
  const bHigh = b >>> 16;
  const middle = aHigh * bLow + ((aLow * bLow) >>> 16);
  const other = aLow * bHigh + (middle & 0xffff);
  return (aHigh * bHigh + (middle >>> 16) + (other >>> 16)) >>> 0;
}

/** The values that determine the noise of a text. */
export interface NoiseKey {
  /** 0 .. 2^64 - 1 */
  readonly seed: bigint;
  /** Which of several continuations of one prompt. */
  readonly choice: number;
}

/**
 * A number in the open interval (0, 1), of 53 bits.
 *
 * @param key of the text
 * @param position index of the token in its text
 * @param tokenId of the token
 */
export function uniform(key: NoiseKey, position: number, tokenId: number): number {
  const low = Number(key.seed & 0xffffffffn);
  const high = Number((key.seed >> 32n) & 0xffffffffn);
  const [first, second] = philox([tokenId, position, key.choice, 0], [low, high]);
  return (first * 2 ** 21 + ((second >>> 11) | 1)) * 2 ** -53;
}

/**
 * Gumbel noise; arguments as for `uniform`. The argmax over tokens of log-probability plus noise is
 * a sample of the distribution.
 */
export function gumbel(key: NoiseKey, position: number, tokenId: number): number {
  return -Math.log(-Math.log(uniform(key, position, tokenId)));
}
