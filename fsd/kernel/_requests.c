/* What a request of the kernel says and libfuse 3.14 and pyfuse3 3.5 do not pass on: whether its caller's
 * privilege is to be taken from the file (FUSE_HANDLE_KILLPRIV_V2). And what need not be passed on one by one: that
 * the kernel forgot an inode, which nobody waits for, once keep_forgotten() was called.
 *
 * And what the kernel asks right after a change although it could know, two of the seven requests of a small file:
 * once answer_here() was called such questions are answered here, without the interpreter. What is answered is what
 * the handler would say: it is known from an answer of a handler, and forgotten before anything but a request
 * that leaves it as it is (see `passes`): the loop calls forget_answers() before it does anything else. The loop also
 * leaves the waiting for the next request to what receives it (may_wait), as long as only a write to its eventfd can
 * end it too: what is answered here then costs a poll, a read and a write.
 *
 * So is a read of a small file whose bytes the handler of its open gave along (file_bytes), as long as nothing comes
 * between that may change any file. And the release of a handle: nobody waits for what it does here, which is done
 * before the next handler is called or anything else happens (take_released). And the flush of a handle whose handlers
 * said that it has nothing to do or to tell (quiet_handle): only a result of the server's, which is no request, can
 * change that.
 *
 * pyfuse3 receives by calling libfuse's fuse_session_receive_buf. The function of that name here comes first when
 * this library is loaded before pyfuse3 and for all to see (RTLD_GLOBAL; fsd/kernel/requests.py does), as with a
 * preloaded library. It passes on and looks at the head of what came. Both it and last() are called under the
 * interpreter's lock by the one thread that receives, and pyfuse3 calls a handler before it receives the next. Where
 * pyfuse3 does not get here, nothing is seen, and last() says so.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define FUSE_USE_VERSION 35
#define _FILE_OFFSET_BITS 64
#include <Python.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse3/fuse_lowlevel.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

/* The beginnings of requests as the kernel lays them out (protocol 7.33); older headers do not know the flags. */
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
enum { OP_FORGET = 2, OP_GETATTR = 3, OP_SETATTR = 4, OP_OPEN = 14, OP_READ = 15, OP_WRITE = 16 };
enum { OP_RELEASE = 18, OP_GETXATTR = 22, OP_FLUSH = 25 };
enum { SETATTR_KILLS = 1 << 11, OPEN_KILLS = 1 << 0, WRITE_FROM_PAGES = 1 << 0, WRITE_KILLS = 1 << 2 };
enum { KILLS = 1, FROM_PAGES = 2, APPENDS = 4, PLACED = 8 }; /* what last() tells */
/* So many are answered here in a row: whoever asks without an end must not keep the loop from what was posted to it. */
enum { IN_A_ROW = 64 };

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

typedef int (*receive_buf)(struct fuse_session *, struct fuse_buf *);
typedef int (*reply_attr)(fuse_req_t, const struct stat *, double);
typedef int (*session_fd)(struct fuse_session *);

static struct request newest; /* zeros: none was seen */
static int mirror[2] = {-1, -1};
static struct {
    uint64_t nodeid, lookups;
} forgotten[4096]; /* they are taken ten times a second; of more each is passed on */
static size_t forgotten_count;
static int keeps; /* whether they are kept */

static int waits_with = -1; /* the descriptor beside the connection, while the next receive may wait */
static int answers;       /* whether questions are answered here */
static long answered;     /* how many were, since forget_answers() */
static uint64_t bare[64]; /* files whose attributes were told last and that have no capabilities; 0: none */
static size_t next_bare;
static uint64_t quiet[64]; /* handles whose flush says nothing, plus 1; 0: none */
static size_t next_quiet;
static struct directory {
    struct attributes told; /* ino 0: none */
    int changed;            /* what a handler said of it since; else the kernel has no reason to ask */
} directories[8];
static size_t next_directory;
static struct {
    uint64_t fh;
    PyObject *bytes; /* NULL: none */
} files[8];          /* whole files by handles that read them */
static size_t next_file;
static uint64_t released[256]; /* handles that are closed */
static size_t released_count;

/* libfuse's own, as the library that called would have found it without us. */
static void *find_real(void *caller, const char *name)
{
    Dl_info info;
    void *handle;

    if (!dladdr(caller, &info) || !info.dli_fname)
        return NULL;
    handle = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    return handle ? dlsym(handle, name) : NULL;
}

static void forget_files(void)
{
    size_t i;

    for (i = 0; i < sizeof(files) / sizeof(*files); i++)
        Py_CLEAR(files[i].bytes);
}

static void forget_all(void)
{
    memset(bare, 0, sizeof(bare));
    memset(quiet, 0, sizeof(quiet));
    memset(directories, 0, sizeof(directories));
    forget_files();
}

static size_t find_file(uint64_t fh)
{
    size_t i;

    for (i = 0; i < sizeof(files) / sizeof(*files); i++)
        if (files[i].bytes && files[i].fh == fh)
            break;
    return i;
}

static struct directory *find_directory(uint64_t nodeid)
{
    size_t i;

    for (i = 0; i < sizeof(directories) / sizeof(*directories); i++)
        if (nodeid && directories[i].told.ino == nodeid)
            return &directories[i];
    return NULL;
}

/* What becomes of what is known here where a request goes to its handler. */
static void passes(uint32_t opcode, uint64_t nodeid)
{
    struct directory *found;
    size_t i;

    switch (opcode) {
    case OP_OPEN:
        if (newest.in.open.flags & O_TRUNC)
            forget_files();
        return;
    case OP_SETATTR:
        forget_files();
        found = find_directory(nodeid);
        if (found)
            memset(found, 0, sizeof(*found));
        return;
    case 1: /* lookup */
    case 3: /* getattr */
    case 5: /* readlink */
    case 15: /* read */
    case 17: /* statfs */
    case 18: /* release */
    case 20: /* fsync */
    case 22: /* getxattr */
    case 23: /* listxattr */
    case 25: /* flush */
    case 27: /* opendir */
    case 28: /* readdir */
    case 29: /* releasedir */
    case 34: /* access */
    case 36: /* interrupt */
    case 44: /* readdirplus */
        return;
    case OP_WRITE:
        forget_files();
        return;
    case 6: /* symlink */
    case 8: /* mknod */
    case 9: /* mkdir */
    case 10: /* unlink */
    case 11: /* rmdir */
    case 12: /* rename */
    case 13: /* link */
    case 35: /* create */
    case 45: /* rename2 */
        forget_files();
        /* Which directories change the handler says, or nobody does. */
        for (i = 0; i < sizeof(directories) / sizeof(*directories); i++)
            directories[i].changed = 0;
        return;
    default:
        forget_all();
    }
}

static int is_bare(uint64_t nodeid)
{
    size_t i;

    for (i = 0; i < sizeof(bare) / sizeof(*bare); i++)
        if (nodeid && bare[i] == nodeid)
            return 1;
    return 0;
}

static int is_quiet(uint64_t fh)
{
    size_t i;

    for (i = 0; i < sizeof(quiet) / sizeof(*quiet); i++)
        if (quiet[i] == fh + 1)
            return 1;
    return 0;
}

static int descriptor(struct fuse_session *se, void *caller)
{
    static session_fd real;

    if (!real)
        real = (session_fd)find_real(caller, "fuse_session_fd");
    return real ? real(se) : -1;
}

/* Whether an answer went out. Whoever asked may be gone (ENOENT), or all is (ENODEV): the next read says so. */
static int told_all(struct fuse_session *se, void *caller, const struct head *head, const void *bytes, size_t length)
{
    struct answer out = {(uint32_t)(sizeof(out) + length), 0, head->unique};
    struct iovec both[2] = {{&out, sizeof(out)}, {(void *)bytes, length}};

    return writev(descriptor(se, caller), both, length ? 2 : 1) >= 0 || errno == ENOENT || errno == ENODEV;
}

/* Whether what came was a read of a file whose bytes are here, a flush that says nothing, or the end of a handle. */
static int served(struct fuse_session *se, void *caller, const struct fuse_buf *buf)
{
    struct request one;
    size_t at, length;
    const char *bytes;

    if (buf->size < sizeof(one.head) + sizeof(one.in.release))
        return 0;
    memcpy(&one, buf->mem, buf->size < sizeof(one) ? buf->size : sizeof(one));
    if (one.head.opcode == OP_FLUSH) /* it begins as a release does */
        return is_quiet(one.in.release.fh) && told_all(se, caller, &one.head, NULL, 0);
    if (one.head.opcode == OP_READ) {
        if (buf->size < sizeof(one.head) + sizeof(one.in.read))
            return 0;
        at = find_file(one.in.read.fh);
        if (at == sizeof(files) / sizeof(*files))
            return 0;
        bytes = PyBytes_AS_STRING(files[at].bytes);
        length = (size_t)PyBytes_GET_SIZE(files[at].bytes);
        if (one.in.read.offset > length)
            one.in.read.offset = length;
        length -= (size_t)one.in.read.offset;
        return told_all(se, caller, &one.head, bytes + one.in.read.offset,
                        length < one.in.read.size ? length : one.in.read.size);
    }
    if (released_count == sizeof(released) / sizeof(*released) || !told_all(se, caller, &one.head, NULL, 0))
        return 0;
    released[released_count++] = one.in.release.fh;
    return 1;
}

/* Whether what came is a question that was answered here. */
static int answer(struct fuse_session *se, void *caller, const struct fuse_buf *buf)
{
    static const char capability[] = "security.capability";
    struct head head;
    struct attributes out;
    struct directory *found;
    size_t length;

    if (!answers || buf->flags & FUSE_BUF_IS_FD || buf->size < sizeof(head))
        return 0;
    memcpy(&head, buf->mem, sizeof(head));
    if (head.opcode == OP_READ || head.opcode == OP_RELEASE || head.opcode == OP_FLUSH)
        return served(se, caller, buf);
    if (head.opcode == OP_GETXATTR) {
        /* behind the head: size, padding, the name with its zero */
        if (buf->size != sizeof(head) + 8 + sizeof(capability) ||
            memcmp((const char *)buf->mem + sizeof(head) + 8, capability, sizeof(capability)) ||
            !is_bare(head.nodeid))
            return 0;
        memset(&out, 0, sizeof(out));
        length = sizeof(out.head);
        out.head.error = -ENODATA;
    } else if (head.opcode == OP_GETATTR) {
        found = find_directory(head.nodeid);
        if (!found || !found->changed)
            return 0;
        out = found->told;
        length = sizeof(out);
    } else {
        return 0;
    }
    out.head.length = (uint32_t)length;
    out.head.unique = head.unique;
    /* Whoever asked may be gone (ENOENT), or all is (ENODEV): the next read says so. */
    if (write(descriptor(se, caller), &out, length) < 0 && errno != ENOENT && errno != ENODEV)
        return 0;
    answered++;
    return 1;
}

/* What is told of a directory's attributes is remembered. */
__attribute__((visibility("default"))) int fuse_reply_attr(fuse_req_t req, const struct stat *attr, double timeout)
{
    static reply_attr real;
    struct directory *found;
    struct attributes *told;

    if (!real)
        real = (reply_attr)find_real(__builtin_return_address(0), "fuse_reply_attr");
    if (!real)
        return -ENOSYS;
    if (answers && S_ISDIR(attr->st_mode) && timeout >= 0 && timeout < 1e9) {
        found = find_directory(attr->st_ino);
        if (!found) {
            found = &directories[next_directory];
            next_directory = (next_directory + 1) % (sizeof(directories) / sizeof(*directories));
        }
        memset(found, 0, sizeof(*found));
        told = &found->told;
        told->valid = (uint64_t)timeout;
        told->valid_ns = (uint32_t)((timeout - (double)told->valid) * 1e9);
        told->ino = attr->st_ino;
        told->size = (uint64_t)attr->st_size;
        told->blocks = (uint64_t)attr->st_blocks;
        told->atime = (uint64_t)attr->st_atim.tv_sec;
        told->mtime = (uint64_t)attr->st_mtim.tv_sec;
        told->ctime = (uint64_t)attr->st_ctim.tv_sec;
        told->atime_ns = (uint32_t)attr->st_atim.tv_nsec;
        told->mtime_ns = (uint32_t)attr->st_mtim.tv_nsec;
        told->ctime_ns = (uint32_t)attr->st_ctim.tv_nsec;
        told->mode = attr->st_mode;
        told->nlink = (uint32_t)attr->st_nlink;
        told->uid = attr->st_uid;
        told->gid = attr->st_gid;
        told->rdev = (uint32_t)attr->st_rdev;
        told->blksize = (uint32_t)attr->st_blksize;
    }
    return real(req, attr, timeout);
}

/* Whether what came was no more than that one inode was forgotten, and is kept. */
static int kept(const struct fuse_buf *buf)
{
    struct request one;

    if (!keeps || buf->flags & FUSE_BUF_IS_FD || buf->size < sizeof(one.head) + sizeof(one.in.forget) ||
        forgotten_count == sizeof(forgotten) / sizeof(*forgotten))
        return 0;
    memcpy(&one, buf->mem, sizeof(one.head) + sizeof(one.in.forget));
    if (one.head.opcode != OP_FORGET)
        return 0;
    forgotten[forgotten_count].nodeid = one.head.nodeid;
    forgotten[forgotten_count++].lookups = one.in.forget.lookups;
    return 1;
}

/* Wait until there is a request, or an end of them (1), or something else to do (0). Without the interpreter's lock. */
static int wait_for_request(int connection)
{
    struct pollfd both[2] = {{connection, POLLIN, 0}, {waits_with, POLLIN, 0}};

    Py_BEGIN_ALLOW_THREADS;
    while (poll(both, 2, -1) < 0 && errno == EINTR && !both[0].revents && !both[1].revents)
        ;
    Py_END_ALLOW_THREADS;
    return both[0].revents != 0;
}

/* The head of a request that libfuse left in a pipe: it stays in there too. */
static ssize_t peek(int fd, struct request *to)
{
    ssize_t there;

    if (mirror[0] < 0 && pipe2(mirror, O_CLOEXEC) < 0)
        return -1;
    there = tee(fd, mirror[1], sizeof(*to), 0);
    return there > 0 ? read(mirror[0], to, (size_t)there) : there;
}

__attribute__((visibility("default"))) int fuse_session_receive_buf(struct fuse_session *se, struct fuse_buf *buf)
{
    static receive_buf real;
    ssize_t seen;
    int got, again = 0, left = IN_A_ROW, waits = waits_with >= 0, connection = -1;

    if (!real)
        real = (receive_buf)find_real(__builtin_return_address(0), "fuse_session_receive_buf");
    if (!real)
        return -ENOSYS;
    if (waits)
        connection = descriptor(se, __builtin_return_address(0));
    do {
        if (!left || (waits && !wait_for_request(connection))) {
            got = -EINTR; /* pyfuse3 waits for the next, and the loop does what else there is */
            break;
        }
        got = real(se, buf);
    } while (got > 0 && (kept(buf) || (answer(se, __builtin_return_address(0), buf) && left--)) && (again = 1));
    waits_with = -1;
    if (got == -EAGAIN && (again || waits))
        return -EINTR; /* there was nothing else, or the kernel took the request back */
    if (got <= 0)
        return got;
    memset(&newest, 0, sizeof(newest));
    seen = (size_t)got < sizeof(newest) ? got : (ssize_t)sizeof(newest);
    if (buf->flags & FUSE_BUF_IS_FD)
        seen = peek(buf->fd, &newest);
    else
        memcpy(&newest, buf->mem, (size_t)seen);
    if (seen < (ssize_t)sizeof(newest.head))
        memset(&newest, 0, sizeof(newest));
    passes(newest.head.opcode, newest.head.nodeid);
    return got;
}

static unsigned int told(void)
{
    unsigned int flags;

    switch (newest.head.opcode) {
    case OP_SETATTR:
        return newest.in.setattr.valid & SETATTR_KILLS ? KILLS : 0;
    case OP_OPEN:
        return newest.in.open.open_flags & OPEN_KILLS ? KILLS : 0;
    case OP_WRITE:
        flags = newest.in.write.write_flags;
        return (flags & WRITE_KILLS ? KILLS : 0) | (flags & WRITE_FROM_PAGES ? FROM_PAGES : 0) |
               (newest.in.write.flags & O_APPEND ? APPENDS : PLACED);
    default:
        return 0;
    }
}

static PyObject *last(PyObject *self, PyObject *none)
{
    return Py_BuildValue("(IIII)", newest.head.opcode, told(), newest.head.pid, newest.head.gid);
}

static PyObject *keep_forgotten(PyObject *self, PyObject *none)
{
    keeps = 1;
    Py_RETURN_NONE;
}

static PyObject *take_forgotten(PyObject *self, PyObject *none)
{
    PyObject *all = PyTuple_New((Py_ssize_t)forgotten_count), *one;
    size_t i;

    for (i = 0; all && i < forgotten_count; i++) {
        one = Py_BuildValue("(KK)", (unsigned long long)forgotten[i].nodeid,
                            (unsigned long long)forgotten[i].lookups);
        if (one)
            PyTuple_SET_ITEM(all, (Py_ssize_t)i, one);
        else
            Py_CLEAR(all);
    }
    if (all)
        forgotten_count = 0;
    return all;
}

static PyObject *may_wait(PyObject *self, PyObject *number)
{
    long fd = PyLong_AsLong(number);

    if (fd == -1 && PyErr_Occurred())
        return NULL;
    waits_with = (int)fd;
    Py_RETURN_NONE;
}

static PyObject *answer_here(PyObject *self, PyObject *none)
{
    answers = 1;
    Py_RETURN_NONE;
}

static PyObject *forget_answers(PyObject *self, PyObject *none)
{
    long count = answered;

    forget_all();
    answered = 0;
    return PyLong_FromLong(count);
}

static PyObject *bare_file(PyObject *self, PyObject *number)
{
    unsigned long long ino = PyLong_AsUnsignedLongLong(number);

    if (PyErr_Occurred())
        return NULL;
    if (!is_bare(ino)) {
        bare[next_bare] = ino;
        next_bare = (next_bare + 1) % (sizeof(bare) / sizeof(*bare));
    }
    Py_RETURN_NONE;
}

static PyObject *quiet_handle(PyObject *self, PyObject *number)
{
    unsigned long long fh = PyLong_AsUnsignedLongLong(number);

    if (PyErr_Occurred())
        return NULL;
    if (!is_quiet(fh)) {
        quiet[next_quiet] = fh + 1;
        next_quiet = (next_quiet + 1) % (sizeof(quiet) / sizeof(*quiet));
    }
    Py_RETURN_NONE;
}

static PyObject *changed_directory(PyObject *self, PyObject *args)
{
    unsigned long long ino, size;
    long long mtime, ctime;
    unsigned long nlink;
    struct directory *found;

    if (!PyArg_ParseTuple(args, "KLLkK", &ino, &mtime, &ctime, &nlink, &size))
        return NULL;
    found = find_directory(ino);
    if (found && mtime >= 0 && ctime >= 0 && found->told.size == size) {
        found->told.mtime = (uint64_t)(mtime / 1000000000);
        found->told.mtime_ns = (uint32_t)(mtime % 1000000000);
        found->told.ctime = (uint64_t)(ctime / 1000000000);
        found->told.ctime_ns = (uint32_t)(ctime % 1000000000);
        found->told.nlink = (uint32_t)nlink;
        found->changed = 1;
    }
    Py_RETURN_NONE;
}

static PyObject *file_bytes(PyObject *self, PyObject *args)
{
    unsigned long long fh;
    PyObject *bytes;

    if (!PyArg_ParseTuple(args, "KS", &fh, &bytes))
        return NULL;
    Py_INCREF(bytes);
    Py_XSETREF(files[next_file].bytes, bytes);
    files[next_file].fh = fh;
    next_file = (next_file + 1) % (sizeof(files) / sizeof(*files));
    Py_RETURN_NONE;
}

static PyObject *take_released(PyObject *self, PyObject *none)
{
    PyObject *all, *one;
    size_t i;

    if (!released_count)
        Py_RETURN_NONE;
    all = PyTuple_New((Py_ssize_t)released_count);
    for (i = 0; all && i < released_count; i++) {
        one = PyLong_FromUnsignedLongLong(released[i]);
        if (one)
            PyTuple_SET_ITEM(all, (Py_ssize_t)i, one);
        else
            Py_CLEAR(all);
    }
    if (all)
        released_count = 0;
    return all;
}

static PyMethodDef methods[] = {
    {"last", last, METH_NOARGS,
     "Of the request received last: its operation (0: none was seen), what it says (1: the set-id bits go, 2: written "
     "from pages, 4: by a handle that appends, 8: by one that does not), and the thread and the group it came from."},
    {"keep_forgotten", keep_forgotten, METH_NOARGS,
     "From now on keep what the kernel forgets, as long as there is room. The connection must not block."},
    {"take_forgotten", take_forgotten, METH_NOARGS, "What was kept: (inode, lookups)."},
    {"may_wait", may_wait, METH_O,
     "Have the next receive wait for a request, or until this descriptor is readable: then it is interrupted."},
    {"answer_here", answer_here, METH_NOARGS, "From now on answer here what is known."},
    {"forget_answers", forget_answers, METH_NOARGS,
     "Forget what is known: something may change that no request is about. How many questions were answered here "
     "since the last call."},
    {"bare_file", bare_file, METH_O, "The kernel was told the attributes of this file, which has no capabilities."},
    {"quiet_handle", quiet_handle, METH_O,
     "The flush of this handle has nothing to do or to tell, until something happens that is no request."},
    {"changed_directory", changed_directory, METH_VARARGS,
     "A handler changed this directory: its inode, mtime and ctime (ns), nlink and size are these now, all else is as "
     "it was told last."},
    {"file_bytes", file_bytes, METH_VARARGS,
     "What this handle, which only reads, reads of its file: all there is of it, until something may change it."},
    {"take_released", take_released, METH_NOARGS,
     "The handles whose release was answered here since the last call; None: there are none."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_requests", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__requests(void)
{
    return PyModule_Create(&module);
}
