/**
 * Verifies drafts on a server. A request is repeated until it is answered, also after cuts of the
 * link: answers depend on the text alone, so repetitions change nothing.
 */
import { LinkError, RefusedError, WireError } from "../errors.js";
import type { ActivationLayout } from "../protocol/activations.js";
import { AVOID_MS, BUSY_MS } from "../protocol/fleet.js";
import { MAX_DRAFTED, MAX_STREAMED } from "../protocol/limits.js";
import { Problem_Kind } from "../protocol/target_pb.js";
import type { Activations, Problem, ServerMessage, Verdict } from "../protocol/target_pb.js";
import { oneLine, rangeMessages } from "../protocol/wire.js";
import type { OpenFields, SamplingFields } from "../protocol/wire.js";
import { commonLength } from "./draft_ahead.js";
import type { AheadDrafter } from "./draft_ahead.js";
import { now } from "./events.js";
import type { ServerLink } from "./link.js";
import { nextTask, WakeUp } from "./timing.js";

/** A waiting request checks its link at least this often. */
const POLL_MS = 250;
/** Limit of times that a server states. */
const MAX_SERVER_MS = 30_000;
/** First and longest pause before a request that the server did not verify is repeated. */
const FIRST_PAUSE_MS = 50;
const MAX_PAUSE_MS = 2000;
/** Missing activations are requested after this multiple of `retryMs` without any. */
const FETCH_AFTER = 2;

/** A request to verify drafts after the last token of a text. */
export interface VerifyRequest {
  readonly text: readonly number[];
  readonly promptLength: number;
  readonly drafts: readonly number[];
  /** Whether this is the first request of a turn. */
  readonly isFirst: boolean;
  /** Whether log-probabilities are asked for. */
  readonly logprobs: boolean;
  readonly sampling: SamplingFields;
}

/** The target's choices after the request's text. */
export interface VerifyResult {
  /** Accepted drafts, and the bonus token. */
  readonly tokens: readonly number[];
  /** The drafts that were verified. */
  readonly drafts: readonly number[];
  readonly logprobs: readonly number[];
  /** Whether the request sent drafts, and only once. */
  readonly counts: boolean;
}

/** A request that waits for its verdict. */
export interface PendingRequest {
  readonly request: VerifyRequest;
  /** Whether it opens a turn. */
  opening: boolean;
  /** The drafts that were sent last. */
  drafts: readonly number[];
  /** Provisional tokens that became part of the text without verification. */
  kept: readonly number[];
  /** Whether the link was lost since the request was made. */
  resent: boolean;
  /** Whether the verdict of a later request came first. */
  overtaken: boolean;
  /** Number of times that the server did not verify it. */
  putOff: number;
  /** Time of the first message, and of the next repetition. */
  readonly firstMs: number;
  dueMs: number;
  result: VerifyResult | undefined;
}

/** The parts and settings of a verifier. */
export interface VerifierOptions {
  readonly ahead: AheadDrafter;
  readonly layout: ActivationLayout;
  readonly vocabSize: number;
  readonly maxPositions: number;
  /** The fields that all `Open` messages of the session share. */
  readonly opening: OpenFields;
  /** Whether provisional tokens stay; otherwise they are drafts. */
  readonly keep: boolean;
  /** As in `RemoteOptions`. */
  readonly retryMs: number;
  /** Drafts one step while a verdict is awaited; returns whether to call it again at once. */
  readonly meanwhile: (pending: PendingRequest) => Promise<boolean>;
  /** Number of rounds without drafts that will follow one without drafts. */
  readonly numStreamed: () => number;
  /** Called with each draft of a streamed token: whether it was right. */
  readonly observe: (isRight: boolean) => void;
}

/** Verifies the drafts of one text. */
export class RemoteVerifier {
  /** Set by the session. */
  link!: ServerLink;
  /** The verified text. */
  text: number[] = [];
  /** Tokens that were shown without verification. */
  provisional: number[] = [];
  turn = 0;
  /** Most tokens that the server streams after a request, in this turn. */
  maxStreamed = 0;
  /** Whether this turn sends no drafts, even after a cut. */
  neverDrafts = false;
  /** Length up to which the server streams tokens in this turn. */
  private streamed = 0;
  /** Verdicts that are not asked for yet, by base. */
  private readonly early = new Map<number, Verdict>();
  /** The server's text, if known. */
  private committed: number[] | undefined;
  private pending: PendingRequest | undefined;
  private readonly wakeUp = new WakeUp();
  private placedMs = 0;
  private askedMs = 0;

  constructor(private readonly options: VerifierOptions) {}

  /**
   * Verify a request on the server.
   *
   * @throws RefusedError the server refuses the session
   * @throws WireError the server's answer is invalid
   * @throws LinkError the signal ends the request
   */
  async verify(request: VerifyRequest, signal: AbortSignal): Promise<VerifyResult> {
    this.text = [...request.text];
    const opening = request.isFirst || !equal(this.text, this.committed);
    this.turn += opening ? 1 : 0;
    this.options.ahead.follow(this.text);
    const pending: PendingRequest = {
      request,
      opening,
      drafts: request.drafts,
      kept: [],
      resent: false,
      overtaken: false,
      putOff: 0,
      firstMs: now(),
      dueMs: 0,
      result: undefined,
    };
    this.pending = pending;
    try {
      this.send();
      this.takeEarly();
      return await this.answer(pending, signal);
    } finally {
      this.pending = undefined;
    }
  }

  /** Handle the verdict on the waiting request, if it has come. */
  private takeEarly(): void {
    const { length } = this.text;
    const verdict = this.early.get(length);
    this.early.delete(length);
    if (verdict) this.onVerdict(verdict);
  }

  /** Wait for the verdict; draft meanwhile, and repeat the request when it is due. */
  private async answer(pending: PendingRequest, signal: AbortSignal): Promise<VerifyResult> {
    await nextTask();
    while (!pending.result) {
      if (signal.aborted) throw new LinkError("The turn was ended.");
      if (this.link.refused) throw this.link.refused;
      const isUp = this.link.stats.state === "up";
      if (isUp && now() >= pending.dueMs) this.send();
      this.fetchMissing();
      if (await this.options.meanwhile(pending)) await nextTask();
      else if (!pending.result) await this.wait(isUp ? pending.dueMs - now() : POLL_MS);
    }
    return pending.result;
  }

  private wait(timeoutMs: number): Promise<void> {
    return this.wakeUp.wait(Math.min(Math.max(10, timeoutMs), POLL_MS));
  }

  /** Let a waiting request check its state. */
  wake(): void {
    this.wakeUp.set();
  }

  /** Resume the session on a new connection, and repeat the waiting request. */
  connected(): void {
    const { pending } = this;
    if (this.committed && !pending?.opening) {
      const received = rangeMessages(this.options.ahead.received.ranges());
      this.link.send(this.turn, { case: "resume", value: { base: this.committed.length, held: received } });
    }
    if (pending) {
      pending.resent = true;
      if (this.options.keep && this.provisional.length) this.keepProvisional(pending);
    }
    this.send();
    this.wake();
  }

  /** Add the provisional tokens to the text. */
  private keepProvisional(pending: PendingRequest): void {
    pending.kept = [...this.provisional];
    pending.opening = true;
    this.turn += 1;
  }

  /** End a turn with its provisional tokens, without asking the server. */
  settle(): void {
    const { pending, provisional } = this;
    if (!pending || pending.result) return;
    this.committed = undefined; // the server does not have these tokens
    pending.resent = true;
    pending.kept = provisional.slice(0, -1);
    this.resolve(pending, provisional.slice(-1), []);
  }

  /** Send the waiting request in its current form. */
  private send(): void {
    const { pending } = this;
    if (!pending || pending.result) return;
    pending.dueMs = now() + this.dueInMs();
    if (!pending.opening) {
      pending.drafts = this.drafts(pending);
      const base = this.text.length;
      const most = Math.min(this.maxStreamed, MAX_STREAMED, this.options.ahead.room);
      const numStreamed = pending.drafts.length ? 0 : Math.min(this.options.numStreamed(), most);
      if (numStreamed) this.streamed = Math.max(this.streamed, base + 1 + numStreamed);
      const value = { base, tokens: [...pending.drafts], further: numStreamed };
      this.link.send(this.turn, { case: "draft", value });
      return;
    }
    this.streamed = 0;
    this.early.clear();
    const { request } = pending;
    const value: OpenFields = {
      ...this.options.opening,
      sampling: request.sampling,
      promptLength: request.promptLength,
      tokenIds: [...this.text, ...pending.kept],
      held: rangeMessages(this.options.ahead.received.ranges()),
    };
    this.link.send(this.turn, { case: "open", value });
  }

  /** Have the server stream no more tokens, because the turn has ended. */
  halt(): void {
    if (this.streamed <= this.text.length) return;
    // A request that has been answered is answered again without a pass.
    this.link.send(this.turn, { case: "draft", value: { base: this.text.length - 1 } });
  }

  private dueInMs(): number {
    const { stats } = this.link;
    const passMs = stats.rounds.at(-1)?.passMs ?? 0;
    return Math.max(this.options.retryMs, 4 * (stats.rttMs ?? 0) + 4 * passMs);
  }

  /** The request's drafts; after a cut, the drafts made since, if they are longer. */
  private drafts(pending: PendingRequest): readonly number[] {
    const ready = this.options.ahead.ready().slice(0, MAX_DRAFTED);
    const { drafts } = pending.request;
    const isReplaced = pending.resent && ready.length > drafts.length && !this.neverDrafts;
    return isReplaced ? ready : drafts;
  }

  /** Request activations that must have been lost. */
  private fetchMissing(): void {
    const { stats } = this.link;
    const waitedMs = Math.min(now() - this.placedMs, now() - this.askedMs);
    const late = waitedMs > FETCH_AFTER * this.options.retryMs && stats.state === "up";
    if (!late || !this.committed) return;
    const gaps = this.options.ahead.received.gaps(this.committed.length - 1);
    if (!gaps.length) return;
    this.askedMs = now();
    this.link.send(this.turn, { case: "fetch", value: { ranges: rangeMessages(gaps) } });
  }

  /**
   * Handle a message of the server. Messages of earlier turns are ignored; a problem without a turn
   * concerns the connection or the whole session.
   *
   * @throws WireError an invalid message
   */
  receive(message: ServerMessage): void {
    const { kind, turn } = message;
    const ofNoTurn = kind.case === "problem" && turn === 0;
    if (turn !== this.turn && !ofNoTurn) return;
    if (kind.case === "verdict") this.onVerdict(kind.value);
    else if (kind.case === "activations") this.onActivations(kind.value);
    else if (kind.case === "problem") this.onProblem(kind.value);
  }

  private onVerdict(verdict: Verdict): void {
    const pending = this.pending?.result ? undefined : this.pending;
    if (verdict.base >= this.text.length + (pending ? 1 : 0) && verdict.base < this.streamed) {
      this.early.set(verdict.base, verdict);
      if (pending && !pending.overtaken) {
        pending.overtaken = true; // its own verdict is lost
        pending.dueMs = 0;
        this.wake();
      }
      return;
    }
    if (pending) {
      const text = [...this.text, ...pending.kept];
      const skip = text.length - verdict.base;
      if (skip < 0) {
        throw new WireError(
          `The server has ${verdict.base} tokens of the text; the device has ${text.length}.`,
        );
      }
      if (skip < verdict.tokens.length) {
        if (!equal(verdict.tokens.slice(0, skip), text.slice(verdict.base))) {
          this.reopen(pending);
          return;
        }
        this.check(pending, verdict);
        this.maxStreamed = verdict.maxFurther;
        this.putOffStreamed(pending, verdict, skip);
        const tokens = verdict.tokens.slice(skip);
        this.committed = [...text, ...tokens];
        const firstDropped = verdict.base === text.length ? verdict.dropped[0] : undefined;
        this.resolve(pending, tokens, verdict.logprobs.slice(skip), firstDropped);
        this.note(pending, verdict.passS);
      }
    }
    if (verdict.activations) this.onActivations(verdict.activations);
  }

  /** Cut a verdict after the tokens that this round can emit; keep the rest for later requests. */
  private putOffStreamed(pending: PendingRequest, verdict: Verdict, skip: number): void {
    const path = verdict.tokens.slice(skip, -1);
    const sent = [pending.request.drafts, pending.drafts];
    const stop = skip + 1 + Math.max(...sent.map((drafts) => commonLength(drafts, path)));
    if (pending.kept.length || stop === verdict.tokens.length) return;
    const base = verdict.base + stop;
    const [tokens, logprobs] = [verdict.tokens.slice(stop), verdict.logprobs.slice(stop)];
    this.early.set(base, { ...verdict, base, tokens, logprobs, dropped: [] });
    verdict.tokens = verdict.tokens.slice(0, stop);
    verdict.logprobs = verdict.logprobs.slice(0, stop);
    delete verdict.activations;
  }

  private check(pending: PendingRequest, { base, tokens, logprobs }: Verdict): void {
    const { maxPositions, vocabSize } = this.options;
    if (base + tokens.length > maxPositions) {
      throw new WireError(`The server sent a text beyond ${maxPositions} tokens.`);
    }
    if (tokens.some((token) => token >= vocabSize)) {
      throw new WireError(`The server sent a token outside 0..${vocabSize - 1}.`);
    }
    const asked = pending.request.logprobs ? tokens.length : 0;
    if (logprobs.length !== asked) {
      throw new WireError(
        `The server sent ${logprobs.length} log-probabilities where ${asked} were due.`,
      );
    }
  }

  /** Resolve a request with the tokens that follow its text and its kept tokens. */
  private resolve(
    pending: PendingRequest,
    tokens: readonly number[],
    logprobs: readonly number[],
    firstDropped?: number,
  ): void {
    const all = [...pending.kept, ...tokens];
    const path = all.slice(0, -1);
    // Drafts that a loaded server did not verify are neither right nor wrong. They end the chain that
    // it decided; a chain that was sent before or after that one begins with the same drafts.
    const sent = [pending.request.drafts, pending.drafts];
    const chains = sent.map((drafts) => drafts.slice(0, firstDropped));
    // Kept tokens are in no request.
    const chain = [...chains, path].find((drafts) => commonLength(drafts, path) === path.length)!;
    const unknown = new Array<number>(pending.kept.length).fill(Number.NaN);
    pending.result = {
      tokens: all,
      drafts: chain,
      logprobs: logprobs.length ? [...unknown, ...logprobs] : [],
      counts: pending.drafts.length > 0 && !pending.opening && !isRepeated(pending),
    };
    this.wake();
    this.text = [...this.text, ...all];
    const { ahead } = this.options;
    const [expected] = ahead.ready();
    const ready = ahead.follow(this.text) && ahead.ready().length > 0;
    const drafted = chain.length || pending.drafts.length;
    if (pending.opening) return;
    if (expected !== undefined && all.length === 1 && !drafted) this.options.observe(expected === all[0]);
    if (!drafted) return;
    if (ready) this.link.stats.aheadHits += 1;
    else this.link.stats.aheadMisses += 1;
  }

  private note(pending: PendingRequest, passS: number): void {
    const drafted = pending.opening ? 0 : pending.result!.drafts.length;
    this.link.stats.addRound({
      sentMs: pending.firstMs,
      receivedMs: now(),
      passMs: believed(1000 * passS),
      drafted,
      dropped: pending.opening ? 0 : Math.max(0, pending.drafts.length - drafted),
      accepted: pending.result!.tokens.length - 1 - pending.kept.length,
      ahead: this.options.ahead.ready().length,
      repeated: isRepeated(pending),
    });
  }

  /** Store activations, if their tokens are known to be verified. */
  private onActivations({ start, count, data }: Activations): void {
    this.link.stats.activationBytes += data.length;
    if (start + count > this.text.length) return;
    const parts = this.options.layout.decode(data, count);
    if (count) this.options.ahead.place(start, parts);
    this.placedMs = now();
    this.wake();
  }

  /** Open the turn again, because the server's text differs. */
  private reopen(pending: PendingRequest): void {
    this.link.stats.reopened += 1;
    pending.opening = true;
    this.turn += 1;
    pending.dueMs = now() + pauseMs(pending);
    if (pending.putOff === 1) this.send();
  }

  private onProblem({ kind, message, retryS }: Problem): void {
    const { pending } = this;
    if (kind === Problem_Kind.REFUSED) {
      this.link.refuse(new RefusedError(`The server refuses: ${oneLine(message)}`));
    } else if (kind === Problem_Kind.DRAINING) {
      this.link.leave(AVOID_MS, true);
    } else if (kind === Problem_Kind.BUSY && pending) {
      pending.dueMs = now() + Math.max(believed(1000 * retryS), pauseMs(pending));
      this.link.leave(BUSY_MS, false);
    } else if (kind === Problem_Kind.LOST) {
      this.committed = undefined;
      if (pending && !pending.result) this.reopen(pending);
    }
    this.wake();
  }
}

/** Whether a request was sent again, after a cut or because the server did not verify it. */
function isRepeated({ resent, putOff }: PendingRequest): boolean {
  return resent || putOff > 0;
}

/** Pause before a request that the server did not verify is repeated; it doubles each time. */
function pauseMs(pending: PendingRequest): number {
  pending.putOff += 1;
  return Math.min(FIRST_PAUSE_MS * 2 ** Math.min(pending.putOff - 2, 16), MAX_PAUSE_MS);
}

/** Clamp a time that a server states, which may be infinite or not a number. */
function believed(ms: number): number {
  return ms >= 0 && ms <= MAX_SERVER_MS ? ms : MAX_SERVER_MS;
}

function equal(a: readonly number[], b: readonly number[] | undefined): boolean {
  return b !== undefined && a.length === b.length && commonLength(a, b) === a.length;
}
