/** Positions start .. stop - 1. */
export type PositionRange = readonly [start: number, stop: number];

/** A set of positions of one text. */
export class PositionSet {
  private flags: boolean[] = [];

  constructor(ranges: Iterable<PositionRange> = []) {
    for (const [start, stop] of ranges) this.add(start, stop);
  }

  /** Number of positions in the set. */
  get size(): number {
    return this.flags.filter(Boolean).length;
  }

  /** Add positions start .. stop - 1. */
  add(start: number, stop: number): void {
    while (this.flags.length < stop) this.flags.push(false);
    this.flags.fill(true, start, stop);
  }

  /** Remove all positions from `length` on. */
  cut(length: number): void {
    this.flags.length = Math.min(this.flags.length, length);
  }

  /** The ranges of the set, ascending. */
  ranges(): PositionRange[] {
    return this.find(true, this.flags.length);
  }

  /** The missing ranges below `length`, ascending. */
  gaps(length: number): PositionRange[] {
    return this.find(false, length);
  }

  private find(wanted: boolean, length: number): PositionRange[] {
    const found: PositionRange[] = [];
    let start = -1;
    for (let position = 0; position <= length; position++) {
      const fits = position < length && (this.flags[position] ?? false) === wanted;
      if (fits && start < 0) start = position;
      if (!fits && start >= 0) {
        found.push([start, position]);
        start = -1;
      }
    }
    return found;
  }
}
