/** A real `fsd serve` in a directory of its own. */

import { spawn, type ChildProcess } from 'node:child_process';
import { existsSync, mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';

import { createFileSystem, type FsdFileSystem } from '../src/index.js';

/** `FSD` names the command; else the checkout's virtual environment, else the one on the PATH. */
function command(): string {
  const own = fileURLToPath(new URL('../../../../.venv/bin/fsd', import.meta.url));
  return process.env['FSD'] ?? (existsSync(own) ? own : 'fsd');
}

export class Server {
  readonly #directory = mkdtempSync(join(tmpdir(), 'fsd-ts-'));
  #process: ChildProcess | undefined;
  endpoint = '';

  async start(): Promise<void> {
    const args = ['serve', '--data-dir', this.#directory, '--listen', '127.0.0.1:0', '--test-clock', '--output', 'json'];
    const running = spawn(command(), args, { stdio: ['ignore', 'pipe', 'inherit'] });
    this.#process = running;
    const line = await new Promise<string>((resolve, reject) => {
      const late = setTimeout(() => reject(new Error('fsd serve did not start within 30 s')), 30_000);
      const done = (end: () => void) => {
        clearTimeout(late);
        end();
      };
      createInterface({ input: running.stdout! }).once('line', (text) => done(() => resolve(text)));
      running.once('error', (error) => done(() => reject(error)));
      running.once('exit', (code) => done(() => reject(new Error(`fsd serve ended: ${code}`))));
    });
    this.endpoint = (JSON.parse(line) as { url: string }).url;
  }

  create(options: { leaseDurationMs?: number; renewAfterMs?: number } = {}): Promise<FsdFileSystem> {
    const adminKey = readFileSync(join(this.#directory, 'admin.key'), 'utf8');
    return createFileSystem({ endpoint: this.endpoint, adminKey, ...options });
  }

  async stop(): Promise<void> {
    const running = this.#process;
    if (running && running.exitCode === null && running.signalCode === null) {
      const ended = new Promise((resolve) => running.once('exit', resolve));
      running.kill('SIGTERM');
      const late = setTimeout(() => running.kill('SIGKILL'), 15_000);
      await ended;
      clearTimeout(late);
    }
    rmSync(this.#directory, { recursive: true, force: true });
  }
}
