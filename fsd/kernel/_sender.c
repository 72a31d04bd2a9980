/* A thread that writes to a FUSE connection and holds nothing of the process but that.
 *
 * A notification waits in the kernel, where no signal reaches it, for the lock of a directory or a page that
 * may belong to a request this very process has yet to answer. Killed then, the process does not end: the
 * thread keeps the table of open files, that keeps /dev/fuse, and that keeps the request. So this thread has
 * a table of its own with a device of its own in it (FUSE_DEV_IOC_CLONE). When the process is killed its own
 * device is closed, the kernel ends the requests that were read from it, the lock is free and the thread ends.
 *
 * In C, since Python may close any file (its collector) or write to any (a log, a signal's wake-up) on
 * whichever thread it runs. All signals are blocked here. One caller at a time.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef FUSE_DEV_IOC_CLONE
#define FUSE_DEV_IOC_CLONE _IOR(229, 0, uint32_t)
#endif
#ifndef CLOSE_RANGE_UNSHARE
#define CLOSE_RANGE_UNSHARE 2
#endif
#ifndef SYS_close_range
#define SYS_close_range 436
#endif

enum state { IDLE, ASKED, DONE };

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static enum state state;
static const char *messages; /* one behind the other; each begins with its length */
static size_t length;
static int errors[64]; /* of each message of the last step, or of the start */

static void end_step(void)
{
    state = DONE;
    pthread_cond_broadcast(&changed);
}

/* The number of a device of `connection` that is the only file this thread has open; -1 with errno. */
static int have_device(int connection)
{
    uint32_t from = (uint32_t)connection;
    int own, fd;

    /* The second does the same where a container's rules for system calls know only the first. */
    if (unshare(CLONE_FILES) && syscall(SYS_close_range, ~0U, ~0U, CLOSE_RANGE_UNSHARE))
        return -1;
    own = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    if (own < 0 || ioctl(own, FUSE_DEV_IOC_CLONE, &from) || dup2(own, 0) < 0)
        return -1;
    if (syscall(SYS_close_range, 1, ~0U, 0)) {
        int most = (int)sysconf(_SC_OPEN_MAX);

        for (fd = 1; fd < most; fd++)
            close(fd);
    }
    return 0;
}

static void write_all(int device)
{
    const char *at = messages;
    int *error;

    for (error = errors; at < messages + length; error++) {
        uint32_t size;

        memcpy(&size, at, sizeof size);
        *error = write(device, at, size) < 0 ? errno : 0;
        at += size;
    }
}

static void *work(void *connection)
{
    int device = have_device((int)(intptr_t)connection);

    errors[0] = device < 0 ? errno : 0;
    pthread_mutex_lock(&guard);
    end_step();
    while (device >= 0) {
        while (state != ASKED)
            pthread_cond_wait(&changed, &guard);
        pthread_mutex_unlock(&guard);
        write_all(device);
        pthread_mutex_lock(&guard);
        end_step();
    }
    pthread_mutex_unlock(&guard);
    return NULL;
}

static void wait_for_step(void)
{
    while (state != DONE)
        pthread_cond_wait(&changed, &guard);
    state = IDLE;
}

/* How many whole messages `data` holds; 0 where it is not made of them, or there are too many. */
static int count(const char *data, size_t size)
{
    const size_t most = sizeof errors / sizeof errors[0];
    size_t at = 0, found;

    for (found = 0; at < size && found < most; found++) {
        uint32_t one;

        if (size - at < sizeof(struct fuse_out_header))
            return 0;
        memcpy(&one, data + at, sizeof one);
        if (one < sizeof(struct fuse_out_header) || one > size - at)
            return 0;
        at += one;
    }
    return at == size ? (int)found : 0;
}

static PyObject *start(PyObject *self, PyObject *args)
{
    sigset_t all, before;
    pthread_t thread;
    int connection, error;

    if (!PyArg_ParseTuple(args, "i", &connection))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(&thread, NULL, work, (void *)(intptr_t)connection);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!error) {
        pthread_setname_np(thread, "fsd-send");
        pthread_detach(thread);
        pthread_mutex_lock(&guard);
        wait_for_step();
        error = errors[0];
        pthread_mutex_unlock(&guard);
    }
    Py_END_ALLOW_THREADS
    errno = error;
    return error ? PyErr_SetFromErrno(PyExc_OSError) : Py_NewRef(Py_None);
}

static PyObject *send_messages(PyObject *self, PyObject *args)
{
    const char *data;
    Py_ssize_t size;
    PyObject *answer, *one;
    int sent, at;

    if (!PyArg_ParseTuple(args, "y#", &data, &size))
        return NULL;
    sent = count(data, (size_t)size);
    if (!sent) {
        PyErr_SetString(PyExc_ValueError, "not 1 to 64 whole messages");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&guard);
    messages = data;
    length = (size_t)size;
    state = ASKED;
    pthread_cond_broadcast(&changed);
    wait_for_step();
    pthread_mutex_unlock(&guard);
    Py_END_ALLOW_THREADS
    answer = PyList_New(sent);
    for (at = 0; answer && at < sent; at++) {
        one = PyLong_FromLong(errors[at]);
        if (!one)
            Py_CLEAR(answer);
        else
            PyList_SET_ITEM(answer, at, one);
    }
    return answer;
}

static PyMethodDef methods[] = {
    {"start", start, METH_VARARGS, "Start the thread for the connection of this descriptor; once. Raises OSError."},
    {"send", send_messages, METH_VARARGS,
     "Have it write 1 to 64 messages, one behind the other; returns 0 or the errno of each when it has."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_sender", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__sender(void)
{
    return PyModule_Create(&module);
}
