/* Makes system calls of one process fail, at files below a path: loaded by LD_PRELOAD, told what to do by a file.

   Counted are the calls that the error can befall: EMFILE what opens a file, any other error what writes one. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

struct orders {
    _Atomic int pid;     /* whose calls; 0: nobody's */
    _Atomic int error;
    _Atomic int first;   /* the number of the first call that fails, from 0 */
    _Atomic int count;   /* how many fail from there on */
    _Atomic int seen;
    _Atomic int failed;
    char below[4096];    /* paths that begin so */
};

static struct orders *orders;

__attribute__((constructor)) static void load(void) {
    const char *path = getenv("WEFT_TEST_FAULTS");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *at = mmap(NULL, sizeof *orders, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at != MAP_FAILED) orders = at;
}

static int fails(const char *path) {
    if (strncmp(path, orders->below, strlen(orders->below))) return 0;
    int number = orders->seen++;
    if (number < orders->first || number - orders->first >= orders->count) return 0;
    orders->failed++;
    errno = orders->error;
    return 1;
}

static int is_on(void) { return orders && orders->pid && orders->pid == getpid(); }

static int opening_fails(const char *path, int flags) {
    if (!is_on()) return 0;
    if (orders->error != EMFILE && !(flags & (O_CREAT | O_WRONLY | O_RDWR))) return 0;
    return fails(path);
}

static int writing_fails(int fd) {
    char link[64], path[4096];
    if (!is_on() || orders->error == EMFILE) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return fails(path);
}

static int changing_fails(const char *path) { return is_on() && orders->error != EMFILE && fails(path); }

#define REAL(name) static __typeof__(name) *real; if (!real) real = dlsym(RTLD_NEXT, #name)

static mode_t mode_of(int flags, va_list arguments) {
    return flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, mode_t) : 0;
}

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); va_list a; va_start(a, flags); mode_t mode = mode_of(flags, a); va_end(a); \
        return opening_fails(path, flags) ? -1 : real(path, flags, mode); }
#define OPENAT(name) \
    int name(int at, const char *path, int flags, ...) { \
        REAL(name); va_list a; va_start(a, flags); mode_t mode = mode_of(flags, a); va_end(a); \
        return opening_fails(path, flags) ? -1 : real(at, path, flags, mode); }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int fd, const void *data, size_t size) { REAL(write); return writing_fails(fd) ? -1 : real(fd, data, size); }
ssize_t writev(int fd, const struct iovec *parts, int n) { REAL(writev); return writing_fails(fd) ? -1 : real(fd, parts, n); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { REAL(pwrite); return writing_fails(fd) ? -1 : real(fd, data, size, at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { REAL(pwrite64); return writing_fails(fd) ? -1 : real(fd, data, size, at); }
int fsync(int fd) { REAL(fsync); return writing_fails(fd) ? -1 : real(fd); }
int fdatasync(int fd) { REAL(fdatasync); return writing_fails(fd) ? -1 : real(fd); }
int ftruncate(int fd, off_t size) { REAL(ftruncate); return writing_fails(fd) ? -1 : real(fd, size); }
int ftruncate64(int fd, off64_t size) { REAL(ftruncate64); return writing_fails(fd) ? -1 : real(fd, size); }
int mkdir(const char *path, mode_t mode) { REAL(mkdir); return changing_fails(path) ? -1 : real(path, mode); }
int rename(const char *from, const char *to) { REAL(rename); return changing_fails(to) ? -1 : real(from, to); }
