/* Loaded with LD_PRELOAD: counts the calls that change files in a folder, and fails one, or all from one on.

Seen are the calls of libc, whoever makes them: Python, Rust and C++. Not seen are writes to mapped files and those of
stdio. A call that fails changes nothing, but a write to a disk that becomes full writes one half first, as systems do. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define MAX_LOGGED 4096
#define LOGGED_BYTES 200

struct state { /* shared with the processes that are forked later */
    long count, nth;
    int error, lasting, failed;
    char kinds[200], folder[PATH_MAX], log[MAX_LOGGED][LOGGED_BYTES];
};
static struct state *state;

/* Fail the call of this number, from 1, of the kinds (names in spaces) in a folder; with `lasting` all from it on.
   A negative error kills the process. */
void failing_arm(const char *folder, const char *kinds, long nth, int error, int lasting) {
    state = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    snprintf(state->folder, sizeof state->folder, "%s", folder);
    snprintf(state->kinds, sizeof state->kinds, " %s ", kinds);
    state->nth = nth, state->error = error, state->lasting = lasting;
}

long failing_count(void) { return state->count; }
int failing_failed(void) { return state->failed; }
const char *failing_call(long index) { return state->log[index % MAX_LOGGED]; }

static int fails(const char *kind, const char *path) {
    char name[40];
    size_t length = strlen(state->folder);
    snprintf(name, sizeof name, " %s ", kind);
    if (strncmp(path, state->folder, length) || !strchr("/", path[length]) || !strstr(state->kinds, name)) return 0;
    long number = __atomic_add_fetch(&state->count, 1, __ATOMIC_SEQ_CST);
    snprintf(state->log[(number - 1) % MAX_LOGGED], LOGGED_BYTES, "%s %.150s", kind, path + length);
    if (!state->nth || (state->lasting ? number < state->nth : number != state->nth)) return 0;
    state->failed = 1;
    if (state->error < 0) raise(SIGKILL);
    errno = state->error;
    return 1;
}

static int fails_at(const char *kind, int folder, const char *path) {
    char full[2 * PATH_MAX], link[40];
    if (!state || !path) return 0;
    int kept = errno;
    full[0] = 0;
    if (path[0] != '/' && folder == AT_FDCWD) {
        if (!getcwd(full, PATH_MAX)) full[0] = 0;
    } else if (path[0] != '/') {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t size = readlink(link, full, PATH_MAX);
        full[size < 0 ? 0 : size] = 0;
    }
    snprintf(full + strlen(full), PATH_MAX, "%s%s", path[0] == '/' ? "" : "/", path);
    errno = kept;
    return fails(kind, full);
}

static int fails_of(const char *kind, int file) {
    char full[PATH_MAX], link[40];
    if (!state) return 0;
    int kept = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, full, PATH_MAX - 1);
    full[size < 0 ? 0 : size] = 0;
    errno = kept;
    return fails(kind, full);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPEN(name)                                                                                                     \
    int name(const char *path, int flags, ...) {                                                                       \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0;                                              \
        va_end(rest);                                                                                                  \
        if (flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC) && fails_at("open", AT_FDCWD, path)) return -1;            \
        return NEXT(name)(path, flags, mode);                                                                          \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                                                   \
    int name(int folder, const char *path, int flags, ...) {                                                           \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0;                                              \
        va_end(rest);                                                                                                  \
        if (flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC) && fails_at("open", folder, path)) return -1;              \
        return NEXT(name)(folder, path, flags, mode);                                                                  \
    }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name)                                                                                                    \
    FILE *name(const char *path, const char *mode) {                                                                   \
        return mode[0] != 'r' && fails_at("open", AT_FDCWD, path) ? NULL : NEXT(name)(path, mode);                     \
    }
FOPEN(fopen)
FOPEN(fopen64)

ssize_t write(int file, const void *bytes, size_t size) {
    if (!fails_of("write", file)) return NEXT(write)(file, bytes, size);
    return state->lasting && size > 1 && state->count == state->nth ? NEXT(write)(file, bytes, size / 2) : -1;
}

/* a function of which only the path or the file and the kind matter */
#define CALL(result, name, kind, test, parameters, arguments)                                                          \
    result name parameters { return test ? -1 : NEXT(name) arguments; }
#define PATH(name, kind, parameters, arguments)                                                                        \
    CALL(int, name, kind, fails_at(kind, AT_FDCWD, path), parameters, arguments)
#define AT(name, kind, parameters, arguments)                                                                          \
    CALL(int, name, kind, fails_at(kind, folder, path), parameters, arguments)
#define OF(result, name, kind, parameters, arguments)                                                                  \
    CALL(result, name, kind, fails_of(kind, file), parameters, arguments)

OF(ssize_t, writev, "write", (int file, const struct iovec *parts, int count), (file, parts, count))
OF(ssize_t, pwrite, "write", (int file, const void *bytes, size_t size, off_t at), (file, bytes, size, at))
OF(ssize_t, pwrite64, "write", (int file, const void *bytes, size_t size, off64_t at), (file, bytes, size, at))
OF(ssize_t, sendfile, "write", (int file, int from, off_t *at, size_t size), (file, from, at, size))
OF(ssize_t, sendfile64, "write", (int file, int from, off64_t *at, size_t size), (file, from, at, size))
CALL(ssize_t, copy_file_range, "write", fails_of("write", file),
     (int from, off64_t *start, int file, off64_t *at, size_t size, unsigned flags),
     (from, start, file, at, size, flags))
OF(int, ftruncate, "truncate", (int file, off_t size), (file, size))
OF(int, ftruncate64, "truncate", (int file, off64_t size), (file, size))
OF(int, fallocate, "truncate", (int file, int mode, off_t at, off_t size), (file, mode, at, size))
OF(int, fallocate64, "truncate", (int file, int mode, off64_t at, off64_t size), (file, mode, at, size))
OF(int, fsync, "fsync", (int file), (file))
OF(int, fdatasync, "fsync", (int file), (file))
OF(int, fchmod, "chmod", (int file, mode_t mode), (file, mode))
PATH(chmod, "chmod", (const char *path, mode_t mode), (path, mode))
AT(fchmodat, "chmod", (int folder, const char *path, mode_t mode, int flags), (folder, path, mode, flags))
AT(utimensat, "chmod", (int folder, const char *path, const struct timespec times[2], int flags),
   (folder, path, times, flags))
PATH(mkdir, "mkdir", (const char *path, mode_t mode), (path, mode))
AT(mkdirat, "mkdir", (int folder, const char *path, mode_t mode), (folder, path, mode))
PATH(unlink, "unlink", (const char *path), (path))
AT(unlinkat, "unlink", (int folder, const char *path, int flags), (folder, path, flags))
PATH(rmdir, "unlink", (const char *path), (path))
PATH(link, "link", (const char *from, const char *path), (from, path))
AT(linkat, "link", (int from_folder, const char *from, int folder, const char *path, int flags),
   (from_folder, from, folder, path, flags))
PATH(symlink, "link", (const char *to, const char *path), (to, path))
AT(symlinkat, "link", (const char *to, int folder, const char *path), (to, folder, path))
PATH(rename, "rename", (const char *from, const char *path), (from, path))
AT(renameat, "rename", (int from_folder, const char *from, int folder, const char *path),
   (from_folder, from, folder, path))
AT(renameat2, "rename", (int from_folder, const char *from, int folder, const char *path, unsigned flags),
   (from_folder, from, folder, path, flags))

int close(int file) { /* which closes it all the same, as on a file system of a network */
    int kept = errno, flags = state ? fcntl(file, F_GETFL) : -1;
    errno = kept;
    int failed = flags != -1 && flags & (O_WRONLY | O_RDWR) && fails_of("close", file);
    int result = NEXT(close)(file);
    if (failed) errno = state->error;
    return failed ? -1 : result;
}
