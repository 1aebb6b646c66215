// Whether two answers are the same, and how fast one is beside the other.

/** Index of the first token at which two lists of ids differ, or -1. */
export function firstDifference(ids, others) {
  const shorter = Math.min(ids.length, others.length);
  for (let i = 0; i < shorter; i += 1) if (ids[i] !== others[i]) return i;
  return ids.length === others.length ? -1 : shorter;
}

/** What to say of a speculative answer beside a plain one: `{same, text}`. */
export function verdict(speculative, plain) {
  const at = firstDifference(speculative.ids, plain.ids);
  const same = at < 0;
  const [fast, slow] = [speculative.stats?.tokens_per_second, plain.stats?.tokens_per_second];
  const speed = fast && slow ? ` ${(fast / slow).toFixed(2)} times as fast as plain decoding.` : "";
  if (same) return { same, text: `✓ The same text, token for token.${speed}` };
  const kept = speculative.kept ? "It was told to keep what it wrote without the link." :
    "There the model’s two best tokens are closer than rounding, or something is wrong.";
  return { same, text: `✗ The texts differ from token ${at + 1} on. ${kept}${speed}` };
}
