import { InputError } from "../errors.js";
import type { SamplingParams, TokenRules } from "../sampling/params.js";

type Settings = Record<string, unknown>;

/** Settings that are not supported, and a test whether a value changes the text. */
const REFUSED: Record<string, (value: any) => boolean> = {
  num_beams: (value) => value > 1,
  num_beam_groups: (value) => value > 1,
  num_return_sequences: (value) => value > 1,
  penalty_alpha: (value) => value > 0,
  guidance_scale: (value) => value !== 1,
  encoder_repetition_penalty: (value) => value !== 1,
  encoder_no_repeat_ngram_size: (value) => value > 0,
  cache_implementation: (value) => value === "quantized",
  constraints: isTrue,
  dola_layers: isTrue,
  force_words_ids: isTrue,
  max_time: isTrue,
  stop_strings: isTrue,
  token_healing: isTrue,
  watermarking_config: isTrue,
};
const REFUSED_SAMPLED: Record<string, (value: any) => boolean> = {
  typical_p: (value) => value < 1,
  epsilon_cutoff: (value) => value > 0,
  eta_cutoff: (value) => value > 0,
  top_h: () => true,
};

const isCount = (value: unknown) => Number.isSafeInteger(value) && (value as number) >= 0 && (value as number) < 2 ** 32;
const isIds = (value: unknown) => Array.isArray(value) && value.every(isCount);
/** One id or several; some files write -1 for none. */
const isIdOrIds = (value: unknown) => [value].flat().every((one) => one === -1 || isCount(one));
const isBias = (pair: unknown) => Array.isArray(pair) && pair.length === 2 && isIds(pair[0]) && Number.isFinite(pair[1]);
/** Forms of the settings that are sent to the server. */
const FORMS: Record<string, (value: unknown) => boolean> = {
  sequence_bias: (value) => !Array.isArray(value) || value.every(isBias),
  no_repeat_ngram_size: isCount,
  bad_words_ids: (value) => Array.isArray(value) && value.every(isIds),
  min_length: isCount,
  min_new_tokens: isCount,
  forced_bos_token_id: isCount,
  forced_eos_token_id: isIdOrIds,
  exponential_decay_length_penalty: (value) =>
    Array.isArray(value) && value.length === 2 && isCount(value[0]) && Number.isFinite(value[1]),
  suppress_tokens: isIdOrIds,
  begin_suppress_tokens: isIdOrIds,
};

/**
 * A model's defaults from its `generation_config.json`, used as in Python's `generate`, except the
 * temperature: a call without one is greedy.
 */
export class GenerationDefaults {
  /** @param config the file's content; {} for none */
  constructor(private readonly config: Settings) {}

  /**
   * Defaults for `samplingParams`.
   *
   * @param sampled whether the text's temperature is above 0
   * @throws InputError the file has a setting that is not supported, or is damaged
   */
  settings(sampled: boolean): Partial<SamplingParams> {
    this.check();
    const biases = this.biases();
    const refused = [
      ...this.changed(REFUSED),
      ...(sampled ? this.changed(REFUSED_SAMPLED) : []),
      ...(biases.every(([ids]) => ids.length === 1) ? [] : ["sequence_bias"]),
    ];
    if (refused.length) {
      throw new InputError(
        `The model's generation_config.json sets ${refused.join(", ")}, which is not supported. ` +
          'Ignore the file with generationConfig: "none".',
      );
    }
    const found: Record<string, unknown> = {
      logitBias: new Map(biases.map(([ids, bias]) => [ids[0]!, bias])),
      rules: this.rules(),
    };
    const numbers: [string, string][] = [["repetition_penalty", "repetitionPenalty"]];
    if (sampled && this.config["do_sample"] === true) {
      numbers.push(["top_k", "topK"], ["top_p", "topP"], ["min_p", "minP"]);
    }
    for (const [from, to] of numbers) {
      const value = this.config[from] ?? undefined;
      if (value !== undefined) found[to] = value;
    }
    return found;
  }

  /** @throws InputError a setting has a value that no model has */
  private check(): void {
    const wrong = Object.keys(FORMS).find((name) => {
      const value = this.config[name] ?? undefined;
      return value !== undefined && !FORMS[name]!(value);
    });
    if (wrong) {
      throw new InputError(
        `The model's generation_config.json is damaged: ${wrong} has another form. Ignore the file ` +
          'with generationConfig: "none".',
      );
    }
  }

  private changed(known: Record<string, (value: any) => boolean>): string[] {
    return Object.keys(known).filter((name) => {
      const value = this.config[name] ?? undefined;
      return value !== undefined && known[name]!(value);
    });
  }

  /** `sequence_bias`, which files have as a list of pairs. */
  private biases(): [number[], number][] {
    const given = this.config["sequence_bias"];
    return Array.isArray(given) ? (given as [number[], number][]) : [];
  }

  private rules(): TokenRules | undefined {
    const { config } = this;
    const rules: TokenRules = {
      noRepeatNgramSize: Number(config["no_repeat_ngram_size"] ?? 0),
      badWordsIds: (config["bad_words_ids"] ?? []) as number[][],
      minLength: Number(config["min_length"] ?? 0),
      minNewTokens: Number(config["min_new_tokens"] ?? 0),
      forcedBosTokenId: (config["forced_bos_token_id"] ?? undefined) as number | undefined,
      forcedEosTokenId: ids(config["forced_eos_token_id"]),
      removeInvalidValues: Boolean(config["remove_invalid_values"]),
      exponentialDecayLengthPenalty: (config["exponential_decay_length_penalty"] ?? undefined) as
        | [number, number]
        | undefined,
      suppressTokens: ids(config["suppress_tokens"]),
      beginSuppressTokens: ids(config["begin_suppress_tokens"]),
    };
    const set = Object.values(rules).some((rule) =>
      Array.isArray(rule) ? rule.length > 0 : rule !== undefined && rule !== 0 && rule !== false,
    );
    return set ? rules : undefined;
  }
}

/** One id or several; some files write -1 for none. */
function ids(value: unknown): number[] {
  const given = value === undefined || value === null ? [] : Array.isArray(value) ? value : [value];
  return given.map(Number).filter((token) => token >= 0);
}

function isTrue(value: unknown): boolean {
  return Array.isArray(value) ? value.length > 0 : Boolean(value);
}
