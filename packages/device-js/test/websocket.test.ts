/** WebSockets: addresses, tokens, refusals, and servers that misbehave. */
import { once } from "node:events";
import type { AddressInfo } from "node:net";
import { afterEach, expect, test } from "vitest";
import WebSocket, { WebSocketServer } from "ws";
import { InputError, LinkError, RefusedError, UnknownClientError, WireError } from "../src/errors.js";
import type { ConnectionEvents } from "../src/protocol/transport.js";
import { WebSocketTransport } from "../src/protocol/websocket.js";

let server: WebSocketServer | undefined;

afterEach(() => {
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
