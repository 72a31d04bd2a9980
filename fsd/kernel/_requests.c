/* What a request of the kernel says and libfuse 3.14 and pyfuse3 3.5 do not pass on: whether its caller's
 * privilege is to be taken from the file (FUSE_HANDLE_KILLPRIV_V2).
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
    } in;
};
enum { OP_SETATTR = 4, OP_OPEN = 14, OP_WRITE = 16 };
enum { SETATTR_KILLS = 1 << 11, OPEN_KILLS = 1 << 0, WRITE_FROM_PAGES = 1 << 0, WRITE_KILLS = 1 << 2 };
enum { KILLS = 1, FROM_PAGES = 2 }; /* what last() tells */

typedef int (*receive_buf)(struct fuse_session *, struct fuse_buf *);

static struct request newest; /* zeros: none was seen */
static int mirror[2] = {-1, -1};

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
    int got;

    if (!real)
        real = find_real(__builtin_return_address(0));
    if (!real)
        return -ENOSYS;
    got = real(se, buf);
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

static PyMethodDef methods[] = {
    {"last", last, METH_NOARGS,
     "Of the request received last: its operation (0: none was seen), what it says (1: the set-id bits go, 2: written "
     "from pages), and the thread and the group it came from."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_requests", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__requests(void)
{
    return PyModule_Create(&module);
}
