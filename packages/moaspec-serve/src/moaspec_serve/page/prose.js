// A growing text, rendered as Markdown and coloured by source.

import { blocks, render, takeLanguage } from "./markdown.js";
import { colours, places, ranges, runsWithin, textNodes } from "./colours.js";
import { copyButton } from "./copy.js";
import { element } from "./elements.js";

export class Prose {
  #shown = []; // rendered blocks

  constructor() {
    this.element = element("div", "text");
  }

  /** Show a text with the runs of its characters. Unchanged blocks stay in place. */
  show(text, runs, { anew = false } = {}) {
    const wanted = blocks(text);
    const old = anew ? [] : this.#shown;
    let same = 0;
    while (same < old.length && old[same].raw === wanted[same]?.raw) same += 1;
    for (const gone of this.#shown.splice(same)) this.#remove(gone);
    for (const block of wanted.slice(same)) this.#shown.push(this.#add(block));
    this.#shown.forEach((one, i) => this.#paint(one, wanted[i].at, runs));
  }

  /** Remove the highlights. */
  remove() {
    for (const one of this.#shown.splice(0)) this.#remove(one);
    this.element.remove();
  }

  #add(block) {
    const holder = element("div", "block");
    holder.append(render(block));
    // The elements added below are not part of the text.
    const texts = textNodes(holder);
    const where = places(texts.map((node) => node.data), block.raw);
    for (const code of holder.querySelectorAll("pre > code")) frameCode(code);
    for (const table of holder.querySelectorAll("table")) frameTable(table);
    if (holder.hasChildNodes()) this.element.append(holder);
    return { raw: block.raw, holder, texts, where, kinds: "", painted: [] };
  }

  #paint(one, at, runs) {
    const within = runsWithin(runs, at, at + one.raw.length);
    const kinds = within.join();
    if (kinds === one.kinds) return;
    colours.wipe(one.painted);
    one.kinds = kinds;
    one.painted = ranges(one.texts, one.where, within);
    colours.paint(one.painted);
  }

  #remove(one) {
    colours.wipe(one.painted);
    one.holder.remove();
  }
}

// The bar is outside the code, so a copied selection does not contain it.
function frameCode(code) {
  const pre = code.parentElement;
  const language = takeLanguage(code);
  const frame = element("div", "code");
  const bar = element("div", "bar");
  bar.dataset.language = language;
  bar.append(copyButton(() => code.textContent, "Copy this code"));
  pre.replaceWith(frame);
  pre.tabIndex = 0;
  pre.setAttribute("role", "group");
  pre.setAttribute("aria-label", language ? `Code, ${language}` : "Code");
  frame.append(bar, pre);
}

function frameTable(table) {
  const frame = element("div", "wide");
  frame.tabIndex = 0;
  frame.setAttribute("role", "group");
  frame.setAttribute("aria-label", "Table");
  table.replaceWith(frame);
  frame.append(table);
}
