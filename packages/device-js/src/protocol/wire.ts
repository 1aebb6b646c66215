/** Conversion between messages of target.proto and our own objects; limits all received values. */
import { create, fromBinary, toBinary } from "@bufbuild/protobuf";
import type { DescMessage, MessageInitShape, MessageShape } from "@bufbuild/protobuf";
import type { TargetIdentity } from "../bundle/manifest.js";
import { WireError } from "../errors.js";
import type { SamplingParams, TokenRules } from "../sampling/params.js";
import { MAX_FRAME_BYTES, MAX_MESSAGE, MAX_RUNS } from "./limits.js";
import type { PositionRange } from "./position_set.js";
import { ClientMessageSchema, DescriptionSchema, GeneratedSchema, ServerMessageSchema, WeightsSchema } from "./target_pb.js";
import type { Description, Generated, OpenSchema, RangeSchema, SamplingSchema, ServerMessage, TokenRulesSchema, Weights } from "./target_pb.js";

/** Length of a session's random name. */
export const SESSION_BYTES = 16;

/** The fields of a message, before it is made. */
export type Fields<Schema extends DescMessage> = Exclude<MessageInitShape<Schema>, { $typeName: string }>;
/** The content of a message to the server. */
export type ClientKind = NonNullable<Fields<typeof ClientMessageSchema>["kind"]>;
export type OpenFields = Fields<typeof OpenSchema>;
export type SamplingFields = Fields<typeof SamplingSchema>;

/** Serialise a message to the server. */
export function clientFrame(session: Uint8Array, turn: number, kind: ClientKind): Uint8Array {
  return toBinary(ClientMessageSchema, create(ClientMessageSchema, { session, turn, kind }));
}

/**
 * Parse a message of the server.
 *
 * @throws WireError too long, or no such message
 */
export function parseServer(frame: Uint8Array): ServerMessage {
  return parsed(ServerMessageSchema, frame);
}

/**
 * Parse a server's description of itself.
 *
 * @throws WireError too long, or no such message
 */
export function parseDescription(frame: Uint8Array): Description {
  return parsed(DescriptionSchema, frame);
}

/**
 * Parse a message of a text that the server decodes.
 *
 * @throws WireError too long, or no such message
 */
export function parseGenerated(frame: Uint8Array): Generated {
  return parsed(GeneratedSchema, frame);
}

/**
 * Parse a piece of a version's weights.
 *
 * @throws WireError too long, or no such message
 */
export function parseWeights(frame: Uint8Array): Weights {
  return parsed(WeightsSchema, frame);
}

function parsed<Schema extends DescMessage>(schema: Schema, frame: Uint8Array): MessageShape<Schema> {
  if (frame.length > MAX_FRAME_BYTES) {
    throw new WireError(`A message of ${frame.length} bytes; the limit is ${MAX_FRAME_BYTES}.`);
  }
  try {
    return fromBinary(schema, frame);
  } catch (error) {
    throw new WireError(`The server sent no message of this protocol: ${(error as Error).message}`);
  }
}

/** Convert ranges to messages; those after the first `MAX_RUNS` are left out. */
export function rangeMessages(ranges: readonly PositionRange[]): Fields<typeof RangeSchema>[] {
  return ranges.slice(0, MAX_RUNS).map(([start, stop]) => ({ start, stop }));
}

/** The fields of a target's identity in `Open`. */
export function targetMessage(target: TargetIdentity) {
  return {
    modelType: target.model_type,
    numLayers: target.num_layers,
    hiddenSize: target.hidden_size,
    numKvHeads: target.num_kv_heads,
    headDim: target.head_dim,
    vocabSize: target.vocab_size,
    tokenizerHash: target.tokenizer_hash ?? "",
    adapter: target.adapter ?? "",
  };
}

/**
 * Convert sampling parameters to a message.
 *
 * @param stopTokenIds of the text, which some rules need
 * @param maxNewTokens of the text, for the same reason
 */
export function samplingMessage(
  sampling: SamplingParams,
  stopTokenIds: readonly number[],
  maxNewTokens: number,
): SamplingFields {
  const { rules, seed, logitBias, topK, ...plain } = sampling;
  return {
    ...plain,
    topK: BigInt(topK),
    logitBias: Object.fromEntries(logitBias),
    ...(seed === undefined ? {} : { seed }),
    ...(rules ? { rules: rulesMessage(rules, stopTokenIds, maxNewTokens) } : {}),
  };
}

function rulesMessage(
  rules: TokenRules,
  stopTokenIds: readonly number[],
  maxNewTokens: number,
): Fields<typeof TokenRulesSchema> {
  const [decayStart, decayFactor] = rules.exponentialDecayLengthPenalty ?? [];
  const { forcedBosTokenId } = rules;
  return {
    noRepeatNgramSize: rules.noRepeatNgramSize,
    badWordsIds: rules.badWordsIds.map((word) => ({ tokenIds: [...word] })),
    minLength: rules.minLength,
    minNewTokens: rules.minNewTokens,
    forcedEosTokenId: [...rules.forcedEosTokenId],
    removeInvalidValues: rules.removeInvalidValues,
    suppressTokens: [...rules.suppressTokens],
    beginSuppressTokens: [...rules.beginSuppressTokens],
    stopTokenIds: [...stopTokenIds].sort((a, b) => a - b),
    maxNewTokens,
    ...(forcedBosTokenId === undefined ? {} : { forcedBosTokenId }),
    ...(decayFactor === undefined ? {} : { decayStart: decayStart!, decayFactor }),
  };
}

/** Shorten a server's message to one line of printable characters. */
export function oneLine(message: string): string {
  return message
    .slice(0, MAX_MESSAGE)
    .trim()
    .split(/\s+/u)
    .join(" ")
    .replace(/[\p{C}\p{Zl}\p{Zp}]/gu, "\ufffd");
}
