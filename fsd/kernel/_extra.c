/* Operations of the kernel that pyfuse3 3.5 has no handlers for: lseek, fallocate, copy_file_range, O_TMPFILE.
 *
 * pyfuse3 gives libfuse a table of its handlers by calling fuse_session_new. The function of that name here
 * comes first when this library is loaded before pyfuse3 and for all to see (RTLD_GLOBAL; fsd/kernel/extra.py
 * does), as with a preloaded library. It adds handlers to a copy of the table once serve() was called, and
 * passes on. Each of them calls what serve() was given, under the interpreter's lock, on the thread that runs
 * the session. Where pyfuse3 does not get here, nothing is added, and these operations stay unsupported.
 *
 * libfuse 3.14 has no word for FUSE_TMPFILE. Its request and its answer are those of FUSE_CREATE, with a name no
 * file can have: it is passed on as that.
 *
 * And a word in a write: pages of a shared mapping are written by any handle of the file that may write, one that
 * appends too, and have their place all the same. pyfuse3 tells its handler nothing but the handle, so it is
 * marked there (MAPPED).
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define FUSE_USE_VERSION 35
#define _FILE_OFFSET_BITS 64
#include <Python.h>
#include <dlfcn.h>
#include <errno.h>
#include <fuse3/fuse_lowlevel.h>
#include <linux/fuse.h>
#include <string.h>
#include <structmember.h>

#define MAPPED (1ULL << 63)

#ifndef FUSE_TMPFILE
#define FUSE_TMPFILE 51
#endif

typedef struct fuse_session *(*session_new)(struct fuse_args *, const struct fuse_lowlevel_ops *, size_t, void *);
typedef void (*process_buf)(struct fuse_session *, const struct fuse_buf *);
typedef int (*reply_err)(fuse_req_t, int);
typedef int (*reply_write)(fuse_req_t, size_t);
typedef int (*reply_lseek)(fuse_req_t, off_t);
typedef const struct fuse_ctx *(*req_ctx)(fuse_req_t);

static PyObject *served; /* what handles the requests */
static session_new real_new;
static process_buf real_process;
static reply_err answer_err;
static reply_write answer_write;
static reply_lseek answer_lseek;
static req_ctx context_of;

/* A request. Answered once: who has no more use for one that was not answered has it fail with EIO. */
typedef struct {
    PyObject_HEAD
    fuse_req_t req;
    unsigned int pid, uid, gid, umask;
    char flushed;
} Request;

static PyMemberDef request_members[] = {
    {"pid", T_UINT, offsetof(Request, pid), READONLY, "The thread that called."},
    {"uid", T_UINT, offsetof(Request, uid), READONLY, NULL},
    {"gid", T_UINT, offsetof(Request, gid), READONLY, NULL},
    {"umask", T_UINT, offsetof(Request, umask), READONLY, NULL},
    {"flushed", T_BOOL, offsetof(Request, flushed), 0, "For the handler, which may be called again."},
    {NULL, 0, 0, 0, NULL},
};

static fuse_req_t take(Request *self)
{
    fuse_req_t req = self->req;

    self->req = NULL;
    if (!req)
        PyErr_SetString(PyExc_RuntimeError, "the request was answered already");
    return req;
}

static PyObject *request_fail(PyObject *self, PyObject *number)
{
    long value = PyLong_AsLong(number);
    fuse_req_t req;

    if (value == -1 && PyErr_Occurred())
        return NULL;
    if (!(req = take((Request *)self)))
        return NULL;
    return PyLong_FromLong(answer_err(req, (int)value));
}

static PyObject *request_wrote(PyObject *self, PyObject *count)
{
    size_t value = PyLong_AsSize_t(count);
    fuse_req_t req;

    if (value == (size_t)-1 && PyErr_Occurred())
        return NULL;
    if (!(req = take((Request *)self)))
        return NULL;
    return PyLong_FromLong(answer_write(req, value));
}

static PyObject *request_found(PyObject *self, PyObject *offset)
{
    long long value = PyLong_AsLongLong(offset);
    fuse_req_t req;

    if (value == -1 && PyErr_Occurred())
        return NULL;
    if (!(req = take((Request *)self)))
        return NULL;
    return PyLong_FromLong(answer_lseek(req, (off_t)value));
}

static void request_dealloc(PyObject *self)
{
    fuse_req_t req = ((Request *)self)->req;

    if (req)
        answer_err(req, EIO);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef request_methods[] = {
    {"fail", request_fail, METH_O, "Answer with an error number, 0 for success. All three return 0 or -errno."},
    {"wrote", request_wrote, METH_O, "Answer with a number of bytes."},
    {"found", request_found, METH_O, "Answer with an offset."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject request_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fsd.kernel._extra.Request",
    .tp_basicsize = sizeof(Request),
    .tp_dealloc = request_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_doc = "One request of the kernel, and who made it.",
    .tp_methods = request_methods,
    .tp_members = request_members,
};

/* Calls what is served with the name of the operation, the request and `rest`, a new tuple. */
static void ask(const char *name, fuse_req_t req, PyObject *rest)
{
    const struct fuse_ctx *context = context_of(req);
    Request *request = PyObject_New(Request, &request_type);
    PyObject *head = NULL, *all = NULL, *done = NULL;

    if (request) {
        request->req = req;
        request->pid = (unsigned int)context->pid;
        request->uid = context->uid;
        request->gid = context->gid;
        request->umask = context->umask;
        request->flushed = 0;
        head = Py_BuildValue("(sO)", name, request);
    } else {
        answer_err(req, EIO);
    }
    if (head && rest)
        all = PySequence_Concat(head, rest);
    if (all)
        done = PyObject_CallObject(served, all);
    if (!done)
        PyErr_WriteUnraisable(served);
    Py_XDECREF(done);
    Py_XDECREF(all);
    Py_XDECREF(head);
    Py_XDECREF(rest);
    Py_XDECREF(request);
}

static void on_lseek(fuse_req_t req, fuse_ino_t ino, off_t off, int whence, struct fuse_file_info *fi)
{
    PyGILState_STATE lock = PyGILState_Ensure();

    ask("lseek", req, Py_BuildValue("(KLi)", (unsigned long long)fi->fh, (long long)off, whence));
    PyGILState_Release(lock);
}

static void on_fallocate(fuse_req_t req, fuse_ino_t ino, int mode, off_t off, off_t length,
                         struct fuse_file_info *fi)
{
    PyGILState_STATE lock = PyGILState_Ensure();

    ask("fallocate", req,
        Py_BuildValue("(KiLL)", (unsigned long long)fi->fh, mode, (long long)off, (long long)length));
    PyGILState_Release(lock);
}

static void on_copy(fuse_req_t req, fuse_ino_t ino_in, off_t off_in, struct fuse_file_info *fi_in, fuse_ino_t ino_out,
                    off_t off_out, struct fuse_file_info *fi_out, size_t length, int flags)
{
    PyGILState_STATE lock = PyGILState_Ensure();

    ask("copy_file_range", req,
        Py_BuildValue("(KLKLKi)", (unsigned long long)fi_in->fh, (long long)off_in, (unsigned long long)fi_out->fh,
                      (long long)off_out, (unsigned long long)length, flags));
    PyGILState_Release(lock);
}

/* libfuse's own of that name, as the library that called would have found it without us. */
static void *find_real(void *caller, const char *name)
{
    Dl_info info;
    void *handle;

    if (!dladdr(caller, &info) || !info.dli_fname)
        return NULL;
    handle = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    return handle ? dlsym(handle, name) : NULL;
}

static int find_answers(void *caller)
{
    answer_err = (reply_err)find_real(caller, "fuse_reply_err");
    answer_write = (reply_write)find_real(caller, "fuse_reply_write");
    answer_lseek = (reply_lseek)find_real(caller, "fuse_reply_lseek");
    context_of = (req_ctx)find_real(caller, "fuse_req_ctx");
    return answer_err && answer_write && answer_lseek && context_of;
}

__attribute__((visibility("default"))) struct fuse_session *
fuse_session_new(struct fuse_args *args, const struct fuse_lowlevel_ops *op, size_t op_size, void *userdata)
{
    void *caller = __builtin_return_address(0);
    union {
        struct fuse_lowlevel_ops ops;
        char room[2 * sizeof(struct fuse_lowlevel_ops)]; /* pyfuse3 may know more operations than we do */
    } more;

    if (!real_new)
        real_new = (session_new)find_real(caller, "fuse_session_new");
    if (!real_new)
        return NULL;
    if (!served || op_size > sizeof(more) || !find_answers(caller))
        return real_new(args, op, op_size, userdata);
    memset(&more, 0, sizeof(more));
    memcpy(&more, op, op_size);
    more.ops.lseek = on_lseek;
    more.ops.fallocate = on_fallocate;
    more.ops.copy_file_range = on_copy;
    if (op_size < sizeof(more.ops))
        op_size = sizeof(more.ops);
    return real_new(args, &more.ops, op_size, userdata);
}

__attribute__((visibility("default"))) void fuse_session_process_buf(struct fuse_session *se,
                                                                      const struct fuse_buf *buf)
{
    struct fuse_in_header *head = buf->mem;
    struct fuse_write_in *in = (struct fuse_write_in *)(head + 1);

    if (!real_process)
        real_process = (process_buf)find_real(__builtin_return_address(0), "fuse_session_process_buf");
    if (!real_process)
        return;
    if (served && !(buf->flags & FUSE_BUF_IS_FD) && buf->size > sizeof(*head) && head->opcode == FUSE_TMPFILE)
        head->opcode = FUSE_CREATE;
    if (!(buf->flags & FUSE_BUF_IS_FD) && buf->size >= sizeof(*head) + sizeof(*in) &&
        head->opcode == FUSE_WRITE && in->write_flags & FUSE_WRITE_CACHE)
        in->fh |= MAPPED;
    real_process(se, buf);
}

static PyObject *serve(PyObject *self, PyObject *callable)
{
    Py_INCREF(callable);
    Py_XSETREF(served, callable);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"serve", serve, METH_O,
     "Have further operations handled, in sessions made from now on: `callable` gets the name of one, its "
     "Request and its arguments, and may not wait."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_extra", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__extra(void)
{
    if (PyType_Ready(&request_type) < 0)
        return NULL;
    return PyModule_Create(&module);
}
