/** `SandboxCheckpointStore` over an fsd server. */

import { Connection, type FsdOptions } from './connection.js';
import type {
  SandboxBlobReference,
  SandboxCheckpoint,
  SandboxCheckpointFork,
  SandboxCheckpointStore,
  SandboxWriter,
  SandboxWriterLease,
} from './types.js';

/** The three fields of a writer; callers pass whole leases. */
function three(writer: SandboxWriter): SandboxWriter {
  return { threadId: writer.threadId, ownerToken: writer.ownerToken, fence: writer.fence };
}

/** `promise`, of which Node does not complain when nobody looks at it before it fails. */
function quiet<T>(promise: Promise<T>): Promise<T> {
  promise.catch(() => undefined);
  return promise;
}

interface Acquired extends SandboxWriter {
  expiresAt: number;
  renewAfterMs: number;
}

export class FsdCheckpointStore<Message = unknown> implements SandboxCheckpointStore<Message> {
  readonly #connection: Connection;

  constructor(options: FsdOptions) {
    this.#connection = new Connection(options);
  }

  /** The body is made before anything is awaited. */
  #call<T>(op: string, input: unknown, always = false): Promise<T> {
    let body: string;
    try {
      body = JSON.stringify(input);
    } catch (error) {
      return quiet(Promise.reject(error));
    }
    return quiet(this.#connection.call<T>(op, body, always));
  }

  get(id: string): Promise<SandboxCheckpoint<Message> | null> {
    return this.#call('get', { id });
  }

  list(threadId: string): Promise<Array<SandboxCheckpoint<Message>>> {
    return this.#call('list', { threadId });
  }

  getHead(threadId: string): Promise<string | null> {
    return this.#call('getHead', { threadId });
  }

  append(input: {
    checkpoint: SandboxCheckpoint<Message>;
    expectedHeadId: string | null;
    writer: SandboxWriter;
  }): Promise<{ headId: string }> {
    return this.#call('append', {
      checkpoint: input.checkpoint,
      expectedHeadId: input.expectedHeadId,
      writer: three(input.writer),
    });
  }

  deleteHead(input: { threadId: string; checkpointId: string; writer: SandboxWriter }): Promise<void> {
    const { threadId, checkpointId } = input;
    return quiet(this.#call<null>('deleteHead', { threadId, checkpointId, writer: three(input.writer) }).then(() => {}));
  }

  deleteCheckpoints(input: {
    threadId: string;
    keep: number;
    writer: SandboxWriter;
  }): Promise<{ deleted: Array<string> }> {
    return this.#call('deleteCheckpoints', {
      threadId: input.threadId,
      keep: input.keep,
      writer: three(input.writer),
    });
  }

  acquireWriter(threadId: string): Promise<SandboxWriterLease> {
    return quiet(this.#call<Acquired>('acquireWriter', { threadId }).then((got) => this.#lease(got)));
  }

  #lease(got: Acquired): SandboxWriterLease {
    let expiresAt = got.expiresAt;
    const writer = three(got);
    return {
      ...writer,
      get expiresAt() {
        return expiresAt;
      },
      renewAfterMs: got.renewAfterMs,
      renew: () =>
        quiet(
          this.#call<{ expiresAt: number }>('renew', { writer }).then((answer) => {
            expiresAt = answer.expiresAt;
            return { expiresAt };
          }),
        ),
      // Never throws: a lease that cannot be released ends by itself. Also for a caller that was aborted.
      release: () => this.#call<null>('release', { writer }, true).then(
        () => undefined,
        () => undefined,
      ),
    };
  }

  listBlobReferences(): Promise<Array<SandboxBlobReference>> {
    return this.#call('listBlobReferences', {});
  }

  forkFromCheckpoint(input: SandboxCheckpointFork): Promise<{ checkpoint: SandboxCheckpoint<Message> }> {
    return this.#call('forkFromCheckpoint', { ...input, writer: three(input.writer) });
  }

  /** The thread's saved transcript, `[]` for an unknown one. A fork writes it together with the checkpoint. */
  loadThread(threadId: string): Promise<Array<Message>> {
    return this.#call('loadThread', { threadId });
  }

  saveThread(threadId: string, messages: Array<Message>): Promise<void> {
    return quiet(this.#call<null>('saveThread', { threadId, messages }).then(() => {}));
  }

  /** Delete what no checkpoint counts and is older; the keys that went. The server closes the race with captures. */
  sweep(olderThanMs: number): Promise<Array<string>> {
    if (!Number.isFinite(olderThanMs) || olderThanMs < 0)
      return quiet(Promise.reject(new RangeError('olderThanMs is a finite number of 0 or more')));
    return quiet(this.#call<{ deleted: Array<string> }>('sweep', { olderThanMs }).then((answer) => answer.deleted));
  }

  /** Remove all but the newest `keep` of the thread's chain; the ids that went, oldest first. */
  async keepNewest(threadId: string, keep: number): Promise<Array<string>> {
    const writer = await this.acquireWriter(threadId);
    try {
      return (await this.deleteCheckpoints({ threadId, keep, writer })).deleted;
    } finally {
      await writer.release();
    }
  }
}
