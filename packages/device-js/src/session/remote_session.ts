/** The device's session: drafts here, verifies on a server. */
import type { Device } from "../device.js";
import { InputError, LinkError } from "../errors.js";
import { ActivationLayout, CODEC_NUMBERS } from "../protocol/activations.js";
import { MAX_STREAMED } from "../protocol/limits.js";
import type { ServerMessage } from "../protocol/target_pb.js";
import { Fleet } from "../protocol/fleet.js";
import type { Route } from "../protocol/fleet.js";
import type { Transport } from "../protocol/transport.js";
import { SESSION_BYTES, targetMessage } from "../protocol/wire.js";
import { AheadDrafter, commonLength } from "./draft_ahead.js";
import { LinkStats, now } from "./events.js";
import type { GenerationResult, RemoteEvent, Source } from "./events.js";
import { ServerLink } from "./link.js";
import { LinkPolicy } from "./link_policy.js";
import { checkDraft, remoteOptions } from "./options.js";
import type { RemoteOptions, SessionOptions, TurnOptions } from "./options.js";
import { RemoteVerifier } from "./remote_verifier.js";
import type { PendingRequest } from "./remote_verifier.js";
import type { StopStrings } from "./stop_strings.js";
import { EventQueue } from "./timing.js";
import { Turn } from "./turn.js";
import type { Emitted } from "./turn.js";

/** A text's beginning, and the activations of its tokens as `MemoryParts` has them. */
export interface Prefix {
  readonly tokenIds: readonly number[];
  readonly key: Float32Array;
  readonly value: Float32Array;
}

/**
 * Decodes turns with a target on a server. Every turn passes the whole conversation so far; the
 * prefix that it shares with the last turn is neither computed nor sent again. One turn at a time.
 */
export class RemoteSession {
  /** Of the link. */
  readonly stats = new LinkStats();
  readonly options: RemoteOptions;
  private readonly ahead: AheadDrafter;
  private readonly verifier: RemoteVerifier;
  private readonly route: Route;
  private readonly link: ServerLink;
  private turn: Turn | undefined;
  private readonly auto: LinkPolicy;
  private policy: LinkPolicy | number = 0;
  private events = new EventQueue<RemoteEvent>();
  private stopTurn = new AbortController();
  private running: Promise<void> = Promise.resolve();
  private failure: unknown;
  private startedMs = 0;
  /** Generated tokens as the reader knows them; the last ones may be provisional. */
  private shown: number[] = [];
  private watcher: StopStrings | undefined;
  /** Whether the drafter believes that the text ends with the provisional tokens. */
  private endedAlone = false;

  /** @throws InputError an invalid option */
  constructor(private readonly device: Device, transport: Transport | Fleet, options: SessionOptions = {}) {
    this.options = remoteOptions(options);
    const { manifest, drafter } = device;
    this.ahead = new AheadDrafter(drafter, manifest.max_positions);
    this.verifier = new RemoteVerifier({
      ahead: this.ahead,
      layout: new ActivationLayout(this.options.codec, manifest),
      vocabSize: manifest.target.vocab_size,
      maxPositions: manifest.max_positions,
      opening: {
        protocol: manifest.protocol,
        samplingVersion: manifest.sampling_version,
        target: targetMessage(manifest.target),
        drafter: manifest.fingerprint,
        codec: CODEC_NUMBERS[this.options.codec],
        numTargetLayers: manifest.num_target_layers,
      },
      keep: this.options.onCut === "keep",
      retryMs: this.options.retryMs,
      meanwhile: (pending) => this.meanwhile(pending),
      numStreamed: () => this.numStreamed,
      observe: (isRight) => {
        if (this.policy instanceof LinkPolicy) this.policy.observe(isRight);
      },
    });
    this.auto = new LinkPolicy(
      () => this.stats.waitMs,
      () => this.ahead.stepMs,
      this.options.draftAhead,
      () => this.plainMs,
      () => this.ahead.isMeasuring,
    );
    const name = crypto.getRandomValues(new Uint8Array(SESSION_BYTES));
    this.route = Fleet.of(transport).route();
    this.link = new ServerLink(this.route, name, this.stats, {
      onMessage: (message: ServerMessage) => this.whenIdle(() => this.verifier.receive(message)),
      onConnect: () => this.whenIdle(() => this.verifier.connected()),
      onChange: () => this.verifier.wake(),
    });
    this.verifier.link = this.link;
  }

  /** Result of the latest turn so far: verified tokens, and kept ones with "keep". */
  get result(): GenerationResult | undefined {
    return this.turn?.result;
  }

  /** Tokens after those of `result` that were shown but are not verified yet. */
  get provisional(): readonly number[] {
    return this.verifier.provisional;
  }

  /** Time of one drafted token, in milliseconds, the median of the latest; undefined before the first. */
  get draftMs(): number | undefined {
    return this.ahead.stepMs;
  }

  /** Expected speed with drafts on this link, relative to the server's streaming alone; undefined until measured. */
  get draftGain(): number | undefined {
    return this.auto.gain;
  }

  /** Connect now, and not with the first turn. */
  connect(): void {
    this.link.start();
  }

  /** Connect at once over a new connection: for a device that has changed its network. */
  reconnect(): void {
    this.link.reconnect();
  }

  /** Answer a conversation; see `stream`. */
  async generate(promptIds: readonly number[], options: TurnOptions = {}): Promise<GenerationResult> {
    for await (const event of this.stream(promptIds, options)) void event;
    return this.turn!.result;
  }

  /**
   * Answer a conversation; yields tokens as they are verified, or drafted without a link.
   *
   * @param promptIds token ids of the whole conversation
   * @throws InputError invalid prompt ids or options
   * @throws RefusedError the server refuses; the message says why
   * @throws WireError the server's answer is invalid
   * @throws LinkError no verdict within `giveUpMs`
   */
  async *stream(promptIds: readonly number[], options: TurnOptions = {}): AsyncGenerator<RemoteEvent> {
    await this.endTurn();
    const turn = this.begin(promptIds, options);
    const running = (this.running = this.decode(turn, this.stopTurn.signal, this.events));
    try {
      yield* this.events;
      if (this.turn === turn && this.failure) throw this.failure;
    } finally {
      if (this.turn === turn) this.stop(); // else the next turn has ended this one
      await running;
    }
  }

  /** End the turn that is under way, if any. */
  stop(): void {
    this.stopTurn.abort();
    this.verifier.wake();
  }

  /** The beginning of the verified text that the device has activations of; undefined for none. */
  prefix(): Prefix | undefined {
    const { ahead, verifier } = this;
    const { length } = verifier.text;
    const [gap] = ahead.received.gaps(length);
    const count = gap ? gap[0] : length;
    if (!count) return undefined;
    const { key, value } = this.device.drafter.memory(count);
    return { tokenIds: verifier.text.slice(0, count), key, value };
  }

  /**
   * Begin with a text of an earlier session with the same drafter; before the first turn. The
   * server need not send what the device has.
   */
  remember({ tokenIds, key, value }: Prefix): void {
    if (this.turn) throw new InputError("remember() comes before the first turn.");
    this.verifier.text = [...tokenIds];
    this.ahead.follow(tokenIds);
    this.ahead.place(0, { key, value, count: tokenIds.length });
  }

  /** End the session here and on the server. */
  async close(): Promise<void> {
    await this.endTurn();
    this.link.send(this.verifier.turn, { case: "close", value: {} });
    await this.link.close();
  }

  private async endTurn(): Promise<void> {
    let ended;
    do { // another turn may begin meanwhile
      ended = this.running;
      this.stop();
      await ended;
    } while (ended !== this.running);
  }

  private begin(promptIds: readonly number[], options: TurnOptions): Turn {
    const draft = options.draft ?? this.options.draft;
    checkDraft(draft);
    const turn = new Turn(this.device, [...promptIds], options);
    this.takeOver(turn);
    this.ahead.renew();
    this.policy = draft === "auto" ? this.auto : draft;
    this.verifier.neverDrafts = draft === 0;
    this.turn = turn;
    this.events = new EventQueue();
    this.stopTurn = new AbortController();
    this.failure = undefined;
    this.shown = [];
    this.endedAlone = false;
    this.verifier.provisional = [];
    this.startedMs = now();
    this.stats.firstTokenMs = undefined;
    this.ahead.sampling = turn.sampling;
    this.ahead.begin(turn.prompt.length + turn.maxNewTokens, turn.stops);
    this.route.aim(turn.prompt);
    this.link.start();
    return turn;
  }

  /** Keep the caches of the tokens that the new text begins with. */
  private takeOver({ prompt }: Turn): void {
    const growth = this.device.manifest.rope_growth;
    const longest = Math.max(prompt.length, this.turn?.prompt.length ?? 0);
    // Beyond this length keys depend on the prompt's length.
    const isGrown = growth !== null && longest > growth;
    const common = commonLength(this.verifier.text, prompt);
    this.ahead.rollback(isGrown ? 0 : Math.min(common, prompt.length - 1));
  }

  /** Run rounds until the turn ends. */
  private async decode(turn: Turn, signal: AbortSignal, events: EventQueue<RemoteEvent>): Promise<void> {
    try {
      let ended = turn.maxNewTokens === 0;
      if (ended) {
        turn.result.stopReason = "max_new_tokens";
        events.push(this.verified({ tokenIds: [], sources: [], stopReason: "max_new_tokens" }));
      }
      for (let isFirst = true; !ended; isFirst = false) {
        const drafts = isFirst ? [] : await this.ahead.propose(turn.text, this.numDrafts(turn));
        const found = await this.verifier.verify(turn.request(drafts), signal);
        if (found.counts && this.policy instanceof LinkPolicy) {
          this.policy.record(found.drafts.length, found.tokens.length - 1);
        }
        const emitted = turn.append(found);
        events.push({ ...this.verified(emitted), ...(isFirst ? {} : { drafts: found.drafts }) });
        ended = emitted.stopReason !== undefined;
      }
    } catch (error) {
      if (!signal.aborted) this.failure = error;
    } finally {
      this.verifier.halt();
      events.end();
    }
  }

  /** Rounds without drafts that will follow one without drafts. */
  private get numStreamed(): number {
    if (this.policy instanceof LinkPolicy) return this.policy.pause;
    return this.policy ? 0 : MAX_STREAMED;
  }

  /** Current time of a token without drafts, which most servers stream. */
  private get plainMs(): number | undefined {
    return this.verifier.maxStreamed ? this.stats.passMs : this.stats.waitMs;
  }

  private numDrafts(turn: Turn): number {
    const wanted = typeof this.policy === "number" ? this.policy : this.policy.numDrafts();
    return Math.min(wanted, turn.room);
  }

  /** Make the event of a round: its tokens, and the provisional tokens that remain. */
  private verified({ tokenIds, sources, stopReason }: Emitted): RemoteEvent {
    const start = this.turn!.result.tokenIds.length - tokenIds.length;
    const guessed = this.shown.slice(start);
    const same = commonLength(guessed, tokenIds);
    const isRight = same === tokenIds.length && stopReason === undefined;
    const rest = isRight ? guessed.slice(tokenIds.length) : [];
    this.shown = [...this.shown.slice(0, start), ...tokenIds, ...rest];
    this.verifier.provisional = rest;
    // The target did not confirm the end, so the next cut may continue the text.
    this.endedAlone &&= rest.length > 0;
    if (tokenIds.length) this.stats.firstTokenMs ??= now() - this.startedMs;
    const numCorrected = guessed.length - same - rest.length;
    this.stats.corrected += numCorrected;
    return {
      start,
      tokenIds: this.shown.slice(start),
      sources: [...sources, ...rest.map((): Source => "draft")],
      numProvisional: rest.length,
      numCorrected,
      link: this.stats.state,
      ...(stopReason === undefined ? {} : { stopReason }),
    };
  }

  /** Draft one step while a verdict is awaited; returns whether to draft another at once. */
  private async meanwhile(pending: PendingRequest): Promise<boolean> {
    this.giveUp(pending);
    if (this.stats.state === "up") return this.draftAhead(pending);
    // The kept text is being sent to the server.
    if (pending.kept.length && this.link.connected) return false;
    const alone = this.isCut && this.options.onCut !== "wait";
    return alone && this.knowsEnough() && this.draftAlone(pending);
  }

  /** Whether there is no link, or there cannot be one. */
  private get isCut(): boolean {
    const { state, failures } = this.stats;
    return state === "down" || (state === "connecting" && failures > 0);
  }

  /** Whether the device has enough activations of the text to draft from. */
  private knowsEnough(): boolean {
    const { minHeldShare } = this.options;
    return this.ahead.received.size >= minHeldShare * (this.verifier.text.length - 1);
  }

  /** Draft ahead, at most to the end of the next round's drafts. */
  private async draftAhead(pending: PendingRequest): Promise<boolean> {
    const own = pending.drafts.length;
    const ready = this.ahead.ready().length;
    if (this.policy instanceof LinkPolicy && !own) {
      // Of a prompt that is being opened the activations are missing.
      return this.policy.observes && !pending.opening && !ready && this.ahead.extend();
    }
    const never = this.policy === 0 || !this.options.draftAhead;
    return !never && own <= ready && ready <= 2 * own && this.ahead.extend();
  }

  /** Show one provisional token; drafts that were sent to the server come first. */
  private async draftAlone(pending: PendingRequest): Promise<boolean> {
    const { provisional } = this.verifier;
    if (this.endedAlone || provisional.length >= this.options.maxProvisional) return false;
    const blindly = this.options.minHeldShare === 0;
    if (this.ahead.ready().length <= provisional.length && !(await this.ahead.extend({ blindly }))) {
      this.endAlone();
      return false;
    }
    // The draft step took a while: the link may be back, and the request answered.
    if (pending.result || !this.isCut) return false;
    const token = this.ahead.ready()[provisional.length];
    if (token === undefined) return true;
    provisional.push(token);
    this.shown.push(token);
    this.stats.provisional += 1;
    this.events.push({
      start: this.shown.length - 1,
      tokenIds: [token],
      sources: ["draft"],
      numProvisional: 1,
      numCorrected: 0,
      link: this.stats.state,
    });
    if (this.aloneStops(token)) this.endAlone();
    return !this.endedAlone;
  }

  /** Whether a provisional token ends the text. */
  private aloneStops(token: number): boolean {
    const turn = this.turn!;
    if (turn.stops.has(token)) return true;
    if (turn.strings.length && this.verifier.provisional.length === 1) {
      this.watcher = turn.watcher();
      for (const earlier of this.shown.slice(0, -1)) this.watcher?.push(earlier);
    }
    return turn.strings.length > 0 && this.watcher?.push(token) !== undefined;
  }

  /** Stop provisional tokens at the end of the text; with "keep", end the turn. */
  private endAlone(): void {
    this.endedAlone = true;
    if (this.options.onCut === "keep" && this.verifier.provisional.length) this.verifier.settle();
  }

  private giveUp({ firstMs }: PendingRequest): void {
    const { giveUpMs } = this.options;
    if (giveUpMs === undefined || now() - firstMs <= giveUpMs) return;
    const isUp = this.stats.state === "up";
    const what = isUp ? "The server has verified nothing" : "No link to the server";
    throw new LinkError(`${what} for ${giveUpMs} ms.`);
  }

  /** Call a function between two draft steps. */
  private whenIdle(work: () => void): void {
    this.ahead.whenIdle(() => {
      try {
        work();
      } catch (error) {
        this.link.refuse(error);
      }
    });
  }
}
