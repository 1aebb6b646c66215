/** Restores private text in an answer's chunks (`moaspec_serve/openai/redaction.py`). */
import { beginning, PLACEHOLDER } from "../privacy/vault.js";
import type { Vault } from "../privacy/vault.js";
import type { Chunk, Piece } from "./messages.js";

/** Restores one answer. Final tokens of an incomplete placeholder wait for the rest of it. */
export class ChunkRestorer {
  private pending: readonly Piece[] = [];

  constructor(private readonly vault: Vault) {}

  chunk(chunk: Chunk): Chunk {
    if (!this.vault.size) return chunk;
    const [choice] = chunk.choices;
    const { pieces = [], provisional, correction, ...rest } = chunk.moaspec;
    const all = [...this.pending, ...pieces];
    const restored = this.restored(all, choice.finish_reason !== null);
    this.pending = all.slice(restored.length);
    const content = restored.map(({ text }) => text).join("");
    return {
      choices: [{ ...choice, delta: { content } }],
      moaspec: {
        ...rest,
        ...(restored.length ? { pieces: restored } : {}),
        ...(provisional ? { provisional: this.restored([...this.pending, ...provisional], true) } : {}),
        ...(correction ? { correction: { ...correction, text: this.vault.restore(correction.text) } } : {}),
      },
    };
  }

  /** The pieces that are certain. A private text is in the piece where its placeholder begins. */
  private restored(pieces: readonly Piece[], isLast: boolean): Piece[] {
    const text = pieces.map((piece) => piece.text).join("");
    const certain = isLast ? text.length : beginning(text);
    const found = [...text.matchAll(PLACEHOLDER)].map(({ 0: { length }, index }) => [index, index + length] as const);
    const units = text.split("");
    for (const [start, stop] of found) {
      units.fill("", start, stop)[start] = this.vault.restore(text.slice(start, stop));
    }
    const shown: Piece[] = [];
    let count = 0;
    let stop = 0;
    for (const piece of pieces) {
      const start = stop;
      stop += piece.text.length;
      shown.push({ ...piece, text: units.slice(start, stop).join("") });
      const isWhole = !found.some(([first, end]) => first < stop && stop < end);
      if (stop <= certain && isWhole) count = shown.length;
    }
    return shown.slice(0, count);
  }
}
