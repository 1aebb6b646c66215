import { LinkError } from "../errors.js";
import type { Connection, ConnectionEvents, Transport } from "../protocol/transport.js";

/** A transport that can be cut, to show what a device does then. */
export class CuttableTransport implements Transport {
  private isCut = false;
  private end: (() => void) | undefined;

  constructor(private readonly inner: Transport) {}

  get cut(): boolean {
    return this.isCut;
  }

  set cut(cut: boolean) {
    this.isCut = cut;
    if (cut) this.end?.();
  }

  async connect(events: ConnectionEvents, signal: AbortSignal): Promise<Connection> {
    if (this.isCut) throw new LinkError("The link is cut.");
    const connection = await this.inner.connect(events, signal);
    this.end = () => {
      connection.close();
      events.onEnd(new LinkError("The link was cut."));
    };
    return connection;
  }
}
