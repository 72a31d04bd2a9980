/* The usual requests about files, taken apart here and handed to plain functions of Python's, past
 * libfuse, pyfuse3 and its coroutines: they give the answer as the kernel lays it out, or let the request go on to its
 * handler. Part of _requests.c, under the interpreter's lock.
 */
#include "_requests.h"
#include <string.h>

enum { LOOKUP = 1, GETATTR = 3, SETATTR = 4, UNLINK = 10, RENAME = 12, READ = 15, WRITE = 16, FSYNC = 20 };
enum { GETXATTR = 22, FLUSH = 25, OPENDIR = 27, RELEASEDIR = 29, FSYNCDIR = 30, CREATE = 35, RENAME2 = 45, CALLS = 46 };

/* What stands behind the head; names, each with its zero, follow. */
struct setattr {
    uint32_t valid, padding;
    uint64_t fh, size, lock_owner, atime, mtime, ctime;
    uint32_t atime_ns, mtime_ns, ctime_ns, mode, unused, uid, gid, unused_too;
};
struct rename {
    uint64_t parent;
    uint32_t flags, padding; /* of RENAME2 */
};
struct write {
    uint64_t fh, offset;
    uint32_t size, write_flags;
    uint64_t lock_owner;
    uint32_t flags, padding;
};
struct create {
    uint32_t flags, mode, umask, open_flags;
};
struct read {
    uint64_t fh, offset;
    uint32_t size, read_flags;
};
struct getxattr {
    uint32_t size, padding;
};

static PyObject *calls[CALLS]; /* NULL: its handler is called */

/* The name at `*at`, which ends before `end`, and `*at` behind it. NULL: there is none. */
static const char *take_name(const char **at, const char *end)
{
    const char *name = *at, *zero = name < end ? memchr(name, 0, (size_t)(end - name)) : NULL;

    if (!zero)
        return NULL;
    *at = zero + 1;
    return name;
}

static PyObject *call_rename(PyObject *call, const struct head *head, const char *at, const char *end)
{
    struct rename in = {0, 0, 0};
    size_t length = head->opcode == RENAME2 ? sizeof(in) : sizeof(in.parent);
    const char *name, *new_name;

    if ((size_t)(end - at) < length)
        return NULL;
    memcpy(&in, at, length);
    at += length;
    name = take_name(&at, end);
    new_name = take_name(&at, end);
    if (!name || !new_name)
        return NULL;
    return PyObject_CallFunction(call, "KyKyI", (unsigned long long)head->nodeid, name, (unsigned long long)in.parent,
                                 new_name, in.flags);
}

static PyObject *call_create(PyObject *call, const struct head *head, const char *at, const char *end)
{
    struct create in;
    const char *name;

    if ((size_t)(end - at) < sizeof(in))
        return NULL;
    memcpy(&in, at, sizeof(in));
    at += sizeof(in);
    name = take_name(&at, end);
    if (!name)
        return NULL;
    return PyObject_CallFunction(call, "KyIIIIII", (unsigned long long)head->nodeid, name, in.mode, in.flags, in.umask,
                                 head->uid, head->gid, head->pid);
}

static PyObject *call_write(PyObject *call, const struct head *head, const char *at, const char *end, unsigned int told)
{
    struct write in;

    if ((size_t)(end - at) < sizeof(in))
        return NULL;
    memcpy(&in, at, sizeof(in));
    at += sizeof(in);
    if ((size_t)(end - at) < in.size || in.offset > INT64_MAX)
        return NULL;
    return PyObject_CallFunction(call, "KKy#III", (unsigned long long)in.fh, (unsigned long long)in.offset, at,
                                 (Py_ssize_t)in.size, told, head->pid, head->gid);
}

static PyObject *call_read(PyObject *call, const char *at, const char *end)
{
    struct read in;

    if ((size_t)(end - at) < sizeof(in))
        return NULL;
    memcpy(&in, at, sizeof(in));
    return PyObject_CallFunction(call, "KKI", (unsigned long long)in.fh, (unsigned long long)in.offset, in.size);
}

static PyObject *call_getxattr(PyObject *call, const struct head *head, const char *at, const char *end)
{
    struct getxattr in;
    const char *name;

    if ((size_t)(end - at) < sizeof(in))
        return NULL;
    memcpy(&in, at, sizeof(in));
    at += sizeof(in);
    name = take_name(&at, end);
    return name ? PyObject_CallFunction(call, "KyI", (unsigned long long)head->nodeid, name, in.size) : NULL;
}

/* What begins with a handle, and who asks. */
static PyObject *call_handle(PyObject *call, const struct head *head, const char *at, const char *end)
{
    uint64_t fh;

    if ((size_t)(end - at) < sizeof(fh))
        return NULL;
    memcpy(&fh, at, sizeof(fh));
    return PyObject_CallFunction(call, "KKI", (unsigned long long)fh, (unsigned long long)head->unique, head->pid);
}

static PyObject *call_setattr(PyObject *call, const struct head *head, const char *at, const char *end)
{
    struct setattr in;

    if ((size_t)(end - at) < sizeof(in))
        return NULL;
    memcpy(&in, at, sizeof(in));
    return PyObject_CallFunction(call, "KI(III)(LI)(LI)III", (unsigned long long)head->nodeid, in.valid, in.mode, in.uid,
                                 in.gid, (long long)in.atime, in.atime_ns, (long long)in.mtime, in.mtime_ns, head->uid,
                                 head->gid, head->pid);
}

/* What the function for this request gives: a number of an error (0: none), the bytes of the answer, or `...`: it comes
 * later (answer_late). NULL: there is no such function, it is no such request, or (with an exception) the function
 * failed. `told` is what last() tells. */
PyObject *shortcut_call(const void *request, size_t size, unsigned int told)
{
    struct head head;
    const char *at = request, *end = at + size, *name;
    PyObject *call;

    if (size < sizeof(head))
        return NULL;
    memcpy(&head, at, sizeof(head));
    at += sizeof(head);
    call = head.opcode < CALLS ? calls[head.opcode] : NULL;
    if (!call)
        return NULL;
    switch (head.opcode) {
    case LOOKUP:
    case UNLINK:
        name = take_name(&at, end);
        return name ? PyObject_CallFunction(call, "Ky", (unsigned long long)head.nodeid, name) : NULL;
    case RENAME:
    case RENAME2:
        return call_rename(call, &head, at, end);
    case CREATE:
        return call_create(call, &head, at, end);
    case WRITE:
        return call_write(call, &head, at, end, told);
    case SETATTR:
        return call_setattr(call, &head, at, end);
    case READ:
        return call_read(call, at, end);
    case FSYNC:
    case FSYNCDIR:
    case FLUSH:
    case RELEASEDIR:
        return call_handle(call, &head, at, end);
    case GETXATTR:
        return call_getxattr(call, &head, at, end);
    case GETATTR:
        return PyObject_CallFunction(call, "K", (unsigned long long)head.nodeid);
    case OPENDIR:
        return PyObject_CallFunction(call, "KI", (unsigned long long)head.nodeid, head.pid);
    default:
        return NULL;
    }
}

/* From now on these functions, by operations, are called. */
PyObject *shortcut_set(PyObject *by_opcode)
{
    PyObject *key, *call;
    Py_ssize_t at = 0;
    unsigned long opcode;

    if (!PyDict_Check(by_opcode))
        return PyErr_Format(PyExc_TypeError, "a dict is needed");
    while (PyDict_Next(by_opcode, &at, &key, &call)) {
        opcode = PyLong_AsUnsignedLong(key);
        if (PyErr_Occurred())
            return NULL;
        if (opcode >= CALLS)
            return PyErr_Format(PyExc_ValueError, "no call for operation %lu", opcode);
        Py_INCREF(call);
        Py_XSETREF(calls[opcode], call);
    }
    Py_RETURN_NONE;
}
