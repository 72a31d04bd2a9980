/* What a request of the kernel says and libfuse 3.14 and pyfuse3 3.5 do not pass on: whether its caller's
 * privilege is to be taken from the file (FUSE_HANDLE_KILLPRIV_V2). And what need not be passed on one by one: that
 * the kernel forgot an inode, which nobody waits for, once keep_forgotten() was called.
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
#include <stdint.h>
#include <string.h>
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
        } write;
        struct {
            uint64_t lookups;
        } forget;
    } in;
};
enum { OP_FORGET = 2, OP_SETATTR = 4, OP_OPEN = 14, OP_WRITE = 16 };
enum { SETATTR_KILLS = 1 << 11, OPEN_KILLS = 1 << 0, WRITE_FROM_PAGES = 1 << 0, WRITE_KILLS = 1 << 2 };
enum { KILLS = 1, FROM_PAGES = 2 }; /* what last() tells */

typedef int (*receive_buf)(struct fuse_session *, struct fuse_buf *);

static struct request newest; /* zeros: none was seen */
static int mirror[2] = {-1, -1};
static struct {
    uint64_t nodeid, lookups;
} forgotten[4096]; /* they are taken ten times a second; of more each is passed on */
static size_t forgotten_count;
static int keeps; /* whether they are kept */

/* libfuse's own, as the library that called would have found it without us. */
static receive_buf find_real(void *caller)
{
    Dl_info info;
    void *handle;

    if (!dladdr(caller, &info) || !info.dli_fname)
        return NULL;
    handle = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    return handle ? (receive_buf)dlsym(handle, "fuse_session_receive_buf") : NULL;
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
    int got, again = 0;

    if (!real)
        real = find_real(__builtin_return_address(0));
    if (!real)
        return -ENOSYS;
    do
        got = real(se, buf);
    while (got > 0 && kept(buf) && (again = 1));
    if (got == -EAGAIN && again)
        return -EINTR; /* there was nothing else: pyfuse3 waits for the next */
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
        return (flags & WRITE_KILLS ? KILLS : 0) | (flags & WRITE_FROM_PAGES ? FROM_PAGES : 0);
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

static PyMethodDef methods[] = {
    {"last", last, METH_NOARGS,
     "Of the request received last: its operation (0: none was seen), what it says (1: the set-id bits go, 2: written "
     "from pages), and the thread and the group it came from."},
    {"keep_forgotten", keep_forgotten, METH_NOARGS,
     "From now on keep what the kernel forgets, as long as there is room. The connection must not block."},
    {"take_forgotten", take_forgotten, METH_NOARGS, "What was kept: (inode, lookups)."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_requests", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__requests(void)
{
    return PyModule_Create(&module);
}
