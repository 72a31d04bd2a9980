"""The JSON fields each command prints: the documented contract.

A name with `?` may be absent, `[]` is a list, `{}` an object. Fields behind `long:` are added by the long
spelling. Tests compare what commands print with this; docs/commands.md shows it.
"""

from __future__ import annotations

from typing import Final

STAT: Final = (
    "path name kind is_dir size_bytes mode uid gid nlink mtime ctime atime mtime_ns ctime_ns atime_ns ino"
    " revision target? rdev? tags{} xattrs{} fs_seq path_b64? name_b64? target_b64? tags_b64? xattrs_b64?"
)
ENTRY: Final = "type seq entry_id observed_at fs_seq barrier prev_hash entry_hash and what the caller gave"
_ACTION: Final = "action status fs_seq stat{}?"
_TOKEN: Final = (
    "file_system_id token_id status"
    " long: local_credentials_updated local_credentials_reason cache_convergence_note"
)
_SWEEP = (
    "dry_run file_systems pins rows blobs blob_bytes packs packs_rewritten packs_gathered packs_damaged"
    " bytes_rewritten objects object_bytes strays stray_bytes database{}"
)
_NEW_TOKEN: Final = (
    "file_system_id token_id token_name scope_kind status issued_at expires_at expired fs_token"
)
_MERGE: Final = (
    "status file_system_id fork_id base_seq fork_seq fs_seq applied conflicts[] conflicts_total"
    " undo_checkpoint_id? server_ms"
)
_LAYER: Final = (
    "layer_id file_system_id base_root_path name tags[] state durability_mode actor_id durable_seq created_at"
    " updated_at sealed_at parent_layer_id origin_seq origin_checkpoint_id depth root_layer_id"
)
_LEFT: Final = "pending{} first_failed_path reason mount_path"

FIELDS: Final = {
    "create": "file_system_id fs_token token_id region_code status display_name labels{} created_at"
    " long: credentials_stored",
    "list": "region_code file_systems[]",
    "describe": "file_system_id display_name labels{} region_code status kind created_at seq usage{}"
    " origin_id? origin_seq? origin_checkpoint? base_seq? copied? rows_copied? chain[]?",
    "recover": "status mount_path state_dir sent{} conflicts superseded damaged[] damaged_logs[] refused[]"
    " reason? not_files? exported[]? incomplete[]? discarded? retried? beside[]? failed[]?",
    "check": "status profile resource endpoint remote checks[]",
    "delete": "file_system_id status forks_deleted[] long: credentials_removed remote_deletion_state",
    "token create": _NEW_TOKEN + " long: credentials_stored previous_token_note",
    "token list": "tokens[] next_offset",
    "token disable": _TOKEN,
    "token enable": _TOKEN,
    "token delete": _TOKEN,
    "token rotate": _NEW_TOKEN + " replaced_token_id",
    "sweep": _SWEEP,
    "checkpoint sweep": _SWEEP,
    "audit": "ok file_systems findings[] packs? packs_read? objects_without_row? unknown_file_systems[]?"
    " repaired? plan? steps[]?",
    "doctor": "status version works{} checks[]",
    "bench": "path files bytes figures{}",
    "cp": "operation source_path target_path bytes_transferred files_transferred directories symlinks skipped"
    " revision status failed[]? changed[]? not_copied[]?",
    "ls": "path entries[] next_after path_b64?",
    "stat": STAT + " long: has_mode resource_id content_type semantic_text degraded",
    "mv": _ACTION + " source_path target_path",
    "rm": "action status fs_seq? removed more path",
    "mkdir": _ACTION + " path",
    "chmod": _ACTION + " path changed?",
    "ln": _ACTION + " link_path target? source_path?",
    "fs create-symlink": _ACTION + " link_path target",
    "fs create-hardlink": _ACTION + " link_path source_path",
    "find": "path matches[]",
    "grep": "path pattern matches[] files_searched files_binary truncated",
    "fs pack-file-system": "status message",
    "fs unpack-file-system": "status message",
    "mount": "status file_system_id mount_path remote_path driver endpoint pid supervisor_pid state_dir"
    " log_file control_socket long: profile write_back_cache mount_profile local_root pack_paths[]",
    "checkpoint create": "checkpoint_id thread_id parent_id fs_seq label reason created_at not_flushed[]"
    " not_flushed_total? and more",
    "checkpoint list": "checkpoints[] next_cursor",
    "checkpoint show": "checkpoint_id thread_id parent_id kind reason label fs_seq entries created_at"
    " expires_at files[]?",
    "checkpoint diff": "from_seq to_seq changes[] server_ms?",
    "checkpoint restore": "status? fs_seq? restored_seq? path? changes? undo_checkpoint_id? server_ms?"
    " dry_run? path_b64? checkpoint_id? directory? files? directories? links? removed? bytes?",
    "checkpoint delete": "checkpoint_id status fs_seq server_ms",
    "checkpoint prune": "deleted[] kept not_considered dry_run?",
    "history": "path versions[] next_cursor moved_to? path_b64? moved_to_b64?",
    "undelete": "status fs_seq restored_seq path changes undo_checkpoint_id server_ms dry_run? path_b64?",
    "checkpoint capture": "checkpoint_id thread_id parent_id label files entries bytes bytes_uploaded"
    " skipped[] duration_ms",
    "checkpoint mount": "status file_system_id mount_path remote_path driver endpoint pid supervisor_pid"
    " state_dir log_file control_socket",
    "fork": "file_system_id fs_token token_id region_code status display_name labels{} created_at origin_id"
    " origin_seq origin_checkpoint fs_seq copied layer server_ms",
    "merge": _MERGE + " changes[]? changes_total?",
    "fs create-layer": _LAYER + " fs_token",
    "fs list-layers": "layers[]",
    "fs describe-layer": _LAYER,
    "fs diff-layer": "layer_id entries[] entries_total durable_seq",
    "fs create-layer-checkpoint": "checkpoint_id layer_id durable_seq label created_at",
    "fs fork-layer": _LAYER + " fs_token",
    "fs list-layer-chain": "chain[]",
    "fs rollback-layer": "operation layer_id status fork_id base_seq fs_seq undo_checkpoint_id server_ms",
    "fs commit-layer": _MERGE + " layer_id",
    "fs delete-layer": "layer_id status layers_deleted[]",
    "drain": "status flushed{} duration_ms fs_seq " + _LEFT,
    "unmount": "status flushed{}? duration_ms? pending{}? first_failed_path? reason? still_mounted_at?"
    " mount_path",
    "wait": "status seq mount_path",
    "wait-exit": "status exit " + _LEFT,
    "status": "pid supervisor_pid restarts mount_session_id file_system_id state fs_seq pending{}"
    " oldest_pending_s conflicts cache{} server{} previous_session{} mount_path and more",
    "mounts": "mounts[]? sessions[]? leases[]?",
    "conflicts": "path conflicts[]",
    "journal create": "file_system_id journal_id kind title actor labels[] next_seq genesis_hash head_hash"
    " created_at updated_at",
    "journal append": "journal_id append_id first_seq last_seq count head_hash idempotent checkpoint_id",
    "journal read": "entries[] next_after_seq",
    "journal list": "journals[]",
    "journal search": "matches[] next_cursor",
    "journal verify": "ok journal_id entries head_hash hash_chain_ok first_bad_seq reason",
}


def names(row: str, long: bool) -> tuple[set[str], set[str], bool]:
    """The fields a row always prints, those it may print, and whether it may print others too."""
    text, _, more = FIELDS[row].partition(" long:")
    if long:
        text += " " + more
    words = text.split()
    open_end = words[-2:] == ["and", "more"]
    words = words[:-2] if open_end else words
    plain = [word.removesuffix("?").rstrip("[]{}") for word in words]
    optional = {p for word, p in zip(words, plain) if word.endswith("?")}
    return set(plain) - optional, optional, open_end
