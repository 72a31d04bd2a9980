/** Requests to one fsd server: who we are, retries, and what its errors become. */

// Node 18 has no global `crypto`.
import { randomUUID } from 'node:crypto';

import { errorOf, FsdError } from './errors.js';

export interface FsdOptions {
  /** `fsd1.…`; names the filesystem, in which ids, counts and blobs are kept apart from those of others. */
  token: string;
  /** Which of the token's endpoints; needed when it knows several. */
  regionCode?: string;
  /** Overrides the endpoint in the token. */
  endpoint?: string;
  /** Sends the token over plain HTTP to other machines too. */
  insecure?: boolean;
  /** The clock of a server started with `--test-clock`, milliseconds since 1970. Others refuse it. */
  now?: () => number;
  /** How long one attempt may go without a word from the server, milliseconds. A body has time beside that to be
   * sent, a second for each 64 KiB. */
  timeoutMs?: number;
  /** Attempts of one call while the server is away or busy. */
  attempts?: number;
  /** Ends every call at once when it is aborted, with its reason; only a `release` still goes out. */
  signal?: AbortSignal;
  fetch?: typeof globalThis.fetch;
  /** Makes errors of other classes than this package's, such as those of the installed `@tanstack/ai-sandbox`. */
  errorOf?: (code: string, message: string, status: number) => Error;
}

const LOOPBACK = new Set(['localhost', '127.0.0.1', '[::1]']);
const PAUSE_MS = 100;
const PAUSE_MAX_MS = 3000;
const SENT_PER_MS = 64; // bytes
const AGAIN = new Set([408, 425, 429, 502, 503, 504]);

/** The endpoint a token names for `region`. */
export function endpointOf(token: string, region?: string): string {
  const parts = token.trim().split('.');
  if (parts.length !== 3 || parts[0] !== 'fsd1') throw new TypeError('that is no fsd token (fsd1.….… is the form)');
  let regions: Record<string, string>;
  try {
    const readable = JSON.parse(Buffer.from(parts[1] ?? '', 'base64url').toString('utf8')) as { r?: unknown };
    if (typeof readable.r !== 'object' || readable.r === null) throw new TypeError('no regions');
    regions = readable.r as Record<string, string>;
  } catch (cause) {
    throw new TypeError('the token is truncated or damaged', { cause });
  }
  const known = Object.keys(regions).sort();
  const chosen = region ?? (known.length === 1 ? known[0] : undefined);
  const found = chosen === undefined ? undefined : regions[chosen];
  if (found === undefined) throw new RangeError(`give a region code this token knows: ${known.join(', ')}`);
  return found;
}

/** Longer with each attempt; ends early, with an error, when `signal` is aborted. */
function pause(attempt: number, signal?: AbortSignal): Promise<void> {
  const whole = Math.min(PAUSE_MAX_MS, PAUSE_MS * 2 ** attempt);
  return new Promise((resolve, reject) => {
    const stop = () => {
      clearTimeout(timer);
      reject(signal!.reason);
    };
    const timer = setTimeout(
      () => {
        signal?.removeEventListener('abort', stop);
        resolve();
      },
      whole / 2 + (Math.random() * whole) / 2,
    );
    if (signal?.aborted) stop();
    else signal?.addEventListener('abort', stop, { once: true });
  });
}

interface ErrorBody {
  error?: { code?: string; message?: string; hint?: string; request_id?: string; retryable?: boolean };
}

export class Connection {
  readonly #base: string;
  readonly #options: FsdOptions;
  readonly #fetch: typeof globalThis.fetch;

  constructor(options: FsdOptions) {
    const base = new URL(options.endpoint ?? endpointOf(options.token, options.regionCode));
    if (base.protocol !== 'https:' && !LOOPBACK.has(base.hostname) && !options.insecure)
      throw new TypeError(`${base.origin} is plain HTTP: the token would be readable; use https, or insecure: true`);
    this.#base = base.href.replace(/\/+$/, '');
    this.#options = options;
    this.#fetch = options.fetch ?? globalThis.fetch;
  }

  /** One of the contract's calls. `body` is the JSON text: made before the first await, since callers may change
   * what they passed. `always`: although the options' signal is aborted. */
  async call<T>(op: string, body: string, always = false): Promise<T> {
    const headers = { 'content-type': 'application/json', 'idempotency-key': randomUUID() };
    const answer = await this.request('POST', `/v1/checkpoints/${op}`, headers, body, [], always);
    return ((await answer.json()) as { result: T }).result;
  }

  /** The answer, with 2xx or a status in `fine`. Asked again while the server is away or busy. */
  async request(
    method: string,
    path: string,
    headers: Record<string, string> = {},
    body?: string | Uint8Array,
    fine: ReadonlyArray<number> = [],
    always = false,
  ): Promise<Response> {
    const signal = always ? undefined : this.#options.signal;
    const sent: Record<string, string> = { ...headers, authorization: `Bearer ${this.#options.token.trim()}` };
    if (this.#options.now) sent['x-fsd-test-now'] = String(this.#options.now());
    const attempts = this.#options.attempts ?? 6;
    for (let attempt = 0; ; attempt++) {
      const last = attempt + 1 >= attempts;
      try {
        signal?.throwIfAborted();
        const answer = await this.#once(method, path, sent, body, signal);
        if (answer.ok || fine.includes(answer.status)) return answer;
        const error = await this.#refusal(answer);
        if (last || !AGAIN.has(answer.status)) throw error;
      } catch (error) {
        signal?.throwIfAborted();
        // What fetch itself throws is a TypeError or an abort: nothing, or only a part, came back.
        const network = error instanceof TypeError || (error instanceof DOMException && error.name === 'TimeoutError');
        if (!network) throw error;
        if (last) throw this.#away(error);
      }
      await pause(attempt, signal);
    }
  }

  /** One attempt, its answer read whole: a body that is cut is an attempt that failed. */
  async #once(
    method: string,
    path: string,
    headers: Record<string, string>,
    body?: string | Uint8Array,
    signal?: AbortSignal,
  ) {
    const silence = this.#options.timeoutMs ?? 60_000;
    const late = new AbortController();
    const within = (ms: number) =>
      setTimeout(() => late.abort(new DOMException('the server was silent', 'TimeoutError')), ms);
    // What has been sent of a body, fetch does not tell.
    let timer = within(silence + (body?.length ?? 0) / SENT_PER_MS);
    try {
      const answer = await this.#fetch(this.#base + path, {
        method,
        headers,
        redirect: 'error',
        signal: signal ? AbortSignal.any([signal, late.signal]) : late.signal,
        ...(body === undefined ? {} : { body: body as BodyInit }),
      });
      const reader = method === 'HEAD' || answer.status === 204 ? undefined : answer.body?.getReader();
      const pieces: Uint8Array[] = [];
      for (let one = await reader?.read(); one && !one.done; one = await reader?.read()) {
        clearTimeout(timer);
        timer = within(silence);
        pieces.push(one.value);
      }
      return new Response(reader ? Buffer.concat(pieces) : null, { status: answer.status, headers: answer.headers });
    } finally {
      clearTimeout(timer);
    }
  }

  async #refusal(answer: Response): Promise<Error> {
    let told: ErrorBody['error'];
    try {
      told = ((await answer.json()) as ErrorBody).error;
    } catch {
      // A proxy's page, or nothing: the status is all there is to tell.
      told = undefined;
    }
    const code = told?.code ?? 'unexpected_answer';
    const message = told?.message ?? `the server answered ${answer.status}`;
    if (this.#options.errorOf) return this.#options.errorOf(code, message, answer.status);
    return errorOf(code, message, answer.status, told?.hint, told?.request_id);
  }

  #away(cause: unknown): Error {
    const error = new FsdError('unavailable', `no answer from ${new URL(this.#base).host}`, 0, 'is the server up?');
    error.cause = cause;
    return error;
  }
}
