/* Faults of the system under a real process: preloaded (LD_PRELOAD), it stands between the process and libc, and refuses what it is told to.

   It touches only files whose path begins with $FAULTS_PREFIX, connections that are accepted, and the wall clock. What is refused stands
   in the file $FAULTS_CONTROL, which is mapped here and by the test (`injected.py` has the same fields), so that a test changes it while
   the process runs. Each kind of call has five numbers: the errno that it gets (0: none), how many calls get it (-1: all), how many pass
   before those, how many calls were seen, and how many were refused.

   A failed sync forgets, if told so: the bytes written since the last good sync of the file are what they were before, as a kernel makes
   them that has dropped the dirty pages (lwn.net/Articles/752063). Links, renames, mmap and dup of these files are not followed. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum kind { OPEN, READ, WRITE, SYNC, TRUNCATE, LOCK, ACCEPT, CLOCK, KINDS };
enum { SHORT = -1, MAX_FD = 1 << 16 };

struct call { int64_t fault, left, passing, seen, refused; };
static struct control { struct call calls[KINDS]; int64_t clock_shift_s, forgets; } nothing, *control = &nothing;

/* What stood in a file before a write that is not synced yet; the newest first. */
struct written { struct written *next; dev_t device; ino_t inode; off_t at; size_t size, known; char before[]; };
static struct written *unsynced;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char is_ours[MAX_FD]; /* 1: one of the files, 2: and not its shared memory, which is never synced */

#define REAL(name) ({ static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name); real; })

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("FAULTS_CONTROL");
    int fd = path ? REAL(open64)(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *mapped = mmap(NULL, sizeof nothing, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped != MAP_FAILED) control = mapped;
    close(fd);
}

static int has_prefix(const char *path)
{
    const char *prefix = getenv("FAULTS_PREFIX");
    return prefix && path && strncmp(path, prefix, strlen(prefix)) == 0;
}

static int is_tracked(int fd) { return fd >= 0 && fd < MAX_FD && is_ours[fd]; }

/* The fault that a call gets, or 0. */
static int fault_of(enum kind kind)
{
    struct call *call = &control->calls[kind];
    __atomic_add_fetch(&call->seen, 1, __ATOMIC_SEQ_CST);
    int fault = (int)__atomic_load_n(&call->fault, __ATOMIC_SEQ_CST);
    if (!fault) return 0;
    if (__atomic_load_n(&call->passing, __ATOMIC_SEQ_CST) > 0 && __atomic_sub_fetch(&call->passing, 1, __ATOMIC_SEQ_CST) >= 0) return 0;
    int64_t left = __atomic_load_n(&call->left, __ATOMIC_SEQ_CST);
    while (left > 0 && !__atomic_compare_exchange_n(&call->left, &left, left - 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
    if (!left) return 0;
    __atomic_add_fetch(&call->refused, 1, __ATOMIC_SEQ_CST);
    return fault;
}

static int refuses(enum kind kind)
{
    int fault = fault_of(kind);
    if (fault) errno = fault;
    return fault;
}

/* --- files */

static int opened(int fd, const char *path)
{
    size_t size = strlen(path);
    int is_shared = size > 4 && strcmp(path + size - 4, "-shm") == 0;
    if (fd >= 0 && fd < MAX_FD) is_ours[fd] = has_prefix(path) ? (is_shared ? 1 : 2) : 0;
    return fd;
}

static int may_open(const char *path, int flags)
{
    if (!has_prefix(path)) return 1;
    int writes = (flags & O_ACCMODE) != O_RDONLY || (flags & O_CREAT);
    if (control->calls[OPEN].fault == EROFS && !writes) return 1;
    return !refuses(OPEN);
}

static mode_t mode_of(int flags, va_list more) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; }

#define OPENS(name) \
    int name(const char *path, int flags, ...) \
    { \
        va_list more; va_start(more, flags); mode_t mode = mode_of(flags, more); va_end(more); \
        return may_open(path, flags) ? opened(REAL(name)(path, flags, mode), path) : -1; \
    }
OPENS(open)
OPENS(open64)

#define OPENS_AT(name) \
    int name(int folder, const char *path, int flags, ...) \
    { \
        va_list more; va_start(more, flags); mode_t mode = mode_of(flags, more); va_end(more); \
        return may_open(path, flags) ? opened(REAL(name)(folder, path, flags, mode), path) : -1; \
    }
OPENS_AT(openat)
OPENS_AT(openat64)

int close(int fd)
{
    if (fd >= 0 && fd < MAX_FD) is_ours[fd] = 0;
    return REAL(close)(fd);
}

static void remember(int fd, off_t at, size_t size)
{
    struct stat found;
    struct written *written = is_ours[fd] == 2 ? malloc(sizeof *written + size) : NULL;
    if (!written || fstat(fd, &found)) return;
    ssize_t known = REAL(pread64)(fd, written->before, size, at);
    written->device = found.st_dev, written->inode = found.st_ino, written->at = at, written->size = size;
    written->known = known > 0 ? (size_t)known : 0;
    memset(written->before + written->known, 0, size - written->known);
    pthread_mutex_lock(&mutex);
    written->next = unsynced, unsynced = written;
    pthread_mutex_unlock(&mutex);
}

/* A file is synced, was cut to nothing, or has lost what was not synced: then it is put back. */
static void settle(int fd, int loses)
{
    struct stat found;
    if (fstat(fd, &found)) return;
    pthread_mutex_lock(&mutex);
    for (struct written **place = &unsynced; *place;) {
        struct written *written = *place;
        if (written->device != found.st_dev || written->inode != found.st_ino) { place = &written->next; continue; }
        if (loses && REAL(pwrite64)(fd, written->before, written->size, written->at) < 0) abort();
        *place = written->next;
        free(written);
    }
    pthread_mutex_unlock(&mutex);
}

#define PREADS(name) \
    ssize_t name(int fd, void *data, size_t size, off_t at) \
    { \
        return is_tracked(fd) && refuses(READ) ? -1 : REAL(name)(fd, data, size, at); \
    }
PREADS(pread)
PREADS(pread64)

ssize_t read(int fd, void *data, size_t size) { return is_tracked(fd) && refuses(READ) ? -1 : REAL(read)(fd, data, size); }

#define PWRITES(name) \
    ssize_t name(int fd, const void *data, size_t size, off_t at) \
    { \
        if (!is_tracked(fd)) return REAL(name)(fd, data, size, at); \
        int fault = fault_of(WRITE); \
        if (fault > 0) { errno = fault; return -1; } \
        if (fault == SHORT && size > 1) size /= 2; \
        remember(fd, at, size); \
        return REAL(name)(fd, data, size, at); \
    }
PWRITES(pwrite)
PWRITES(pwrite64)

ssize_t write(int fd, const void *data, size_t size)
{
    if (!is_tracked(fd)) return REAL(write)(fd, data, size);
    int fault = fault_of(WRITE);
    if (fault > 0) { errno = fault; return -1; }
    return REAL(write)(fd, data, fault == SHORT && size > 1 ? size / 2 : size);
}

#define TRUNCATES(name) \
    int name(int fd, off_t size) \
    { \
        if (!is_tracked(fd)) return REAL(name)(fd, size); \
        if (refuses(TRUNCATE)) return -1; \
        if (!size) settle(fd, 0); \
        return REAL(name)(fd, size); \
    }
TRUNCATES(ftruncate)
TRUNCATES(ftruncate64)

#define SYNCS(name) \
    int name(int fd) \
    { \
        if (!is_tracked(fd)) return REAL(name)(fd); \
        int fault = refuses(SYNC); \
        int result = fault ? -1 : REAL(name)(fd); \
        if (!fault || control->forgets) settle(fd, fault); \
        if (fault) errno = fault; \
        return result; \
    }
SYNCS(fsync)
SYNCS(fdatasync)

/* --- locks */

static int is_lock(int command)
{
    return command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK || command == F_OFD_SETLKW;
}

#define CONTROLS(name) \
    int name(int fd, int command, ...) \
    { \
        va_list more; va_start(more, command); void *argument = va_arg(more, void *); va_end(more); \
        if (is_tracked(fd) && is_lock(command) && ((struct flock *)argument)->l_type != F_UNLCK && refuses(LOCK)) return -1; \
        return REAL(name)(fd, command, argument); \
    }
CONTROLS(fcntl)
CONTROLS(fcntl64)

int flock(int fd, int operation)
{
    return is_tracked(fd) && !(operation & LOCK_UN) && refuses(LOCK) ? -1 : REAL(flock)(fd, operation);
}

/* --- connections and the clock */

int accept(int fd, struct sockaddr *address, socklen_t *size) { return refuses(ACCEPT) ? -1 : REAL(accept)(fd, address, size); }

int accept4(int fd, struct sockaddr *address, socklen_t *size, int flags)
{
    return refuses(ACCEPT) ? -1 : REAL(accept4)(fd, address, size, flags);
}

static int64_t shift_s(void)
{
    __atomic_add_fetch(&control->calls[CLOCK].seen, 1, __ATOMIC_RELAXED);
    return control->clock_shift_s;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int result = REAL(clock_gettime)(clock, now);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += shift_s();
    return result;
}

int gettimeofday(struct timeval *now, void *zone)
{
    int result = REAL(gettimeofday)(now, zone);
    if (!result) now->tv_sec += shift_s();
    return result;
}

time_t time(time_t *now)
{
    struct timespec read;
    clock_gettime(CLOCK_REALTIME, &read);
    if (now) *now = read.tv_sec;
    return read.tv_sec;
}
