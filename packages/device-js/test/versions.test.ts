/** Versions of a drafter from servers that misbehave. */
import { once } from "node:events";
import type { AddressInfo } from "node:net";
import { create, fromBinary, toBinary } from "@bufbuild/protobuf";
import type { MessageInitShape } from "@bufbuild/protobuf";
import { afterEach, expect, test } from "vitest";
import WebSocket, { WebSocketServer } from "ws";
import { LinkError, RefusedError, WireError } from "../src/errors.js";
import { DescribeRequestSchema, DescriptionSchema, WeightsSchema } from "../src/protocol/target_pb.js";
import { WebSocketTransport } from "../src/protocol/websocket.js";
import { newerVersion } from "../src/session/server_calls.js";

const VERSIONS = { packing: "onnx/1/int8/0", ranges: [[3, 4], [9, 2]] as const };
type Piece = MessageInitShape<typeof WeightsSchema> | "noise";

let server: WebSocketServer | undefined;
const asked: string[] = [];

afterEach(() => {
  for (const client of server?.clients ?? []) client.terminate();
  server?.close();
  asked.length = 0;
});

/** A server that announces a version, sends these pieces, and ends the call with this code. */
async function serving(pieces: readonly Piece[], { newest = "new", code = 1000 } = {}): Promise<WebSocketTransport> {
  server = new WebSocketServer({ port: 0, host: "127.0.0.1" });
  server.on("connection", (socket, { url }) =>
    socket.on("message", (frame: Buffer) => {
      if (url!.endsWith("/describe")) {
        socket.send(toBinary(DescriptionSchema, create(DescriptionSchema, { newest })));
        return;
      }
      asked.push(fromBinary(DescribeRequestSchema, frame).packing);
      for (const piece of pieces) {
        const data = piece === "noise" ? Buffer.from("noise") : toBinary(WeightsSchema, create(WeightsSchema, piece));
        socket.send(data);
      }
      socket.close(code, "as told");
    }),
  );
  await once(server, "listening");
  const { port } = server.address() as AddressInfo;
  return new WebSocketTransport(`ws://127.0.0.1:${port}`, { WebSocket: WebSocket as any });
}

const piece = (length: number, changes: object = {}) => ({
  data: new Uint8Array(length).fill(length),
  version: "new",
  packing: VERSIONS.packing,
  ...changes,
});

test("pieces are put together", async () => {
  const found = await newerVersion(await serving([piece(2), piece(4)]), VERSIONS, "old");
  expect(found).toEqual({ version: "new", data: Uint8Array.of(2, 2, 4, 4, 4, 4) });
  expect(asked).toEqual([VERSIONS.packing]);
});

test.each<[string, Piece[], string]>([
  ["none is announced", [piece(6)], ""],
  ["it is the device's own", [piece(6)], "old"],
  ["the server cannot pack it", [], "new"],
  ["another server answers, which is behind", [piece(6, { version: "old" })], "new"],
])("no version: %s", async (_, pieces, newest) => {
  expect(await newerVersion(await serving(pieces, { newest }), VERSIONS, "old")).toBeUndefined();
  expect(asked.length).toBe(Number(newest === "new"));
});

test.each<[string, Piece[], new (message: string) => Error, number]>([
  ["too few bytes", [piece(5)], RefusedError, 1000],
  ["too many bytes", [piece(4), piece(3)], RefusedError, 1000],
  ["safetensors, as older servers", [piece(6, { packing: "" })], RefusedError, 1000],
  ["another form", [piece(6, { packing: "\u001b[31monnx" })], RefusedError, 1000],
  ["noise", ["noise"], WireError, 1000],
  ["a broken link", [piece(4)], LinkError, 1011],
  ["a refusal", [], RefusedError, 4412],
])("a server that sends %s", async (_, pieces, error, code) => {
  await expect(newerVersion(await serving(pieces, { code }), VERSIONS, "old")).rejects.toThrow(error);
});
