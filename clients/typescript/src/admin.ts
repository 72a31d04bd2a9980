/** For the host, which holds the admin key: a filesystem of its own for each name space. */

import { randomUUID } from 'node:crypto';

import { FsdError } from './errors.js';

export interface FsdAdminOptions {
  endpoint: string;
  /** Never inside a sandbox. */
  adminKey: string;
  displayName?: string;
  /** How long a writer lease lasts unless renewed. */
  leaseDurationMs?: number;
  /** After which time a holder should renew; shorter than the lease. */
  renewAfterMs?: number;
  fetch?: typeof globalThis.fetch;
}

export interface FsdFileSystem {
  fileSystemId: string;
  token: string;
  endpoint: string;
}

const LEASE_MS = 120_000;
const RENEW_MS = 45_000;

/** Make an empty filesystem. Throws at once when the lease times make no sense. */
export function createFileSystem(options: FsdAdminOptions): Promise<FsdFileSystem> {
  const lease = options.leaseDurationMs ?? LEASE_MS;
  const renew = options.renewAfterMs ?? RENEW_MS;
  for (const [name, value] of [['leaseDurationMs', lease], ['renewAfterMs', renew]] as const)
    if (!Number.isFinite(value) || value <= 0) throw new RangeError(`${name} is a finite number above 0`);
  if (renew >= lease) throw new RangeError('renewAfterMs is shorter than leaseDurationMs');
  const body = { display_name: options.displayName ?? '', lease_duration_ms: lease, renew_after_ms: renew };
  return create(options, JSON.stringify(body));
}

async function create(options: FsdAdminOptions, body: string): Promise<FsdFileSystem> {
  const answer = await (options.fetch ?? globalThis.fetch)(new URL('/v1/file-systems', options.endpoint), {
    method: 'POST',
    headers: {
      authorization: `Bearer ${options.adminKey.trim()}`,
      'content-type': 'application/json',
      'idempotency-key': randomUUID(),
    },
    redirect: 'error',
    signal: AbortSignal.timeout(60_000),
    body,
  });
  const text = await answer.text();
  if (answer.status !== 201) throw new FsdError('not_created', `the server answered ${answer.status}: ${text}`, answer.status);
  const made = JSON.parse(text) as { file_system_id: string; fs_token: string };
  return { fileSystemId: made.file_system_id, token: made.fs_token, endpoint: options.endpoint };
}
