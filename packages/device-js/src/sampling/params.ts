import { InputError } from "../errors.js";
import { MAX_LOGIT_BIAS } from "../protocol/limits.js";

/** Constraints on tokens by position; names and meaning of transformers' `GenerationConfig`. */
export interface TokenRules {
  readonly noRepeatNgramSize: number;
  readonly badWordsIds: readonly (readonly number[])[];
  readonly minLength: number;
  readonly minNewTokens: number;
  readonly forcedBosTokenId: number | undefined;
  readonly forcedEosTokenId: readonly number[];
  readonly removeInvalidValues: boolean;
  /** Tokens before the decay begins, and its factor. */
  readonly exponentialDecayLengthPenalty: readonly [number, number] | undefined;
  readonly suppressTokens: readonly number[];
  readonly beginSuppressTokens: readonly number[];
}

/** How the target chooses tokens. The server applies them; see `SamplingParams` in Python. */
export interface SamplingParams {
  /** 0 takes the best token, without noise. */
  readonly temperature: number;
  /** Keep the k best tokens; 0 keeps all. */
  readonly topK: number;
  /** Keep the most probable tokens until they hold this mass. */
  readonly topP: number;
  /** Drop tokens below this share of the best token's probability. */
  readonly minP: number;
  /** Of the noise, 0 .. 2^64 - 1; drawn where it is needed and not given. */
  readonly seed: bigint | undefined;
  /** Which of several continuations of one prompt. */
  readonly choice: number;
  readonly repetitionPenalty: number;
  readonly presencePenalty: number;
  readonly frequencyPenalty: number;
  /** Added to logits, by token id; -Infinity forbids a token. */
  readonly logitBias: ReadonlyMap<number, number>;
  /** Whether to report log-probabilities of the chosen tokens. */
  readonly logprobs: boolean;
  readonly rules: TokenRules | undefined;
}

/** Sampling options of a call; what is left out is the model's default. */
export interface SamplingOptions {
  temperature?: number;
  topK?: number;
  topP?: number;
  minP?: number;
  seed?: bigint | number;
  choice?: number;
  repetitionPenalty?: number;
  presencePenalty?: number;
  frequencyPenalty?: number;
  logitBias?: ReadonlyMap<number, number>;
  logprobs?: boolean;
}

/** The best token of the target's own logits. */
export const GREEDY: SamplingParams = {
  temperature: 0,
  topK: 0,
  topP: 1,
  minP: 0,
  seed: undefined,
  choice: 0,
  repetitionPenalty: 1,
  presencePenalty: 0,
  frequencyPenalty: 0,
  logitBias: new Map(),
  logprobs: false,
  rules: undefined,
};

/**
 * Check options and fill in defaults.
 *
 * @param options of the call
 * @param defaults of the model, for what the call leaves out
 * @throws InputError a value outside its range
 */
export function samplingParams(
  options: SamplingOptions,
  defaults: Partial<SamplingParams> = {},
): SamplingParams {
  const names = Object.keys(GREEDY) as (keyof SamplingOptions)[];
  const given = Object.fromEntries(
    names.filter((name) => options[name] !== undefined).map((name) => [name, options[name]]),
  );
  const found = { ...GREEDY, ...defaults, ...given } as SamplingParams;
  for (const name of ["temperature", "minP", "topP", "repetitionPenalty"] as const) {
    number(name, found[name], 0, name === "topP" || name === "minP" ? 1 : Number.MAX_VALUE);
  }
  number("presencePenalty", found.presencePenalty, -Number.MAX_VALUE, Number.MAX_VALUE);
  number("frequencyPenalty", found.frequencyPenalty, -Number.MAX_VALUE, Number.MAX_VALUE);
  if (found.repetitionPenalty === 0) throw new InputError("repetitionPenalty must be above 0.");
  integer("topK", found.topK, Number.MAX_SAFE_INTEGER);
  integer("choice", found.choice, 2 ** 32 - 1);
  checkBias(found.logitBias);
  const logitBias = new Map([...(defaults.logitBias ?? []), ...found.logitBias]);
  return { ...found, logitBias, seed: checkedSeed(found) };
}

function checkedSeed({ seed, temperature }: SamplingParams): bigint | undefined {
  if (seed === undefined) return temperature > 0 ? drawnSeed() : undefined;
  if (typeof seed === "number") integer("seed", seed, Number.MAX_SAFE_INTEGER);
  const bits = BigInt(seed);
  if (bits < 0n || bits >= 1n << 64n) throw new InputError(`seed must be 0 .. 2^64 - 1, got ${seed}.`);
  return bits;
}

function drawnSeed(): bigint {
  const [low, high] = crypto.getRandomValues(new Uint32Array(2));
  return (BigInt(high! >>> 1) << 32n) | BigInt(low!);
}

function checkBias(bias: ReadonlyMap<number, number>): void {
  if (!(bias instanceof Map) || bias.size > MAX_LOGIT_BIAS) {
    throw new InputError(`logitBias must be a Map of at most ${MAX_LOGIT_BIAS} tokens.`);
  }
  for (const [token, value] of bias) {
    integer("a token of logitBias", token, 2 ** 32 - 1);
    if (value !== Number.NEGATIVE_INFINITY) {
      number(`logitBias of token ${token}`, value, -Number.MAX_VALUE, Number.MAX_VALUE);
    }
  }
}

function number(name: string, value: unknown, low: number, high: number): void {
  if (typeof value !== "number" || !(value >= low && value <= high)) {
    const range = low < 0 ? "finite" : high === 1 ? "within 0..1" : "of at least 0";
    throw new InputError(`${name} must be a number, ${range}; got ${String(value)}.`);
  }
}

/** @throws InputError the value is no integer of 0 .. `high` */
export function integer(name: string, value: unknown, high: number): void {
  if (!Number.isSafeInteger(value) || (value as number) < 0 || (value as number) > high) {
    throw new InputError(`${name} must be an integer within 0..${high}, got ${String(value)}.`);
  }
}
