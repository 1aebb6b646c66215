import { gumbel } from "./noise.js";
import type { SamplingParams } from "./params.js";

/** Factor of the drafter's log-probabilities; see `moaspec_core/drafting/draft_noise.py`. */
const SHARPNESS = 1.75;
/** Smallest temperature that is used. */
const COLDEST = 1e-200;

/** The drafter's most probable next tokens, the best first. */
export interface Drafts {
  readonly tokenIds: readonly number[];
  readonly logQ: ArrayLike<number>;
}

/**
 * Choose the token to draft: at temperature 0 the most probable one. Above it the target adds noise
 * to its scores, so the same noise is added here.
 *
 * @param position of the drafted token in its text
 */
export function chooseDraft(drafts: Drafts, sampling: SamplingParams, position: number): number {
  if (sampling.temperature === 0) return drafts.tokenIds[0]!;
  const factor = SHARPNESS / Math.max(sampling.temperature, COLDEST);
  const scores = Array.from(drafts.logQ, (logQ) => logQ * factor);
  const threshold = survivorThreshold(scores, sampling);
  const key = { seed: sampling.seed ?? 0n, choice: sampling.choice };
  let best = 0;
  let bestScore = Number.NEGATIVE_INFINITY;
  drafts.tokenIds.forEach((tokenId, i) => {
    const score = scores[i]! + gumbel(key, position, tokenId);
    if (scores[i]! >= threshold && score > bestScore) [best, bestScore] = [i, score];
  });
  return drafts.tokenIds[best]!;
}

/** Least score that top-k, top-p and min-p keep; `scores` descend. */
function survivorThreshold(scores: readonly number[], sampling: SamplingParams): number {
  let kept = scores.length;
  if (sampling.topK) kept = Math.min(kept, sampling.topK);
  if (sampling.topP < 1) {
    const weights = scores.slice(0, kept).map((score) => Math.exp(score - scores[0]!));
    const mass = sampling.topP * weights.reduce((sum, weight) => sum + weight, 0);
    let before = 0;
    let within = 0;
    while (within < kept && before < mass) before += weights[within++]!;
    kept = Math.max(1, within);
  }
  const minimum = sampling.minP ? scores[0]! + Math.log(sampling.minP) : Number.NEGATIVE_INFINITY;
  return Math.max(scores[kept - 1]!, minimum);
}
