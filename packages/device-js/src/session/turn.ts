import type { Device } from "../device.js";
import { InputError } from "../errors.js";
import { samplingMessage } from "../protocol/wire.js";
import type { SamplingFields } from "../protocol/wire.js";
import { integer, samplingParams } from "../sampling/params.js";
import type { SamplingParams } from "../sampling/params.js";
import type { GenerationResult, Source, StopReason } from "./events.js";
import { stopStrings } from "./options.js";
import type { TurnOptions } from "./options.js";
import type { VerifyRequest, VerifyResult } from "./remote_verifier.js";
import { StopStrings } from "./stop_strings.js";

/** The tokens that one verification added to a text. */
export interface Emitted {
  readonly tokenIds: readonly number[];
  readonly sources: readonly Source[];
  readonly stopReason: StopReason | undefined;
}

/** The state of one turn: its text, its settings, and where it ends. */
export class Turn {
  /** Prompt and verified tokens. */
  readonly text: number[];
  readonly result: GenerationResult;
  readonly sampling: SamplingParams;
  readonly stops: ReadonlySet<number>;
  readonly maxNewTokens: number;
  readonly strings: readonly string[];
  private readonly maxPositions: number;
  private readonly matcher: StopStrings | undefined;
  private readonly message: SamplingFields;
  private isFirst = true;

  /** @throws InputError invalid prompt ids or options */
  constructor(
    private readonly device: Device,
    readonly prompt: readonly number[],
    options: TurnOptions,
  ) {
    const { manifest } = device;
    this.maxPositions = manifest.max_positions;
    this.checkPrompt(manifest.target.vocab_size);
    this.maxNewTokens = options.maxNewTokens ?? 64;
    integer("maxNewTokens", this.maxNewTokens, Number.MAX_SAFE_INTEGER);
    const sampled = (options.temperature ?? 0) > 0;
    const defaults = options.generationConfig === "none" ? {} : device.generationDefaults.settings(sampled);
    this.sampling = samplingParams(options, defaults);
    const stopTokenIds = options.stopTokenIds ?? manifest.stop_token_ids;
    this.stops = new Set(stopTokenIds);
    this.strings = stopStrings(options.stop);
    this.message = samplingMessage(this.sampling, stopTokenIds, this.maxNewTokens);
    this.matcher = this.watcher();
    this.text = [...prompt];
    this.result = {
      tokenIds: [],
      sources: [],
      logprobs: [],
      acceptLengths: [],
      drafted: [],
      stopReason: undefined,
      stopString: undefined,
      seed: this.sampling.seed,
    };
  }

  private checkPrompt(vocabSize: number): void {
    const { prompt, maxPositions } = this;
    if (!prompt.length || prompt.length >= maxPositions) {
      throw new InputError(`A prompt has 1 to ${maxPositions - 1} tokens, got ${prompt.length}.`);
    }
    const wrong = prompt.find((id) => !Number.isInteger(id) || id < 0 || id >= vocabSize);
    if (wrong !== undefined) {
      throw new InputError(`A prompt has token ids within 0..${vocabSize - 1}, got ${wrong}.`);
    }
  }

  /** A watcher for stop strings from the start of the answer; undefined if there are none. */
  watcher(): StopStrings | undefined {
    if (!this.strings.length) return undefined;
    if (!this.device.tokenizer) throw new InputError("Stop strings need a tokenizer.");
    return new StopStrings(this.strings, this.device.tokenizer, this.prompt);
  }

  /** Number of drafts that the text has room for; a round emits one token more. */
  get room(): number {
    const remaining = this.maxNewTokens - this.result.tokenIds.length;
    return Math.max(0, Math.min(this.maxPositions - this.text.length, remaining) - 1);
  }

  /** The request that verifies drafts after the text. Drafts that would end it are left out. */
  request(drafts: readonly number[]): VerifyRequest {
    const { text, sampling, isFirst } = this;
    return {
      text,
      promptLength: this.prompt.length,
      drafts: drafts.slice(0, this.firstEnd(drafts)),
      isFirst,
      logprobs: sampling.logprobs,
      sampling: this.message,
    };
  }

  private firstEnd(drafts: readonly number[]): number {
    const watcher = this.matcher?.fork();
    const end = drafts.findIndex((token) => this.stops.has(token) || watcher?.push(token));
    return end < 0 ? drafts.length : end;
  }

  /** Append the tokens of a verification, up to the end of the text. */
  append({ tokens, drafts, logprobs }: VerifyResult): Emitted {
    const { result } = this;
    const [count, stopReason] = this.untilEnd(tokens);
    const tokenIds = tokens.slice(0, count);
    const sources = tokenIds.map((_, i): Source => (i < tokens.length - 1 ? "draft" : "target"));
    if (!this.isFirst) {
      result.acceptLengths.push(count);
      result.drafted.push(drafts.length);
    }
    this.isFirst = false;
    this.text.push(...tokenIds);
    result.tokenIds.push(...tokenIds);
    result.sources.push(...sources);
    result.logprobs.push(...logprobs.slice(0, count));
    result.stopReason = stopReason;
    return { tokenIds, sources, stopReason };
  }

  /** Number of tokens up to and including the first that ends the text, and why it ends. */
  private untilEnd(tokens: readonly number[]): [number, StopReason | undefined] {
    const space = this.maxPositions - this.text.length;
    const remaining = this.maxNewTokens - this.result.tokenIds.length;
    for (const [i, token] of tokens.entries()) {
      if (this.stops.has(token)) return [i + 1, "stop_token"];
      const found = this.matcher?.push(token);
      if (found) {
        this.result.stopString = found;
        return [i + 1, "stop_string"];
      }
      if (i + 1 >= remaining) return [i + 1, "max_new_tokens"];
      if (i + 1 === space) return [i + 1, "context"];
    }
    return [tokens.length, undefined];
  }
}
