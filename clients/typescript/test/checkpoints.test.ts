import assert from 'node:assert/strict';
import { webcrypto } from 'node:crypto';
import { createServer } from 'node:http';
import type { AddressInfo } from 'node:net';
import { after, before, test } from 'node:test';

import type { SandboxRecord, SandboxStore } from '@tanstack/ai-sandbox';

import {
  artifactKey,
  createFileSystem,
  endpointOf,
  fileKey,
  FsdBlobStore,
  FsdCheckpointStore,
  FsdError,
  FsdInstanceStore,
  SandboxCheckpointConflictError,
  SandboxCheckpointDuplicateIdError,
  SandboxCheckpointError,
  SandboxCheckpointInvalidEntryError,
  SandboxCheckpointInvalidIdError,
  SandboxCheckpointNotHeadError,
  SandboxCheckpointParentMismatchError,
  SandboxCheckpointWriterConflictError,
  SandboxCheckpointWriterLostError,
  withWriter,
  type FsdOptions,
  type SandboxCheckpoint,
  type SandboxCheckpointStore,
} from '../src/index.js';
import { Server } from './server.js';

const server = new Server();
before(() => server.start());
after(() => server.stop());

const HASH = 'a'.repeat(64);

interface Place {
  store: FsdCheckpointStore;
  options: FsdOptions;
  clock: { ms: number };
}

/** An empty name space with leases of 100 ms of a clock that stands still unless moved. */
async function place(): Promise<Place> {
  const made = await server.create({ leaseDurationMs: 100, renewAfterMs: 25 });
  const clock = { ms: 1_000 };
  const options = { token: made.token, endpoint: made.endpoint, now: () => clock.ms };
  const store: FsdCheckpointStore & SandboxCheckpointStore = new FsdCheckpointStore(options);
  return { store, options, clock };
}

function checkpoint(id: string, parent: string | null, more: Partial<SandboxCheckpoint> = {}): SandboxCheckpoint {
  return {
    id,
    threadId: 't',
    parentCheckpointId: parent,
    createdAt: 5,
    reason: 'automatic',
    files: [{ path: 'a/b', kind: 'file', blobKey: `sandbox-files/sha256/${HASH}`, size: 3 }],
    conversation: [{ role: 'user', text: 'cut \ud83d here' }],
    artifacts: [],
    ...more,
  };
}

test('a chain: append, list, head, delete', async () => {
  const { store } = await place();
  assert.equal(await store.get('no'), null);
  assert.deepEqual(await store.list('t'), []);
  assert.equal(await store.getHead('t'), null);
  const writer = await store.acquireWriter('t');
  const root = checkpoint('one', null, { label: 'first' });
  assert.deepEqual(await store.append({ checkpoint: root, expectedHeadId: null, writer }), { headId: 'one' });
  const child = checkpoint('two', 'one', { createdAt: 4 });
  await store.append({ checkpoint: child, expectedHeadId: 'one', writer });
  assert.deepEqual(await store.get('one'), root);
  assert.deepEqual(await store.list('t'), [child, root]);
  assert.equal(await store.getHead('t'), 'two');
  assert.deepEqual(await store.listBlobReferences(), [{ key: `sandbox-files/sha256/${HASH}`, references: 2 }]);
  await store.deleteHead({ threadId: 't', checkpointId: 'two', writer });
  assert.equal(await store.getHead('t'), 'one');
  await writer.release();
  assert.deepEqual(await store.keepNewest('t', 1), []);
});

test('each refusal has its class', async () => {
  const { store, clock } = await place();
  const writer = await store.acquireWriter('t');
  await store.append({ checkpoint: checkpoint('one', null), expectedHeadId: null, writer });
  const appends = (id: string, parent: string | null, head: string | null, more = {}) =>
    store.append({ checkpoint: checkpoint(id, parent, more), expectedHeadId: head, writer });
  await assert.rejects(store.get('\ud800'), SandboxCheckpointInvalidIdError);
  await assert.rejects(appends('x', 'one', 'one', { createdAt: NaN }), SandboxCheckpointInvalidEntryError);
  await assert.rejects(appends('one', 'one', 'one'), SandboxCheckpointDuplicateIdError);
  await assert.rejects(appends('x', null, null), SandboxCheckpointConflictError);
  await assert.rejects(appends('x', null, 'one'), SandboxCheckpointParentMismatchError);
  await assert.rejects(
    store.deleteHead({ threadId: 't', checkpointId: 'x', writer }),
    SandboxCheckpointNotHeadError,
  );
  await assert.rejects(store.acquireWriter('t'), SandboxCheckpointWriterConflictError);
  clock.ms += 100;
  await assert.rejects(appends('x', 'one', 'one'), SandboxCheckpointWriterLostError);
  await assert.rejects(store.sweep(-1), RangeError);
  assert.equal((await store.list('t')).length, 1);
});

test('a lease is renewed, passed on and released without a throw', async () => {
  const { store, clock } = await place();
  const first = await store.acquireWriter('t');
  assert.deepEqual([first.expiresAt, first.renewAfterMs], [1_100, 25]);
  clock.ms = 1_050;
  assert.deepEqual(await first.renew(), { expiresAt: 1_150 });
  assert.equal(first.expiresAt, 1_150);
  clock.ms = 1_150;
  const second = await store.acquireWriter('t');
  assert.ok(second.fence > first.fence && second.ownerToken !== first.ownerToken);
  await assert.rejects(first.renew(), SandboxCheckpointWriterLostError);
  await first.release();
  assert.deepEqual(await second.renew(), { expiresAt: 1_250 });
  const nowhere = new FsdCheckpointStore({ token: 'fsd1.e30.x', endpoint: 'http://127.0.0.1:9', attempts: 1 });
  await assert.rejects(nowhere.acquireWriter('t'), (error: FsdError) => error.code === 'unavailable');
});

test('a failed call nobody looks at yet does no harm', async () => {
  const { store } = await place();
  const fails = store.get('');
  for (let turn = 0; turn < 4; turn++) await store.getHead('t');
  await assert.rejects(fails, SandboxCheckpointInvalidIdError);
});

test('what the caller changes after the call is not sent', async () => {
  const { store } = await place();
  const writer = await store.acquireWriter('t');
  const given = checkpoint('one', null);
  const appended = store.append({ checkpoint: given, expectedHeadId: null, writer });
  given.files.pop();
  given.reason = 'changed';
  await appended;
  assert.deepEqual(await store.get('one'), checkpoint('one', null));
});

test('a fork brings the conversation along', async () => {
  const { store } = await place();
  const writer = await store.acquireWriter('t');
  await store.append({ checkpoint: checkpoint('one', null, { label: 'x' }), expectedHeadId: null, writer });
  const fork = { sourceThreadId: 't', sourceCheckpointId: 'one', destinationThreadId: 'u', destinationCheckpointId: 'root' };
  const on = await store.acquireWriter('u');
  const { checkpoint: made } = await store.forkFromCheckpoint({ ...fork, createdAt: 9, writer: on });
  assert.equal(made.reason, 'fork-root');
  assert.ok(!('label' in made) && made.parentCheckpointId === null);
  assert.deepEqual(await store.loadThread('u'), checkpoint('one', null).conversation);
  await store.saveThread('v', []);
  const third = await store.acquireWriter('v');
  const again = { ...fork, destinationThreadId: 'v', destinationCheckpointId: 'r2', createdAt: 9, writer: third };
  await assert.rejects(
    store.forkFromCheckpoint(again),
    (error: SandboxCheckpointError) => error.code === 'SANDBOX_SNAPSHOT_FORK_DESTINATION_NOT_EMPTY',
  );
});

test('a lost answer is asked for again and changes nothing twice', async () => {
  const { options } = await place();
  let lose = 0;
  const losing: typeof fetch = async (...call) => {
    const answer = await fetch(...call);
    if (lose-- > 0) throw new TypeError('the connection broke');
    return answer;
  };
  const store = new FsdCheckpointStore({ ...options, fetch: losing });
  lose = 1;
  const writer = await store.acquireWriter('t');
  lose = 2;
  assert.deepEqual(await store.append({ checkpoint: checkpoint('one', null), expectedHeadId: null, writer }), {
    headId: 'one',
  });
  assert.equal((await store.list('t')).length, 1);
});

test('a server that stays away is asked a bounded number of times', async () => {
  const { options } = await place();
  let asked = 0;
  const gone = new FsdCheckpointStore({
    ...options,
    attempts: 3,
    fetch: async () => {
      asked++;
      throw new TypeError('connection refused');
    },
  });
  await assert.rejects(gone.getHead('t'), (error: FsdError) => error.code === 'unavailable' && error.status === 0);
  assert.equal(asked, 3);
  asked = 0;
  const busy = new FsdCheckpointStore({
    ...options,
    attempts: 2,
    fetch: async () => {
      asked++;
      return Response.json({ error: { code: 'busy', message: 'not now', hint: 'later' } }, { status: 503 });
    },
  });
  await assert.rejects(busy.getHead('t'), (error: FsdError) => error.code === 'busy' && error.status === 503);
  assert.equal(asked, 2);
});

test('an aborted call ends at once and is not asked again; a lease is released all the same', async () => {
  const { options } = await place();
  const stop = new AbortController();
  let asked = 0;
  let hang = false;
  const slow: typeof fetch = (input, init) => {
    asked++;
    if (!hang) return fetch(input, init);
    return new Promise((_, reject) => {
      init!.signal!.addEventListener('abort', () => reject(init!.signal!.reason), { once: true });
    });
  };
  const store = new FsdCheckpointStore({ ...options, fetch: slow, signal: stop.signal });
  const writer = await store.acquireWriter('t');
  hang = true;
  asked = 0;
  const call = store.append({ checkpoint: checkpoint('one', null), expectedHeadId: null, writer });
  const reason = new Error('the run was cancelled');
  stop.abort(reason);
  await assert.rejects(call, (error) => error === reason);
  await assert.rejects(store.getHead('t'), (error) => error === reason);
  assert.equal(asked, 1, 'nothing goes out after that');
  hang = false;
  await writer.release();
  await (await new FsdCheckpointStore(options).acquireWriter('t')).release();
});

test('a blob of many blocks goes there and back', async () => {
  const { options } = await place();
  const blobs = new FsdBlobStore(options);
  const bytes = new Uint8Array(24 * 1024 * 1024 + 5);
  for (let at = 0; at < bytes.length; at += 65_536) webcrypto.getRandomValues(bytes.subarray(at, at + 65_536));
  const key = await fileKey(bytes);
  await blobs.put(key, bytes);
  assert.deepEqual(await blobs.head(key), { key, size: bytes.length });
  assert.equal(Buffer.compare(await (await blobs.get(key))!.bytes(), bytes), 0);
});

test('Node 18 has no global crypto, and none is needed', async () => {
  const had = Object.getOwnPropertyDescriptor(globalThis, 'crypto');
  Reflect.deleteProperty(globalThis, 'crypto');
  try {
    assert.equal(globalThis.crypto, undefined);
    const { store, options } = await place();
    const blobs = new FsdBlobStore(options);
    const bytes = new TextEncoder().encode('content');
    const key = await fileKey(bytes);
    await blobs.put(key, bytes);
    assert.deepEqual(Buffer.from(await (await blobs.get(key))!.bytes()), Buffer.from(bytes));
    assert.equal((await artifactKey(bytes)).length, 'sandbox-artifacts/sha256/'.length + 64);
    await (await store.acquireWriter('t')).release();
  } finally {
    if (had) Object.defineProperty(globalThis, 'crypto', had);
  }
});

test('a slow way is not a silent server: blobs take as long as they take', async () => {
  const { options } = await place();
  const bytes = webcrypto.getRandomValues(new Uint8Array(65_536));
  const key = await fileKey(bytes);
  const slow = createServer((request, response) => {
    request.resume();
    request.on('end', () => {
      // Longer than `timeoutMs` in all: before an upload is answered, and from piece to piece of a download.
      if (request.method === 'PUT') setTimeout(() => response.end('{"result": null}'), 900);
      else {
        response.setHeader('content-length', bytes.length);
        const send = (at: number) => {
          if (at === 4) return response.end();
          response.write(bytes.subarray(at * 16_384, (at + 1) * 16_384));
          setTimeout(() => send(at + 1), 250);
        };
        send(0);
      }
    });
  });
  await new Promise<void>((resolve) => slow.listen(0, '127.0.0.1', resolve));
  try {
    const endpoint = `http://127.0.0.1:${(slow.address() as AddressInfo).port}`;
    const blobs = new FsdBlobStore({ ...options, endpoint, timeoutMs: 600 });
    await blobs.put(key, bytes);
    assert.equal(Buffer.compare(await (await blobs.get(key))!.bytes(), bytes), 0);
  } finally {
    slow.closeAllConnections();
    await new Promise((resolve) => slow.close(resolve));
  }
});

test('a server that falls silent is given up', async () => {
  const { options } = await place();
  const silent = createServer((_request, response) => {
    response.setHeader('content-length', 100);
    response.write('{'); // and no more
  });
  await new Promise<void>((resolve) => silent.listen(0, '127.0.0.1', resolve));
  try {
    const endpoint = `http://127.0.0.1:${(silent.address() as AddressInfo).port}`;
    let asked = 0;
    // Counted here: on a slow machine the time may be over before a request has arrived.
    const counted: typeof fetch = (...args) => (asked++, fetch(...args));
    const store = new FsdCheckpointStore({ ...options, endpoint, timeoutMs: 200, attempts: 2, fetch: counted });
    await assert.rejects(store.getHead('t'), (error: FsdError) => error.code === 'unavailable');
    assert.equal(asked, 2);
  } finally {
    silent.closeAllConnections();
    await new Promise((resolve) => silent.close(resolve));
  }
});

test('blobs are kept by hash, listed, swept', async () => {
  const { store, options, clock } = await place();
  const blobs = new FsdBlobStore(options);
  const bytes = new TextEncoder().encode('content');
  const [kept, loose] = [await fileKey(bytes), await artifactKey(bytes)];
  assert.equal(await blobs.head(kept), null);
  assert.equal(await blobs.get(kept), null);
  await blobs.put(kept, bytes);
  await blobs.put(loose, 'content');
  await assert.rejects(
    blobs.put(kept, 'other'),
    (error: SandboxCheckpointError) => error.code === 'SANDBOX_SNAPSHOT_INVALID_BLOB',
  );
  assert.deepEqual(await blobs.head(kept), { key: kept, size: 7 });
  assert.deepEqual(Buffer.from(await (await blobs.get(kept))!.arrayBuffer()), Buffer.from(bytes));
  assert.deepEqual((await blobs.list('sandbox-files/')).map((one) => one.key), [kept]);
  await assert.rejects(blobs.get('../../etc/passwd'), RangeError);
  const writer = await store.acquireWriter('t');
  const files = [{ path: 'f', kind: 'file' as const, blobKey: kept, size: 7 }];
  await store.append({ checkpoint: checkpoint('one', null, { files }), expectedHeadId: null, writer });
  clock.ms += 10_000;
  assert.deepEqual(await store.sweep(1_000), [loose]);
  assert.deepEqual((await blobs.list()).map((one) => one.key), [kept]);
  await assert.rejects(blobs.delete(kept), (error: FsdError) => error.status === 409);
  await blobs.delete(loose);
});

test('instance records are replaced whole', async () => {
  const { options } = await place();
  // The interface of the version in the registry.
  const store: SandboxStore = new FsdInstanceStore(options);
  const record: SandboxRecord = { key: 'k', provider: 'p', providerSandboxId: 's', threadId: 't', updatedAt: 1, latestRunId: 'r' };
  assert.equal(await store.get('k'), null);
  await store.upsert(record);
  assert.deepEqual(await store.get('k'), record);
  const { latestRunId: _, ...less } = record;
  await store.upsert({ ...less, updatedAt: 2 });
  assert.deepEqual(await store.get('k'), { ...less, updatedAt: 2 });
  await store.delete('k');
  await store.delete('k');
  assert.equal(await store.get('k'), null);
});

test('a writer is kept over long work, and a lost one is told', async () => {
  const made = await server.create({ leaseDurationMs: 30_000, renewAfterMs: 60 });
  const store = new FsdCheckpointStore({ token: made.token, endpoint: made.endpoint });
  const value = await withWriter(store, 't', async (lease, check) => {
    const first = lease.expiresAt;
    while (lease.expiresAt < first + 300) await new Promise((resolve) => setTimeout(resolve, 20));
    await check();
    await store.append({ checkpoint: checkpoint('one', null), expectedHeadId: null, writer: lease });
    return 'done';
  });
  assert.equal(value, 'done');
  await assert.rejects(
    withWriter(store, 't', async (lease, check) => {
      await lease.release();
      for (;;) {
        await check();
        await new Promise((resolve) => setTimeout(resolve, 20));
      }
    }),
    SandboxCheckpointWriterLostError,
  );
  await (await store.acquireWriter('t')).release();
});

test('wrong ways in are refused at once', async () => {
  const made = await server.create();
  assert.match(endpointOf(made.token), /^http:\/\/127\.0\.0\.1:/);
  assert.throws(() => endpointOf('hello'), TypeError);
  assert.throws(() => endpointOf(made.token, 'elsewhere'), RangeError);
  assert.throws(() => new FsdCheckpointStore({ token: made.token, endpoint: 'http://example.org' }), TypeError);
  assert.throws(() => createFileSystem({ endpoint: server.endpoint, adminKey: 'x', leaseDurationMs: 0 }), RangeError);
  assert.throws(
    () => createFileSystem({ endpoint: server.endpoint, adminKey: 'x', leaseDurationMs: 10, renewAfterMs: 10 }),
    RangeError,
  );
  const wrong = new FsdCheckpointStore({ token: `${made.token.slice(0, -4)}AAAA`, endpoint: made.endpoint });
  await assert.rejects(wrong.getHead('t'), (error: FsdError) => error.status === 401);
});
