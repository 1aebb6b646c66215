/** WebSockets: addresses, tokens, refusals, and servers that misbehave. */
import { createHash } from "node:crypto";
import { once } from "node:events";
import { createServer } from "node:net";
import type { AddressInfo, Server, Socket } from "node:net";
import { create, fromBinary, toBinary } from "@bufbuild/protobuf";
import type { MessageInitShape } from "@bufbuild/protobuf";
import { afterEach, expect, test } from "vitest";
import WebSocket, { WebSocketServer } from "ws";
import { InputError, LinkError, MoaSpecError, RefusedError, UnknownClientError, WireError } from "../src/errors.js";
import type { ConnectionEvents } from "../src/protocol/transport.js";
import { WebSocketTransport } from "../src/protocol/websocket.js";
import { GeneratedSchema, GenerateRequestSchema } from "../src/protocol/target_pb.js";
import type { GenerateRequest } from "../src/protocol/target_pb.js";
import { RemoteSession } from "../src/session/remote_session.js";
import { RemoteText } from "../src/session/server_text.js";
import type { ServerTextEvent } from "../src/session/server_text.js";
import { device, PROMPT } from "./fake_target.js";

let server: WebSocketServer | undefined;
const listeners: Server[] = [];
const sockets: Socket[] = [];

afterEach(() => {
  for (const socket of sockets.splice(0)) socket.destroy();
  for (const listener of listeners.splice(0)) listener.close();
  for (const client of server?.clients ?? []) client.terminate();
  server?.close();
});

async function listening(onSocket: (socket: WebSocket) => void, options = {}): Promise<string> {
  server = new WebSocketServer({ port: 0, host: "127.0.0.1", ...options });
  server.on("connection", onSocket);
  await once(server, "listening");
  return `ws://127.0.0.1:${(server.address() as AddressInfo).port}`;
}

function transport(url: string, token?: string): WebSocketTransport {
  return new WebSocketTransport(url, { WebSocket: WebSocket as any, ...(token ? { token } : {}) });
}

/** The first thing that happens on a connection: a frame, or its end. */
async function first(url: string, token?: string): Promise<Uint8Array | Error> {
  return new Promise((resolve, reject) => {
    const events: ConnectionEvents = { onFrame: resolve, onEnd: resolve };
    transport(url, token).connect(events, new AbortController().signal).catch(reject);
  });
}

test("frames in both directions, and the call as a path", async () => {
  const paths: (string | undefined)[] = [];
  const url = await listening((socket) => socket.on("message", (data) => socket.send(data)));
  server!.on("connection", (_, request) => paths.push(request.url));
  const echoed = new Promise<Uint8Array>((resolve, reject) => {
    const opening = transport(`${url}/below/`).connect({ onFrame: resolve, onEnd: reject }, new AbortController().signal);
    opening.then((connection) => connection.send(Uint8Array.of(1, 2, 3)), reject);
  });
  expect(await echoed).toEqual(Uint8Array.of(1, 2, 3));
  expect(paths).toEqual(["/below/v1/converse"]);
});

test("a token travels as a subprotocol, not in the URL", async () => {
  const offered: (string | undefined)[] = [];
  const url = await listening((socket) => socket.send(Uint8Array.of(1)));
  server!.on("connection", (_, request) => offered.push(request.url, request.headers["sec-websocket-protocol"]));
  await first(url, "sec?ret>~");
  const encoded = Buffer.from("sec?ret>~").toString("base64url");
  expect(offered).toEqual(["/v1/converse", `moaspec.v1,moaspec.token.${encoded}`]);
});

test("descriptions: nonsense, a refusal, silence", async () => {
  const url = await listening((socket) => socket.send(Uint8Array.of(255, 255)));
  await expect(transport(url).describe()).rejects.toThrow(WireError);
  server!.close();
  const refusing = await listening((socket) => socket.close(4401, "no"));
  await expect(transport(refusing).describe()).rejects.toThrow(UnknownClientError);
  server!.close();
  const silent = await listening(() => {});
  await expect(transport(silent).describe(100)).rejects.toThrow(LinkError);
});

test.each([4400, 4401, 4403, 4412, 1009])("close code %s is a refusal", async (code) => {
  const url = await listening((socket) => socket.close(code, "no\nway"));
  const error = await first(url);
  expect(error).toBeInstanceOf(RefusedError);
  expect((error as Error).message).toBe("The server refuses: no way");
});

test.each([1000, 1001, 1011, 1013, 4000])("close code %s breaks the link", async (code) => {
  const url = await listening((socket) => socket.close(code));
  expect(await first(url)).toBeInstanceOf(LinkError);
});

test("a connection that breaks without a code", async () => {
  const url = await listening((socket) => socket.terminate());
  expect(await first(url)).toBeInstanceOf(LinkError);
});

test("text, and a server of something else", async () => {
  const url = await listening((socket) => socket.send("text"));
  expect(await first(url)).toBeInstanceOf(RefusedError);
  server!.close();
  const other = await listening((socket) => socket.send(Uint8Array.of(1)), { handleProtocols: () => false });
  await expect(first(other)).rejects.toThrow(Error);
});

test("nobody listens, and an attempt that is given up", async () => {
  const url = await listening(() => {});
  server!.close();
  await expect(first(url)).rejects.toThrow(LinkError);
  const attempt = new AbortController();
  const opening = transport("ws://127.0.0.1:9").connect({ onFrame: () => {}, onEnd: () => {} }, attempt.signal);
  attempt.abort();
  await expect(opening).rejects.toThrow(LinkError);
});

type Message = MessageInitShape<typeof GeneratedSchema> | Uint8Array | "close";

/** What a server says to `Generate`, with these messages after the request. */
async function generated(messages: Message[], timeoutMs = 60_000) {
  let asked: GenerateRequest | undefined;
  const url = await listening((socket) =>
    socket.on("message", (data) => {
      asked = fromBinary(GenerateRequestSchema, new Uint8Array(data as Buffer));
      for (const message of messages) {
        if (message === "close") socket.close(1000);
        else socket.send(message instanceof Uint8Array ? message : toBinary(GeneratedSchema, create(GeneratedSchema, message)));
      }
    }),
  );
  const texts = new RemoteText(device(), transport(url));
  const events: ServerTextEvent[] = [];
  const options = { maxNewTokens: 6, temperature: 0.5, seed: 3, stopTokenIds: [4], speculate: true, timeoutMs };
  for await (const event of texts.stream(PROMPT, options)) events.push(event);
  return { events, asked };
}

test("a text that the server decodes alone", async () => {
  const end = { tokenIds: [7], sources: [2], stopReason: "max_new_tokens" };
  const { events, asked } = await generated([{ tokenIds: [1, 2], sources: [0, 1] }, end]);
  expect(events).toEqual([
    { tokenIds: [1, 2], sources: ["target", "draft"] },
    { tokenIds: [7], sources: ["copy"], stopReason: "max_new_tokens" },
  ]);
  expect(asked).toMatchObject({ tokenIds: PROMPT, maxNewTokens: 6, stopTokenIds: [4], speculate: true, stop: [] });
  expect(asked!.sampling).toMatchObject({ temperature: 0.5, seed: 3n });
});

test.each([
  ["noise", Uint8Array.of(255, 255), WireError],
  ["a token outside the vocabulary", { tokenIds: [97], sources: [0] }, WireError],
  ["fewer sources than tokens", { tokenIds: [1, 2], sources: [0] }, WireError],
  ["an unknown source", { tokenIds: [1], sources: [3] }, WireError],
  ["too many tokens", { tokenIds: [1, 1, 1, 1, 1, 1, 1], sources: [0, 0, 0, 0, 0, 0, 0] }, WireError],
  ["an unknown end", { stopReason: "<script>" }, WireError],
  ["an end without a reason", "close", LinkError],
  ["silence", {}, LinkError],
] as const)("a text that lies: %s", async (name, message, error) => {
  await expect(generated([message as any], name === "silence" ? 500 : 60_000)).rejects.toThrow(error);
});

test("a text without end is given up", async () => {
  await expect(generated(new Array(3000).fill({}))).rejects.toThrow(MoaSpecError);
});

/** A server that upgrades connections and then writes these bytes, again and again. */
async function raw(bytes: Uint8Array, { upgrades = true, first = [] as number[] } = {}): Promise<string> {
  const listener = createServer((socket) => {
    sockets.push(socket);
    socket.on("error", () => {});
    socket.once("data", (data) => {
      const key = /sec-websocket-key: (.*)\r/i.exec(data.toString())![1];
      const accept = createHash("sha1").update(`${key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11`).digest("base64");
      const head = `HTTP/1.1 101 Yes\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: ${accept}\r\n`;
      socket.write(upgrades ? `${head}Sec-WebSocket-Protocol: moaspec.v1\r\n\r\n` : "HTTP/1.1 101 Yes\r\nX: ");
      socket.write(Uint8Array.from(first));
      const again = setInterval(() => socket.write(bytes), 20);
      socket.on("close", () => clearInterval(again));
    });
  });
  listeners.push(listener.listen(0, "127.0.0.1"));
  await once(listener, "listening");
  return `ws://127.0.0.1:${(listener.address() as AddressInfo).port}`;
}

test.each([
  ["a message whose parts never end", Uint8Array.of(0x00, 1, 7), { first: [0x02, 1, 7] }],
  ["the beginning of a frame alone", Uint8Array.of(), { first: [0x82] }],
  ["pings without end", Uint8Array.of(0x89, 0), {}],
  ["a frame of 2^62 bytes", Uint8Array.of(0x82, 127, 0x40, 0, 0, 0, 0, 0, 0, 0), {}],
  ["frames of a reserved kind", Uint8Array.of(0x83, 1, 7), {}],
  ["an endless header", new Uint8Array(100).fill(0x61), { upgrades: false }],
])("a session ends with an error: %s", async (_, bytes, options) => {
  const url = await raw(bytes, options);
  const session = new RemoteSession(device(), transport(url), { giveUpMs: 1500 });
  await expect(session.generate(PROMPT)).rejects.toThrow(MoaSpecError);
  await session.close();
  expect(sockets.length).toBeLessThan(100);
});

test("addresses and tokens", () => {
  for (const address of ["", "host:1", "http://host", "ws://u:p@host", "ws://host?token=x", "ws://host#x"]) {
    expect(() => transport(address), address).toThrow(InputError);
  }
  expect(() => transport("ws://example.org:1", "secret")).toThrow(InputError);
  expect(() => transport("wss://example.org:1", "a\nb")).toThrow(InputError);
  for (const address of ["wss://example.org", "ws://localhost:1", "ws://127.0.0.1:1", "ws://[::1]:1"]) {
    expect(() => transport(address, "secret"), address).not.toThrow();
  }
});
