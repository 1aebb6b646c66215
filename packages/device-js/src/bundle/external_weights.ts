import { BinaryReader, BinaryWriter, WireType } from "@bufbuild/protobuf/wire";

/** Fields of onnx.proto: of a model, of its graph, and of a tensor. */
const [GRAPH, INITIALIZER] = [7, 5];
const [RAW_DATA, EXTERNAL_DATA, DATA_LOCATION] = [9, 13, 14];
const EXTERNAL = 1;
/** Bytes of the smallest tensor that is taken out. */
const MIN_BYTES = 4096;

/**
 * A copy of an ONNX model without its large weights, which it names as parts of the file `path`: the model itself.
 *
 * onnxruntime-web copies such parts into WebAssembly's memory once. A model with its weights is there twice more while it
 * is loaded, and that memory never shrinks.
 */
export function withoutWeights(model: Uint8Array, path: string): Uint8Array<ArrayBuffer> {
  const tensor = (data: Uint8Array) => external(data, model, path);
  return edited(model, GRAPH, (graph) => edited(graph, INITIALIZER, tensor));
}

/** A message with each value of a field replaced; without a value the field is left out. */
function edited(
  message: Uint8Array,
  number: number,
  edit: (value: Uint8Array) => Uint8Array | undefined,
): Uint8Array<ArrayBuffer> {
  const [reader, writer] = [new BinaryReader(message), new BinaryWriter()];
  while (reader.pos < reader.len) {
    const start = reader.pos;
    const [field, type] = reader.tag();
    if (field === number && type === WireType.LengthDelimited) {
      const value = edit(reader.bytes());
      if (value) writer.tag(field, type).bytes(value);
    } else {
      reader.skip(type, field);
      writer.raw(message.subarray(start, reader.pos));
    }
  }
  return writer.finish();
}

/** A tensor that names its bytes' place in the model, if they are many. */
function external(tensor: Uint8Array, model: Uint8Array, path: string): Uint8Array {
  let raw: Uint8Array | undefined;
  const rest = edited(tensor, RAW_DATA, (data) => {
    raw = data;
    return undefined;
  });
  if (!raw || raw.length < MIN_BYTES) return tensor;
  const place = { location: path, offset: raw.byteOffset - model.byteOffset, length: raw.length };
  const writer = new BinaryWriter().raw(rest);
  for (const [key, value] of Object.entries(place)) {
    writer.tag(EXTERNAL_DATA, WireType.LengthDelimited).fork();
    writer.tag(1, WireType.LengthDelimited).string(key);
    writer.tag(2, WireType.LengthDelimited).string(String(value)).join();
  }
  return writer.tag(DATA_LOCATION, WireType.Varint).int32(EXTERNAL).finish();
}
