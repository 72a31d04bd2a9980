"""The SQL that reads the namespace (namespace.md section 2, queries 1 and 2): live, and at a retained seq.

Each question has two texts. Live rows are found by their exact key (`died` is part of it). At a seq, the only
candidate is the version of the key with the smallest `died` behind it, whose `born` must not be behind it;
names and blocks of a range are passed over, those of one key are one probe. Parameters: the live text's,
then the seq as often as the text wants it (`AT_…`), then a limit where there is one. The unary + keeps both
planners on the key; the literal is `sql.MAX`.
"""

from __future__ import annotations

from typing import Final

_I: Final = (
    "i.ino, i.mode, i.nlink, i.uid, i.gid, i.size, i.atime, i.mtime, i.ctime, i.rdev, i.target, i.parent, "
    "i.parts, i.xattrs, i.cseq, i.writer, i.born"
)
# The inode an entry names: live, and as it was. Wants the seq twice.
_LIVE_INODE: Final = "i.fs=d.fs AND i.ino=d.ino AND i.died=140737488355327"
_INODE_AT: Final = (
    "i.fs=d.fs AND i.ino=d.ino AND +i.born<=? AND i.died="
    "(SELECT min(y.died) FROM inode y WHERE y.fs=d.fs AND y.ino=d.ino AND y.died>?)"
)
_SEEN: Final = "+d.died>? AND +d.born<=?"  # of a range of names

_ENTRY: Final = (
    f"SELECT d.name, d.born, {_I} FROM dentry d CROSS JOIN inode i "
    f"WHERE d.fs=? AND d.died=140737488355327 AND {_LIVE_INODE} AND "
)
LOOKUP: Final = _ENTRY + "d.parent=? AND d.name=?"
LIST: Final = _ENTRY + "d.parent=? AND d.name>? ORDER BY d.name LIMIT ?"
TREE: Final = f"SELECT d.parent, {_ENTRY.removeprefix('SELECT ')} d.parent IN {{}} ORDER BY d.parent, d.name"
ATTRS: Final = f"SELECT {_I} FROM inode i WHERE i.fs=? AND i.died=140737488355327 AND i.ino IN {{}}"
# How many entries directories have, and how many bytes their inodes' attributes.
_WEIGHT: Final = (
    "SELECT d.parent, count(*), sum(coalesce(length(i.xattrs),0)) FROM dentry d CROSS JOIN inode i "
    "WHERE d.fs=? AND d.parent IN {} AND "
)
WEIGHT: Final = f"{_WEIGHT}d.died=140737488355327 AND {_LIVE_INODE} GROUP BY d.parent"
COUNT: Final = (
    "SELECT count(*) FROM (SELECT 1 FROM dentry "
    "WHERE fs=? AND parent=? AND died=140737488355327 LIMIT ?) AS c"
)
# The entries of each of several directories, counted up to a limit: one of a million costs no more than that.
_COUNTS: Final = "SELECT k.column1, (SELECT count(*) FROM (SELECT 1 FROM dentry d WHERE d.fs=? AND "
COUNTS: Final = f"{_COUNTS}d.parent=k.column1 AND d.died=140737488355327 LIMIT ?) AS c) FROM {{}} AS k"
BLOCKS: Final = (
    "SELECT idx, parts FROM block WHERE fs=? AND ino=? AND idx>=? AND idx<? "
    "AND died=140737488355327 ORDER BY idx"
)

_ENTRY_AT: Final = f"SELECT d.name, d.born, {_I} FROM dentry d CROSS JOIN inode i WHERE d.fs=? AND "
# Its parameters: fs, parent, name, seq, and the same four again, then the seq twice.
LOOKUP_AT: Final = (
    f"{_ENTRY_AT}d.parent=? AND d.name=? AND +d.born<=? AND d.died="
    "(SELECT min(x.died) FROM dentry x WHERE x.fs=? AND x.parent=? AND x.name=? AND x.died>?) "
    f"AND {_INODE_AT}"
)
# The next two want the seq four times.
LIST_AT: Final = f"{_ENTRY_AT}d.parent=? AND d.name>? AND {_SEEN} AND {_INODE_AT} ORDER BY d.name LIMIT ?"
TREE_AT: Final = (
    f"SELECT d.parent, {_ENTRY_AT.removeprefix('SELECT ')}d.parent IN {{}} AND {_SEEN} AND {_INODE_AT} "
    "ORDER BY d.parent, d.name"
)
# `{}` is a list of rows (`sql.values_list`), whose parameters come first; then fs, seq, fs, seq.
ATTRS_AT: Final = (
    f"SELECT {_I} FROM {{}} AS k CROSS JOIN inode i WHERE i.fs=? AND i.ino=k.column1 AND +i.born<=? "
    "AND i.died=(SELECT min(y.died) FROM inode y WHERE y.fs=? AND y.ino=k.column1 AND y.died>?)"
)
WEIGHT_AT: Final = f"{_WEIGHT}{_SEEN} AND {_INODE_AT} GROUP BY d.parent"  # the seq four times
COUNT_AT: Final = (
    "SELECT count(*) FROM (SELECT 1 FROM dentry "
    "WHERE fs=? AND parent=? AND +died>? AND +born<=? LIMIT ?) AS c"
)
COUNTS_AT: Final = f"{_COUNTS}d.parent=k.column1 AND {_SEEN} LIMIT ?) AS c) FROM {{}} AS k"
BLOCKS_AT: Final = (
    "SELECT idx, parts FROM block WHERE fs=? AND ino=? AND idx>=? AND idx<? "
    "AND +died>? AND +born<=? ORDER BY idx"
)
