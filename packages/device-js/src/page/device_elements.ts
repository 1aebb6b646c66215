/** Elements of the page as a device: the bundle's download, and the device's figures. */
import type { Link, Stats } from "./messages.js";

function element(tag: string, text = ""): HTMLElement {
  const made = document.createElement(tag);
  made.textContent = text;
  return made;
}

function megabytes(bytes: number): string {
  return `${(bytes / 1e6).toFixed(1)} MB`;
}

/** Progress of the bundle's download, above the message box. */
export class DownloadBar {
  private readonly box = element("div");
  private readonly progress = document.createElement("progress");
  private readonly label = element("label");

  constructor() {
    this.box.id = "download";
    this.box.hidden = true;
    this.progress.id = "downloaded";
    this.label.setAttribute("for", this.progress.id);
    this.box.append(this.label, " ", this.progress);
    document.getElementById("ask")?.before(this.box);
    const manifest = document.createElement("link");
    manifest.rel = "manifest";
    manifest.href = "/app.webmanifest";
    document.head.append(manifest);
  }

  show(loaded: number, total: number): void {
    this.box.hidden = false;
    this.progress.max = total;
    this.progress.value = loaded;
    this.label.textContent = `The drafter for this browser: ${megabytes(loaded)} of ${megabytes(total)}`;
  }

  hide(): void {
    this.box.hidden = true;
  }
}

/** A device's battery; TypeScript does not know it. */
interface Battery extends EventTarget {
  /** 0 to 1. */
  readonly level: number;
  readonly charging: boolean;
}

/** Data and time that drafting here takes, below the link's figures. */
export class DeviceFigures {
  private readonly values = new Map<string, HTMLElement>();

  constructor() {
    const list = document.querySelector("#link .figures");
    for (const [id, name] of [
      ["token-sent", "sent per token"],
      ["token-received", "received per token"],
      ["draft-time", "per draft step"],
      ["battery", "battery"],
    ] as const) {
      const [row, value] = [element("div"), element("dd", "–")];
      value.id = id;
      row.append(element("dt", name), value);
      list?.append(row);
      this.values.set(id, value);
    }
    void this.showBattery();
  }

  /** Charge now, and after each change. Most browsers do not tell it. */
  private async showBattery(): Promise<void> {
    const { getBattery } = navigator as { getBattery?(): Promise<Battery> };
    const battery = await getBattery?.call(navigator).catch(() => undefined);
    const show = (): void => {
      const charge = `${Math.round(100 * battery!.level)}%`;
      this.set("battery", battery!.charging ? `${charge}, charging` : charge);
    };
    for (const change of ["levelchange", "chargingchange"]) battery?.addEventListener(change, show);
    if (battery) show();
    else this.values.get("battery")!.parentElement!.hidden = true;
  }

  show(stats: Stats, link: Link): void {
    const { bytes_sent_per_token: sent, bytes_received_per_token: received } = stats;
    this.set("token-sent", sent === null ? "–" : `${sent} B`);
    this.set("token-received", received === null ? "–" : `${received} B`);
    this.set("draft-time", link.draft_ms === null ? "–" : `${link.draft_ms.toFixed(1)} ms`);
  }

  private set(id: string, text: string): void {
    this.values.get(id)!.textContent = text;
  }
}
