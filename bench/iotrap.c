/* Preloaded library that numbers the file operations of a process tree below one folder and injures one of them.
 *
 * It sits below Python, C++ and Rust alike, so that every checkpoint format meets the same fault. All processes that
 * inherit LD_PRELOAD and IOTRAP_STATE share one counter, one plan and one log; a lock makes "operation k" mean the same
 * for all of them. Only operations on files below the watched folder count. iotrap.py says what the fields mean.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CREATE = 1, TRUNCATE = 2, WRITE = 4, ALLOCATE = 8, FSYNC = 16, FSYNC_DIR = 32, RENAME = 64, LINK = 128,
       UNLINK = 256, MKDIR = 512, RMDIR = 1024, SYMLINK = 2048 };
enum { NOTHING = 0, KILL = 1, FAIL = 2 };

struct state {
    volatile int lock;
    int action, error, is_sticky;
    int64_t classes, at, counted, fired;
    int64_t bad_begin, bad_end;
    char watch[PATH_MAX], log[PATH_MAX], bad_path[PATH_MAX], fired_path[PATH_MAX];
};

struct record {
    uint32_t kind, path_bytes, other_bytes, pad;
    uint64_t offset, data_bytes;
};

static struct state *shared;
static int log_fd = -1;
static char log_name[PATH_MAX];

#define REAL(ret, name, ...) \
    static ret (*real_##name)(__VA_ARGS__); \
    if (!real_##name) real_##name = (ret (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

static struct state *plan(void) {
    if (shared) return shared;
    const char *path = getenv("IOTRAP_STATE");
    if (!path) return NULL;
    int fd = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) return NULL;
    if (syscall(SYS_ftruncate, fd, sizeof(struct state)) == 0) {
        void *map = (void *)syscall(SYS_mmap, NULL, sizeof(struct state), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (map != MAP_FAILED) shared = map;
    }
    syscall(SYS_close, fd);
    return shared;
}

void iotrap_arm(const char *watch, const char *log, int64_t classes, int64_t at, int action, int error, int sticky) {
    struct state *s = plan();
    if (!s) return;
    memset(s, 0, sizeof *s);
    strncpy(s->log, log, PATH_MAX - 1);
    s->classes = classes; s->at = at; s->action = action; s->error = error; s->is_sticky = sticky;
    strncpy(s->watch, watch, PATH_MAX - 1);
}

void iotrap_bad_sector(const char *path, int64_t begin, int64_t end) {
    struct state *s = plan();
    if (!s) return;
    strncpy(s->bad_path, path, PATH_MAX - 1);
    s->bad_begin = begin; s->bad_end = end;
}

int64_t iotrap_counted(void) { return plan() ? shared->counted : -1; }
int64_t iotrap_fired(void) { return plan() ? shared->fired : -1; }
const char *iotrap_fired_path(void) { return plan() ? shared->fired_path : ""; }

static void lock(void) { while (__sync_lock_test_and_set(&shared->lock, 1)) sched_yield(); }
static void unlock(void) { __sync_lock_release(&shared->lock); }

static int is_watching(void) { return plan() && shared->watch[0]; }
static int is_below(const char *path) {
    size_t n = strlen(shared->watch);
    return n && strncmp(path, shared->watch, n) == 0 && (path[n] == '/' || path[n] == 0);
}

static int path_of_fd(int fd, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = syscall(SYS_readlinkat, AT_FDCWD, link, out, PATH_MAX - 1);
    if (n <= 0) return 0;
    out[n] = 0;
    return is_below(out);
}

static int path_at(int dirfd, const char *path, char *out) {
    if (!path) return 0;
    if (path[0] == '/') snprintf(out, PATH_MAX, "%s", path);
    else {
        char base[PATH_MAX];
        if (dirfd == AT_FDCWD) { if (syscall(SYS_getcwd, base, sizeof base) < 0) return 0; }
        else {
            char link[64];
            snprintf(link, sizeof link, "/proc/self/fd/%d", dirfd);
            ssize_t n = syscall(SYS_readlinkat, AT_FDCWD, link, base, sizeof base - 1);
            if (n <= 0) return 0;
            base[n] = 0;
        }
        if (snprintf(out, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) return 0;
    }
    return is_below(out);
}

static void emit(const void *data, size_t size) {
    const char *at = data;
    while (size) {
        ssize_t n = syscall(SYS_write, log_fd, at, size);
        if (n <= 0) return;
        at += n; size -= n;
    }
}

static void note(int kind, const char *path, const char *other, uint64_t offset, const struct iovec *v, int count,
                 size_t limit) {
    if (!shared->log[0]) return;
    if (log_fd < 0 || strcmp(log_name, shared->log)) {
        if (log_fd >= 0) syscall(SYS_close, log_fd);
        strcpy(log_name, shared->log);
        int fd = syscall(SYS_openat, AT_FDCWD, log_name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        log_fd = fd < 0 ? -1 : (int)syscall(SYS_fcntl, fd, F_DUPFD_CLOEXEC, 700);
        if (fd >= 0) syscall(SYS_close, fd);
        if (log_fd < 0) return;
    }
    struct record r = {kind, strlen(path), other ? strlen(other) : 0, 0, offset, 0};
    for (int i = 0; i < count; i++) r.data_bytes += v[i].iov_len;
    if (r.data_bytes > limit) r.data_bytes = limit;
    emit(&r, sizeof r);
    emit(path, r.path_bytes);
    if (other) emit(other, r.other_bytes);
    size_t left = r.data_bytes;
    for (int i = 0; i < count && left; i++) {
        size_t n = v[i].iov_len < left ? v[i].iov_len : left;
        emit(v[i].iov_base, n);
        left -= n;
    }
}

static void die(void) {
    syscall(SYS_kill, 0, SIGKILL);
    for (;;) pause();
}

/* 0: do it. 1: injured, errno is set. 2: a write that is to be torn in the middle before what comes next. Called with
 * the lock held. */
static int enter(int kind, const char *path, int can_tear) {
    struct state *s = shared;
    if (!(kind & s->classes)) return 0;
    s->counted++;
    int is_due = s->action && (s->counted == s->at || (s->is_sticky && s->counted > s->at));
    if (!is_due) return 0;
    if (!s->fired++) strncpy(s->fired_path, path, PATH_MAX - 1);
    if (can_tear && s->counted == s->at && (s->action == KILL || s->is_sticky)) return 2;
    if (s->action == KILL) die();
    errno = s->error;
    return 1;
}

/* --- names ------------------------------------------------------------------------------------------------------ */

#define NAMED(kind, path, other, call) do { \
    lock(); \
    int r = enter(kind, path, 0) ? -1 : (int)(call); \
    int e = errno; \
    if (r == 0) note(kind, path, other, 0, NULL, 0, 0); \
    unlock(); \
    errno = e; \
    return r; } while (0)

static int do_rename(int da, const char *a, int db, const char *b, unsigned flags) {
    char pa[PATH_MAX], pb[PATH_MAX];
    if (!is_watching() || !path_at(db, b, pb)) return syscall(SYS_renameat2, da, a, db, b, flags);
    path_at(da, a, pa);
    NAMED(RENAME, pa, pb, syscall(SYS_renameat2, da, a, db, b, flags));
}
int rename(const char *a, const char *b) { return do_rename(AT_FDCWD, a, AT_FDCWD, b, 0); }
int renameat(int da, const char *a, int db, const char *b) { return do_rename(da, a, db, b, 0); }
int renameat2(int da, const char *a, int db, const char *b, unsigned f) { return do_rename(da, a, db, b, f); }

static int do_link(int da, const char *a, int db, const char *b, int flags) {
    char pa[PATH_MAX], pb[PATH_MAX];
    if (!is_watching() || !path_at(db, b, pb)) return syscall(SYS_linkat, da, a, db, b, flags);
    path_at(da, a, pa);
    NAMED(LINK, pa, pb, syscall(SYS_linkat, da, a, db, b, flags));
}
int link(const char *a, const char *b) { return do_link(AT_FDCWD, a, AT_FDCWD, b, 0); }
int linkat(int da, const char *a, int db, const char *b, int flags) { return do_link(da, a, db, b, flags); }

static int do_symlink(const char *to, int d, const char *p) {
    char path[PATH_MAX];
    if (!is_watching() || !path_at(d, p, path)) return syscall(SYS_symlinkat, to, d, p);
    NAMED(SYMLINK, path, to, syscall(SYS_symlinkat, to, d, p));
}
int symlink(const char *to, const char *p) { return do_symlink(to, AT_FDCWD, p); }
int symlinkat(const char *to, int d, const char *p) { return do_symlink(to, d, p); }

static int do_unlink(int d, const char *p, int flags) {
    char path[PATH_MAX];
    if (!is_watching() || !path_at(d, p, path)) return syscall(SYS_unlinkat, d, p, flags);
    NAMED(flags & AT_REMOVEDIR ? RMDIR : UNLINK, path, NULL, syscall(SYS_unlinkat, d, p, flags));
}
int unlink(const char *p) { return do_unlink(AT_FDCWD, p, 0); }
int unlinkat(int d, const char *p, int flags) { return do_unlink(d, p, flags); }
int rmdir(const char *p) { return do_unlink(AT_FDCWD, p, AT_REMOVEDIR); }
int remove(const char *p) {
    int r = do_unlink(AT_FDCWD, p, 0);
    return r < 0 && errno == EISDIR ? do_unlink(AT_FDCWD, p, AT_REMOVEDIR) : r;
}

static int do_mkdir(int d, const char *p, mode_t mode) {
    char path[PATH_MAX];
    struct stat st;
    if (!is_watching() || !path_at(d, p, path) || stat(path, &st) == 0) return syscall(SYS_mkdirat, d, p, mode);
    NAMED(MKDIR, path, NULL, syscall(SYS_mkdirat, d, p, mode));
}
int mkdir(const char *p, mode_t mode) { return do_mkdir(AT_FDCWD, p, mode); }
int mkdirat(int d, const char *p, mode_t mode) { return do_mkdir(d, p, mode); }

/* --- opening ---------------------------------------------------------------------------------------------------- */

static int do_open(int d, const char *p, int flags, mode_t mode) {
    char path[PATH_MAX];
    struct stat st;
    if (!is_watching() || !(flags & (O_CREAT | O_TRUNC)) || (flags & O_TMPFILE) == O_TMPFILE || !path_at(d, p, path))
        return syscall(SYS_openat, d, p, flags, mode);
    int is_new = stat(path, &st) != 0;
    if (!is_new && !(flags & O_TRUNC)) return syscall(SYS_openat, d, p, flags, mode);
    int kind = is_new ? CREATE : TRUNCATE;
    lock();
    int r = enter(kind, path, 0) ? -1 : (int)syscall(SYS_openat, d, p, flags, mode);
    int e = errno;
    if (r >= 0) note(kind, path, NULL, 0, NULL, 0, 0);
    unlock();
    errno = e;
    return r;
}
#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | __O_TMPFILE)) { va_list ap; va_start(ap, flags); mode = va_arg(ap, mode_t); va_end(ap); }
int open(const char *p, int flags, ...) { MODE(flags); return do_open(AT_FDCWD, p, flags, mode); }
int open64(const char *p, int flags, ...) { MODE(flags); return do_open(AT_FDCWD, p, flags | O_LARGEFILE, mode); }
int openat(int d, const char *p, int flags, ...) { MODE(flags); return do_open(d, p, flags, mode); }
int openat64(int d, const char *p, int flags, ...) { MODE(flags); return do_open(d, p, flags | O_LARGEFILE, mode); }
int creat(const char *p, mode_t mode) { return do_open(AT_FDCWD, p, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *p, mode_t mode) { return creat(p, mode); }

/* Writers in C++ open through stdio and then write to the descriptor themselves (libstdc++). */
static FILE *do_fopen(const char *p, const char *m, FILE *(*real)(const char *, const char *)) {
    char path[PATH_MAX];
    if (!is_watching() || !strpbrk(m, "wa") || !path_at(AT_FDCWD, p, path)) return real(p, m);
    int flags = (strchr(m, '+') ? O_RDWR : O_WRONLY) | O_CREAT | (strchr(m, 'w') ? O_TRUNC : O_APPEND);
    int fd = do_open(AT_FDCWD, p, flags, 0666);
    return fd < 0 ? NULL : fdopen(fd, m);
}
FILE *fopen(const char *p, const char *m) { REAL(FILE *, fopen, const char *, const char *); return do_fopen(p, m, real_fopen); }
FILE *fopen64(const char *p, const char *m) { REAL(FILE *, fopen64, const char *, const char *); return do_fopen(p, m, real_fopen64); }

/* --- bytes ------------------------------------------------------------------------------------------------------ */

static ssize_t put(int fd, const struct iovec *v, int n, int64_t offset, int flags) {
    if (offset < 0) return syscall(SYS_writev, fd, v, n);
    return syscall(SYS_pwritev2, fd, v, n, (unsigned long)offset, 0UL, flags);
}

static ssize_t do_write(int fd, const struct iovec *v, int n, int64_t offset, int flags) {
    char path[PATH_MAX];
    if (!is_watching() || !path_of_fd(fd, path)) return put(fd, v, n, offset, flags);
    lock();
    int64_t where = offset;
    if (where < 0) {
        struct stat st;
        int is_append = syscall(SYS_fcntl, fd, F_GETFL) & O_APPEND;
        where = is_append && fstat(fd, &st) == 0 ? st.st_size : syscall(SYS_lseek, fd, 0, SEEK_CUR);
    }
    ssize_t r = -1;
    int verdict = enter(WRITE, path, 1);
    if (verdict == 2) {
        size_t half = v[0].iov_len / 2 & ~(size_t)4095;
        struct iovec first = {v[0].iov_base, half ? half : v[0].iov_len / 2};
        r = first.iov_len ? put(fd, &first, 1, offset, flags) : 0;
        if (shared->action == KILL) die();
        if (r <= 0) { r = -1; errno = shared->error; }
    } else if (verdict == 0) r = put(fd, v, n, offset, flags);
    int e = errno;
    if (r > 0) note(WRITE, path, NULL, where, v, n, r);
    unlock();
    errno = e;
    return r;
}
ssize_t write(int fd, const void *b, size_t n) { struct iovec v = {(void *)b, n}; return do_write(fd, &v, 1, -1, 0); }
ssize_t writev(int fd, const struct iovec *v, int n) { return do_write(fd, v, n, -1, 0); }
ssize_t pwrite(int fd, const void *b, size_t n, off_t o) { struct iovec v = {(void *)b, n}; return do_write(fd, &v, 1, o, 0); }
ssize_t pwrite64(int fd, const void *b, size_t n, off_t o) { return pwrite(fd, b, n, o); }
ssize_t pwritev(int fd, const struct iovec *v, int n, off_t o) { return do_write(fd, v, n, o, 0); }
ssize_t pwritev64(int fd, const struct iovec *v, int n, off_t o) { return do_write(fd, v, n, o, 0); }
ssize_t pwritev2(int fd, const struct iovec *v, int n, off_t o, int f) { return do_write(fd, v, n, o, f); }
ssize_t pwritev64v2(int fd, const struct iovec *v, int n, off_t o, int f) { return do_write(fd, v, n, o, f); }

/* Copying inside the kernel would go past us: callers fall back to read and write. */
static int is_ours(int fd) { char path[PATH_MAX]; return is_watching() && path_of_fd(fd, path); }
ssize_t sendfile(int out, int in, off_t *o, size_t n) {
    if (is_ours(out)) { errno = EINVAL; return -1; }
    return syscall(SYS_sendfile, out, in, o, n);
}
ssize_t sendfile64(int out, int in, off_t *o, size_t n) { return sendfile(out, in, o, n); }
ssize_t copy_file_range(int in, off_t *io, int out, off_t *oo, size_t n, unsigned f) {
    if (is_ours(out)) { errno = ENOSYS; return -1; }
    return syscall(SYS_copy_file_range, in, io, out, oo, n, f);
}

static int do_sized(int kind, int fd, uint64_t size, int is_allocation, int mode, uint64_t offset) {
    char path[PATH_MAX];
    if (!is_watching() || !path_of_fd(fd, path))
        return is_allocation ? syscall(SYS_fallocate, fd, mode, offset, size) : syscall(SYS_ftruncate, fd, size);
    lock();
    int r = -1;
    if (!enter(kind, path, 0))
        r = is_allocation ? syscall(SYS_fallocate, fd, mode, offset, size) : syscall(SYS_ftruncate, fd, size);
    int e = errno;
    if (r == 0) note(kind, path, mode & FALLOC_FL_KEEP_SIZE ? "keep" : NULL, is_allocation ? offset + size : size, NULL, 0, 0);
    unlock();
    errno = e;
    return r;
}
int ftruncate(int fd, off_t n) { return do_sized(TRUNCATE, fd, n, 0, 0, 0); }
int ftruncate64(int fd, off_t n) { return do_sized(TRUNCATE, fd, n, 0, 0, 0); }
int fallocate(int fd, int mode, off_t o, off_t n) { return do_sized(ALLOCATE, fd, n, 1, mode, o); }
int fallocate64(int fd, int mode, off_t o, off_t n) { return do_sized(ALLOCATE, fd, n, 1, mode, o); }
int posix_fallocate(int fd, off_t o, off_t n) {
    if (!is_ours(fd)) { REAL(int, posix_fallocate, int, off_t, off_t); return real_posix_fallocate(fd, o, n); }
    return do_sized(ALLOCATE, fd, n, 1, 0, o) ? errno : 0;
}
int posix_fallocate64(int fd, off_t o, off_t n) { return posix_fallocate(fd, o, n); }

static int do_sync(int fd, int number) {
    char path[PATH_MAX];
    struct stat st;
    if (!is_watching() || !path_of_fd(fd, path) || fstat(fd, &st)) return syscall(number, fd);
    int kind = S_ISDIR(st.st_mode) ? FSYNC_DIR : FSYNC;
    NAMED(kind, path, NULL, syscall(number, fd));
}
int fsync(int fd) { return do_sync(fd, SYS_fsync); }
int fdatasync(int fd) { return do_sync(fd, SYS_fdatasync); }

/* --- reading from a bad sector ---------------------------------------------------------------------------------- */

static int is_bad(int fd, int64_t begin, int64_t size) {
    char path[PATH_MAX];
    return is_watching() && shared->bad_path[0] && size > 0 && begin < shared->bad_end &&
           begin + size > shared->bad_begin && path_of_fd(fd, path) && strcmp(path, shared->bad_path) == 0 &&
           ++shared->fired && (errno = EIO);
}
static int64_t here(int fd) { return shared && shared->bad_path[0] ? syscall(SYS_lseek, fd, 0, SEEK_CUR) : 0; }
static size_t total(const struct iovec *v, int n) { size_t s = 0; for (int i = 0; i < n; i++) s += v[i].iov_len; return s; }

ssize_t read(int fd, void *b, size_t n) { return is_bad(fd, here(fd), n) ? -1 : syscall(SYS_read, fd, b, n); }
ssize_t pread(int fd, void *b, size_t n, off_t o) { return is_bad(fd, o, n) ? -1 : syscall(SYS_pread64, fd, b, n, o); }
ssize_t pread64(int fd, void *b, size_t n, off_t o) { return pread(fd, b, n, o); }
ssize_t readv(int fd, const struct iovec *v, int n) { return is_bad(fd, here(fd), total(v, n)) ? -1 : syscall(SYS_readv, fd, v, n); }
ssize_t preadv(int fd, const struct iovec *v, int n, off_t o) {
    return is_bad(fd, o, total(v, n)) ? -1 : syscall(SYS_preadv, fd, v, n, (unsigned long)o, 0UL);
}
ssize_t preadv64(int fd, const struct iovec *v, int n, off_t o) { return preadv(fd, v, n, o); }
ssize_t preadv2(int fd, const struct iovec *v, int n, off_t o, int f) {
    if (is_bad(fd, o < 0 ? here(fd) : o, total(v, n))) return -1;
    return syscall(SYS_preadv2, fd, v, n, (unsigned long)o, 0UL, f);
}
ssize_t preadv64v2(int fd, const struct iovec *v, int n, off_t o, int f) { return preadv2(fd, v, n, o, f); }

/* A mapped page that cannot be read is a SIGBUS, not an error code: so is a page beyond the end of a file. */
void *mmap(void *at, size_t n, int prot, int flags, int fd, off_t o) {
    void *map = (void *)syscall(SYS_mmap, at, n, prot, flags, fd, o);
    if (map == MAP_FAILED || fd < 0 || !shared || !shared->bad_path[0]) return map;
    int e = errno;
    if (is_bad(fd, o, n)) {
        int64_t first = (shared->bad_begin & ~4095L) - o;
        if (first < 0) first = 0;
        int empty = syscall(SYS_memfd_create, "bad-sector", MFD_CLOEXEC);
        syscall(SYS_mmap, (char *)map + first, 4096, prot, MAP_FIXED | MAP_PRIVATE, empty, 0);
        syscall(SYS_close, empty);
    }
    errno = e;
    return map;
}
void *mmap64(void *at, size_t n, int prot, int flags, int fd, off_t o) { return mmap(at, n, prot, flags, fd, o); }
