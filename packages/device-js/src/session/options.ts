import { InputError } from "../errors.js";
import { CODEC_NUMBERS } from "../protocol/activations.js";
import type { CodecName } from "../protocol/activations.js";
import { MAX_DRAFTED } from "../protocol/limits.js";
import { integer } from "../sampling/params.js";
import type { SamplingOptions } from "../sampling/params.js";

/** Treatment of tokens that are drafted without a link. */
export type OnCut = "rollback" | "keep" | "wait";

/** How a session uses its link. */
export interface RemoteOptions {
  /** Of activations. */
  readonly codec: CodecName;
  /** Drafts of a round: "auto" for the fastest number on this link, or a number; 0 drafts nothing. */
  readonly draft: "auto" | number;
  /** Draft while waiting for a verdict. */
  readonly draftAhead: boolean;
  /** "rollback" replaces tokens that the target does not choose, "keep" leaves them, "wait" drafts none. */
  readonly onCut: OnCut;
  /**
   * Share of a text whose activations a device must hold to continue it without a link. With 0 it
   * also begins answers that the server has never seen, mostly with wrong words.
   */
  readonly minHeldShare: number;
  /** Largest number of tokens drafted in one cut of the link. */
  readonly maxProvisional: number;
  /**
   * Milliseconds after which a request is sent again, in case it or its answer was lost; or four round trips and four
   * passes of the server, if these take longer.
   */
  readonly retryMs: number;
  /** Milliseconds without a verdict after which a turn fails, with or without a link. */
  readonly giveUpMs: number | undefined;
}

/** Options of a session; what is left out has its default. */
export type SessionOptions = Partial<RemoteOptions>;

/** Options of one turn. */
export interface TurnOptions extends SamplingOptions {
  /** Limit of generated tokens; default: 64. */
  maxNewTokens?: number;
  /** Strings that end the text with the token that completes one. */
  stop?: string | readonly string[];
  /** Ids that end the text; default: the model's own. */
  stopTokenIds?: readonly number[];
  /** "none" ignores the model's generation_config.json. */
  generationConfig?: "auto" | "none";
  /** Replaces the session's `draft`. */
  draft?: "auto" | number;
}

/** @throws InputError an invalid value */
export function remoteOptions(given: SessionOptions): RemoteOptions {
  const options: RemoteOptions = {
    codec: "int8",
    draft: "auto",
    draftAhead: true,
    onCut: "rollback",
    minHeldShare: 0.75,
    maxProvisional: MAX_DRAFTED,
    retryMs: 500,
    giveUpMs: undefined,
    ...given,
  };
  oneOf("codec", options.codec, Object.keys(CODEC_NUMBERS));
  oneOf("onCut", options.onCut, ["rollback", "keep", "wait"]);
  integer("maxProvisional", options.maxProvisional, MAX_DRAFTED);
  checkDraft(options.draft);
  if (!(options.minHeldShare >= 0 && options.minHeldShare <= 1)) {
    throw new InputError(`minHeldShare must be within 0..1, got ${options.minHeldShare}.`);
  }
  return options;
}

/** @throws InputError neither "auto" nor a number of drafts */
export function checkDraft(draft: unknown): void {
  if (draft !== "auto") integer("draft", draft, MAX_DRAFTED);
}

/** @throws InputError an empty string, or none */
export function stopStrings(stop: string | readonly string[] = []): readonly string[] {
  const strings = typeof stop === "string" ? [stop] : [...stop];
  if (strings.some((one) => typeof one !== "string" || !one)) {
    throw new InputError(`stop must be one or more non-empty strings, got ${JSON.stringify(stop)}.`);
  }
  return strings;
}

function oneOf(name: string, value: string, known: readonly string[]): void {
  if (!known.includes(value)) {
    throw new InputError(`${name} must be one of ${known.join(", ")}, got ${String(value)}.`);
  }
}
