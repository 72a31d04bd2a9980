/* What the kernel is about to ask of files and directories, as far as handlers said it: the part of _requests.c that
 * remembers, and forgets before it may not be so any more.
 */
#include "_requests.h"
#include <fcntl.h>
#include <string.h>

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
static struct {
    uint64_t nodeid;   /* 0: none */
    PyObject *entries; /* all its names, as the volume keeps them: what each means, None for nothing */
    PyObject *answer;  /* what is told of a name that does not exist */
} whole[4];
static size_t next_whole;
static PyObject *absent[256]; /* names that were told not to exist: (nodeid, name) */
static size_t absent_count;

static void forget_files(void)
{
    size_t i;

    for (i = 0; i < sizeof(files) / sizeof(*files); i++)
        Py_CLEAR(files[i].bytes);
}

void known_forget(void)
{
    size_t i;

    memset(bare, 0, sizeof(bare));
    memset(quiet, 0, sizeof(quiet));
    memset(directories, 0, sizeof(directories));
    forget_files();
    for (i = 0; i < sizeof(whole) / sizeof(*whole); i++) {
        whole[i].nodeid = 0;
        Py_CLEAR(whole[i].entries);
        Py_CLEAR(whole[i].answer);
    }
}

/* The bytes that a handle reads, borrowed; NULL: not known. */
PyObject *known_bytes(uint64_t fh)
{
    size_t i;

    for (i = 0; i < sizeof(files) / sizeof(*files); i++)
        if (files[i].bytes && files[i].fh == fh)
            return files[i].bytes;
    return NULL;
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
void known_passes(const struct request *request)
{
    uint64_t nodeid = request->head.nodeid;
    struct directory *found;
    size_t i;

    switch (request->head.opcode) {
    case OP_OPEN:
        if (request->in.open.flags & O_TRUNC)
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
        known_forget();
    }
}

int known_bare(uint64_t nodeid)
{
    size_t i;

    for (i = 0; i < sizeof(bare) / sizeof(*bare); i++)
        if (nodeid && bare[i] == nodeid)
            return 1;
    return 0;
}

int known_quiet(uint64_t fh)
{
    size_t i;

    for (i = 0; i < sizeof(quiet) / sizeof(*quiet); i++)
        if (quiet[i] == fh + 1)
            return 1;
    return 0;
}

/* What a directory is after a change in it; NULL: there was none that the kernel asks about, or it is not known. */
const struct attributes *known_directory(uint64_t nodeid)
{
    struct directory *found = find_directory(nodeid);

    return found && found->changed ? &found->told : NULL;
}

/* What is told of a name where all of its directory are known and it is none of them, borrowed, and remembered as told.
 * NULL: that is for its handler (without an exception). */
PyObject *known_absent(uint64_t nodeid, const char *name, size_t length)
{
    PyObject *key, *meant, *told = NULL;
    size_t i;

    for (i = 0; i < sizeof(whole) / sizeof(*whole) && whole[i].nodeid != nodeid; i++)
        ;
    if (i == sizeof(whole) / sizeof(*whole) || length > 255 || absent_count == sizeof(absent) / sizeof(*absent))
        return NULL;
    key = PyBytes_FromStringAndSize(name, (Py_ssize_t)length);
    meant = key ? PyDict_GetItemWithError(whole[i].entries, key) : NULL;
    if (key && (!meant || meant == Py_None) && !PyErr_Occurred())
        told = Py_BuildValue("(KO)", (unsigned long long)nodeid, key);
    Py_XDECREF(key);
    if (!told) {
        PyErr_Clear();
        return NULL;
    }
    absent[absent_count++] = told;
    return whole[i].answer;
}

/* What is told of a directory's attributes is remembered. */
void known_told(const struct stat *attr, double timeout)
{
    struct directory *found;
    struct attributes *told;

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

PyObject *bare_file(PyObject *self, PyObject *number)
{
    unsigned long long ino = PyLong_AsUnsignedLongLong(number);

    if (PyErr_Occurred())
        return NULL;
    if (!known_bare(ino)) {
        bare[next_bare] = ino;
        next_bare = (next_bare + 1) % (sizeof(bare) / sizeof(*bare));
    }
    Py_RETURN_NONE;
}

PyObject *quiet_handle(PyObject *self, PyObject *number)
{
    unsigned long long fh = PyLong_AsUnsignedLongLong(number);

    if (PyErr_Occurred())
        return NULL;
    if (!known_quiet(fh)) {
        quiet[next_quiet] = fh + 1;
        next_quiet = (next_quiet + 1) % (sizeof(quiet) / sizeof(*quiet));
    }
    Py_RETURN_NONE;
}

PyObject *changed_directory(PyObject *self, PyObject *args)
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

PyObject *file_bytes(PyObject *self, PyObject *args)
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

PyObject *whole_directory(PyObject *self, PyObject *args)
{
    unsigned long long nodeid;
    PyObject *entries, *answer;

    if (!PyArg_ParseTuple(args, "KO!S", &nodeid, &PyDict_Type, &entries, &answer))
        return NULL;
    Py_INCREF(entries);
    Py_XSETREF(whole[next_whole].entries, entries);
    Py_INCREF(answer);
    Py_XSETREF(whole[next_whole].answer, answer);
    whole[next_whole].nodeid = nodeid;
    next_whole = (next_whole + 1) % (sizeof(whole) / sizeof(*whole));
    Py_RETURN_NONE;
}

PyObject *take_absent(PyObject *self, PyObject *none)
{
    PyObject *all = PyTuple_New((Py_ssize_t)absent_count);
    size_t i;

    if (!all)
        return NULL;
    for (i = 0; i < absent_count; i++)
        PyTuple_SET_ITEM(all, (Py_ssize_t)i, absent[i]);
    absent_count = 0;
    return all;
}
