/* What a request of the kernel says and libfuse 3.14 and pyfuse3 3.5 do not pass on: whether its caller's
 * privilege is to be taken from the file (FUSE_HANDLE_KILLPRIV_V2). And what need not be passed on one by one: that
 * the kernel forgot an inode, which nobody waits for, once keep_forgotten() was called.
 *
 * And what the kernel asks right after a change although it could know, two of the seven requests of a small file:
 * once answer_here() was called such questions are answered here, without the interpreter. What is answered is what
 * the handler would say: it is known from an answer of a handler, and forgotten before anything but a request
 * that leaves it as it is (see `known_passes`): the loop calls forget_answers() before it does anything else. The loop also
 * leaves the waiting for the next request to what receives it (may_wait), as long as only a write to its eventfd can
 * end it too: what is answered here then costs a poll, a read and a write.
 *
 * So is a read of a small file whose bytes the handler of its open gave along (file_bytes), as long as nothing comes
 * between that may change any file. And the release of a handle: nobody waits for what it does here, which is done
 * before the next handler is called or anything else happens (take_released). And the flush of a handle whose handlers
 * said that it has nothing to do or to tell (quiet_handle): only a result of the server's, which is no request, can
 * change that.
 *
 * And for what else files cost, plain functions of Python's are called from here (_shortcut.c), as long as that makes
 * nothing to do that is no request. Where one is left with nothing but to wait, for a commit, the answer comes later
 * (answer_late).
 *
 * pyfuse3 receives by calling libfuse's fuse_session_receive_buf. The function of that name here comes first when
 * this library is loaded before pyfuse3 and for all to see (RTLD_GLOBAL; fsd/kernel/requests.py does), as with a
 * preloaded library. It passes on and looks at the head of what came. Both it and last() are called under the
 * interpreter's lock by the one thread that receives, and pyfuse3 calls a handler before it receives the next. Where
 * pyfuse3 does not get here, nothing is seen, and last() says so.
 */
#define _GNU_SOURCE
#define FUSE_USE_VERSION 35
#define _FILE_OFFSET_BITS 64
#include "_requests.h"
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse3/fuse_lowlevel.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

/* So many are answered here in a row: whoever asks without an end must not keep the loop from what was posted to it. */
enum { IN_A_ROW = 64 };

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
static uint64_t released[256]; /* handles that are closed */
static size_t released_count;
static int late = -1; /* the connection, for answers that come later */
static PyObject *to_do; /* what calls leave for the loop to hand out; its length counts */

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

static void told_error(struct fuse_session *se, void *caller, const struct head *head, int error)
{
    struct answer out = {sizeof(out), -error, head->unique};

    if (write(descriptor(se, caller), &out, sizeof(out)) < 0)
        return; /* whoever asked is gone, or all is */
}

/* Whether what came was a read of a file whose bytes are here, a flush that says nothing, or the end of a handle. */
static int served(struct fuse_session *se, void *caller, const struct fuse_buf *buf)
{
    struct request one;
    PyObject *known;
    size_t length;
    const char *bytes;

    if (buf->size < sizeof(one.head) + sizeof(one.in.release))
        return 0;
    memcpy(&one, buf->mem, buf->size < sizeof(one) ? buf->size : sizeof(one));
    if (one.head.opcode == OP_FLUSH) /* it begins as a release does */
        return known_quiet(one.in.release.fh) && told_all(se, caller, &one.head, NULL, 0);
    if (one.head.opcode == OP_READ) {
        if (buf->size < sizeof(one.head) + sizeof(one.in.read))
            return 0;
        known = known_bytes(one.in.read.fh);
        if (!known)
            return 0;
        bytes = PyBytes_AS_STRING(known);
        length = (size_t)PyBytes_GET_SIZE(known);
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
    const struct attributes *found;
    struct attributes out;
    const char *name;
    PyObject *absent;
    size_t length;

    if (!answers || buf->flags & FUSE_BUF_IS_FD || buf->size < sizeof(head))
        return 0;
    memcpy(&head, buf->mem, sizeof(head));
    if (head.opcode == OP_READ || head.opcode == OP_RELEASE || head.opcode == OP_FLUSH)
        return served(se, caller, buf);
    if (head.opcode == OP_LOOKUP) { /* behind the head: the name with its zero */
        name = (const char *)buf->mem + sizeof(head);
        absent = known_absent(head.nodeid, name, strnlen(name, buf->size - sizeof(head)));
        if (!absent || !told_all(se, caller, &head, PyBytes_AS_STRING(absent), (size_t)PyBytes_GET_SIZE(absent)))
            return 0;
        answered++;
        return 1;
    }
    if (head.opcode == OP_GETXATTR) {
        /* behind the head: size, padding, the name with its zero */
        if (buf->size != sizeof(head) + 8 + sizeof(capability) ||
            memcmp((const char *)buf->mem + sizeof(head) + 8, capability, sizeof(capability)) ||
            !known_bare(head.nodeid))
            return 0;
        memset(&out, 0, sizeof(out));
        length = sizeof(out.head);
        out.head.error = -ENODATA;
    } else if (head.opcode == OP_GETATTR) {
        found = known_directory(head.nodeid);
        if (!found)
            return 0;
        out = *found;
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

    if (!real)
        real = (reply_attr)find_real(__builtin_return_address(0), "fuse_reply_attr");
    if (!real)
        return -ENOSYS;
    if (answers && S_ISDIR(attr->st_mode) && timeout >= 0 && timeout < 1e9)
        known_told(attr, timeout);
    return real(req, attr, timeout);
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

/* What is known of what came, for its handler. */
static void note(const struct fuse_buf *buf, size_t size)
{
    ssize_t seen = size < sizeof(newest) ? (ssize_t)size : (ssize_t)sizeof(newest);

    memset(&newest, 0, sizeof(newest));
    if (buf->flags & FUSE_BUF_IS_FD)
        seen = peek(buf->fd, &newest);
    else
        memcpy(&newest, buf->mem, (size_t)seen);
    if (seen < (ssize_t)sizeof(newest.head))
        memset(&newest, 0, sizeof(newest));
    known_passes(&newest);
}

/* Whether what came was done and answered by one of Python's plain functions. */
static int called(struct fuse_session *se, void *caller, const struct fuse_buf *buf)
{
    PyObject *result;
    int error = EIO;

    if (!to_do || buf->flags & FUSE_BUF_IS_FD)
        return 0;
    note(buf, buf->size);
    result = shortcut_call(buf->mem, buf->size, told());
    if (!result && !PyErr_Occurred())
        return 0;
    if (result == Py_None) { /* that is for its handler */
        Py_DECREF(result);
        return 0;
    }
    if (result == Py_Ellipsis) { /* that will be answered */
        Py_DECREF(result);
        late = descriptor(se, caller);
        return 1;
    }
    if (result && PyBytes_Check(result)) {
        if (told_all(se, caller, &newest.head, PyBytes_AS_STRING(result), (size_t)PyBytes_GET_SIZE(result)))
            error = 0;
    } else {
        if (result)
            error = (int)PyLong_AsLong(result);
        if (PyErr_Occurred()) {
            PyErr_WriteUnraisable(to_do);
            error = EIO;
        }
        if (!error)
            told_all(se, caller, &newest.head, NULL, 0);
    }
    if (error)
        told_error(se, caller, &newest.head, error);
    Py_XDECREF(result);
    return 1;
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

/* Wait until there is a request, or an end of them (1), or also something else to do (0). Without the interpreter's
 * lock. */
static int wait_for_request(int connection)
{
    struct pollfd both[2] = {{connection, POLLIN, 0}, {waits_with, POLLIN, 0}};

    Py_BEGIN_ALLOW_THREADS;
    while (poll(both, 2, -1) < 0 && errno == EINTR && !both[0].revents && !both[1].revents)
        ;
    Py_END_ALLOW_THREADS;
    return both[0].revents && !both[1].revents;
}

/* Whether what came is done. `left`: how many more may be, until the loop has its turn. */
static int here(struct fuse_session *se, void *caller, const struct fuse_buf *buf, int waits, int *left)
{
    if (kept(buf))
        return 1;
    if (answer(se, caller, buf)) {
        --*left;
        return 1;
    }
    if (!called(se, caller, buf))
        return 0;
    /* What it has left to be done, and what the loop waits for beside requests, do not wait for more of these. */
    *left = !waits || PyObject_Size(to_do) ? 0 : *left - 1;
    return 1;
}

__attribute__((visibility("default"))) int fuse_session_receive_buf(struct fuse_session *se, struct fuse_buf *buf)
{
    static receive_buf real;
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
    } while (got > 0 && here(se, __builtin_return_address(0), buf, waits, &left) && (again = 1));
    waits_with = -1;
    if (got == -EAGAIN && (again || waits))
        return -EINTR; /* there was nothing else, or the kernel took the request back */
    if (got <= 0)
        return got;
    note(buf, (size_t)got);
    return got;
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

static PyObject *call_directly(PyObject *self, PyObject *args)
{
    PyObject *by_opcode, *jobs;

    if (!PyArg_ParseTuple(args, "OO", &by_opcode, &jobs))
        return NULL;
    Py_INCREF(jobs);
    Py_XSETREF(to_do, jobs);
    return shortcut_set(by_opcode);
}

static PyObject *answer_late(PyObject *self, PyObject *args)
{
    unsigned long long unique;
    int error;
    struct answer out = {sizeof(out), 0, 0};

    if (!PyArg_ParseTuple(args, "Ki", &unique, &error))
        return NULL;
    out.unique = unique;
    out.error = -error;
    if (write(late, &out, sizeof(out)) < 0)
        Py_RETURN_NONE; /* whoever asked is gone, or all is */
    Py_RETURN_NONE;
}

static PyObject *forget_answers(PyObject *self, PyObject *none)
{
    long count = answered;

    known_forget();
    answered = 0;
    return PyLong_FromLong(count);
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
    {"call_directly", call_directly, METH_VARARGS,
     "From now on call these functions, by operations, instead of handlers; what the second argument holds then is for "
     "the loop to do."},
    {"answer_late", answer_late, METH_VARARGS,
     "Answer the request of this number, for which a function gave `...`, with an error (0: none)."},
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
    {"whole_directory", whole_directory, METH_VARARGS,
     "All names of this directory are the keys of a dict, of which those that mean None do not exist; of others this is "
     "to be answered, until something happens that is no request."},
    {"take_absent", take_absent, METH_NOARGS, "(directory, name) of each that was answered so since the last call."},
    {"take_released", take_released, METH_NOARGS,
     "The handles whose release was answered here since the last call; None: there are none."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_requests", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__requests(void)
{
    return PyModule_Create(&module);
}
