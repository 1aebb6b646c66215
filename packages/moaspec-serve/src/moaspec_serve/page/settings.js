// Settings of answers and of the page, stored in the browser.

import { colours } from "./colours.js";
import { readJson, write } from "./store.js";

const KEY = "moaspec-settings";
const DEFAULTS = {
  system: "", temperature: 0, topP: 1, seed: null, limit: 512, speculation: true, colours: true,
};
const NUMBERS = {
  temperature: { id: "temperature", name: "Temperature", min: 0, max: 2 },
  topP: { id: "top-p", name: "Top-p", min: 0, max: 1 },
  seed: { id: "seed", name: "Seed", min: 0, max: 2 ** 32 - 1, whole: true, empty: true },
  limit: { id: "max-tokens", name: "Token limit", min: 1, max: 1_000_000, whole: true },
};

/** The parts of the extension that the page requests. */
const ASKED = { sources: true, tree: true, stats: true, link: true, provisional: true };

const $ = (id) => document.getElementById(id);
const randomSeed = () => crypto.getRandomValues(new Uint32Array(1))[0];

/** Parse a typed number: null if empty, undefined if the setting does not allow it. */
export function numberOf({ min, max, whole, empty }, text) {
  if (text.trim() === "") return empty ? null : undefined;
  const number = Number(text);
  const right = number >= min && number <= max && (!whole || Number.isSafeInteger(number));
  return right ? number : undefined;
}

/** Valid stored settings, and defaults for the others. */
export function checked(stored) {
  const values = { ...DEFAULTS };
  for (const [name, rule] of Object.entries(NUMBERS)) {
    const number = numberOf(rule, String(stored?.[name] ?? ""));
    if (number !== undefined) values[name] = number;
  }
  for (const name of ["speculation", "colours"]) values[name] = stored?.[name] !== false;
  if (typeof stored?.system === "string") values.system = stored.system;
  return values;
}

export class Settings {
  values = checked(readJson(KEY));

  constructor() {
    for (const [name, rule] of Object.entries(NUMBERS)) this.#listenNumber(name, rule);
    $("system").addEventListener("input", () => this.#set("system", $("system").value));
    for (const name of ["speculation", "colours"]) {
      $(name).addEventListener("change", () => this.#set(name, $(name).checked));
    }
    $("reset").addEventListener("click", () => {
      this.values = { ...DEFAULTS };
      this.#save();
      this.#fill();
    });
    this.#fill();
  }

  /** Whether answers are compared with plain decoding. */
  get compares() {
    return $("compare").checked && !$("compare-label").hidden;
  }

  /** Fields of a request apart from the conversation. */
  body(about) {
    const { temperature, topP, seed, limit, speculation } = this.values;
    const body = {
      model: about.model,
      temperature,
      seed: seed ?? randomSeed(),
      max_completion_tokens: limit,
      moaspec: { ...ASKED, speculation: speculation || this.compares },
    };
    return topP < 1 ? { ...body, top_p: topP } : body;
  }

  #listenNumber(name, rule) {
    const input = $(rule.id);
    input.addEventListener("input", () => {
      const number = numberOf(rule, input.validity.badInput ? "?" : input.value);
      this.#complain(rule, number === undefined);
      if (number !== undefined) this.#set(name, number);
    });
  }

  #complain(rule, wrong) {
    const where = $(`${rule.id}-wrong`);
    const kind = rule.whole ? "a whole number" : "a number";
    where.textContent = wrong ? `${rule.name} is ${kind} from ${rule.min} to ${rule.max}.` : "";
    $(rule.id).setAttribute("aria-invalid", String(wrong));
  }

  #set(name, value) {
    this.values[name] = value;
    this.#save();
    if (name === "colours") this.#colour();
  }

  #save() {
    write(KEY, JSON.stringify(this.values));
  }

  #fill() {
    for (const [name, rule] of Object.entries(NUMBERS)) {
      $(rule.id).value = this.values[name] ?? "";
      this.#complain(rule, false);
    }
    $("system").value = this.values.system;
    for (const name of ["speculation", "colours"]) $(name).checked = this.values[name];
    this.#colour();
  }

  #colour() {
    colours.shown = this.values.colours;
    $("legend").hidden = !this.values.colours;
  }
}
