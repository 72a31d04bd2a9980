/**
 * The shapes of the checkpoint contract. `@tanstack/ai-sandbox` has types of the same names and shapes in the
 * versions that bring portable snapshots; a store of this package can be given wherever one of theirs is asked for.
 */

/** A regular file. `mode` and `mtimeNs` are ours: who does not know them still restores the bytes. */
export interface SandboxFileEntry {
  path: string;
  kind: 'file';
  /** `sandbox-files/sha256/` and 64 lowercase hexadecimal digits. */
  blobKey: string;
  /** Bytes. */
  size: number;
  mode?: number;
  mtimeNs?: number;
}

/** An empty directory; others are implied by what is in them. */
export interface SandboxDirectoryEntry {
  path: string;
  kind: 'dir';
}

export interface SandboxSymlinkEntry {
  path: string;
  kind: 'symlink';
  target: string;
}

export type SandboxEntry = SandboxFileEntry | SandboxDirectoryEntry | SandboxSymlinkEntry;

export interface SandboxCheckpointArtifact {
  artifactId: string;
  name: string;
  mimeType: string;
  /** Bytes. */
  size: number;
  /** `sandbox-artifacts/sha256/` and 64 lowercase hexadecimal digits. */
  blobKey: string;
  /** Milliseconds since 1970. */
  createdAt: number;
}

export interface SandboxCheckpoint<Message = unknown> {
  id: string;
  threadId: string;
  parentCheckpointId?: string | null;
  /** Milliseconds since 1970; need not rise along the chain. */
  createdAt: number;
  reason: string;
  label?: string;
  sourceRunId?: string;
  files: Array<SandboxEntry>;
  conversation: Array<Message>;
  artifacts: Array<SandboxCheckpointArtifact>;
}

/** What every write presents. */
export interface SandboxWriter {
  threadId: string;
  ownerToken: string;
  fence: number;
}

export interface SandboxWriterLease extends SandboxWriter {
  /** The server's clock, milliseconds since 1970; not to be compared with the local one. Moves with `renew`. */
  readonly expiresAt: number;
  /** So long after acquiring or renewing the holder should renew. */
  readonly renewAfterMs: number;
  renew(): Promise<{ expiresAt: number }>;
  release(): Promise<void>;
}

export interface SandboxBlobReference {
  key: string;
  references: number;
}

export interface SandboxCheckpointFork {
  sourceThreadId: string;
  sourceCheckpointId: string;
  destinationThreadId: string;
  destinationCheckpointId: string;
  createdAt: number;
  writer: SandboxWriter;
}

export interface SandboxCheckpointStore<Message = unknown> {
  get(id: string): Promise<SandboxCheckpoint<Message> | null>;
  list(threadId: string): Promise<Array<SandboxCheckpoint<Message>>>;
  getHead(threadId: string): Promise<string | null>;
  append(input: {
    checkpoint: SandboxCheckpoint<Message>;
    expectedHeadId: string | null;
    writer: SandboxWriter;
  }): Promise<{ headId: string }>;
  deleteHead(input: { threadId: string; checkpointId: string; writer: SandboxWriter }): Promise<void>;
  acquireWriter(threadId: string): Promise<SandboxWriterLease>;
  listBlobReferences(): Promise<Array<SandboxBlobReference>>;
  deleteCheckpoints?(input: {
    threadId: string;
    keep: number;
    writer: SandboxWriter;
  }): Promise<{ deleted: Array<string> }>;
  forkFromCheckpoint?(input: SandboxCheckpointFork): Promise<{ checkpoint: SandboxCheckpoint<Message> }>;
}

/** Which provider's sandbox to resume for a compound key. */
export interface SandboxInstanceRecord {
  key: string;
  provider: string;
  providerSandboxId: string;
  latestSnapshotId?: string;
  threadId: string;
  latestRunId?: string;
  /** Milliseconds since 1970. */
  updatedAt: number;
}

export interface SandboxInstanceStore {
  get(key: string): Promise<SandboxInstanceRecord | null>;
  upsert(record: SandboxInstanceRecord): Promise<void>;
  delete(key: string): Promise<void>;
}
