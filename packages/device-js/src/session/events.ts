/** Events of a device's session, and statistics of its link. All times are milliseconds. */

export type LinkState = "connecting" | "up" | "down" | "closed";
/** Who proposed a token: the drafter, or the target itself where no draft matched. */
export type Source = "draft" | "target";
export type StopReason = "stop_token" | "stop_string" | "max_new_tokens" | "context";

/** A change of the generated text: readers replace all tokens from `start` on by `tokenIds`. */
export interface RemoteEvent {
  /** Index into the generated tokens. */
  readonly start: number;
  /** The tokens from `start` on. */
  readonly tokenIds: readonly number[];
  /** Of each of `tokenIds`. */
  readonly sources: readonly Source[];
  /** Number of tokens at the end that are not verified. */
  readonly numProvisional: number;
  /** Number of earlier provisional tokens that were removed or changed. */
  readonly numCorrected: number;
  readonly link: LinkState;
  /** The drafts that a round verified; undefined for other events. */
  readonly drafts?: readonly number[];
  /** Set on the last event of a turn. */
  readonly stopReason?: StopReason;
}

/** Verified tokens of a turn, and counts of its rounds (one round is one verification). */
export interface GenerationResult {
  readonly tokenIds: number[];
  readonly sources: Source[];
  /** Of each token, where asked for; NaN for tokens that were kept without verification. */
  readonly logprobs: number[];
  /** Tokens emitted by each round; the prompt's first token belongs to none. */
  readonly acceptLengths: number[];
  /** Drafted tokens in each round. */
  readonly drafted: number[];
  stopReason: StopReason | undefined;
  stopString: string | undefined;
  readonly seed: bigint | undefined;
}

/** Mean tokens per round; undefined without rounds. Decoding without drafts has 1. */
export function tau({ acceptLengths }: GenerationResult): number | undefined {
  const tokens = acceptLengths.reduce((sum, length) => sum + length, 0);
  return acceptLengths.length ? tokens / acceptLengths.length : undefined;
}

/** Times and counts of one verdict. */
export interface RoundTrip {
  readonly sentMs: number;
  readonly receivedMs: number;
  /** Duration of the server's pass. */
  readonly passMs: number;
  /** Drafted tokens that the server verified, and those that it did not. */
  readonly drafted: number;
  readonly dropped: number;
  readonly accepted: number;
  /** Tokens drafted while the request waited. */
  readonly ahead: number;
  /** Whether the request was sent again, after a cut or because the server was busy. */
  readonly repeated?: boolean;
}

/** Number of latest rounds whose times count. */
const NUM_LATEST = 9;
/** Rounds after which the wait of a round with drafts no longer counts. */
const MAX_WAIT_AGE = 256;
/** Rounds that are kept. */
const MAX_ROUNDS = 4096;

/** Statistics of a session's link. */
export class LinkStats {
  state: LinkState = "connecting";
  /** Round trip of heartbeats, smoothed. */
  rttMs: number | undefined;
  bytesUp = 0;
  bytesDown = 0;
  messagesUp = 0;
  messagesDown = 0;
  /** Of `bytesDown`, activations. */
  activationBytes = 0;
  /** Attempts to connect that failed since the link was up. */
  failures = 0;
  /** Times the link was lost, and times it came back. */
  cuts = 0;
  reconnects = 0;
  /** Times the server had forgotten the session. */
  reopened = 0;
  /** Tokens shown without verification, and those of them that were taken back or changed. */
  provisional = 0;
  corrected = 0;
  /** Verdicts on drafts at which the next draft was ready, or was not. */
  aheadHits = 0;
  aheadMisses = 0;
  /** From the turn's request to its first token. */
  firstTokenMs: number | undefined;
  /** Silence of the link when the last cut was noticed. */
  noticedMs: number | undefined;
  /** `now()` of the last cut, and of the last connection. */
  downMs: number | undefined;
  upMs: number | undefined;
  /** One per verdict, the latest last. */
  readonly rounds: RoundTrip[] = [];
  private readonly waits: ([number, number] | undefined)[] = [];

  addRound(round: RoundTrip): void {
    this.rounds.push(round);
    if (this.rounds.length > MAX_ROUNDS) this.rounds.shift();
    const wait: [number, number] = [round.receivedMs - round.sentMs, this.rttMs ?? 0];
    const counts = (round.drafted || round.dropped) && !round.repeated;
    this.waits.push(counts ? wait : undefined);
    if (this.waits.length > MAX_WAIT_AGE) this.waits.shift();
  }

  /** Time of the server's latest passes, the lower quartile; undefined before the first. */
  get passMs(): number | undefined {
    const latest = this.rounds.slice(-NUM_LATEST).map((round) => round.passMs);
    latest.sort((a, b) => a - b);
    return latest[latest.length >> 2];
  }

  /**
   * Time of a verdict on drafts: the median of the latest ones, which ignores outliers. Few rounds
   * draft on a slow link, so these may be old. If the round trip of heartbeats has become shorter
   * since, the difference is subtracted. Without verdicts on drafts it is that round trip plus a pass.
   */
  get waitMs(): number | undefined {
    const rttMs = this.rttMs ?? 0;
    const waits = this.waits.filter((wait) => wait !== undefined).slice(-NUM_LATEST);
    const latest = waits.map(([waitMs, thenMs]) => waitMs - Math.max(0, thenMs - rttMs));
    latest.sort((a, b) => a - b);
    if (latest.length) return latest[latest.length >> 1];
    return this.rttMs === undefined ? undefined : rttMs + (this.passMs ?? 0);
  }
}

/** The clock of all statistics, which never jumps. */
export function now(): number {
  return performance.now();
}
