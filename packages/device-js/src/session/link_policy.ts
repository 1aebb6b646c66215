/**
 * How many tokens a device drafts: the chain with the most expected tokens per second, or none.
 *
 * n drafts, t each; R the round trip with the server's pass; A(n) expected tokens of a round, the
 * bonus token included; h the probability that a round's text is what was drafted ahead.
 *
 * Synchronous: A / (n t + R). Ahead: A / (max(n t, R) + (1 - h) n t). Without drafts, tokens are
 * streamed: 1 / pass.
 */

import { MAX_STREAMED } from "../protocol/limits.js";

/** Longest chain; beyond `MAX_DEPTH` the acceptance of the last depth is assumed. */
const MAX_DRAFTS = 24;
const MAX_DEPTH = 8;
/** Assumed P(the target chooses the drafter's favourite) at first, measured for the bundled drafters' chains. */
const PRIOR = 0.5;
/** Rounds that the prior counts for. */
const PRIOR_ROUNDS = 4;
/** Weight of an observation one round later, as texts change. */
const MEMORY = 0.98;
/** Times assumed before the first round trip and the first draft step. */
const ASSUMED_WAIT_MS = 50;
const ASSUMED_STEP_MS = 10;
/**
 * Time, beyond a round trip, for which the server streams without a new request, so that a lost packet
 * or the first draft step does not stop the stream.
 */
const STREAM_SLACK_MS = 250;
/** Streamed tokens that are drafted too: all of the first ones, then a part, to save energy. */
const NUM_OBSERVED = 16;
const OBSERVED_EVERY = 4;
/** Least expected speed-up for which a device begins to draft, which costs a round trip. */
const MIN_GAIN = 1.05;
/** The budget of drafts: tokens that they may cost at first, and more for each streamed token. Gains are added. */
const FIRST_LOSS = 1.5;
const LOSS_PER_TOKEN = 0.005;
/** Most time of a draft step, relative to that of a streamed token, for tokens to be observed. */
const MAX_STEP_SHARE = 0.8;
/** Largest budget, in tokens. */
const MAX_BUDGET = 16;
/** Rates of drafts that are never wrong. */
const ALL_RIGHT = new Array<number>(MAX_DEPTH).fill(1);
/** Least time that is used; shorter ones are raised to it. */
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
    // Counts of all depths shift the prior; the counts at each depth then correct it.
    const shifted = (PRIOR_ROUNDS * PRIOR + sum(this.hits)) / (PRIOR_ROUNDS + sum(this.trials));
    return this.hits.map(
      (hits, depth) => (PRIOR_ROUNDS * shifted + hits) / (PRIOR_ROUNDS + this.trials[depth]!),
    );
  }
}

/** Expected tokens of a round with some number of drafts, and its time. */
interface Round {
  readonly tokens: number;
  readonly roundMs: number;
}

/**
 * Chooses the number of drafts of each round. A device begins without drafts. While tokens are streamed,
 * it drafts the next one and compares: this takes no round trip, and shows the time of a draft step and
 * the acceptance.
 */
export class LinkPolicy {
  /**
   * Rounds without drafts that the server streams after the current one. Each such round sets it anew;
   * once drafts pay, it counts down to their start.
   */
  pause = 0;
  private numPlain = 0;
  private budget = FIRST_LOSS;
  /** Of the newest round with drafts, in tokens. */
  private cost = 1;
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

  /**
   * Whether to draft the token that is streamed. A step must fit well between two tokens, and drafts
   * must pay if all of them are right.
   */
  get observes(): boolean {
    if (this.numPlain === 1) return false; // the request that begins the stream goes out first
    const [stepMs, plainMs] = [this.stepMs(), this.plainMs()];
    if (this.measuring() || stepMs === undefined || plainMs === undefined) return true;
    const isDue = this.numPlain <= NUM_OBSERVED || this.numPlain % OBSERVED_EVERY === 0;
    if (!isDue || stepMs >= MAX_STEP_SHARE * plainMs) return false;
    return Math.max(...this.speeds(ALL_RIGHT)) * plainMs >= 1000 * MIN_GAIN;
  }

  /** Number of drafts with the most expected tokens per second; 0 if plain decoding is faster. */
  numDrafts(): number {
    const knownMs = this.plainMs();
    const rounds = this.rounds(this.acceptance.rates);
    const speeds = rounds.map(({ tokens, roundMs }) => tokens / roundMs);
    const best = speeds.indexOf(Math.max(...speeds));
    if (knownMs === undefined) return best + 1;
    const plainMs = Math.max(knownMs, MIN_MS);
    const isKnown = this.stepMs() !== undefined && !this.measuring();
    const gain = speeds[best]! * plainMs;
    const pays = isKnown && this.budget > 0 && gain >= (this.pause ? MIN_GAIN : 1);
    if (pays && !this.pause) {
      // Before the first drafts the server waits for a round trip.
      const beginsMs = this.numPlain ? this.knownWaitMs - plainMs : 0;
      this.cost = (rounds[best]!.roundMs + beginsMs) / plainMs;
      this.numPlain = 0;
      return best + 1;
    }
    this.numPlain += 1;
    this.add(LOSS_PER_TOKEN);
    if (pays) {
      this.pause -= 1; // tokens that are already asked for come first
    } else {
      this.pause = Math.min(Math.ceil((this.knownWaitMs + STREAM_SLACK_MS) / plainMs), MAX_STREAMED);
    }
    return 0;
  }

  /** Expected tokens per second of chains of 1, 2, ... drafts; `rates`: of acceptance. */
  speeds(rates = this.acceptance.rates): number[] {
    return this.rounds(rates).map(({ tokens, roundMs }) => (1000 * tokens) / roundMs);
  }

  /** Expected speed of the best chain, relative to streaming without drafts; undefined until both are measured. */
  get gain(): number | undefined {
    const plainMs = this.plainMs();
    if (plainMs === undefined || this.stepMs() === undefined || this.measuring()) return undefined;
    return (Math.max(...this.speeds()) * Math.max(plainMs, MIN_MS)) / 1000;
  }

  private get knownWaitMs(): number {
    return Math.max(this.waitMs() ?? ASSUMED_WAIT_MS, MIN_MS);
  }

  private rounds(rates: readonly number[]): Round[] {
    const waitMs = this.knownWaitMs;
    const stepMs = Math.max(this.stepMs() ?? ASSUMED_STEP_MS, MIN_MS);
    let reached = 1;
    let tokens = 1;
    return Array.from({ length: MAX_DRAFTS }, (_, i) => {
      reached *= rates[Math.min(i, MAX_DEPTH - 1)]!;
      tokens += reached;
      const draftMs = (i + 1) * stepMs;
      const missed = 1 - reached * rates[0]!;
      const roundMs = this.ahead ? Math.max(draftMs, waitMs) + missed * draftMs : draftMs + waitMs;
      return { tokens, roundMs };
    });
  }

  /** Count a round that sent drafts; `drafted` are those that the server did not drop. */
  record(drafted: number, accepted: number): void {
    if (drafted) this.acceptance.count(drafted, accepted);
    this.add(accepted + 1 - this.cost);
  }

  /** Add to the budget; outliers do not forbid drafts for long. */
  private add(tokens: number): void {
    this.budget = Math.min(Math.max(this.budget + tokens, -FIRST_LOSS), MAX_BUDGET);
  }

  /** Count a draft of a token that the server streamed. */
  observe(isRight: boolean): void {
    this.acceptance.count(1, isRight ? 1 : 0);
  }
}

function sum(values: readonly number[]): number {
  return values.reduce((total, value) => total + value, 0);
}
