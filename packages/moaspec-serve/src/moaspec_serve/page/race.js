// Replays two answers, which ran one after the other, side by side at their measured speeds, or
// faster by one factor where they took long.

import { element } from "./elements.js";

/** Milliseconds that a replay takes at most. */
const LONGEST = 5000;

/** Milliseconds from an answer's first entry to another entry of its record. */
const since = (record, entry) => entry.at - record[0].at;

/** Number of entries that had arrived after `elapsed` milliseconds. */
export function arrived(record, elapsed) {
  const next = record.findIndex((entry) => since(record, entry) > elapsed);
  return next < 0 ? record.length : next;
}

/** Show the race. When `signal` aborts, both answers are shown completely. */
export async function race(answers, signal) {
  const lanes = answers.map((answer) => new Lane(answer));
  const took = Math.max(...lanes.map(({ record }) => since(record, record.at(-1))));
  const factor = Math.max(1, took / LONGEST);
  const start = performance.now();
  while (!signal.aborted && lanes.some((lane) => !lane.over)) {
    const now = await new Promise(requestAnimationFrame);
    for (const lane of lanes) lane.run(factor * (now - start), factor);
  }
  for (const lane of lanes) lane.end();
}

class Lane {
  #shown = 0;

  constructor(answer) {
    this.answer = answer;
    this.record = answer.record;
    this.bar = element("progress", "lane");
    this.bar.max = this.record.length;
    this.bar.value = 0;
    this.bar.setAttribute("aria-label", `Progress: ${answer.title.firstChild.data}`);
    answer.title.after(this.bar);
    answer.rewind();
  }

  get over() {
    return this.#shown === this.record.length;
  }

  run(elapsed, factor = 1) {
    if (this.over) return;
    const upTo = arrived(this.record, elapsed);
    for (const entry of this.record.slice(this.#shown, upTo)) this.answer.add(entry.pieces);
    this.#shown = upTo;
    this.bar.value = upTo;
    const took = this.over ? since(this.record, this.record.at(-1)) : elapsed;
    const done = this.over ? "done after " : "";
    const faster = factor > 1 ? ` · shown ${factor.toFixed(1)} times as fast` : "";
    this.answer.clock(
      `${this.answer.ids.length} tokens · ${done}${(took / 1000).toFixed(2)} s${faster}`,
    );
  }

  end() {
    this.run(Infinity);
    this.bar.remove();
    this.answer.clock("");
    this.answer.end();
  }
}
