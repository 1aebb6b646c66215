/** Messages between the page and its worker, and events of the page's chat. */
import type { ChatMessage } from "../bundle/tokenizer.js";

/** A question to the worker. */
export interface Question {
  readonly messages: readonly ChatMessage[];
  /** The last message is continued. */
  readonly continueFinal: boolean;
  readonly temperature: number;
  readonly topP: number | undefined;
  readonly seed: number;
  readonly maxNewTokens: number;
  /** Whether to draft. */
  readonly speculation: boolean;
}

export type ToWorker =
  | { readonly kind: "load"; readonly token: string }
  | { readonly kind: "ask"; readonly id: number; readonly question: Question }
  | { readonly kind: "stop" }
  /** All conversations were deleted: keep no text of them. */
  | { readonly kind: "forget" }
  /** The browser has another network, or none. */
  | { readonly kind: "network" }
  | { readonly kind: "cut"; readonly cut: boolean };

export type FromWorker =
  | { readonly kind: "progress"; readonly loaded: number; readonly total: number }
  | { readonly kind: "ready"; readonly info: ModelInfo }
  | { readonly kind: "failed"; readonly failure: Failure }
  | { readonly kind: "link"; readonly link: Link }
  | { readonly kind: "chunk"; readonly id: number; readonly chunk: Chunk }
  | { readonly kind: "end"; readonly id: number; readonly failure?: Failure };

/** An error; `status` is 401 if a token is missing or wrong, else 0. */
export interface Failure {
  readonly message: string;
  readonly status: number;
}

export interface ModelInfo {
  readonly model: string;
  readonly context: number;
  /** Bytes of the bundle. */
  readonly bytes: number;
  readonly threads: number;
}

/** State of the link; the first five fields are those of `/v1/moaspec` (docs/serve.md). */
export interface Link {
  readonly state: "up" | "down" | "syncing";
  readonly round_trip_s: number | null;
  readonly bytes_sent: number;
  readonly bytes_received: number;
  readonly cut: boolean;
  readonly can_cut: boolean;
  /** Expected speed with drafts on this link, relative to the server's streaming alone. */
  readonly draft_gain: number | null;
  /** Milliseconds of one drafted token. */
  readonly draft_ms: number | null;
}

export interface Piece {
  readonly text: string;
  readonly id: number;
  readonly source: "draft" | "target" | "provisional";
  readonly was?: "provisional" | "corrected";
}

/** A piece of an answer, in the form of the HTTP endpoint's chunks (docs/serve.md). */
export interface Chunk {
  readonly choices: readonly [{ index: 0; delta: { content: string }; finish_reason: string | null }];
  readonly moaspec: {
    readonly pieces?: readonly Piece[];
    readonly round?: Round;
    readonly stats: Stats;
    readonly link: Link;
    readonly provisional?: readonly Piece[];
    readonly correction?: { confirmed: number; removed: number; text: string };
  };
}

export interface Round {
  readonly number: number;
  readonly nodes: readonly { text: string; id: number; parent: number; source: "draft"; accepted: boolean }[];
  readonly emitted: number;
}

export interface Stats {
  readonly tokens: number;
  readonly rounds: number;
  readonly tau: number | null;
  readonly drafted: number;
  readonly accepted: number;
  readonly copied: 0;
  readonly tokens_per_second: number | null;
  readonly elapsed_s: number;
  /** Of this answer. */
  readonly bytes_sent_per_token: number | null;
  readonly bytes_received_per_token: number | null;
}
