/** `SandboxInstanceStore` over an fsd server: which provider's sandbox to resume for a compound key. */

import { Connection, type FsdOptions } from './connection.js';
import type { SandboxInstanceRecord, SandboxInstanceStore } from './types.js';

export class FsdInstanceStore implements SandboxInstanceStore {
  readonly #connection: Connection;

  constructor(options: FsdOptions) {
    this.#connection = new Connection(options);
  }

  /** Fields that were not stored are absent. */
  get(key: string): Promise<SandboxInstanceRecord | null> {
    return this.#connection.call('instances.get', JSON.stringify({ key }));
  }

  /** Replaces the whole record of `record.key`: a field left out, or undefined, is cleared. */
  upsert(record: SandboxInstanceRecord): Promise<void> {
    return this.#connection.call<null>('instances.upsert', JSON.stringify({ record })).then(() => undefined);
  }

  /** A key that is not there is fine. */
  delete(key: string): Promise<void> {
    return this.#connection.call<null>('instances.delete', JSON.stringify({ key })).then(() => undefined);
  }
}
