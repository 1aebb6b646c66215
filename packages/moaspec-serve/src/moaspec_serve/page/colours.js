// Colours rendered Markdown by token source with CSS custom highlights, without changing elements.

export const KINDS = ["draft", "copy", "provisional", "corrected", "device"];
const AHEAD = 8; // characters that must match before text and source are in step again

/** Append a piece of text to runs `[kind, length]`; adjacent runs of one kind are merged. */
export function addRun(runs, kind, length) {
  if (length <= 0) return;
  const last = runs.at(-1);
  if (last?.[0] === kind) last[1] += length;
  else runs.push([kind, length]);
}

/** The runs inside a range of the text. */
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
 * The position of each rendered character in the source, or -1. Markdown mostly removes characters,
 * so where the two differ, the source is skipped up to the next position where they match again.
 */
export function places(texts, source) {
  let at = 0;
  return texts.map((text) => {
    const found = [];
    for (let i = 0; i < text.length; i += 1) {
      const ahead = text.slice(i, i + AHEAD);
      // The renderer may add white space that is not in the source.
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

/** Ranges `[kind, start, end]` of a rendered text: words of one kind, without white space. */
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

/** All text nodes of an element, in order. */
export function textNodes(element) {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  const nodes = [];
  while (walker.nextNode()) nodes.push(walker.currentNode);
  return nodes;
}

/** DOM ranges `[kind, range]` in text nodes. `where` comes from `places`, `runs` from the source. */
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

/** The highlights of the page. They can be switched off together. */
export class Colours {
  #painted = new Map(); // DOM ranges by kind

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
