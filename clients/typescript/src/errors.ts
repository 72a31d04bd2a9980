/** Errors by code, as `@tanstack/ai-sandbox` names them. */

const PREFIX = 'SANDBOX_SNAPSHOT_';

/** A refusal of the contract. `code` says which; the subclasses only give the frequent ones a name. */
export class SandboxCheckpointError extends Error {
  readonly code: string;

  constructor(code: string, message: string) {
    super(message);
    this.name = new.target.name;
    this.code = code;
  }
}

export class SandboxCheckpointInvalidIdError extends SandboxCheckpointError {}
export class SandboxCheckpointInvalidEntryError extends SandboxCheckpointError {}
export class SandboxCheckpointWriterLostError extends SandboxCheckpointError {}
export class SandboxCheckpointWriterConflictError extends SandboxCheckpointError {}
export class SandboxCheckpointDuplicateIdError extends SandboxCheckpointError {}
/** The head is not the expected one. */
export class SandboxCheckpointConflictError extends SandboxCheckpointError {}
export class SandboxCheckpointParentMismatchError extends SandboxCheckpointError {}
export class SandboxCheckpointNotHeadError extends SandboxCheckpointError {}

/** Anything else the server answered, or that it did not answer (`status` 0). */
export class FsdError extends Error {
  override readonly name = 'FsdError';

  constructor(
    readonly code: string,
    message: string,
    readonly status: number,
    /** What to do. */
    readonly hint = '',
    /** What the server's log has of it. */
    readonly requestId = '',
  ) {
    super(hint ? `${message} (${hint})` : message);
  }
}

const CLASSES = new Map<string, typeof SandboxCheckpointError>([
  ['INVALID_ID', SandboxCheckpointInvalidIdError],
  ['INVALID_ENTRY', SandboxCheckpointInvalidEntryError],
  ['WRITER_LOST', SandboxCheckpointWriterLostError],
  ['WRITER_CONFLICT', SandboxCheckpointWriterConflictError],
  ['DUPLICATE_ID', SandboxCheckpointDuplicateIdError],
  ['STALE_HEAD', SandboxCheckpointConflictError],
  ['PARENT_MISMATCH', SandboxCheckpointParentMismatchError],
  ['NOT_HEAD', SandboxCheckpointNotHeadError],
]);

/** What the server's `{"error": …}` becomes. */
export function errorOf(code: string, message: string, status: number, hint = '', requestId = ''): Error {
  if (!code.startsWith(PREFIX)) return new FsdError(code, message, status, hint, requestId);
  const Kind = CLASSES.get(code.slice(PREFIX.length)) ?? SandboxCheckpointError;
  return new Kind(code, message);
}
