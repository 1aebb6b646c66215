/** Turns a session's events, which replace the end of a text, into chunks, which extend it. */
import type { DeviceTokenizer } from "../bundle/tokenizer.js";
import { commonLength } from "../session/draft_ahead.js";
import { now, tau } from "../session/events.js";
import type { RemoteEvent, Source } from "../session/events.js";
import type { RemoteSession } from "../session/remote_session.js";
import { TextStream } from "../session/stop_strings.js";
import type { Chunk, Link, Piece, Round, Stats } from "./messages.js";

/** Writes the chunks of one answer; `openai/extension.py` writes those of Python's servers. */
export class ChunkWriter {
  private readonly stream: TextStream;
  private readonly startedMs = now();
  private readonly bytesBefore: readonly [number, number];
  private tokenIds: number[] = [];
  private sources: Source[] = [];
  private numFinal = 0;
  private numRounds = 0;
  private shown: readonly number[] = [];

  /** @param prompt of the answer */
  constructor(
    private readonly tokenizer: DeviceTokenizer,
    private readonly session: RemoteSession,
    prompt: readonly number[],
  ) {
    this.stream = new TextStream((ids) => tokenizer.decode(ids), prompt);
    this.bytesBefore = [session.stats.bytesUp, session.stats.bytesDown];
  }

  /** @param link state that the chunk reports */
  chunk(event: RemoteEvent, link: Link): Chunk {
    const first = this.numFinal;
    this.tokenIds.splice(event.start, Infinity, ...event.tokenIds);
    this.sources.splice(event.start, Infinity, ...event.sources);
    if (event.start <= first) {
      this.numFinal = Math.max(first, event.start + event.tokenIds.length - event.numProvisional);
    }
    const fresh = this.tokenIds.slice(first, this.numFinal);
    const provisional = this.tokenIds.slice(this.numFinal);
    const right = commonLength(this.shown, [...fresh, ...provisional]);
    const pieces = fresh.map((id, i) => this.piece(id, this.sources[first + i]!, this.was(i, right)));
    const guesses = this.guesses(provisional);
    const correction = this.correction(right);
    const hadProvisional = this.shown.length > 0;
    this.shown = provisional;
    const { stopReason } = event;
    const finish = stopReason && (stopReason.startsWith("stop") ? "stop" : "length");
    return {
      choices: [
        { index: 0, delta: { content: pieces.map(({ text }) => text).join("") }, finish_reason: finish ?? null },
      ],
      moaspec: {
        stats: this.stats(),
        link,
        ...(pieces.length ? { pieces } : {}),
        ...(event.drafts ? { round: this.round(event.drafts, fresh) } : {}),
        ...(provisional.length || hadProvisional ? { provisional: guesses } : {}),
        ...(correction ? { correction } : {}),
      },
    };
  }

  private piece(id: number, source: Source, was: Piece["was"]): Piece {
    return { text: this.stream.step(id), id, source, ...(was ? { was } : {}) };
  }

  /** What a final token was before, as the reader saw it. */
  private was(index: number, right: number): Piece["was"] {
    if (index >= this.shown.length) return undefined;
    return index < right ? "provisional" : "corrected";
  }

  private guesses(tokenIds: readonly number[]): Piece[] {
    const ahead = this.stream.fork();
    return tokenIds.map((id) => ({ text: ahead.step(id), id, source: "provisional" }));
  }

  private correction(right: number): Chunk["moaspec"]["correction"] {
    const removed = this.shown.slice(right);
    if (!removed.length) return undefined;
    return { confirmed: right, removed: removed.length, text: this.tokenizer.decode(removed) };
  }

  private round(drafts: readonly number[], emitted: readonly number[]): Round {
    this.numRounds += 1;
    const accepted = commonLength(drafts, emitted);
    const nodes = drafts.map((id, i) => ({
      text: this.tokenizer.decode([id]),
      id,
      parent: i - 1,
      source: "draft" as const,
      accepted: i < accepted,
    }));
    return { number: this.numRounds, nodes, emitted: emitted.length };
  }

  private stats(): Stats {
    const { stats, result } = this.session;
    const { drafted, acceptLengths } = result!;
    const sum = (values: readonly number[]) => values.reduce((total, value) => total + value, 0);
    const tokens = this.numFinal;
    const elapsedMs = now() - this.startedMs;
    const sinceFirstMs = elapsedMs - (stats.firstTokenMs ?? elapsedMs);
    const perToken = (bytes: number) => (tokens ? Math.round(bytes / tokens) : null);
    return {
      tokens,
      rounds: acceptLengths.length,
      tau: tau(result!) ?? null,
      drafted: sum(drafted),
      accepted: sum(acceptLengths) - acceptLengths.length,
      copied: 0,
      tokens_per_second: sinceFirstMs > 0 ? (1000 * (tokens - 1)) / sinceFirstMs : null,
      elapsed_s: elapsedMs / 1000,
      bytes_sent_per_token: perToken(stats.bytesUp - this.bytesBefore[0]),
      bytes_received_per_token: perToken(stats.bytesDown - this.bytesBefore[1]),
    };
  }
}
