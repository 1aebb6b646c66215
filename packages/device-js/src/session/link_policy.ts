/**
 * How many tokens a device drafts: the chain with the most expected tokens per second, or none.
 *
 * n drafts, t each; R the round trip with the server's pass; A(n) expected tokens of a round, the
 * bonus token included; h the probability that a round's text is what was drafted ahead.
 *
 * Synchronous: A / (n t + R). Ahead: A / (max(n t, R) + (1 - h) n t). Without drafts, tokens are
 * streamed: 1 / pass.
 */

import { MAX_FURTHER } from "../protocol/limits.js";

/** Longest chain; beyond `MAX_DEPTH` the acceptance of the last depth is assumed. */
const MAX_DRAFTS = 24;
const MAX_DEPTH = 8;
/** P(the target chooses the drafter's favourite) before anything is known: the bundled drafters' chains. */
const PRIOR = 0.5;
/** Rounds that the prior counts for. */
const PRIOR_ROUNDS = 4;
/** Worth of an observation one round later: texts change, so old rounds fade. */
const MEMORY = 0.98;
/** Assumed before the first round trip and the first draft. */
const ASSUMED_WAIT_MS = 50;
const ASSUMED_STEP_MS = 10;
/** Rounds without drafts before drafts are tried again. */
const MIN_PAUSE = 4;
const MAX_PAUSE = 4096;
/** Most pauses of `2 * MIN_PAUSE` rounds for further measurements, once a draft step is known. */
const MAX_MEASURING = 2;
/**
 * Share of plain decoding's time that these trials may cost; the length of pauses follows. Trials that
 * take more than 20 rounds' time cost more, because of `MAX_PAUSE`.
 */
const MAX_LOSS = 0.005;
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

/** Expected tokens of a round with some number of drafts, and per second. */
interface Expected {
  readonly tokens: number;
  readonly speed: number;
}

/**
 * Chooses the number of drafts of each round. After each pause without drafts one round drafts, because
 * acceptance and times change; a pause ends early where drafts would pay by now. A device begins with a
 * pause, in which it measures its draft steps while tokens are streamed.
 */
export class LinkPolicy {
  /** Rounds without drafts that follow the current one. */
  pause = 0;
  private paused = false;
  private mayMeasure = MAX_MEASURING;
  private readonly acceptance = new AcceptanceRates();

  /**
   * @param waitMs current time of a round trip with its pass; undefined before the first
   * @param stepMs current time of one drafted token; undefined before the first
   * @param ahead whether the device drafts while it waits for a verdict
   * @param plainMs current time of a token without drafts; undefined has every round draft
   * @param measuring whether `stepMs` rests on too few steps to decide by it
   */
  constructor(
    private readonly waitMs: () => number | undefined,
    private readonly stepMs: () => number | undefined,
    private readonly ahead: boolean,
    private readonly plainMs: () => number | undefined = () => undefined,
    private readonly measuring: () => boolean = () => false,
  ) {}

  /** Number of drafts with the most expected tokens per second; 0 where plain decoding has more. */
  numDrafts(): number {
    const plainMs = this.plainMs();
    if (this.pause) {
      this.pause -= 1;
      const isDue = this.pause >= MAX_FURTHER && this.pause % MAX_FURTHER === 0;
      if (isDue && Math.max(...this.speeds()) * (plainMs ?? 0) >= 1000) {
        this.pause = MAX_FURTHER - 1; // tokens that are already asked for come first
      }
      return 0;
    }
    if (plainMs !== undefined && this.mustMeasure()) {
      this.pause = 2 * MIN_PAUSE - 1; // each pause ends with a round trip
      return 0;
    }
    const expected = this.expected();
    const speeds = expected.map(({ speed }) => speed);
    const best = speeds.indexOf(Math.max(...speeds));
    const { tokens, speed } = expected[best]!;
    if (plainMs === undefined || this.paused || speed * plainMs >= 1000) {
      this.paused = false;
      return best + 1;
    }
    // The round after a trial waits for a round trip, as tokens are not streamed yet.
    const trialMs = (1000 * tokens) / speed + this.knownWaitMs;
    const rounds = Math.ceil((trialMs / plainMs - tokens - 1) / MAX_LOSS);
    this.pause = Math.min(Math.max(rounds, MIN_PAUSE), MAX_PAUSE) - 1;
    this.paused = true;
    return 0;
  }

  /** Whether the device should measure draft steps before it decides. */
  private mustMeasure(): boolean {
    if (this.stepMs() === undefined) return true;
    if (!this.measuring() || !this.mayMeasure) return false;
    this.mayMeasure -= 1;
    return true;
  }

  /** Expected tokens per second of chains of 1, 2, ... drafts. */
  speeds(): number[] {
    return this.expected().map(({ speed }) => speed);
  }

  private get knownWaitMs(): number {
    return Math.max(this.waitMs() ?? ASSUMED_WAIT_MS, MIN_MS);
  }

  private expected(): Expected[] {
    const { rates } = this.acceptance;
    const waitMs = this.knownWaitMs;
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
      return { tokens, speed: (1000 * tokens) / roundMs };
    });
  }

  /** Update acceptance rates, if there were drafts; see `AcceptanceRates.count`. */
  record(drafted: number, accepted: number): void {
    if (drafted) this.acceptance.count(drafted, accepted);
  }
}

function sum(values: readonly number[]): number {
  return values.reduce((total, value) => total + value, 0);
}
