export { createFileSystem, type FsdAdminOptions, type FsdFileSystem } from './admin.js';
export {
  artifactKey,
  fileKey,
  FsdBlobStore,
  type FsdBlob,
  type FsdBlobInfo,
  type FsdListedBlob,
} from './blobs.js';
export { FsdCheckpointStore } from './checkpoints.js';
export { endpointOf, type FsdOptions } from './connection.js';
export * from './errors.js';
export { FsdInstanceStore } from './instances.js';
export { withWriter } from './lease.js';
export type * from './types.js';
