// The draft tree of one pass: layout (pure functions) and drawing.

const COLUMN = 72;
const ROW = 32;
const NODE = { width: 62, height: 24 };
const SMALLEST = 0.75;
const SVG = "http://www.w3.org/2000/svg";

/** A token's text on one short line with visible white space. Special tokens have no text. */
export function label(text, longest = 8) {
  const shown = text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ | $/g, "␣");
  const letters = [...shown];
  const short = letters.length > longest ? [...letters.slice(0, longest - 1), "…"] : letters;
  return short.join("") || "end";
}

/**
 * Depth and row of each node. Every leaf has its own row, parents are in the row of their first
 * child, and the accepted path is the top row.
 */
export function layout(nodes) {
  const children = new Map([[-1, []]]);
  nodes.forEach((_, index) => children.set(index, []));
  nodes.forEach((node, index) => children.get(node.parent).push(index));
  for (const some of children.values()) {
    some.sort((a, b) => nodes[b].accepted - nodes[a].accepted || a - b);
  }
  const places = [];
  let rows = 0;
  const place = (index, depth) => {
    places[index] = { depth, row: rows };
    children.get(index).forEach((child) => place(child, depth + 1));
    if (children.get(index).length === 0) rows += 1;
  };
  children.get(-1).forEach((child) => place(child, 1));
  return { places, rows: Math.max(rows, 1), depth: Math.max(0, ...places.map((one) => one.depth)) };
}

/** A round with the target's own token appended to the accepted path. */
export function withOwn(round, pieces = []) {
  const last = pieces.at(-1);
  const nodes = [...round.nodes];
  if (last?.source === "target") {
    const parent = nodes.findLastIndex((node) => node.accepted);
    nodes.push({ text: last.text, parent, source: "target", accepted: true });
  }
  return nodes;
}

/** Describe a round in a sentence. */
export function sentence(round) {
  const drafted = round.nodes.length;
  if (drafted === 0) return `Pass ${round.number}: no drafts, 1 token.`;
  const accepted = round.nodes.filter((node) => node.accepted).length;
  const tokens = `${round.emitted} token${round.emitted === 1 ? "" : "s"}`;
  return `Pass ${round.number}: ${drafted} drafted, ${accepted} accepted, ${tokens} written.`;
}

/** Draw a round inside an element. */
export function draw(into, round) {
  const nodes = withOwn(round, round.pieces);
  const { places, rows, depth } = layout(nodes);
  const width = depth * COLUMN + 24;
  const svg = make("svg", {
    viewBox: `0 0 ${width} ${rows * ROW}`,
    role: "img", "aria-label": sentence(round),
  });
  // A deep tree shrinks to the panel's width, as far as it can be read; then it scrolls.
  svg.style.minWidth = `${Math.round(SMALLEST * width)}px`;
  svg.style.maxWidth = `${width}px`;
  nodes.forEach((node, index) => svg.append(edge(places[node.parent], places[index], node)));
  svg.append(make("circle", { cx: 8, cy: ROW / 2, r: 5, class: "root" }));
  nodes.forEach((node, index) => svg.append(box(places[index], node)));
  into.replaceChildren(svg);
}

function edge(from, to, node) {
  const [x0, y0] = from ? [left(from) + NODE.width, middle(from)] : [8, ROW / 2];
  const [x1, y1] = [left(to), middle(to)];
  const bend = (x0 + x1) / 2;
  return make("path", { d: `M${x0} ${y0}C${bend} ${y0} ${bend} ${y1} ${x1} ${y1}`, class: kind(node) });
}

function box(place, node) {
  const group = make("g", { class: kind(node) });
  const [x, y] = [left(place), middle(place) - NODE.height / 2];
  group.append(make("rect", { x, y, rx: 6, ...NODE }));
  const text = make("text", { x: x + NODE.width / 2, y: middle(place) + 4 });
  text.textContent = (node.accepted && node.source !== "target" ? "✓" : "") + label(node.text);
  group.append(text);
  return group;
}

const left = (place) => 24 + (place.depth - 1) * COLUMN;
const middle = (place) => (place.row + 0.5) * ROW;
const kind = (node) => `${node.source} ${node.accepted ? "accepted" : "refused"}`;

function make(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}
