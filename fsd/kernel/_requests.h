/* What the parts of the extension _requests share. Protocol 7.33; older headers do not know the flags. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <sys/stat.h>

#pragma GCC visibility push(hidden)

/* The beginnings of requests as the kernel lays them out. */
struct head {
    uint32_t length, opcode;
    uint64_t unique, nodeid;
    uint32_t uid, gid, pid, padding;
};
struct request {
    struct head head;
    union {
        struct {
            uint32_t valid;
        } setattr;
        struct {
            uint32_t flags, open_flags;
        } open;
        struct {
            uint64_t fh, offset;
            uint32_t size, write_flags;
            uint64_t lock_owner;
            uint32_t flags, padding;
        } write;
        struct {
            uint64_t fh, offset;
            uint32_t size, read_flags;
        } read;
        struct {
            uint64_t fh;
            uint32_t flags, release_flags;
        } release;
        struct {
            uint64_t lookups;
        } forget;
    } in;
};
enum { OP_LOOKUP = 1, OP_FORGET = 2, OP_GETATTR = 3, OP_SETATTR = 4, OP_OPEN = 14, OP_READ = 15, OP_WRITE = 16 };
enum { OP_RELEASE = 18, OP_GETXATTR = 22, OP_FLUSH = 25 };
enum { SETATTR_KILLS = 1 << 11, OPEN_KILLS = 1 << 0, WRITE_FROM_PAGES = 1 << 0, WRITE_KILLS = 1 << 2 };
enum { KILLS = 1, FROM_PAGES = 2, APPENDS = 4, PLACED = 8 }; /* what last() tells */
/* The beginning of every answer, and the answer to GETATTR. */
struct answer {
    uint32_t length;
    int32_t error;
    uint64_t unique;
};
struct attributes {
    struct answer head;
    uint64_t valid;
    uint32_t valid_ns, unused;
    uint64_t ino, size, blocks, atime, mtime, ctime;
    uint32_t atime_ns, mtime_ns, ctime_ns, mode, nlink, uid, gid, rdev, blksize, flags;
};

/* _known.c: what is known of answers that handlers would give. */
void known_forget(void);
void known_passes(const struct request *request);
int known_bare(uint64_t nodeid);
int known_quiet(uint64_t fh);
PyObject *known_bytes(uint64_t fh);
const struct attributes *known_directory(uint64_t nodeid);
PyObject *known_absent(uint64_t nodeid, const char *name, size_t length);
void known_told(const struct stat *attr, double timeout);
PyObject *bare_file(PyObject *self, PyObject *number);
PyObject *quiet_handle(PyObject *self, PyObject *number);
PyObject *changed_directory(PyObject *self, PyObject *args);
PyObject *file_bytes(PyObject *self, PyObject *args);
PyObject *whole_directory(PyObject *self, PyObject *args);
PyObject *take_absent(PyObject *self, PyObject *none);

/* _shortcut.c: requests that are done by plain functions of Python's. */
PyObject *shortcut_call(const void *request, size_t size, unsigned int told);
PyObject *shortcut_set(PyObject *by_opcode);

#pragma GCC visibility pop
