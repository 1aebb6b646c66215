// Parser of OpenAI's server-sent events: one JSON value or [DONE] each.

/** Split a text into the data of complete events and the rest. */
export function split(text) {
  const blocks = text.replaceAll("\r\n", "\n").split("\n\n");
  const rest = blocks.pop();
  return { events: blocks.map(dataOf).filter((data) => data !== ""), rest };
}

function dataOf(block) {
  const lines = block.split("\n").filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).trimStart()).join("\n");
}

/** Yield the JSON values of a byte stream. Throws if it ends without [DONE]. */
export async function* read(stream) {
  let left = "";
  for await (const text of texts(stream)) {
    const { events, rest } = split(left + text);
    left = rest;
    for (const data of events) {
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
  throw new Error("The stream ended early.");
}

// Some browsers cannot iterate over a stream.
async function* texts(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
