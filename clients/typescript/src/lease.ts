/** Holding a writer lease over long work. */

import type { SandboxCheckpointStore, SandboxWriterLease } from './types.js';

type Outcome<T> = { done: true; value: T } | { done: false; error: unknown };

/**
 * Run `work` under the thread's writer lease, renewed all the time, released at the end.
 *
 * `work` gets the lease and `check`, to be awaited before anything is published: it waits for a renewal under way
 * and throws what a failed one threw. Of several errors the renewal's is thrown first, then that of `work`.
 */
export async function withWriter<T>(
  store: Pick<SandboxCheckpointStore, 'acquireWriter'>,
  threadId: string,
  work: (lease: SandboxWriterLease, check: () => Promise<void>) => Promise<T>,
): Promise<T> {
  const lease = await store.acquireWriter(threadId);
  let lost: { error: unknown } | undefined;
  let renewal: Promise<void> = Promise.resolve();
  let timer: ReturnType<typeof setTimeout> | undefined;
  let over = false;
  // The next one is armed when the last has ended: never two renewals at once.
  const arm = () => {
    timer = setTimeout(() => {
      renewal = lease.renew().then(
        () => {
          if (!over) arm();
        },
        (error: unknown) => {
          lost = { error };
        },
      );
    }, lease.renewAfterMs);
  };
  const check = async () => {
    await renewal;
    if (lost) throw lost.error;
  };
  arm();
  let outcome: Outcome<T>;
  try {
    outcome = { done: true, value: await work(lease, check) };
  } catch (error) {
    outcome = { done: false, error };
  }
  over = true;
  clearTimeout(timer);
  await renewal;
  await lease.release();
  if (lost) throw lost.error;
  if (!outcome.done) throw outcome.error;
  return outcome.value;
}
