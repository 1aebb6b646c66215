// Comparison of two answers: equality and speed.

/** Index of the first difference between two lists of token ids, or -1. */
export function firstDifference(ids, others) {
  const shorter = Math.min(ids.length, others.length);
  for (let i = 0; i < shorter; i += 1) if (ids[i] !== others[i]) return i;
  return ids.length === others.length ? -1 : shorter;
}

/**
 * Compare a speculative answer with a plain one: `{same, text}`, `text` being a sentence. Both are
 * `{ids, stats, kept}`.
 */
export function verdict(speculative, plain) {
  const at = firstDifference(speculative.ids, plain.ids);
  const speed = speedOf(speculative.stats, plain.stats);
  if (at < 0) {
    const passes = passesOf(speculative.stats, plain.stats);
    return { same: true, text: `✓ Same text, token for token${passes}.${speed}` };
  }
  const why = speculative.kept ? "it kept what it wrote while the link was cut" :
    "there the model’s two best tokens are closer than rounding, or something is wrong";
  return { same: false, text: `✗ The texts differ from token ${at + 1} on; ${why}.${speed}` };
}

function speedOf(fast, slow) {
  const [a, b] = [fast?.tokens_per_second, slow?.tokens_per_second];
  if (!a || !b) return "";
  const ratio = (a / b).toFixed(2);
  const slower = a < b ? ", so slower" : "";
  return ` Speed: ${ratio} times as fast with speculation${slower} ` +
    `(${a.toFixed(1)} against ${b.toFixed(1)} tokens a second).`;
}

function passesOf(fast, slow) {
  if (!fast?.rounds || !slow?.rounds) return "";
  return `, in ${fast.rounds} passes of the model instead of ${slow.rounds}`;
}
