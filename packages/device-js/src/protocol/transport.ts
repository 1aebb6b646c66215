import type { LinkError, RefusedError } from "../errors.js";

/** Callbacks of a connection. */
export interface ConnectionEvents {
  /** A frame has arrived. */
  onFrame(frame: Uint8Array): void;
  /** The connection has ended, other than by `close`. Called once at most. */
  onEnd(error: LinkError | RefusedError): void;
}

/** One stream of frames in both directions. */
export interface Connection {
  /** Send a frame; after the connection's end it is dropped. */
  send(frame: Uint8Array): void;
  /** Close the connection. */
  close(): void;
}

/** Makes connections to one server. */
export interface Transport {
  /**
   * Open a connection.
   *
   * @param signal ends the attempt
   * @throws LinkError the server cannot be reached
   * @throws RefusedError the server does not accept this device
   */
  connect(events: ConnectionEvents, signal: AbortSignal): Promise<Connection>;
}
