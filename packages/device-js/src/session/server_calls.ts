/** A server's calls with one request: their frames, and versions of a drafter that learns. */
import { create, toBinary } from "@bufbuild/protobuf";
import type { Versions } from "../bundle/manifest.js";
import { LinkError, RefusedError, WireError } from "../errors.js";
import { MAX_WAITING_MESSAGES } from "../protocol/limits.js";
import { DescribeRequestSchema } from "../protocol/target_pb.js";
import type { Connection } from "../protocol/transport.js";
import { EndOfCall } from "../protocol/websocket.js";
import type { Call, WebSocketTransport } from "../protocol/websocket.js";
import { oneLine, parseWeights } from "../protocol/wire.js";
import { EventQueue } from "./timing.js";

/** A version of a drafter. */
export interface DrafterVersion {
  /** Its fingerprint. */
  readonly version: string;
  /** The bytes for `Versions.ranges` of a bundle, one range after another. */
  readonly data: Uint8Array;
}

/** Milliseconds that all weights of a version may take. */
const UPDATE_MS = 600_000;
/** Milliseconds for asking whether there is one. */
const DESCRIBE_MS = 60_000;

/**
 * The frames that answer a request, until the server ends the call or the caller leaves the loop.
 *
 * @throws LinkError the link broke, or the time is over
 * @throws RefusedError the server refuses; the message says why
 * @throws WireError the server sends more than is read
 */
export async function* frames(
  transport: WebSocketTransport,
  call: Call,
  request: Uint8Array,
  timeoutMs: number,
): AsyncGenerator<Uint8Array> {
  const queue = new EventQueue<Uint8Array>();
  const limit = new AbortController();
  let failure: Error | undefined;
  let waiting = 0;
  const fail = (error: Error) => {
    failure ??= error;
    queue.end();
  };
  const onFrame = (frame: Uint8Array) => {
    if (++waiting > MAX_WAITING_MESSAGES) fail(new WireError("The server sends more messages than are read."));
    else queue.push(frame);
  };
  const timer = setTimeout(() => {
    limit.abort();
    fail(new LinkError("The server took too long."));
  }, timeoutMs);
  let connection: Connection | undefined;
  try {
    connection = await transport.open(call, { onFrame, onEnd: fail }, limit.signal);
    connection.send(request);
    for await (const frame of queue) {
      waiting -= 1;
      yield frame;
    }
    if (!(failure instanceof EndOfCall)) throw failure;
  } finally {
    clearTimeout(timer);
    connection?.close();
  }
}

/**
 * The newest version of a server's drafter; undefined if it has no newer one for this bundle.
 *
 * @param own the version that the device has
 * @throws LinkError the link broke
 * @throws RefusedError the server refuses, or sends weights that are not for this bundle
 * @throws WireError the server's answer is invalid
 */
export async function newerVersion(
  transport: WebSocketTransport,
  { packing, ranges }: Versions,
  own: string,
): Promise<DrafterVersion | undefined> {
  const known = ["", own];
  if (known.includes((await transport.describe(DESCRIBE_MS)).newest)) return undefined;
  const data = new Uint8Array(ranges.reduce((sum, [, count]) => sum + count, 0));
  let version = "";
  let size = 0;
  const request = toBinary(DescribeRequestSchema, create(DescribeRequestSchema, { packing }));
  for await (const frame of frames(transport, "update", request, UPDATE_MS)) {
    const piece = parseWeights(frame);
    version = piece.version;
    if (known.includes(version)) return undefined; // another server answers, which is behind
    if (piece.packing !== packing) {
      const form = oneLine(piece.packing) || "safetensors";
      throw new RefusedError(`The server sends weights as ${form}, this device needs ${packing}. Update the server.`);
    }
    if (size + piece.data.length > data.length) {
      throw new RefusedError(`The server sends more than the ${data.length} bytes of weights.`);
    }
    data.set(piece.data, size);
    size += piece.data.length;
  }
  if (!version) return undefined;
  if (size < data.length) throw new RefusedError(`The server sends ${size} of ${data.length} bytes of weights.`);
  return { version, data };
}
