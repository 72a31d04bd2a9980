/** The blob store a capture, a restore and `sweepSandboxBlobs` need: `head`, `get`, `put`, `list`, `delete`. */

import { webcrypto } from 'node:crypto';

import { Connection, type FsdOptions } from './connection.js';
import { FsdError } from './errors.js';

export interface FsdBlobInfo {
  key: string;
  /** Bytes. */
  size: number;
}

export interface FsdBlob extends FsdBlobInfo {
  arrayBuffer(): Promise<ArrayBuffer>;
  bytes(): Promise<Uint8Array>;
}

export interface FsdListedBlob extends FsdBlobInfo {
  /** Milliseconds since 1970: when it was last uploaded or used again. */
  uploadedAt: number;
}

const KEY = /^sandbox-(files|artifacts)\/sha256\/[0-9a-f]{64}$/;

function hex(digest: ArrayBuffer): string {
  return Buffer.from(digest).toString('hex');
}

export class FsdBlobStore {
  readonly #connection: Connection;

  constructor(options: FsdOptions) {
    this.#connection = new Connection(options);
  }

  async head(key: string): Promise<FsdBlobInfo | null> {
    const answer = await this.#connection.request('HEAD', this.#path(key), {}, undefined, [404]);
    return answer.status === 404 ? null : { key, size: Number(answer.headers.get('content-length')) };
  }

  /** The bytes, whose hash is checked here too; null when there is no such blob. */
  async get(key: string): Promise<FsdBlob | null> {
    const answer = await this.#connection.request('GET', this.#path(key), {}, undefined, [404]);
    if (answer.status === 404) return null;
    const buffer = await answer.arrayBuffer();
    if (hex(await webcrypto.subtle.digest('SHA-256', buffer)) !== key.slice(-64))
      throw new FsdError('bad_blob', `the bytes of ${key} are not those it names`, answer.status);
    return {
      key,
      size: buffer.byteLength,
      arrayBuffer: () => Promise.resolve(buffer.slice(0)),
      bytes: () => Promise.resolve(new Uint8Array(buffer.slice(0))),
    };
  }

  /** Bytes that do not hash to the key are refused. A blob that is there already becomes young again. */
  async put(key: string, value: string | Uint8Array | ArrayBuffer): Promise<void> {
    const bytes =
      typeof value === 'string' ? new TextEncoder().encode(value) : value instanceof Uint8Array ? value.slice() : new Uint8Array(value.slice(0));
    await this.#connection.request('PUT', this.#path(key), { 'content-type': 'application/octet-stream' }, bytes);
  }

  /** A blob that is not there is fine; one that a checkpoint counts is refused (status 409). */
  async delete(key: string): Promise<void> {
    await this.#connection.request('DELETE', this.#path(key), {}, undefined, [404]);
  }

  /** All of them below `prefix`, every page. */
  async list(prefix = ''): Promise<Array<FsdListedBlob>> {
    const found: Array<FsdListedBlob> = [];
    let cursor: string | null = null;
    do {
      const query: string = new URLSearchParams({ prefix, ...(cursor === null ? {} : { cursor }) }).toString();
      const answer = await this.#connection.request('GET', `/v1/blobs?${query}`);
      const page = (await answer.json()) as { blobs: Array<FsdListedBlob>; cursor?: string | null };
      found.push(...page.blobs);
      cursor = page.cursor ?? null;
    } while (cursor !== null);
    return found;
  }

  #path(key: string): string {
    if (!KEY.test(key)) throw new RangeError(`not a blob key: ${JSON.stringify(key)}`);
    return `/v1/blobs/${key}`;
  }
}

/** The key of file bytes. */
export async function fileKey(bytes: Uint8Array): Promise<string> {
  return `sandbox-files/sha256/${hex(await webcrypto.subtle.digest('SHA-256', bytes.slice()))}`;
}

/** The key of an artifact's bytes. */
export async function artifactKey(bytes: Uint8Array): Promise<string> {
  return `sandbox-artifacts/sha256/${hex(await webcrypto.subtle.digest('SHA-256', bytes.slice()))}`;
}
