/* What libfuse can say in the answer to an open and pyfuse3 3.5 has no name for.
 *
 * pyfuse3 answers by calling libfuse's fuse_reply_open. The function of that name here comes first when this
 * library is loaded before pyfuse3 and for all to see (RTLD_GLOBAL; fsd/kernel/replies.py does), as with a
 * preloaded library. It adds what without_flush() asked for and passes on. Both are called under the
 * interpreter's lock by the one thread that answers. Where pyfuse3 does not get here, nothing is added.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define FUSE_USE_VERSION 35
#define _FILE_OFFSET_BITS 64
#include <Python.h>
#include <dlfcn.h>
#include <errno.h>
#include <fuse3/fuse_lowlevel.h>

typedef int (*reply_open)(fuse_req_t, const struct fuse_file_info *);

static int noflush; /* for the next answer alone */

/* libfuse's own, as the library that called would have found it without us. */
static reply_open find_real(void *caller)
{
    Dl_info info;
    void *handle;

    if (!dladdr(caller, &info) || !info.dli_fname)
        return NULL;
    handle = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    return handle ? (reply_open)dlsym(handle, "fuse_reply_open") : NULL;
}

__attribute__((visibility("default"))) int fuse_reply_open(fuse_req_t req, const struct fuse_file_info *fi)
{
    static reply_open real;
    struct fuse_file_info answer = *fi;

    if (!real)
        real = find_real(__builtin_return_address(0));
    if (noflush)
        answer.noflush = 1;
    noflush = 0;
    return real ? real(req, &answer) : -ENOSYS;
}

static PyObject *without_flush(PyObject *self, PyObject *asked)
{
    int value = PyObject_IsTrue(asked);

    if (value < 0)
        return NULL;
    noflush = value;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"without_flush", without_flush, METH_O,
     "Whether the kernel need not ask for a flush when the file is closed that the next answer opens."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_replies", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__replies(void)
{
    return PyModule_Create(&module);
}
