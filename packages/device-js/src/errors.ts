/**
 * All errors of this package:
 *
 * - MoaSpecError
 *   - InputError: the caller passed something that is not valid
 *   - BundleError: a bundle is damaged, or of another format
 *   - WireError: the server sent something that the protocol does not allow
 *   - LinkError: the link broke, or no answer came in time
 *   - RefusedError: the server refuses this device; a repetition would not help
 *     - UnknownClientError: it knows no such token
 */
export class MoaSpecError extends Error {
  constructor(message: string) {
    super(message);
    this.name = new.target.name;
  }
}

export class InputError extends MoaSpecError {}
export class BundleError extends MoaSpecError {}
export class WireError extends MoaSpecError {}
export class LinkError extends MoaSpecError {}
export class RefusedError extends MoaSpecError {}
export class UnknownClientError extends RefusedError {}
