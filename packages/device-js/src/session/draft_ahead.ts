/** Drafting ahead of the verified text, while a verdict is awaited or without a link. */
import type { Drafter } from "../bundle/onnx_drafter.js";
import type { MemoryParts } from "../protocol/activations.js";
import { MAX_WAITING_MESSAGES } from "../protocol/limits.js";
import { PositionSet } from "../protocol/position_set.js";
import { GREEDY } from "../sampling/params.js";
import type { SamplingParams } from "../sampling/params.js";
import { chooseDraft } from "../sampling/ranking.js";
import { WireError } from "../errors.js";
import { now } from "./events.js";
import { nextTask } from "./timing.js";

/** Most tokens of a text in one run of the drafter; bounds its memory. */
const READ_CHUNK = 512;
/** Most new tokens of a draft step whose time counts; reading a prompt takes longer. */
const MAX_NEW = 8;
/** Timed draft steps before `stepMs` is reliable, and the number of latest ones that count. */
const MIN_STEPS = 4;
const NUM_STEPS = 9;

/**
 * Keeps an expected text: the verified one, and the tokens that were drafted after it.
 *
 * While the target chooses the expected tokens, drafts are ready before they are needed. A draft
 * step takes several tasks, and nothing else may change the text meanwhile: `whenIdle` delays changes
 * until the step has ended.
 */
export class AheadDrafter {
  /** The verified text and the tokens drafted after it. */
  expected: number[] = [];
  /** Positions whose activations the drafter has. */
  readonly received = new PositionSet();
  sampling: SamplingParams = GREEDY;
  private readonly stepsMs: number[] = [];
  private numVerified = 0;
  private numRead = 0;
  private end = 0;
  private stops: ReadonlySet<number> = new Set();
  private isBusy = false;
  private readonly waiting: (() => void)[] = [];

  /** @param maxPositions tokens of the longest text */
  constructor(
    private readonly drafter: Drafter,
    private readonly maxPositions: number,
  ) {}

  /** Whether the drafter has activations, which it needs. */
  get canDraft(): boolean {
    return this.received.size > 0;
  }

  /** Time of one drafted token: the median of the latest; undefined before the first. */
  get stepMs(): number | undefined {
    return [...this.stepsMs].sort((a, b) => a - b)[this.stepsMs.length >> 1];
  }

  /** Whether `stepMs` is the median of too few steps to be reliable. */
  get isMeasuring(): boolean {
    return this.stepsMs.length < MIN_STEPS;
  }

  /** Tokens of the turn that come after the next one. */
  get room(): number {
    return Math.max(0, this.end - this.numVerified - 1);
  }

  /**
   * Start a turn.
   *
   * @param end length of the text at which it ends
   * @param stops tokens that end it
   */
  begin(end: number, stops: ReadonlySet<number>): void {
    this.end = Math.min(end, this.maxPositions);
    this.stops = stops;
  }

  /** Draft with the newest version of the drafter from now on; between turns only. */
  renew(): void {
    if (this.drafter.renew?.()) this.numRead = 0;
  }

  /** Call a function now, or after the draft step under way. */
  whenIdle(work: () => void): void {
    if (!this.isBusy) {
      work();
    } else if (this.waiting.push(work) > MAX_WAITING_MESSAGES) {
      throw new WireError("The server sends more messages than this device can read.");
    }
  }

  /** Store activations of verified tokens. */
  place(start: number, parts: MemoryParts): void {
    this.drafter.place(start, parts);
    this.received.add(start, start + parts.count);
  }

  /** Take over the verified text with its newest token; returns whether it was expected. */
  follow(text: readonly number[]): boolean {
    const common = commonLength(this.expected, text);
    if (common < Math.min(this.expected.length, text.length)) this.rollback(common);
    const hit = common === text.length;
    if (!hit) this.expected = [...text];
    this.numVerified = text.length;
    return hit;
  }

  /** Expected tokens after the verified text. */
  ready(): number[] {
    return this.expected.slice(this.numVerified);
  }

  /** The next `count` expected tokens, drafted if they are missing; fewer if the text ends. */
  async propose(text: readonly number[], count: number): Promise<number[]> {
    this.follow(text);
    while (this.ready().length < count && (await this.extend()));
    return this.ready().slice(0, count);
  }

  /**
   * Draft one more expected token; returns false if the text ends or nothing can be drafted.
   *
   * @param options blindly: also without any activations
   */
  async extend({ blindly = false } = {}): Promise<boolean> {
    const text = this.expected;
    const ended = this.ready().some((token) => this.stops.has(token));
    if (this.isBusy || text.length >= this.end || !(this.canDraft || blindly) || ended) return false;
    this.isBusy = true;
    const numNew = text.length - this.numRead;
    const started = now();
    try {
      text.push(await this.draft(text));
    } finally {
      this.isBusy = false;
      for (const work of this.waiting.splice(0)) work();
    }
    this.measure(now() - started, numNew);
    await nextTask();
    return true;
  }

  /** Note the time of a step that read this number of tokens. */
  private measure(tookMs: number, numNew: number): void {
    // A step with many new tokens is an upper bound of one without.
    if (numNew > MAX_NEW && !(tookMs < (this.stepMs ?? 0))) return;
    this.stepsMs.push(tookMs);
    if (this.stepsMs.length > NUM_STEPS) this.stepsMs.shift();
  }

  /** Run the drafter over the tokens that it has not read, at least the newest one. */
  private async draft(text: readonly number[]): Promise<number> {
    let start = Math.min(this.numRead, text.length - 1);
    for (; text.length - start > READ_CHUNK; start += READ_CHUNK) {
      await this.drafter.run(text.slice(start, start + READ_CHUNK), start);
    }
    const drafts = await this.drafter.run(text.slice(start), start);
    this.numRead = text.length;
    return chooseDraft(drafts, this.sampling, text.length);
  }

  /** Cut the expected text and the drafter's caches. */
  rollback(length: number): void {
    this.expected = this.expected.slice(0, length);
    this.numRead = Math.min(this.numRead, length);
    this.received.cut(length);
    this.drafter.cut(length);
  }
}

/** Length of the longest common prefix of two texts, in tokens. */
export function commonLength(a: readonly number[], b: readonly number[]): number {
  const most = Math.min(a.length, b.length);
  let common = 0;
  while (common < most && a[common] === b[common]) common++;
  return common;
}
