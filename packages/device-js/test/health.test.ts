/** What a page asks a server before it opens a WebSocket. */
import { once } from "node:events";
import { createServer } from "node:http";
import type { Server } from "node:http";
import type { AddressInfo } from "node:net";
import { afterEach, expect, test, vi } from "vitest";
import { Health } from "../src/protocol/health.js";

const open: Server[] = [];
const signal = new AbortController().signal;

afterEach(() => {
  for (const server of open.splice(0)) {
    server.closeAllConnections();
    server.close();
  }
});

/** A server that answers with a status, or not at all; its address. */
async function answering(status: number | undefined, port = 0): Promise<string> {
  const server = createServer((_, response) => {
    if (status !== undefined) response.writeHead(status, { connection: "close" }).end();
  });
  open.push(server.listen(port, "127.0.0.1"));
  await once(server, "listening");
  return `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
}

function failed(server: string, origin = server): Health {
  const health = new Health(server, origin);
  health.noteFailure();
  return health;
}

test("a server that is away, and back", async () => {
  const server = await answering(200);
  const [away] = open.splice(0);
  away!.closeAllConnections();
  away!.close();
  const health = new Health(server, server);
  expect(await health.mayOpen(signal)).toBe(true);
  health.noteFailure();
  expect(await health.mayOpen(signal)).toBe(false);
  await answering(200, Number(new URL(server).port));
  expect(await health.mayOpen(signal)).toBe(true);
});

test.each([[200, true], [401, true], [404, true], [302, true], [502, false], [503, false], [undefined, true]])(
  "an answer with status %s",
  async (status, may) => expect(await failed(await answering(status)).mayOpen(signal)).toBe(may),
);

test("a server of another origin is asked in vain until an answer was read", async () => {
  const server = await answering(502);
  const health = failed(server, "https://example.org");
  expect(await health.mayOpen(signal)).toBe(true);
  const port = Number(new URL(server).port);
  const [first] = open.splice(0);
  first!.close();
  await answering(200, port);
  expect(await health.mayOpen(signal)).toBe(true);
  const [second] = open.splice(0);
  second!.closeAllConnections();
  second!.close();
  expect(await health.mayOpen(signal)).toBe(false);
});

test("a request that fails late is awaited from then on", async () => {
  const waiting: (() => void)[] = [];
  const server = createServer((_, response) => {
    waiting.push(() => response.writeHead(503, { connection: "close" }).end());
  });
  open.push(server.listen(0, "127.0.0.1"));
  await once(server, "listening");
  const health = failed(`http://127.0.0.1:${(server.address() as AddressInfo).port}`);
  expect(await health.mayOpen(signal)).toBe(true);
  waiting.shift()!();
  await vi.waitFor(async () => {
    const asked = health.mayOpen(signal);
    setTimeout(() => waiting.shift()?.(), 1000);
    expect(await asked).toBe(false);
  }, 60_000);
});
