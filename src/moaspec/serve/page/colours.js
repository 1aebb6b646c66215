// Colours by source on rendered Markdown. The elements stay as they are: the browser is told which
// stretches of them to paint (CSS custom highlights).

export const KINDS = ["draft", "copy", "provisional", "corrected", "device"];
const AHEAD = 8; // characters that must agree before text counts as found again

/** Runs `[kind, length]` with one more piece of text; neighbours of one kind are joined. */
export function addRun(runs, kind, length) {
  if (length <= 0) return;
  const last = runs.at(-1);
  if (last?.[0] === kind) last[1] += length;
  else runs.push([kind, length]);
}

/** The runs that lie within a stretch of the text. */
export function runsWithin(runs, start, end) {
  const found = [];
  let at = 0;
  for (const [kind, length] of runs) {
    addRun(found, kind, Math.min(at + length, end) - Math.max(at, start));
    at += length;
    if (at >= end) break;
  }
  return found;
}

/**
 * Where each character of rendered texts stands in their source, or -1. Markdown mostly leaves
 * characters out, so the source is read forward: where the two part, it is skipped up to the place
 * from which they agree again.
 */
export function places(texts, source) {
  let at = 0;
  return texts.map((text) => {
    const found = [];
    for (let i = 0; i < text.length; i += 1) {
      const ahead = text.slice(i, i + AHEAD);
      // White space alone may be the renderer's, which is no part of the source.
      if (source[at] !== text[i] && ahead.trim()) {
        const next = source.indexOf(ahead, at);
        if (next >= 0) at = next;
      }
      found.push(source[at] === text[i] ? at : -1);
      if (source[at] === text[i]) at += 1;
    }
    return found;
  });
}

/** Stretches `[kind, start, end]` of a rendered text: words of one kind, no white space. */
export function stretches(text, where, kinds) {
  const found = [];
  for (let i = 0; i < text.length; i += 1) {
    const kind = /\s/.test(text[i]) ? undefined : kinds[where[i]];
    const last = found.at(-1);
    if (last && last[0] === kind && last[2] === i) last[2] += 1;
    else if (KINDS.includes(kind)) found.push([kind, i, i + 1]);
  }
  return found;
}

/** The text nodes of an element, in order. */
export function textNodes(element) {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  const nodes = [];
  while (walker.nextNode()) nodes.push(walker.currentNode);
  return nodes;
}

/** Ranges `[kind, range]` in text nodes; `where` is what `places` says, `runs` are the source's. */
export function ranges(nodes, where, runs) {
  const kinds = runs.flatMap(([kind, length]) => Array(length).fill(kind));
  return nodes.flatMap((node, i) =>
    stretches(node.data, where[i], kinds).map(([kind, start, end]) => [
      kind,
      new StaticRange({
        startContainer: node, startOffset: start, endContainer: node, endOffset: end,
      }),
    ]));
}

/** What the page paints, which can be switched off as a whole. */
export class Colours {
  #painted = new Map(); // ranges by kind

  constructor() {
    // Older browsers show the text without colours.
    if (globalThis.Highlight) for (const kind of KINDS) this.#painted.set(kind, new Highlight());
    this.shown = true;
  }

  /** Whether colours are shown. */
  set shown(shown) {
    for (const [kind, highlight] of this.#painted) {
      if (shown) CSS.highlights.set(kind, highlight);
      else CSS.highlights.delete(kind);
    }
  }

  paint(found) {
    for (const [kind, range] of found) this.#painted.get(kind)?.add(range);
  }

  wipe(found) {
    for (const [kind, range] of found) this.#painted.get(kind)?.delete(range);
  }
}

export const colours = new Colours();
