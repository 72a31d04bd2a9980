"""Rows: forks and merges, and layers, which are forks that are merged back or thrown away."""

from __future__ import annotations

from typing import Final

from fsd.cli import values
from fsd.cli.rows_control import FS_NAMED, FS_OPERAND
from fsd.cli.table import NO_BARRIER, YES, Command, flag, switch

GROUP: Final = "Forks"
ONE: Final = "/v1/file-systems/{file_system_id}"
LAYER: Final = flag("--layer-id", "id of the layer", metavar="ID", required=True)
LAYER_REF: Final = flag("--layer-ref", "id or name of the layer", metavar="REF", required=True)
FORCE: Final = switch("--force", "although somebody has it mounted for writing")

ROWS: Final = (
    Command(
        ("fork",), (), GROUP, "make a filesystem that starts as another; prints its token once",
        'export FSD_TOKEN="$(fsd fork --display-name try-1 --query fs_token --output text)"',
        "do_fork:fork", identity="either", changes=True,
        plan=("POST", ONE + "/forks", "fork the filesystem {file_system_id}"),
        flags=(
            FS_OPERAND,
            flag("--checkpoint --checkpoint-id", "start as this checkpoint (default: as it is now)",
                 metavar="ID"),
            flag("--display-name", "a name for people", metavar="NAME"),
            flag("--label", "label", values.pair, metavar="K=V", many=True),
            NO_BARRIER,
        ),
    ),
    Command(
        ("merge",), (), GROUP,
        "bring a fork's changes into the filesystem it was made from: all of them, or with conflicts none",
        "fsd merge fs_bbbbbbbbbbbbbbbbbbbb --dry-run\n"
        "fsd merge fs_bbbbbbbbbbbbbbbbbbbb --theirs '/build/*' --ours '*.log'",
        "do_fork:merge", identity="either", changes=True,
        plan=("POST", ONE + "/merges", "merge {fork}"),
        flags=(
            flag("--fork", "id of the fork", metavar="FORK", position=0, required=True),
            FS_NAMED,
            flag("--ours", "conflicts of these paths: keep what the parent has (* is any text, also /)",
                 metavar="PATTERN", many=True),
            flag("--theirs", "conflicts of these paths: take what the fork has", metavar="PATTERN",
                 many=True),
            NO_BARRIER,
        ),
    ),
    Command(
        (), ("fs", "create-layer"), GROUP, "make a layer: a fork to be committed or rolled back later",
        "fsd fs create-layer --base-root-path / --layer-name try-1", "do_fork:create_layer",
        identity="either", changes=True, plan=("POST", ONE + "/forks", "fork {file_system_id} as a layer"),
        flags=(
            FS_NAMED,
            flag("--base-root-path", "/: a layer is of the whole filesystem", metavar="PATH", default="/"),
            flag("--layer-id", "its id (default: the fork's)", metavar="ID"),
            flag("--layer-name", "a name for people", metavar="NAME"),
            flag("--tag", "tag", metavar="TAG", many=True),
            flag("--durability-mode", "restore-safe, which is what happens anyway",
                 values.one_of("restore-safe"), metavar="MODE", default="restore-safe"),
            flag("--actor-id", "who works in it", metavar="ID"),
            NO_BARRIER,
        ),
    ),
    Command(
        (), ("fs", "list-layers"), GROUP, "list layers, those of layers too",
        "fsd fs list-layers", "do_fork:list_layers", identity="either", flags=(FS_NAMED,),
    ),
    Command(
        (), ("fs", "describe-layer"), GROUP, "show one layer", "fsd fs describe-layer --layer-id try-1",
        "do_fork:describe_layer", identity="either", flags=(FS_NAMED, LAYER),
    ),
    Command(
        (), ("fs", "diff-layer"), GROUP, "what a layer changed since it was made or last committed",
        "fsd fs diff-layer --layer-id try-1", "do_fork:diff_layer", identity="either",
        flags=(
            FS_NAMED, LAYER,
            flag("--max-seq", "", metavar="N", refuse="a layer's difference is of its present state"),
        ),
    ),
    Command(
        (), ("fs", "create-layer-checkpoint"), GROUP, "keep the present state of a layer",
        "fsd fs create-layer-checkpoint --layer-id try-1 --label before-tests",
        "do_fork:checkpoint_layer", identity="either", changes=True,
        plan=("POST", ONE + "/forks/{layer_id}/checkpoints", "make a checkpoint of the layer"),
        flags=(
            FS_NAMED, LAYER,
            flag("--checkpoint-id", "", metavar="ID", refuse="the server makes the ids of checkpoints"),
            flag("--label", "a name for people", metavar="LABEL"),
            NO_BARRIER,
        ),
    ),
    Command(
        (), ("fs", "fork-layer"), GROUP, "make a layer of a layer",
        "fsd fs fork-layer --parent-layer-ref try-1 --layer-id try-1b", "do_fork:fork_layer",
        identity="either", changes=True, plan=("POST", ONE + "/forks", "fork the layer {parent_layer_ref}"),
        flags=(
            FS_NAMED,
            flag("--parent-layer-ref", "id or name of the layer", metavar="REF", required=True),
            flag("--checkpoint-id", "start as this checkpoint of it", metavar="ID"),
            flag("--layer-id", "its id (default: the fork's)", metavar="ID"),
            flag("--layer-name", "a name for people", metavar="NAME"),
            flag("--actor-id", "who works in it", metavar="ID"),
            NO_BARRIER,
        ),
    ),
    Command(
        (), ("fs", "list-layer-chain"), GROUP, "a layer and what it was made from, up to the filesystem",
        "fsd fs list-layer-chain --layer-ref try-1b", "do_fork:layer_chain", identity="either",
        flags=(FS_NAMED, LAYER_REF),
    ),
    Command(
        (), ("fs", "rollback-layer"), GROUP, "take back what a layer changed since then; its id stays",
        "fsd fs rollback-layer --layer-id try-1", "do_fork:rollback_layer", identity="either", changes=True,
        plan=("POST", ONE + "/forks/{layer_id}/rollback", "roll the layer back"),
        flags=(FS_NAMED, LAYER, FORCE, NO_BARRIER),
    ),
    Command(
        (), ("fs", "commit-layer"), GROUP, "bring a layer's changes into what it was made from, or none",
        "fsd fs commit-layer --layer-id try-1", "do_fork:commit_layer", identity="either", changes=True,
        plan=("POST", ONE + "/merges", "merge the layer {layer_id}"), flags=(FS_NAMED, LAYER, NO_BARRIER),
    ),
    Command(
        (), ("fs", "delete-layer"), GROUP, "delete a layer with its files",
        "fsd fs delete-layer --layer-ref try-1", "do_fork:delete_layer", identity="either", changes=True,
        plan=("DELETE", ONE + "/forks/{layer_ref}", "delete the layer"),
        flags=(FS_NAMED, LAYER_REF, switch("--cascade", "layers made from it too"), YES),
    ),
)  # fmt: skip
