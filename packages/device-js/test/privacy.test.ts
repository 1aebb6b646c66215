/** Private spans: the same placeholders as Python's, what is refused, and what a vault shows. */
import { readFileSync } from "node:fs";
import { inspect } from "node:util";
import { expect, test } from "vitest";
import { InputError } from "../src/errors.js";
import type { Chunk, Piece } from "../src/page/messages.js";
import { ChunkRestorer } from "../src/page/private_chunks.js";
import { fold } from "../src/privacy/folding.js";
import { defaultRecognisers, phones } from "../src/privacy/recognisers.js";
import { marked, Span } from "../src/privacy/spans.js";
import { Vault } from "../src/privacy/vault.js";

interface Case {
  recognise: boolean;
  texts: string[];
  hidden: (string | null)[];
}

/** Made by packages/moaspec-edge/tests/write_golden.py. */
const cases: Case[] = JSON.parse(readFileSync(new URL("golden.json", import.meta.url), "utf8")).private_texts;
const TEXT = "Write to bob@example.org or call +49 30 901820, card 4111 1111 1111 1111.";

function hidden(vault: Vault, text: string): string | null {
  try {
    return vault.hide(text);
  } catch (error) {
    expect(error).toBeInstanceOf(InputError);
    expect((error as Error).message).toMatch(/write <\/?private>/);
    expect((error as Error).message).not.toContain("\n");
    return null;
  }
}

test("placeholders and refusals are those of Python, and texts come back", () => {
  for (const { recognise, texts, hidden: expected } of cases) {
    const vault = new Vault(recognise ? defaultRecognisers(["US", "DE"]) : []);
    const found = texts.map((text) => hidden(vault, text));
    expect(found, JSON.stringify(texts)).toEqual(expected);
    texts.forEach((text, i) => {
      if (found[i] !== null) expect(vault.restore(found[i]!)).toBe(marked(text)[0]);
    });
  }
});

test("what one message marks is hidden in all; marks do not reach over messages", () => {
  const vault = new Vault([]);
  const messages = [
    { role: "user", content: "My cat is called Schroedinger.", name: "me" },
    { role: "assistant", content: "Forget <private>Schroedinger</private>." },
  ];
  expect(vault.hideMessages(messages)).toEqual([
    { role: "user", content: "My cat is called [PRIVATE_1].", name: "me" },
    { role: "assistant", content: "Forget [PRIVATE_1]." },
  ]);
  expect(() => vault.hideMessages([{ content: "<private>A" }, { content: "da</private>" }])).toThrow(InputError);
});

test("given spans: overlapping ones become one, others are refused", () => {
  const vault = new Vault([]);
  expect(vault.hideSpans("abcdefgh", [new Span(1, 4), new Span(3, 6, "NAME")])).toBe("a[PRIVATE_2]gh");
  expect(vault.restore("[PRIVATE_2] [PRIVATE_9]")).toBe("bcdef [PRIVATE_9]");
  for (const [start, stop, kind] of [[0, 0, "NAME"], [-1, 2, "NAME"], [0.5, 2, "NAME"], [0, 1, "name"], [0, 1, "A_B"]] as const) {
    expect(() => new Span(start, stop, kind)).toThrow(InputError);
  }
  expect(() => vault.hideSpans("abc", [new Span(1, 4)])).toThrow(InputError);
  expect(() => phones(["XX"])).toThrow(new InputError("Unknown telephone regions XX: use two-letter codes, as US, DE."));
});

test("characters of two units stay whole, accents stay with their letters", () => {
  const folded = fold("\u{1d7ce}\u{1f600}e\u0301x");
  expect([folded.text, folded.span(0, 1), folded.span(1, 3), folded.span(3, 4)]).toEqual(["0\u{1f600}ex", [0, 2], [2, 4], [4, 6]]);
  const vault = new Vault([]);
  expect(vault.hide("<private>\u{1f600}</private> \u{1f600} \ud83d")).toBe("[PRIVATE_1] [PRIVATE_1] \ud83d");
});

test("each text is read once", () => {
  const read: string[] = [];
  const recognise = (text: string) => (read.push(text), []);
  new Vault([recognise]).hideTexts(["a", "<private>b</private>"]);
  expect(read).toEqual(["a", "b"]);
});

test("the mapping stays in memory", () => {
  const vault = new Vault();
  vault.hide(TEXT);
  expect(vault.size).toBe(3);
  expect(() => JSON.stringify({ vault })).toThrow(InputError);
  const shown = [String(vault), inspect(vault, { showHidden: true }), inspect(vault.restorer()), inspect(structuredClone(vault))];
  expect(shown.join()).not.toMatch(/bob|4111/);
});

test("pieces restore as the whole; only what may be a placeholder waits", () => {
  const vault = new Vault();
  const text = `${vault.hide(TEXT)} [EMAIL_ [EMAIL_1 [[PHONE_1]] [X`;
  for (let size = 1; size < 12; size++) {
    const restorer = vault.restorer();
    let shown = "";
    for (let place = 0; place < text.length; place += size) shown += restorer.push(text.slice(place, place + size));
    expect(shown + restorer.close()).toBe(vault.restore(text));
  }
  const restorer = vault.restorer();
  const pieces = ["to [EMA", "IL_1", "] or [not", " ["].map((piece) => restorer.push(piece));
  expect([...pieces, restorer.close()]).toEqual(["to ", "", "bob@example.org or [not", " ", "["]);
});

/** The texts of an answer's chunks, with those of provisional tokens, after a restorer. */
function restored(vault: Vault, chunks: readonly (readonly [final: string[], provisional?: string[]])[]) {
  const restorer = new ChunkRestorer(vault);
  const piece = (text: string): Piece => ({ text, id: 0, source: "target" });
  return chunks.map(([final, provisional], i) => {
    const finish_reason = i === chunks.length - 1 ? "stop" : null;
    const correction = { confirmed: 0, removed: 1, text: "[PRIVATE_1]" };
    const moaspec = { pieces: final.map(piece), correction, ...(provisional ? { provisional: provisional.map(piece) } : {}) };
    const chunk = { choices: [{ index: 0, delta: { content: final.join("") }, finish_reason }], moaspec };
    const { choices, moaspec: said } = restorer.chunk(chunk as unknown as Chunk);
    const texts = said.pieces?.map(({ text }) => text) ?? [];
    expect(choices[0].delta.content).toBe(texts.join(""));
    expect(said.correction!.text).toBe(vault.restore("[PRIVATE_1]"));
    return [texts, said.provisional?.map(({ text }) => text)];
  });
}

test("private text is restored in the tokens of an answer", () => {
  const vault = new Vault([]);
  const chunks = [[["Dear ", "[PRIV"]], [["ATE", "_1"], ["] and", " [PRIVATE_1]!"]], [["]["]], [["a", "PRIVATE_1] [PR"]]] as const;
  const given = chunks.map(([final, provisional]) => [[...final], provisional && [...provisional]] as [string[], string[]?]);
  expect(restored(vault, given)).toEqual(given); // it hides nothing
  vault.hide("I am <private>Ada</private>");
  expect(restored(vault, given)).toEqual([
    [["Dear "], undefined],
    [[], ["Ada", "", "", " and", " Ada!"]],
    [[], undefined],
    [["Ada", "", "", "[", "a", "PRIVATE_1] [PR"], undefined],
  ]);
});

test("long hostile texts end", () => {
  const pieces = [
    ..."1a\\< ", "aa00", "DE89370400440532013000 ", "1 ", "4111 1111 1111 1111 ", "a@", "a.", '"a"@', "+1",
    "+ 1 1 1 1 1 1 1 1", "%41&lt;\\u0041", "[AA_1", "1\u0301\u0302", "<private>abc</private> abc ",
  ];
  // Expressions that backtrack would take hours.
  for (const piece of pieces) new Vault().hide(piece.repeat(4000 / piece.length));
});

test("private texts within one another take bounded work", () => {
  const vault = new Vault([]);
  const nested = (i: number) => `<private>${"a b c".slice(0, 2 * (i % 2) + 3)}${"d".repeat(i)}</private> `;
  vault.hide(Array.from({ length: 300 }, (_, i) => nested(i)).join(""));
  vault.hide(Array.from({ length: 200 }, (_, i) => `<private>x y${" x".repeat(i)}</private>\n`).join(""));
  const text = "x".repeat(20_000);
  expect(vault.restore(vault.hide(text))).toBe(text);
});
