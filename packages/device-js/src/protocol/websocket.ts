import { InputError, LinkError, RefusedError, UnknownClientError } from "../errors.js";
import { Health } from "./health.js";
import { MAX_FRAME_BYTES } from "./limits.js";
import type { Connection, ConnectionEvents, Transport } from "./transport.js";
import type { Description } from "./target_pb.js";
import { oneLine, parseDescription } from "./wire.js";

const SUBPROTOCOL = "moaspec.v1";
/** A subprotocol that carries a token: browsers cannot set headers, and URLs appear in logs. */
const TOKEN_PREFIX = "moaspec.token.";
/** Close code for no token, or one that the server does not know. */
const UNKNOWN_CLIENT = 4401;
/** Close codes after which a device does not try again: invalid, unknown client, forbidden, ... */
const REFUSALS = new Set([4400, 4403, 4412, 1009]);
/** Hosts to which a token may be sent without encryption. */
const LOCAL_HOST = /^(localhost|127(\.\d+){3}|\[::1\])$/;

export interface WebSocketOptions {
  /** Shows the server who this device is. */
  readonly token?: string;
  /** The class of connections; default: the global one. For Node below 22 pass that of `ws`. */
  readonly WebSocket?: new (url: string, protocols: string[]) => WebSocket;
}

/** A call of target.proto. */
export type Call = "converse" | "describe" | "generate" | "update";

/** The server has ended a call. */
export class EndOfCall extends LinkError {}

/** Connections to a `moaspec target-server`; each binary message is one frame. */
export class WebSocketTransport implements Transport {
  private readonly url: string;
  private readonly protocols = [SUBPROTOCOL];
  private readonly make: new (url: string, protocols: string[]) => WebSocket;
  private readonly health: Health | undefined;

  /**
   * @param address ws://HOST:PORT, or wss://HOST:PORT for TLS
   * @throws InputError no such address, or a token that would be sent without encryption
   */
  constructor(address: string, options: WebSocketOptions = {}) {
    const parts = parsed(address);
    const { token } = options;
    if (token !== undefined) {
      if (!/^[\x20-\x7e]+$/.test(token)) {
        throw new InputError("A token must be one line of printable ASCII characters.");
      }
      if (parts.protocol === "ws:" && !LOCAL_HOST.test(parts.hostname)) {
        throw new InputError("A token is only sent with encryption: connect to wss://.");
      }
      const encoded = btoa(token).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");
      this.protocols.push(TOKEN_PREFIX + encoded);
    }
    const place = parts.href.replace(/\/+$/, "");
    this.url = `${place}/v1/`;
    this.health = options.WebSocket ? undefined : Health.of(place);
    const make = options.WebSocket ?? globalThis.WebSocket;
    if (!make) throw new InputError("There is no global WebSocket here; pass that of the package ws.");
    this.make = make;
  }

  connect(events: ConnectionEvents, signal: AbortSignal): Promise<Connection> {
    return this.open("converse", events, signal);
  }

  /**
   * Ask the server what it serves.
   *
   * @throws LinkError no answer in time
   * @throws RefusedError the server does not accept this device
   * @throws WireError the answer is no description
   */
  async describe(timeoutMs = 5000): Promise<Description> {
    const limit = new AbortController();
    const timer = setTimeout(() => limit.abort(), timeoutMs);
    let connection: Connection | undefined;
    try {
      return await new Promise<Description>((resolve, reject) => {
        const onFrame = (frame: Uint8Array) => {
          try {
            resolve(parseDescription(frame));
          } catch (error) {
            reject(error);
          }
        };
        limit.signal.addEventListener("abort", () => reject(new LinkError("The server took too long.")));
        this.open("describe", { onFrame, onEnd: reject }, limit.signal).then((opened) => {
          connection = opened;
          opened.send(new Uint8Array());
        }, reject);
      });
    } finally {
      clearTimeout(timer);
      connection?.close();
    }
  }

  /** Open a connection for one of the server's calls; see `connect`. */
  async open(call: Call, events: ConnectionEvents, signal: AbortSignal): Promise<Connection> {
    if (this.health && !(await this.health.mayOpen(signal))) throw new LinkError("The server does not answer.");
    if (signal.aborted) throw new LinkError("The server took too long.");
    return this.dial(call, events, signal);
  }

  private dial(call: Call, events: ConnectionEvents, signal: AbortSignal): Promise<Connection> {
    return new Promise((resolve, reject) => {
      const socket = new this.make(this.url + call, this.protocols);
      socket.binaryType = "arraybuffer";
      let opened = false;
      let closed = false;
      const end = (error: LinkError | RefusedError): void => {
        if (closed) return;
        closed = true;
        if (!(error instanceof EndOfCall)) this.health?.noteFailure();
        if (socket.readyState < 2) socket.close();
        if (opened) events.onEnd(error);
        else reject(error);
      };
      signal.addEventListener("abort", () => !opened && end(new LinkError("The server took too long.")));
      socket.onopen = () => {
        if (closed) return;
        if (socket.protocol !== SUBPROTOCOL) {
          end(new RefusedError("What answers there is no `moaspec target-server`."));
          return;
        }
        opened = true;
        this.health?.noteOpened();
        resolve({
          send: (frame) => {
            if (closed || socket.readyState !== 1) return;
            if (socket.bufferedAmount > MAX_FRAME_BYTES) end(new LinkError("The server reads nothing."));
            else socket.send(frame as Uint8Array<ArrayBuffer>);
          },
          close: () => {
            closed = true;
            socket.close();
          },
        });
      };
      socket.onmessage = ({ data }) => {
        if (closed) return;
        if (data instanceof ArrayBuffer) events.onFrame(new Uint8Array(data));
        else end(new RefusedError("The server sent text, which the protocol does not have."));
      };
      // An `error` event says nothing and is followed by `close`.
      socket.onerror = () => {};
      socket.onclose = ({ code, reason }) => end(closeError(code, reason));
    });
  }
}

function closeError(code: number, reason: string): LinkError | RefusedError {
  const refusal = `The server refuses: ${oneLine(reason)}`;
  if (code === UNKNOWN_CLIENT) return new UnknownClientError(refusal);
  if (REFUSALS.has(code)) return new RefusedError(refusal);
  if (code === 1000) return new EndOfCall("The server ended the call.");
  return new LinkError(`The link broke: close code ${code}.`);
}

function parsed(address: string): URL {
  let parts: URL | undefined;
  try {
    parts = new URL(address);
  } catch {
    // The message below tells.
  }
  const isPlain = parts && !(parts.search || parts.hash || parts.username || parts.password);
  if (!parts || !isPlain || !["ws:", "wss:"].includes(parts.protocol)) {
    throw new InputError(`A server is ws://HOST:PORT or wss://HOST:PORT, got ${JSON.stringify(address)}.`);
  }
  return parts;
}
