// Text for screen readers: whole sentences, not tokens.

const END = /[.!?:…。！？]["')\]]*\s|\n+/g;

/** Split a text into its complete sentences and the rest. */
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

  /** Speak a message at once. */
  say(text) {
    const line = document.createElement("p");
    line.textContent = text;
    this.element.append(line);
    // Remove lines that were read: some screen readers are slow with a growing region.
    while (this.element.childElementCount > 20) this.element.firstElementChild.remove();
  }

  /** Add text of an answer. */
  add(text) {
    const { whole, rest } = sentences(this.#left + text);
    this.#left = rest;
    if (whole) this.say(whole);
  }

  /** Speak the rest of the answer. */
  end() {
    if (this.#left.trim()) this.say(this.#left.trim());
    this.#left = "";
  }
}
