// What a screen reader says: whole sentences, not tokens.

const END = /[.!?:…。！？]["')\]]*\s|\n+/g;

/** The whole sentences at the beginning of a text, and what is left. */
export function sentences(text) {
  const ends = [...text.matchAll(END)].map((match) => match.index + match[0].length);
  const cut = ends.at(-1) ?? 0;
  return { whole: text.slice(0, cut).trim(), rest: text.slice(cut) };
}

/** Collects verified text and speaks it sentence by sentence. */
export class Speaker {
  #left = "";

  constructor(element) {
    this.element = element;
  }

  /** Something that happened, at once. */
  say(text) {
    const line = document.createElement("p");
    line.textContent = text;
    this.element.append(line);
    // Old lines were read; a growing region is slow in some readers.
    while (this.element.childElementCount > 20) this.element.firstElementChild.remove();
  }

  /** More of an answer. */
  add(text) {
    const { whole, rest } = sentences(this.#left + text);
    this.#left = rest;
    if (whole) this.say(whole);
  }

  /** The answer is over. */
  end() {
    if (this.#left.trim()) this.say(this.#left.trim());
    this.#left = "";
  }
}
