/**
 * How many tokens a device drafts: the chain with the most expected tokens per second.
 *
 * n drafts, t each; R the round trip with the server's pass; A(n) expected tokens of a round, the
 * bonus token included; h the probability that a round's text is what was drafted ahead.
 *
 * Synchronous: A / (n t + R). Ahead: A / (max(n t, R) + (1 - h) n t).
 */

/** Longest chain; beyond `MAX_DEPTH` the acceptance of the last depth is assumed. */
const MAX_DRAFTS = 24;
const MAX_DEPTH = 8;
/** P(the target chooses the drafter's favourite) before anything is known of it. */
const PRIOR = 0.28;
/** Rounds that the prior counts for. */
const PRIOR_ROUNDS = 4;
/** Worth of an observation one round later: texts change, so old rounds fade. */
const MEMORY = 0.98;
/** Assumed before the first round trip and the first draft. */
const ASSUMED_WAIT_MS = 50;
const ASSUMED_STEP_MS = 10;
/** Shorter times are not believed. */
const MIN_MS = 0.1;

/** How often the target chooses the drafter's favourite, by depth. */
export class AcceptanceRates {
  private readonly hits = new Array<number>(MAX_DEPTH).fill(0);
  private readonly trials = new Array<number>(MAX_DEPTH).fill(0);

  /** Count one round: a chain of `drafted` tokens, of which `accepted` were accepted. */
  count(drafted: number, accepted: number): void {
    for (let depth = 0; depth < MAX_DEPTH; depth++) {
      const tried = depth < drafted && depth <= accepted ? 1 : 0;
      this.trials[depth] = this.trials[depth]! * MEMORY + tried;
      this.hits[depth] = this.hits[depth]! * MEMORY + (tried && depth < accepted ? 1 : 0);
    }
  }

  /** By depth: P(the target chooses the favourite), given that it chose the path to it. */
  get rates(): number[] {
    // Counts of one depth shift the expectation of all; its own counts then correct it.
    const shifted = (PRIOR_ROUNDS * PRIOR + sum(this.hits)) / (PRIOR_ROUNDS + sum(this.trials));
    return this.hits.map(
      (hits, depth) => (PRIOR_ROUNDS * shifted + hits) / (PRIOR_ROUNDS + this.trials[depth]!),
    );
  }
}

/** Chooses the number of drafts of each round. */
export class LinkPolicy {
  private readonly acceptance = new AcceptanceRates();

  /**
   * @param waitMs current time of a round trip with its pass; undefined before the first
   * @param stepMs current time of one drafted token; undefined before the first
   * @param ahead whether the device drafts while it waits for a verdict
   */
  constructor(
    private readonly waitMs: () => number | undefined,
    private readonly stepMs: () => number | undefined,
    private readonly ahead: boolean,
  ) {}

  /** Number of drafts with the most expected tokens per second. */
  numDrafts(): number {
    const speeds = this.speeds();
    return speeds.indexOf(Math.max(...speeds)) + 1;
  }

  /** Expected tokens per second of chains of 1, 2, ... drafts. */
  speeds(): number[] {
    const { rates } = this.acceptance;
    const waitMs = Math.max(this.waitMs() ?? ASSUMED_WAIT_MS, MIN_MS);
    const stepMs = Math.max(this.stepMs() ?? ASSUMED_STEP_MS, MIN_MS);
    let reached = 1;
    let tokens = 1;
    return Array.from({ length: MAX_DRAFTS }, (_, i) => {
      reached *= rates[Math.min(i, MAX_DEPTH - 1)]!;
      tokens += reached;
      const draftMs = (i + 1) * stepMs;
      const missed = 1 - reached * rates[0]!;
      const roundMs = this.ahead
        ? Math.max(draftMs, waitMs) + missed * draftMs
        : draftMs + waitMs;
      return (1000 * tokens) / roundMs;
    });
  }

  /** Update acceptance rates; see `AcceptanceRates.count`. */
  record(drafted: number, accepted: number): void {
    this.acceptance.count(drafted, accepted);
  }
}

function sum(values: readonly number[]): number {
  return values.reduce((total, value) => total + value, 0);
}
