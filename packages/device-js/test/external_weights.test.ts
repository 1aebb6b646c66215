/** A graph without its weights: what a runtime reads in their place. */
import { BinaryReader, BinaryWriter, WireType } from "@bufbuild/protobuf/wire";
import { expect, test } from "vitest";
import { withoutWeights } from "../src/bundle/external_weights.js";

type Fields = Map<number, (Uint8Array | number)[]>;

function fieldsOf(message: Uint8Array): Fields {
  const [reader, found]: [BinaryReader, Fields] = [new BinaryReader(message), new Map()];
  while (reader.pos < reader.len) {
    const [field, type] = reader.tag();
    const value = type === WireType.Varint ? reader.int32() : reader.bytes();
    found.set(field, [...(found.get(field) ?? []), value]);
  }
  return found;
}

function message(...fields: [number, Uint8Array][]): Uint8Array {
  const writer = new BinaryWriter();
  for (const [field, value] of fields) writer.tag(field, WireType.LengthDelimited).bytes(value);
  return writer.finish();
}

const text = (data: unknown) => new TextDecoder().decode(data as Uint8Array);
const bytes = (value: string) => new TextEncoder().encode(value);
const large = Uint8Array.from({ length: 5000 }, (_, i) => i % 251);
const small = Uint8Array.of(1, 2, 3);
const graph = message([2, bytes("draft")], [5, message([8, bytes("a")], [9, large])], [5, message([9, small], [8, bytes("b")])]);

test.each([0, 7])("large weights are parts of the file, small ones stay; the file at byte %s of its buffer", (first) => {
  const whole = message([2, bytes("producer")], [7, graph]);
  const model = new Uint8Array(first + whole.length).subarray(first);
  model.set(whole);
  const found = fieldsOf(withoutWeights(model, "here"));
  expect(text(found.get(2)![0])).toBe("producer");
  const [one, two] = fieldsOf(found.get(7)![0] as Uint8Array).get(5)!.map((tensor) => fieldsOf(tensor as Uint8Array));
  expect(two).toEqual(fieldsOf(message([9, small], [8, bytes("b")])));
  expect(one!.has(9)).toBe(false);
  expect(one!.get(14)).toEqual([1]);
  const place = Object.fromEntries(
    one!.get(13)!.map((entry) => [1, 2].map((field) => text(fieldsOf(entry as Uint8Array).get(field)![0]))),
  );
  expect(place["location"]).toBe("here");
  const offset = Number(place["offset"]);
  expect(model.subarray(offset, offset + Number(place["length"]))).toEqual(large);
});
